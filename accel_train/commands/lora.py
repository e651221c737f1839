"""``accel-train lora``: adapters from a dataset of pictures in six steps. Each can be called alone.

check -> plan -> cache -> train -> validate -> export. The plan is a file, ``RUN/plan.yaml``, read by the later
steps: the same command continues where it was ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from accel_train.commands import lora_plan, places
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.commands.lora_plan import Intent
from accel_train.config import Fraction, PositiveFloat, PositiveInt, UsageError, expand_path
from accel_train.options.flags import FlagError, read_flags
from accel_train.options.help_text import print_command_help, requested_topic
from accel_train.options.loading import from_tree, read_tree
from accel_train.options.tree import (
    INVOCATION_OPTIONS,
    Tree,
    defaults_tree,
    flatten,
    option_types,
    overlaid,
    tree_text,
    without_invocation,
)
from accel_train.precision import nan_as_infinite
from accel_train.store.atomic_files import replace_file
from accel_train.store.names import METRICS_FILE, REPORT
from accel_train.store.run_file import has_trained

Step = Literal["check", "plan", "cache", "train", "validate", "export"]
STEPS: tuple[Step, ...] = ("check", "plan", "cache", "train", "validate", "export")
RECIPE = "lora"
PLAN = "plan.yaml"
PLANNED = "# The plan of `accel-train lora`; valid input for recipes/lora.py. Edit it before training begins.\n"
MADE_WITH = "# Made with "
OF_THE_PLAN = ("intent", "memory_gib")
"""Options of the step plan. The recipe does not have them, so the plan keeps them in a comment, ``MADE_WITH``."""
CHECKED = (
    *("data.resolutions", "data.bucket_step", "data.max_aspect", "data.split", "data.image_column"),
    *("data.caption_column", "data.caption_extension", "data.min_side", "data.cache_dir"),
)
"""Options of the recipe shared with the check of the data."""
NAMES = {"data.path": "the word after `accel-train lora`", "base.source": "--base"}
"""Options of the recipe that are given in another way on this command line."""
WORSE = 1.02
"""Ratio of the newest held-out loss to the lowest one above which the model overfits to the pictures."""


@dataclass(frozen=True)
class LoraOptions:
    """Train adapters on a pipeline from a dataset of pictures: check, plan, cache, train, validate, export.

    Every option of recipes/lora.py may be given too, such as --lora.rank 32 or --max_steps 500.
    """

    base: str | None = None
    """Hub id or folder of the base: --base.source of the recipe."""
    intent: Intent = "balanced"
    """speed: fewer steps and smaller adapters. quality: more and larger ones, with averaged weights."""
    memory_gib: PositiveFloat | None = None
    """Memory to plan for, in GiB. None: that of the smallest accelerator of this machine, or of its host."""
    steps: tuple[Step, ...] = STEPS
    """Steps to run, in this order whatever the order given. Steps after the plan read it from the run's directory."""
    min_dataset_quality: Fraction = 0.5
    """Quality below which the dataset fails the check and nothing is trained."""
    config_file: str | None = None
    """Launch file of accelerate. None: as for `accel-train launch`."""
    num_processes: PositiveInt | None = None
    """Processes over all machines. None: from the launch file, or one for each accelerator."""


@dataclass(frozen=True)
class _Request:
    """The request of a user, and the paths of its files."""

    dataset: str
    options: LoraOptions
    recipe: ModuleType
    flags: Mapping[str, Any]
    """Options of the experiment by dotted name. They become part of the plan."""
    start: Mapping[str, Any]
    """Options of one start of the recipe, for the step train only."""
    made_with: Mapping[str, Any]
    """``OF_THE_PLAN``, as far as they were given."""

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return expand_path(self.flags["output_dir"])

    @property
    def plan(self) -> Path:
        return self.run / PLAN

    def tree(self) -> Tree:
        """Return the options of the plan. Raises ``UsageError`` without a plan."""
        if not self.plan.is_file():
            raise UsageError(f"{self.plan}: there is no plan yet; run the step plan first, or all steps")
        return _read_plan(self.plan)

    def config(self) -> Any:
        """Return the recipe's config of the plan. Raises ``UsageError`` without a plan."""
        return from_tree(self.recipe.Config, self.tree(), str(self.plan))

    @property
    def reads_plan(self) -> bool:
        """True if the steps read a plan that they do not make."""
        steps = set(self.options.steps)
        if "plan" in steps:
            return False
        # An export reads the run alone, which another command may have started.
        return bool(steps & {"cache", "train", "validate"}) or ("export" in steps and self.plan.is_file())


def lora(dataset: str, arguments: Sequence[str]) -> int:
    """Run the requested steps, and return the exit code of the first failing one, else 0.

    Raises ``UsageError``. Exit code 75 means that a step was stopped: the same command continues it.
    """
    request = _read(dataset, arguments)
    actions: dict[Step, Callable[[_Request], int]] = {
        "check": _check,
        "plan": _plan,
        "cache": _cache,
        "train": _train,
        "validate": _validate,
        "export": _export,
    }
    if request.reads_plan:
        _refuse_other_values(request)
    for number, name in enumerate(STEPS, 1):
        if name not in request.options.steps:
            continue
        # Flushed, because the processes of the next step write to the same terminal.
        print(f"\n[{number}/{len(STEPS)}] {name}", flush=True)
        code = actions[name](request)
        if code != 0:
            print(f"{name} ended with exit code {code}; the steps after it were not run", flush=True)
            return code
    return 0


