"""``accel-train compare``: two configs of a recipe, what each of their differences gives by itself, or several values
of one option, run against each other fairly.

Variants take turns, each run is a process of its own, and nothing but what is compared may differ: seed, data, global
batch and number of steps are the same, or the comparison is refused.
"""

from __future__ import annotations

import difflib
import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from accel_train.compare import report
from accel_train.compare.figures import Observations, effects, observations, window_of
from accel_train.compare.runs import (
    InterruptedRunError,
    Run,
    RunFailedError,
    Variant,
    ending_as_exception,
    read_config,
    read_run,
    run_once,
)
from accel_train.config import UsageError, expand_path
from accel_train.metrics.gates import Decision, Gate, decide, read_gate, values_of
from accel_train.metrics.progress import format_seconds

EQUAL = ("seed", "global_batch_size", "max_steps", "max_epochs")
"""Options that must be the same in every variant, but for the one that is varied."""
ONE_OF = ("max_steps", "max_epochs")
"""A recipe takes one of them and wants None for the other."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    recipe: str
    sources: tuple[str, ...]
    """Two presets or YAML files, or one with ``vary``."""
    config_file: str | None = None
    """Launch file for ``accel-train launch``. None: the recipe runs as one plain process."""
    vary: str | None = None
    """``key=v1,v2``."""
    ablate: bool = False
    """Between A and B also A with each single option of B that differs."""
    max_steps: int | None = None
    max_epochs: float | None = None
    seed: int | None = None
    rounds: int = 5
    gates: tuple[str, ...] = ()
    output: str | None = None
    """None: a new directory under runs/."""
    tolerance: float = 1e-5
    """Relative to A: smaller differences of losses and evaluation figures count as equal."""
    keep_checkpoints: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"--rounds {self.rounds}: at least 1 is required; 5 give an honest interval")
        if not 0 <= self.tolerance < float("inf"):
            raise UsageError(f"--tolerance {self.tolerance}: a number from 0 up is required, such as 1e-5")
        if self.max_steps is not None and self.max_epochs is not None:
            raise UsageError(
                f"--max_steps {self.max_steps} and --max_epochs {self.max_epochs}: a run ends once; give one of the two"
            )
        if self.ablate and self.vary is not None:
            raise UsageError(f"--ablate and --vary {self.vary}: one takes two configs, the other one; leave one out")
        wanted = 1 if self.vary is not None else 2
        if len(self.sources) != wanted:
            raise UsageError(
                f"{len(self.sources)} preset(s) or file(s) given ({', '.join(self.sources)}); "
                + ("--vary takes one" if wanted == 1 else "two are required, A and B, or one with --vary key=v1,v2")
            )


def compare(request: Request) -> int:
    """Run everything, print and write the result. 0, or 1 if a gate fails, a run fails or the comparison is broken off.

    Raises ``UsageError`` for what would not be fair. Main thread only: it takes over the ending signals meanwhile.
    """
    gates = [read_gate(text) for text in request.gates]
    with ending_as_exception():
        try:
            return _compare(request, gates)
        except RunFailedError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        except InterruptedRunError as signal_name:
            print(f"broken off by {signal_name}: the run in progress is ended, no result", file=sys.stderr, flush=True)
    return 1


def _compare(request: Request, gates: Sequence[Gate]) -> int:
    recipe = expand_path(request.recipe)
    if not recipe.is_file():
        raise UsageError(f"recipe {request.recipe!r}: there is no such file; give the path of a recipe")
    if request.config_file is not None:
        from accel_train.launch_files.machine_config import read_machine_config

        read_machine_config(expand_path(request.config_file))  # refused now, not by the first run
    key, variants = read_variants(request, recipe)
    refuse_unequal_configs(variants, key)
    output = _open_output(request)
    plan = report.Plan(request.recipe, variants, key, request.rounds, request.tolerance)
    print("\n".join(report.header(plan, output)), flush=True)
    rounds = _run_rounds(request, recipe, variants, key, gates, output)
    window = window_of([run for runs in rounds for run in runs])
    values = observations(rounds, window)
    found = [effects(values[0], other, request.rounds, request.tolerance) for other in values[1:]]
    judged = values[-1:] if request.ablate else values[1:]  # of an ablation, all options together
    decisions = [decide_gates(gates, values[0], other) if other in judged else [] for other in values[1:]]
    result = report.Result(plan, rounds, window, values, found, decisions)
    print("\n".join(report.text(result)), flush=True)
    for path in report.write(result, output):
        print(f"written: {path}", flush=True)
    return 1 if any(d.verdict == "FAILED" for ds in decisions for d in ds) else 0


def decide_gates(gates: Sequence[Gate], a: Observations, b: Observations) -> list[Decision]:
    """Each gate for B against A. Raises ``UsageError`` for names that neither has."""
    return [decide(gate, values_of(gate, a, b)) for gate in gates]


def _open_output(request: Request) -> Path:
    path = expand_path(request.output or time.strftime("runs/compare-%Y%m%d-%H%M%S"))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"--output {path} is not empty; give another directory, or delete it first")
    path.mkdir(parents=True, exist_ok=True)
    return path


# ------------------------------------------------------------------------------------------------ what is compared
def read_variants(request: Request, recipe: Path) -> tuple[str | None, list[Variant]]:
    """The varied option, if there is one, and the variants with their options. Runs the recipe with
    ``--print_config``, twice for each variant at most, a few seconds each."""
    bases = {source: read_config(recipe, [source]) for source in dict.fromkeys(request.sources)}
    key, sides = None, [(source, source, tuple[str, ...]()) for source in request.sources]
    if request.ablate:
        first, last = request.sources
        sides[1:1] = [(name, first, flags) for name, flags in single_options(bases[first], bases[last])]
        if len(sides) > len(LETTERS):
            raise UsageError(f"--ablate: {len(sides) - 2} options differ, at most {len(LETTERS) - 2} can be tried")
    if request.vary is not None:
        key, values = _read_vary(request.vary, bases[request.sources[0]])
        sides = [(f"{key}={v}", request.sources[0], (f"--{key}", *shlex.split(v))) for v in values]
    variants: list[Variant] = []
    for letter, (name, source, varied) in zip(LETTERS, sides, strict=False):
        flags = (*_common_flags(request, bases[source], source, key), *varied)
        config = read_config(recipe, [source, *flags]) if flags else bases[source]
        variants.append(Variant(letter, name, source, flags, config))
    _refuse_twins(key, variants)
    return key, variants


def single_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Each option of B that is not as in A: what it is called in the table, and its flag. ``output_dir``, what must be
    equal and the Hub, to which nothing is pushed, are left out. Raises ``UsageError`` where nothing is left, or an
    option is in one of the two only."""
    differing = [n for n in dict.fromkeys((*a, *b)) if a.get(n) != b.get(n)]
    names = [n for n in differing if n not in ("output_dir", *EQUAL) and not n.startswith("hub.")]
    if not names and all(a.get(name) == b.get(name) for name in EQUAL):
        raise UsageError("--ablate: the two configs have the same options; there is nothing to take apart")
    if lacking := [name for name in names if name not in a or name not in b]:
        raise UsageError(f"--ablate: {lacking[0]} is an option in one of the two only; give it in both")
    return [(f"{n}: {a[n]!r} -> {b[n]!r}", (f"--{n}", *_words(b[n]))) for n in names]


