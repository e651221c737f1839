"""``accel-train branch``: fork a run at a checkpoint, on the same samples and noise.

The branch is a new run with an id of its own. Its control is the recorded run itself if that continues far enough with
the same options, else an unchanged branch, which is trained too.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.commands.bundled import import_recipe
from accel_train.compare.runs import InterruptedRunError, RunFailedError, report_failure, stop_signals_raise
from accel_train.config import NonNegativeInt, PositiveInt, UsageError, expand_path
from accel_train.metrics.records import write_json
from accel_train.options.loading import config_of, read_options
from accel_train.options.tree import Tree, flatten, option_names, to_tree, tree_text
from accel_train.rerun import branch_report, changes, recorded, training
from accel_train.rerun.agreement import reasons_for_other_bits
from accel_train.rerun.recorded import WITHOUT_EFFECT, RecordedRun
from accel_train.rerun.training import Machine
from accel_train.store.manifest import Checkpoint, checkpoint_name
from accel_train.store.names import CONFIG_FILE, REPORT, RUN_FILE
from accel_train.store.run_file import is_covered, recall
from accel_train.wording import shortened

BRANCH_FILE = "branch.json"
SAVE_SECONDS = 300.0
"""Time that an interrupted branch gets to save, since the same command continues it. As for `accel-train run`."""


@dataclass(frozen=True)
class BranchOptions:
    """Fork a run at a checkpoint with changed options, on the same samples and noise, and compare the two.

    Every option of the run's recipe may be given too, such as --optimizer.lr 3e-4.
    """

    at: NonNegativeInt | None = None
    """Required. Optimizer steps of the checkpoint to fork at, or of the newest one before."""
    steps: PositiveInt | None = None
    """Optimizer steps after the checkpoint. None: to the end of the run."""
    output_dir: str | None = None
    """Directory of the branch. None: beside the run, with the step and the changes in its name."""
    recipe: str | None = None
    """Recipe of your own that trained the run. The file is executed."""
    config_file: str | None = None
    """Launch file of accelerate. None: as for `accel-train launch`."""
    num_processes: PositiveInt | None = None
    """Processes on this machine. None: from the launch file, or one for each accelerator."""

    def __post_init__(self) -> None:
        if self.at is None:
            raise UsageError("--at is missing: the step to fork at is required, as in --at 5000")


@dataclass(frozen=True)
class _Fork:
    """The point where a branch leaves its run, and its changes."""

    run: RecordedRun
    at: int
    """Requested step."""
    checkpoint: Checkpoint
    recipe: Path
    machine: Machine
    options: Tree
    """Nested options of the run at the checkpoint, with the length of the branch."""
    batches: Mapping[str, Any]
    """``batch_schedule`` with the batch sizes that the run measured, in place of a measurement. Empty without one."""
    flags: Sequence[str]
    """Words of the command line for the changed options."""
    changed: Mapping[str, Any]
    """Changed options, by dotted name."""
    free: Sequence[str]
    """Options and groups of the recipe without an effect on the trajectory."""
    last: int
    """Last step of the branch."""


def branch(place: str, arguments: Sequence[str]) -> int:
    """Train the branch and, if needed, its control, print their differences and return exit code 0, or 1.

    Raises ``UsageError``. The same command continues where it was stopped. Main thread only, because it handles
    the stop signals.
    """
    # argparse would need the recipe for its options, and the recipe is known once the run is open.
    own, flags = split_words(arguments, option_names(BranchOptions))
    options = read_options(BranchOptions, own, "accel-train branch RUN")
    with tempfile.TemporaryDirectory(prefix="accel-train-branch-") as folder, stop_signals_raise():
        try:
            # Everything that can be refused is refused before anything is trained.
            fork = _open_fork(place, options, flags, Path(folder))
            directory = _directory(fork, options.output_dir)
            print("\n".join(_describe(fork, directory)), flush=True)
            # The branch first: a control of hours is of no use if the branch is refused.
            _train(fork, directory, Path(folder), changed=True)
            control = _control(fork, directory, Path(folder))
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "the same command continues")
    # Opened only now, because the training has just written its log.
    made = recorded.open_run(str(directory))
    rows = branch_report.differences(control, made, fork.checkpoint.step, fork.last)
    print("\n".join(branch_report.table(rows, fork.checkpoint.step, fork.last)), flush=True)
    starts = control.starts(fork.checkpoint.step + 1, fork.last)
    reasons = reasons_for_other_bits(starts, made.last_start(), fork.changed)
    if reasons:
        print(f"differences in the last digits come from the order of sums, not from the change: {'; '.join(reasons)}")
    # In the branch, since nothing is written to the run itself.
    _write(directory / REPORT / BRANCH_FILE, fork, control, rows)
    words = ["launch", recorded.name_of(fork.recipe), str(directory / CONFIG_FILE), "--output_dir", str(directory)]
    command = shlex.join(["accel-train", *words])
    print(f"the branch is a run of its own: {command}", flush=True)
    return 0


def split_words(words: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the flags of this command, with their one value each, from those of the recipe."""
    ours: list[str] = []
    others: list[str] = []
    target = others
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            target = others
            # Flags of a recipe have dots or other names, so none belongs to both.
            if name in own or name == "help":
                target = ours
        target.append(word)
    return ours, others