def _read(dataset: str, arguments: Sequence[str]) -> _Request:
    if requested_topic(arguments) is not None:
        print_command_help(LoraOptions, "accel-train lora DATASET")
    recipe = import_recipe(find_recipe(RECIPE))
    own = option_types(LoraOptions)
    try:
        flags = read_flags(option_types(recipe.Config) | own, arguments, list)
    except FlagError as error:
        raise UsageError(str(error)) from None
    options = from_tree(LoraOptions, {name: value for name, value in flags.items() if name in own}, "command line")
    # All other options are the recipe's, whose config checks them.
    rest = {name: value for name, value in flags.items() if name not in own}
    for option, given in (("data.path", dataset), ("base.source", options.base)):
        if option in rest:
            raise UsageError(f"--{option} {rest[option]}: in this command it is {NAMES[option]}; give it only there")
        if given is not None:
            rest[option] = given
    start = {name: rest.pop(name) for name in INVOCATION_OPTIONS if name in rest}
    _refuse_of_other_steps(options, rest, start)
    made_with = {name: flags[name] for name in OF_THE_PLAN if name in flags}
    return _Request(dataset, options, recipe, {"output_dir": lora_plan.OUTPUT_DIR} | rest, start, made_with)


def _refuse_of_other_steps(options: LoraOptions, flags: Mapping[str, Any], start: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for options of a start without the step train, and for ``cache_only``."""
    if "cache_only" in flags:
        raise UsageError("--cache_only: here it is the step cache; give --steps cache")
    if start and "train" not in options.steps:
        given = " ".join(_flags(start))
        raise UsageError(
            f"{given}: belongs to the step train, which is not among --steps; add train, or leave this out"
        )


def _refuse_other_values(request: _Request) -> None:
    """Raise ``UsageError`` for options that differ from the plan, which the steps after it would not obey."""
    planned = flatten(defaults_tree(request.recipe.Config)) | flatten(request.tree())
    others = {option: value for option, value in request.flags.items() if not _is_same(planned.get(option), value)}
    lines = [
        f"{NAMES.get(option, f'--{option}')}: {planned.get(option)!r} there, {value!r} now"
        for option, value in others.items()
    ]
    lines += _other_making(request)
    if lines:
        listed = "\n  ".join(lines)
        raise UsageError(
            f"{request.plan}: the steps {' '.join(request.options.steps)} read the plan, which has other values:\n"
            f"  {listed}\nadd plan to --steps, or leave out what differs"
        )


def _is_same(planned: Any, given: Any) -> bool:
    if isinstance(planned, str) and isinstance(given, str):
        # Such as photos/ for photos.
        return planned == given or expand_path(planned) == expand_path(given)
    return planned == given


def _other_making(request: _Request) -> list[str]:
    """Return a line for each option of the step plan whose value now differs from that in the plan."""
    made = _made_with(request.plan)
    return [
        f"--{name}: {made.get(name)!r} there, {value!r} now"
        for name, value in request.made_with.items()
        if made.get(name) != value
    ]


def _check(request: _Request) -> int:
    from accel_train.commands import data

    # Only given options are passed on, because the check has its own defaults.
    given = {option.removeprefix("data."): request.flags[option] for option in CHECKED if option in request.flags}
    quality = {"min_dataset_quality": request.options.min_dataset_quality}
    return data.check(request.dataset, _flags(quality | given))


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Write options as words of a command line."""
    words: list[str] = []
    for option, value in options.items():
        several = cast("list[Any]", value) if isinstance(value, list) else [value]
        words += [f"--{option}", *map(str, several)]
    return words


def _plan(request: _Request) -> int:
    # With overwrite the step train deletes the run, so its plan no longer matters.
    if has_trained(request.run) and not request.start.get("overwrite"):
        if not request.plan.is_file():
            raise UsageError(
                f"{request.run}: a run without {PLAN}, so not started by this command; continue with "
                f"`accel-train launch {RECIPE} {request.run / 'config.yaml'} --output_dir {request.run}`, or give "
                "another --output_dir"
            )
        others = _other_making(request)
        if others:
            listed = "\n  ".join(others)
            raise UsageError(
                f"{request.plan}: is kept, because training has begun, but was made with other options:\n  {listed}\n"
                "leave them out, give another --output_dir, or --overwrite to delete the run and plan again"
            )
        # Not planned again: this may be another machine by now, but the experiment must stay the same.
        tree = overlaid(_read_plan(request.plan), request.flags)
        made_with = _made_with(request.plan)
        lines = ["kept, because training has begun; options given now are added, and refused if they change the run"]
    else:
        options = request.options
        tree, lines = lora_plan.make(request.recipe, request.flags, options.intent, options.memory_gib)
        made_with = {"intent": options.intent} | dict(request.made_with)
    # An invalid plan is refused here, and not only by the first process that trains.
    from_tree(request.recipe.Config, tree | dict(request.start), "command line")
    _write(request.plan, tree, made_with)
    print("\n".join([*lines, f"{request.plan}: the plan, as options of recipes/lora.py"]), flush=True)
    return 0


def _read_plan(path: Path) -> Tree:
    """Return the options of a plan. Options of a single start, which a user may have added, are removed from the file.

    With ``overwrite: true`` in it, every later start would delete the run.
    """
    found = read_tree(path)
    tree = without_invocation(found)
    removed = [name for name in found if name not in tree]
    if removed:
        _write(path, tree, _made_with(path))
        print(f"{path}: {', '.join(removed)} removed, because a plan applies to every start", flush=True)
    return tree


def _made_with(path: Path) -> dict[str, Any]:
    """Return the options ``OF_THE_PLAN`` that a plan was made with. Empty if their line is gone."""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith(MADE_WITH):
            # The line may have been edited.
            with suppress(FlagError):
                return read_flags(option_types(LoraOptions), line.removeprefix(MADE_WITH).split(), list)
    return {}


def _write(path: Path, tree: Tree, made_with: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = PLANNED
    if made_with:
        text += f"{MADE_WITH}{' '.join(_flags(made_with))}\n"
    replace_file(path, (text + tree_text(tree)).encode())


def _cache(request: _Request) -> int:
    return _launch(request, "--cache_only")


def _train(request: _Request) -> int:
    return _launch(request, *_flags(request.start))


def _launch(request: _Request, *flags: str) -> int:
    from accel_train.commands.launch import Launch, launch

    # Without a plan, this raises an error that names the step plan.
    request.config()
    options = request.options
    arguments = (str(request.plan), *flags)
    return launch(Launch(options.config_file, RECIPE, arguments, num_processes=options.num_processes))


def _validate(request: _Request) -> int:
    """Show the results of the evaluations. The newest checkpoint is evaluated first if that has not been done."""
    from accel_train.metrics.records import evaluated_report

    config = request.config()
    newest, _ = places.newest_at(request.run)
    report = request.run / REPORT
    # One in the folder of other data may be of any data, unless this call has written it.
    if evaluated_report(report, newest.step) != report:
        code = _launch(request, "--evaluate_only")
        if code != 0:
            return code
    for line in _findings(request.run / METRICS_FILE):
        print(line)
    if config.evaluation.prompts:
        shown = evaluated_report(report, newest.step) or report
        print(f"{shown / 'pictures.png'}: the prompts, a row for each of up to 10 evaluations")
    else:
        print("no pictures: give --evaluation.prompts 'a red flag' to see the same prompts at every evaluation")
    return 0


def _findings(metrics: Path) -> list[str]:
    """Return lines about the held-out losses over the run."""
    from accel_train.metrics.records import read_metrics

    losses: dict[int, float] = {}
    for record in read_metrics(metrics):
        if record["event"] == "evaluation" and "loss" in record:
            losses[int(record["step"])] = float(record["loss"])
    if not losses:
        return ["no held-out pictures (data.heldout_fraction), so nothing tells learning from memorising"]
    listed = ", ".join(f"{loss:.4f} at step {step}" for step, loss in sorted(losses.items()))
    lines = [f"held-out loss: {listed}"]
    newest = max(losses)
    last = losses[newest]
    if not math.isfinite(last):
        # The comparison below is False for NaN.
        lines.append(f"WARNING: {last} at step {newest}: the weights are spoiled; export an earlier checkpoint")
        return lines
    # Of equal losses the earliest step, which has overfitted less.
    best = min(losses, key=lambda step: nan_as_infinite(losses[step]))
    # A held-out loss fluctuates from evaluation to evaluation.
    if last > WORSE * losses[best]:
        lines.append(
            f"WARNING: {last / losses[best] - 1:.0%} above its lowest value, at step {best}: the pictures are being "
            f"memorised; export that checkpoint, or train fewer steps"
        )
    return lines


def _export(request: _Request) -> int:
    from accel_train.commands.export import export

    newest, _ = places.newest_at(request.run)
    destination = request.run / f"exported-{newest.step:08d}"
    if destination.is_dir() and any(destination.iterdir()):
        _refuse_other_export(destination, newest.path, newest.manifest.get("run_id"))
        # The name has the step in it, and a checkpoint of a run never changes.
        print(f"{destination}: there already")
        return 0
    return export(str(request.run), str(destination))


def _refuse_other_export(destination: Path, checkpoint: Path, run_id: str | None) -> None:
    """Raise ``UsageError`` for a folder that is not an export of the run, such as one of an overwritten run."""
    try:
        exported = json.loads((destination / "experiment.json").read_text("utf-8")).get("run_id")
    except (OSError, ValueError) as error:
        found = f"no export that can be read ({error})"
    else:
        if exported == run_id:
            return
        found = f"the export of another run, {exported}"
    raise UsageError(
        f"{destination}: is {found}; {checkpoint} is of run {run_id}. Move the folder away, and give --steps export"
    )