def _words(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]


def _read_vary(text: str, config: Mapping[str, Any]) -> tuple[str, list[str]]:
    key, equals, rest = text.partition("=")
    key, values = key.strip().removeprefix("--"), [v.strip() for v in rest.split(",")]
    if not equals or not key or len(values) < 2 or not all(values):
        raise UsageError(f"--vary {text!r} is not KEY=V1,V2 with two values or more; write it as in --vary seed=0,1")
    if len(values) > len(LETTERS):
        raise UsageError(f"--vary {key}: {len(values)} values given, at most {len(LETTERS)} are compared; give fewer")
    if key.startswith("hub."):
        raise UsageError(f"--vary {key}: a comparison pushes nothing to the Hub; vary another option")
    if key not in config or key == "output_dir":
        nearest = difflib.get_close_matches(key, [k for k in config if k != "output_dir"], n=1, cutoff=0.5)
        hint = f": did you mean {nearest[0]!r}?" if nearest else ""
        raise UsageError(f"--vary {key}: no option that can be varied{hint}; the recipe's --print_config names all")
    return key, values


def _common_flags(request: Request, config: Mapping[str, Any], source: str, key: str | None) -> list[str]:
    """What is set for every variant, as the recipe spells it."""
    if "output_dir" not in config:
        raise UsageError(f"{source}: the recipe has no option output_dir, so its runs cannot be kept apart; add it")
    given = {"max_steps": request.max_steps, "max_epochs": request.max_epochs, "seed": request.seed}
    set_here = {name: str(value) for name, value in given.items() if value is not None}
    for name, value in set_here.items():
        if name == key or {name, key} == set(ONE_OF):
            raise UsageError(f"--{name} {value} and --vary {key}: both say it; leave --{name} out")
        if name not in config:
            raise UsageError(f"--{name} {value}: the recipe has no option {name}; leave it out")
    for name, other in (ONE_OF, ONE_OF[::-1]):
        if (name in set_here or name == key) and config.get(other) is not None:
            set_here[other] = "None"
    if config.get("hub.repo_id") is not None:
        set_here["hub.repo_id"] = "None"  # a comparison pushes nothing
    return [word for name, value in set_here.items() for word in (f"--{name}", value)]