def _open_fork(place: str, options: BranchOptions, flags: Sequence[str], folder: Path) -> _Fork:
    assert options.at is not None, "BranchOptions requires it"
    run = recorded.open_run(place)
    recipe = recorded.recipe_of(run, options.recipe)
    checkpoint = _checkpoint_at(run, options.at)
    recorded_options = recorded.options_at(run, checkpoint)
    last = _last_step(run, checkpoint.step, options.steps)
    tree = training.set_length(recorded_options, last)
    # A branch must neither push to its parent's repository nor, should anything be refused, log into its directory.
    tree |= {"hub": tree["hub"] | {"repo_id": None}, "output_dir": str(folder / "refused")}
    batches = changes.measured_batches(recorded_options, checkpoint.manifest, run.lines("noise_scale"))
    # A flag that rules out a measurement is fine: the branch has the sizes and measures none.
    changed, free = _changed_options(recipe, _with_batches(tree, batches), flags, folder / CONFIG_FILE)
    machine = Machine(options.config_file, options.num_processes)
    return _Fork(run, options.at, checkpoint, recipe, machine, tree, batches, flags, changed, free, last)


def _checkpoint_at(run: RecordedRun, step: int) -> Checkpoint:
    if step > run.last_step:
        raise UsageError(f"--at {step}: {run.directory} ends at step {run.last_step}; give that step or an earlier one")
    checkpoint, reasons = run.newest_at(step)
    if checkpoint is None:
        steps = [str(step) for step, _ in run.checkpoints]
        refused = "".join(f"\n  refused: {reason}" for reason in reasons)
        raise UsageError(
            f"--at {step}: {run.directory} has no checkpoint at or before that step from which it can continue; it has "
            f"{shortened(steps, 12)}{refused}"
        )
    for reason in reasons:
        print(f"passed over: {reason}", flush=True)
    return checkpoint


def _last_step(run: RecordedRun, start: int, steps: int | None) -> int:
    if steps is not None:
        return start + steps
    # The run's own: a checkpoint from before it was extended has the length of that time. None for a run by epochs,
    # which then ends where its log does.
    last = run.saved["experiment"].get("max_steps") or run.last_step
    if last <= start:
        raise UsageError(
            f"--steps: the run ends at step {last}, where the branch begins; give the number of steps to train from "
            "there"
        )
    return last


def _changed_options(
    recipe: Path, options: Tree, flags: Sequence[str], config: Path
) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the options changed by ``flags``, and those without an effect on the trajectory.

    ``options`` are those of the run. Raises ``UsageError`` for a change that a branch cannot have.
    """
    config.write_text(tree_text(options), encoding="utf-8")
    # The recipe itself checks names, types and ranges.
    main = import_recipe(recipe).main
    loaded = config_of(main, [str(config), *flags])
    if loaded is None:
        raise UsageError(f"recipe {str(recipe)!r}: its main ended without a config, so its options are unknown")
    values = flatten(to_tree(loaded.config))
    # The config file given to it has the recorded options, so only flags count as changes.
    given = {name: values[name] for name, origin in loaded.origins.items() if origin == "command line"}
    before = flatten(options)
    free: Sequence[str] = loaded.config.run_options().free_to_change
    changes.refuse_unchangeable(given, before, free)
    return {name: value for name, value in given.items() if before.get(name) != value}, free


def _directory(fork: _Fork, given: str | None) -> Path:
    """Return the directory of the branch. Raises ``UsageError`` if it is the run's, or another branch's."""
    parent = fork.run.directory
    directory = parent.with_name(changes.directory_name(parent.name, fork.checkpoint.step, fork.changed))
    if given is not None:
        directory = expand_path(given)
    # Resolved: a link must not lead back into the run.
    if directory.resolve().is_relative_to(parent.resolve()):
        raise UsageError(
            f"--output_dir {directory}: is inside the run itself, which is never changed; give another one"
        )
    if (directory / RUN_FILE).exists():
        _refuse_other_branch(fork, directory, fork.changed)
    return directory


def _refuse_other_branch(fork: _Fork, directory: Path, changed: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` unless the run in ``directory`` is this very branch, which then continues."""
    saved, _ = recall(directory)
    parent: Mapping[str, Any] = {} if saved is None else saved.get("parent", {})
    experiment: Mapping[str, Any] = {} if saved is None else saved["experiment"]
    wanted = flatten(_trained_options(fork)) | dict(changed)
    # The branch passes `--allow`, which would accept any change of a half-trained run.
    others = [
        f"{name} {experiment.get(name)!r} there, {value!r} now"
        for name, value in wanted.items()
        if not WITHOUT_EFFECT.fullmatch(name) and name in experiment and experiment[name] != value
    ]
    if parent.get("run_id") != fork.run.run_id or parent.get("checkpoint") != checkpoint_name(fork.checkpoint.step):
        others.insert(0, f"its parent is {parent.get('run_id')} at {parent.get('checkpoint')}")
    if others:
        raise UsageError(
            f"--output_dir {directory}: contains another run ({'; '.join(others)}); give an unused directory, or "
            "delete it"
        )


