"""``accel-train compare``: run a recipe with two configs, each of their differences, or several values of an option.

Variants take turns, and each run is a process of its own. Seed, data, global batch and number of steps must be the
same in all of them, except that each round may have a seed of its own. If they are not, the comparison is refused.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

from accel_train.commands.bundled import find_recipe
from accel_train.compare import report
from accel_train.compare.figures import Observations, effects, is_about_machine, observations, window_of
from accel_train.compare.request import Request
from accel_train.compare.result import Plan, Result
from accel_train.compare.rounds import EQUAL, Rounds, Runner
from accel_train.compare.runs import (
    InterruptedRunError,
    Options,
    RunFailedError,
    Variant,
    read_config,
    report_failure,
    stop_signals_raise,
)
from accel_train.config import UsageError, expand_path, refuse_unwritable
from accel_train.metrics.gates import Decision, Gate, decide, gate_values, read_gate
from accel_train.options.flags import nearest_option
from accel_train.wording import did_you_mean

# Exclusive options: a recipe takes one and requires None for the other.
EXCLUSIVE = ("max_steps", "max_epochs")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # also the limit on variants


def compare(request: Request) -> int:
    """Run everything, print and write the result. Return 1 if a gate or a run fails or a signal stops it, else 0.

    A failed run or a signal ends the comparison early, and the result then covers the rounds completed so far.
    Raises ``UsageError`` for an unfair comparison. Main thread only, because it handles the stop signals.
    """
    gates = [read_gate(text) for text in request.gates]
    with stop_signals_raise():
        try:
            return _compare(request, gates)
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "the current run is stopped, no result")


def _compare(request: Request, gates: Sequence[Gate]) -> int:
    recipe = find_recipe(request.recipe)
    if request.config_file is not None:
        from accel_train.launch_files.machine_config import read_machine_config

        # An invalid launch file is refused here, before the first run would do so.
        read_machine_config(expand_path(request.config_file), num_processes=request.num_processes)
    key, variants = read_variants(request, recipe)
    refuse_unequal_configs(variants, (key, "seed") if request.seeds else (key,))
    output = _open_output(request)
    plan = Plan(request.recipe, variants, key, request.rounds, request.tolerance, request.seeds)
    print("\n".join(report.header(plan, output)), flush=True)
    rounds = Runner(request, recipe, output).run_rounds(variants, key, gates)
    result = _result(plan.of_rounds(len(rounds.runs)), gates, rounds)
    rounds.print_end()
    print("\n".join(report.text(result)), flush=True)
    for path in report.write(result, output):
        print(f"written: {path}", flush=True)
    failed = any(decision.verdict == "FAILED" for decisions in result.decisions for decision in decisions)
    return 1 if failed or rounds.cut_short is not None else 0


def _result(plan: Plan, gates: Sequence[Gate], rounds: Rounds) -> Result:
    window = window_of([run for runs in rounds.runs for run in runs])
    values = observations(rounds.runs, window)
    a, *others = values
    compared = values
    if plan.key == "seed":
        compared = [_once(found) for found in values]
    all_effects = [effects(compared[0], b, plan.rounds, plan.tolerance) for b in compared[1:]]
    decisions = [decide_gates(gates, a, b, of_seeds=bool(plan.seeds)) for b in others]
    if plan.is_ablation:
        # Gates are for B, not for its options one by one.
        decisions[:-1] = [[] for _ in decisions[:-1]]
    return Result(plan, rounds, window, values, all_effects, decisions)


def _once(values: Observations) -> dict[str, Sequence[float]]:
    """Return the median in place of the rounds where they repeat the value of one seed, which has no interval."""
    return {name: found if is_about_machine(name) else [median(found)] for name, found in values.items()}


def decide_gates(gates: Sequence[Gate], a: Observations, b: Observations, *, of_seeds: bool = False) -> list[Decision]:
    """Decide each gate for B against A. Raises ``UsageError`` for names missing from either.

    ``of_seeds`` tells that each round has a seed of its own.
    """
    return [_decide(gate, gate_values(gate, a, b), of_seeds) for gate in gates]


def _decide(gate: Gate, values: Sequence[float], of_seeds: bool) -> Decision:
    """Decide a gate by the interval over the rounds if it is about the machine or the seeds differ, else by the median.

    If all rounds of a side train with one seed, their spread shows the noise of the machine, not how a loss varies
    with the seed.
    """
    metric = gate.name.removesuffix("_ratio").removesuffix("_delta")
    if of_seeds or is_about_machine(metric) or len(values) == 1 or any(map(isnan, values)):
        return decide(gate, values)
    reason = f"each side ran one seed, so no interval: the median of its {len(values)} rounds decides"
    return replace(decide(gate, [median(values)]), reason=reason)


def _open_output(request: Request) -> Path:
    path = expand_path(request.output or time.strftime("runs/compare-%Y%m%d-%H%M%S"))
    with refuse_unwritable(f"--output {path}"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"--output {path} is not empty; give another directory, or delete it first")
        path.mkdir(parents=True, exist_ok=True)
    return path


# ---------------------------------------------------------------------------------------------------------- variants
@dataclass(frozen=True)
class _Side:
    """A variant before its options are resolved."""

    name: str
    source: str
    flags: tuple[str, ...] = ()


def read_variants(request: Request, recipe: Path) -> tuple[str | None, list[Variant]]:
    """Return the varied option, if any, and the variants with their options.

    Runs the recipe with ``--print_config`` up to twice per variant, which takes a few seconds each.
    """
    # Both sources may be the same, which measures the noise of the machine.
    bases = {source: read_config(recipe, [source]) for source in dict.fromkeys(request.sources)}
    key, sides = _sides(request, bases)
    variants: list[Variant] = []
    for side in sides:
        base = bases[side.source]
        flags = (*_common_flags(request, base, side.source, key), *side.flags)
        config = base
        try:
            if flags:
                config = read_config(recipe, [side.source, *flags])
        except UsageError as error:
            if not (request.ablate and side.flags):
                raise
            # Some options of B are refused without others of B.
            print(f"not by itself: {side.name} ({error})", flush=True)
            continue
        variants.append(Variant(LETTERS[len(variants)], side.name, side.source, flags, config))
    if key is not None:
        _refuse_equal_values(key, variants)
    return key, variants


def _sides(request: Request, bases: Mapping[str, Options]) -> tuple[str | None, list[_Side]]:
    """Return the varied option, if any, and the variants in the order of the table."""
    first = request.sources[0]
    if request.vary is not None:
        key, values = _read_vary(request.vary, bases[first])
        varied: list[_Side] = []
        for value in values:
            # An option of several values takes several words.
            words = _words_of_shell("vary", key, value)
            varied.append(_Side(f"{key}={value}", first, (f"--{key}", *words)))
        return key, varied
    sides = [_Side(source, source) for source in request.sources]
    if request.ablate:
        last = request.sources[-1]
        singles = [_Side(name, first, flags) for name, flags in single_options(bases[first], bases[last])]
        if len(singles) + 2 > len(LETTERS):
            raise UsageError(f"--ablate: {len(singles)} options differ, at most {len(LETTERS) - 2} can be tried")
        sides[1:1] = singles
    return None, sides


def single_options(a: Options, b: Options) -> list[tuple[str, tuple[str, ...]]]:
    """Return each option of B that differs from A: its name in the table and its flag.

    Skips ``output_dir``, the options in ``EQUAL`` and those of the Hub. Raises ``UsageError`` if no option is left or
    one exists on one side only.
    """
    names_in_order = dict.fromkeys((*a, *b))
    differing = [name for name in names_in_order if a.get(name) != b.get(name)]
    skipped = ("output_dir", *EQUAL)
    names = [name for name in differing if name not in skipped and not name.startswith("hub.")]
    # Differences in EQUAL are refused later, with an error of their own.
    if not names and not set(EQUAL).intersection(differing):
        raise UsageError("--ablate: the two configs have the same options; there is nothing to ablate")
    options: list[tuple[str, tuple[str, ...]]] = []
    for name in names:
        if name not in a or name not in b:
            raise UsageError(f"--ablate: {name} is an option in only one of the two; give it in both")
        options.append((f"{name}: {a[name]!r} -> {b[name]!r}", (f"--{name}", *_words(b[name]))))
    return options


def _words(value: Any) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return [str(value)]


def _read_vary(text: str, config: Options) -> tuple[str, list[str]]:
    name, equals, rest = text.partition("=")
    key = name.strip().removeprefix("--")
    values = [value.strip() for value in rest.split(",")]
    if not equals or not key or len(values) < 2 or not all(values):
        raise UsageError(f"--vary {text!r} is not KEY=V1,V2 with two values or more; write it as in --vary seed=0,1")
    if len(values) > len(LETTERS):
        raise UsageError(f"--vary {key}: {len(values)} values given, at most {len(LETTERS)} are compared; give fewer")
    if key.startswith("hub."):
        raise UsageError(f"--vary {key}: a comparison pushes nothing to the Hub; vary another option")
    options = [option for option in config if option != "output_dir"]
    if key not in options:
        hint = did_you_mean(nearest_option(key, options))
        raise UsageError(f"--vary {key}: not an option that can be varied{hint}; the recipe's --print_config names all")
    return key, values


def _requested_flags(request: Request) -> dict[str, str]:
    given = {"max_steps": request.max_steps, "max_epochs": request.max_epochs, "seed": request.seed}
    flags = {name: str(value) for name, value in given.items() if value is not None}
    for name, value in request.settings().items():
        if name in (*given, "output_dir") or name.startswith(("hub.", "profile.")):
            raise UsageError(f"--set {name}={value}: it has a flag of its own here, or belongs to the comparison")
        flags[name] = value
    return flags


def _common_flags(request: Request, config: Options, source: str, key: str | None) -> list[str]:
    """Return the flags set for every variant, as the recipe spells them."""
    if "output_dir" not in config:
        raise UsageError(f"{source}: the recipe has no option output_dir, so its runs cannot be kept apart; add it")
    if request.seeds and "seed" not in config:
        raise UsageError(f"--seeds {' '.join(map(str, request.seeds))}: the recipe has no option seed; leave it out")
    flags = _requested_flags(request)
    for name, value in flags.items():
        if name == key or {name, key} == set(EXCLUSIVE):
            raise UsageError(f"--{name} {value} and --vary {key}: both set the same thing; leave --{name} out")
        if name not in config:
            raise UsageError(f"--{name} {value}: the recipe has no option {name}; leave it out")
    for name, other in (EXCLUSIVE, EXCLUSIVE[::-1]):  # a preset may set the other one
        if (name in flags or name == key) and config.get(other) is not None:
            flags[other] = "None"
    off = {"hub.repo_id": "None", "profile.steps": "None", "profile.memory": "False"}  # they push, or slow steps down
    kept = {key, "profile.steps"} if key == "profile.memory" else {key}
    flags |= {name: value for name, value in off.items() if config.get(name) and name not in kept}
    words: list[str] = []
    for name, value in flags.items():
        words += [f"--{name}", *_words_of_shell("set", name, value)]
    return words


def _words_of_shell(flag: str, name: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise UsageError(
            f"--{flag} {name}={value}: {error}; values are split into words as in a shell: quote the quotation mark"
        ) from None


def _refuse_equal_values(key: str, variants: Sequence[Variant]) -> None:
    seen: dict[str, str] = {}
    for variant in variants:
        value = repr(variant.config.get(key))
        if value in seen:
            raise UsageError(f"--vary: {seen[value]} and {variant.name} are the same value; leave one out")
        seen[value] = variant.name


def refuse_unequal_configs(variants: Sequence[Variant], varied: Sequence[str | None]) -> None:
    """Raise ``UsageError`` for an unfair comparison, if the options alone show it. Called before anything runs.

    Options in ``varied`` may differ on purpose.
    """
    first, *others = variants
    for name in EQUAL:
        if name in varied:
            continue
        for other in others:
            a = first.config.get(name)
            b = other.config.get(name)
            if a != b:
                remedy = f"give --{name} for both"
                # `compare` has no flag for it.
                if name == "global_batch_size":
                    remedy = "make it the same in both"
                raise UsageError(
                    f"{name}: {a!r} in {first.name}, {b!r} in {other.name}: a fair comparison needs the same; "
                    f"{remedy}, or compare it on purpose with --vary {name}=..."
                )