def _refuse_twins(key: str | None, variants: Sequence[Variant]) -> None:
    seen: dict[str, str] = {}
    for variant in variants if key else ():
        value = repr(variant.config.get(key or ""))
        if value in seen:
            raise UsageError(f"--vary: {seen[value]} and {variant.name} are the same value; leave one out")
        seen[value] = variant.name


def refuse_unequal_configs(variants: Sequence[Variant], key: str | None) -> None:
    """Refuse, before anything runs, what is no fair comparison by the options alone."""
    first = variants[0]
    for name in EQUAL:
        for other in variants[1:]:
            one, two = first.config.get(name), other.config.get(name)
            if one != two and name != key:
                remedy = f"give --{name} for both" if name != "global_batch_size" else "make it the same in both"
                raise UsageError(
                    f"{name}: {one!r} in {first.name}, {two!r} in {other.name}: a fair comparison needs the same; "
                    f"{remedy}, or compare it on purpose with --vary {name}=..."
                )


# ---------------------------------------------------------------------------------------------------------- rounds
def _run_rounds(
    request: Request, recipe: Path, variants: Sequence[Variant], key: str | None, gates: Sequence[Gate], output: Path
) -> list[list[Run]]:
    """Every round's runs in the variants' order; each other round runs them in reverse, so that what drifts with
    time favours nobody."""
    done: list[Run] = []
    for number in range(1, request.rounds + 1):
        for variant in variants if number % 2 else reversed(variants):
            run = _run_variant(request, recipe, variant, number, output)
            done.append(run)
            refuse_unequal_runs(done[0], run, key)
            if len(done) in (1, len(variants)):
                _check_gate_names(gates, done)
            print(_progress(done, variant, request.rounds * len(variants)), flush=True)
    order = {v.letter: index for index, v in enumerate(variants)}
    by_round = [[run for run in done if run.round == number] for number in range(1, request.rounds + 1)]
    return [sorted(runs, key=lambda run: order[run.letter]) for runs in by_round]


def _run_variant(request: Request, recipe: Path, variant: Variant, number: int, output: Path) -> Run:
    folder = output / f"round_{number}"
    folder.mkdir(exist_ok=True)
    directory = folder / variant.letter
    command = [sys.executable, str(recipe)]
    if request.config_file is not None:
        machine = str(expand_path(request.config_file))
        command = [sys.executable, "-m", "accel_train.cli", "launch", "--config_file", machine, str(recipe)]
    command += [variant.source, *variant.flags, "--output_dir", str(directory)]
    try:
        seconds, cpu_seconds = run_once(command, folder / f"{variant.letter}.log", request.gates)
    except UsageError:
        if not directory.exists() and len(list(folder.iterdir())) == 1:
            shutil.rmtree(folder)  # nothing has run: the same --output can be given again
        raise
    run = read_run(variant.letter, number, directory, seconds, cpu_seconds)
    if not request.keep_checkpoints:
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    return run


def _check_gate_names(gates: Sequence[Gate], runs: Sequence[Run]) -> None:
    """After the first run, because the names of its evaluation are known now, and after the first round, because
    some figures need log lines that another variant may not write; not after the last."""
    values = observations([runs], window_of(runs))
    for gate, other in itertools.product(gates, values):
        values_of(gate, values[0], other)


def refuse_unequal_runs(first: Run, run: Run, key: str | None) -> None:
    """Refuse what the options did not show: other data, another number of steps, another real batch."""
    facts = {
        "data fingerprint": (first.fingerprint, run.fingerprint, (key or "").startswith("data.")),
        "steps done": (first.last_step, run.last_step, key in EQUAL or (key or "").startswith("data.")),
        "global_batch_size": (*(r.lines[-1].get("global_batch_size") for r in (first, run)), key in EQUAL),
    }
    for name, (one, two, varied) in facts.items():
        if one != two and not varied:
            raise UsageError(
                f"{name}: {one!r} in {first.directory}, {two!r} in {run.directory}: a fair comparison needs the same; "
                "correct the configs, or compare the option that changes it with --vary"
            )


def _progress(done: Sequence[Run], variant: Variant, total: int) -> str:
    run, left = done[-1], total - len(done)
    line = run.lines[-1]
    loss = line.get("loss")
    shown = f"  loss {loss:.4g}" if isinstance(loss, (int, float)) else ""
    rest = f"{left} left, about {format_seconds(left * fmean(r.seconds for r in done))}" if left else "all done"
    return (
        f"run {len(done)} of {total}  round {run.round}  {variant.letter} {variant.name}  {format_seconds(run.seconds)}"
        f"  {line['step_seconds']:.4g} s/step{shown}  {rest}"
    )