def _describe(fork: _Fork, directory: Path) -> list[str]:
    step = fork.checkpoint.step
    lines = [f"run {fork.run.run_id}: {fork.run.directory}"]
    if step < fork.at:
        lines.append(f"no checkpoint of step {fork.at}: the branch forks at step {step}, the newest one before it")
    before = flatten(fork.options)
    texts = [f"{name} {before.get(name)!r} -> {value!r}" for name, value in fork.changed.items()]
    lines.append(f"changed from step {step + 1} on: {', '.join(texts) or 'nothing'}")
    return [*lines, f"branch: steps {step + 1} to {fork.last}, in {directory}"]


def _train(fork: _Fork, directory: Path, folder: Path, *, changed: bool) -> None:
    """Train the branch, or an unchanged one, in ``directory``. Continues a run found there."""
    config = folder / CONFIG_FILE
    options = _trained_options(fork) | {"output_dir": str(directory)}
    config.write_text(tree_text(options), encoding="utf-8")
    arguments = [str(config), "--resume", str(fork.checkpoint.path.resolve())]
    allowed = [changes.BATCHES] if fork.batches else []
    if changed:
        arguments += fork.flags
        allowed += fork.changed
    # A list option needs a value.
    if allowed:
        arguments += ["--allow", *allowed]
    training.train(fork.machine.command(fork.recipe, arguments), folder / "log", save_seconds=SAVE_SECONDS)


def _trained_options(fork: _Fork) -> Tree:
    return _with_batches(fork.options, fork.batches)


def _with_batches(options: Tree, batches: Mapping[str, Any]) -> Tree:
    """Return the options of the run, with its measured batches as a fixed schedule: a branch keeps the samples."""
    return options | ({changes.BATCHES: batches} if batches else {})


def _control(fork: _Fork, directory: Path, folder: Path) -> RecordedRun:
    """Return the recorded run if it continues far enough unchanged, else an unchanged branch, trained here."""
    problem = _unusable_as_control(fork)
    if problem is None:
        print("control: the recorded run itself", flush=True)
        return fork.run
    control = directory.with_name(f"{directory.name}-control")
    print(f"control: an unchanged branch in {control}, because {problem}", flush=True)
    if (control / RUN_FILE).exists():
        _refuse_other_branch(fork, control, {})
    _train(fork, control, folder, changed=False)
    return recorded.open_run(str(control))


def _unusable_as_control(fork: _Fork) -> str | None:
    """Return why the recorded run cannot serve as the control, or None."""
    logged = fork.run.lines("train")
    end = max(logged, default=0)
    if end < fork.last:
        return f"the run logged steps up to {end}"
    wanted = flatten(fork.options)
    # As in Recorder.due: the branch logs its last step, which the run need not have logged.
    every = (wanted | dict(fork.changed))["log.log_every"]
    start = fork.checkpoint.step
    if not any(start < step <= fork.last and (step % every == 0 or step in (1, fork.last)) for step in logged):
        return f"the run logged none of the steps {start + 1} to {fork.last} that the branch logs"
    for record in fork.run.starts(start + 1, fork.last):
        for name, value in flatten(record.options).items():
            # Options that change no result may differ from the branch's.
            if name in wanted and wanted[name] != value and not is_covered(name, fork.free):
                return f"the run continued with {name} {value!r}"
    return None


def _write(path: Path, fork: _Fork, control: RecordedRun, rows: Sequence[branch_report.Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    content: dict[str, Any] = {
        "parent": {"run_id": fork.run.run_id, "checkpoint": checkpoint_name(fork.checkpoint.step)},
        "control_run_id": control.run_id,
        "changed": dict(fork.changed),
        "steps": [fork.checkpoint.step, fork.last],
        "differences": rows,
    }
    write_json(path, content)
