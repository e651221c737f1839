"""``accel-train replay``: train a window of a recorded run again, and compare it with the record bit by bit."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from accel_train.compare.runs import InterruptedRunError, RunFailedError, report_failure, stop_signals_raise
from accel_train.config import UsageError
from accel_train.rerun import agreement, recorded, training, weights
from accel_train.rerun.agreement import TOLERANCE, Row, Weights
from accel_train.rerun.receipt import Result, receipt_file, write_receipt
from accel_train.rerun.recorded import RecordedRun
from accel_train.rerun.starts import Start
from accel_train.rerun.training import Machine
from accel_train.store import manifest
from accel_train.store.manifest import Checkpoint, checkpoint_name
from accel_train.wording import shortened

NO_MACHINE = Machine()
WINDOW = re.compile(r"(\d{1,15}):(\d{1,15})")


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    run: str
    steps: str
    """``FIRST:LAST``: from the state after FIRST optimizer steps to the state after LAST."""
    recipe: str | None = None
    machine: Machine = NO_MACHINE
    receipt: str | None = None
    """None: a name with run and window, in the current directory."""
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if not (isfinite(self.tolerance) and self.tolerance >= 0):
            raise UsageError(f"--tolerance {self.tolerance}: a number from 0 up is required, such as 1e-4")

    @property
    def window(self) -> tuple[int, int]:
        """The two numbers of ``steps``."""
        match = WINDOW.fullmatch(self.steps)
        if match is None:
            raise UsageError(f"--steps {self.steps}: two step numbers are required, as in --steps 400:420")
        first, last = int(match[1]), int(match[2])
        if first >= last:
            raise UsageError(f"--steps {self.steps}: contains no step; the second number must be the larger one")
        return first, last


@dataclass(frozen=True)
class _Plan:
    """Steps to train again, and their records to compare with."""

    run: RecordedRun
    recipe: Path
    window: tuple[int, int]
    checkpoint: Checkpoint | None
    logged: Sequence[int]
    """Logged steps to compare, from the checkpoint on."""
    save_every: int
    saved: Sequence[int]
    """Steps of the compared checkpoints."""

    @property
    def start_step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def beginning(self) -> str:
        """Beginning of the replay, for people."""
        return "step 0" if self.checkpoint is None else checkpoint_name(self.checkpoint.step)


def replay(request: Request) -> int:
    """Replay a window, print the comparison and write the receipt. Return 0 if the sides agree, else 1.

    Raises ``UsageError``. Main thread only, because it handles the stop signals.
    """
    first, last = request.window
    # Entered first, so that a signal leaves nothing behind.
    with tempfile.TemporaryDirectory(prefix="accel-train-replay-") as folder, stop_signals_raise():
        try:
            run = recorded.open_window(request.run, first, last, Path(folder))
            plan, notices = _plan(request, run, first, last)
            # Not in the directory of the run, which is never changed.
            path = receipt_file(request.receipt, f"replay-{run.run_id}-{first}-{last}.json")
            print("\n".join([f"run {run.run_id}: {run.directory}", *notices]), flush=True)
            result, starts = _replay(request, plan, Path(folder))
            more = {"changed_options": {str(step): changed for step, changed in result.changes.items()}}
            write_receipt(path, run.run_id, plan.recipe, plan.checkpoint, starts, result, more)
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "nothing is compared")
    print("\n".join(report(result)), flush=True)
    print(f"receipt: {path}", flush=True)
    return 1 if result.verdict in ("different", "not judged") else 0


def _plan(request: Request, run: RecordedRun, first: int, last: int) -> tuple[_Plan, list[str]]:
    """Choose the checkpoint and the steps to compare. Raises ``UsageError`` if there are none."""
    # Compared from the checkpoint on: steps up to the window are trained anyway, and may differ first.
    recipe = recorded.recipe_of(run, request.recipe)
    checkpoint, reasons = _beginning(run, recipe, first)
    start_step = 0 if checkpoint is None else checkpoint.step
    logged = [step for step in run.lines("train") if start_step < step <= last]
    within = [step for step, _ in run.checkpoints if start_step < step <= last]
    save_every, saved = training.steps_to_save(within, last)
    plan = _Plan(
        run,
        recipe,
        (first, last),
        checkpoint,
        logged,
        save_every,
        saved,
    )
    # Steps before the window are trained to reach it, and are no reason to train.
    if not any(first < step <= last for step in (*logged, *saved)):
        raise UsageError(
            f"--steps {request.steps}: the run has neither a logged step nor a checkpoint in it, so nothing can be "
            f"compared; the nearest logged steps are {_nearest(run, first, last)}"
        )
    return plan, _notices(plan, reasons)


def _beginning(run: RecordedRun, recipe: Path, first: int) -> tuple[Checkpoint | None, list[str]]:
    checkpoint, reasons = run.newest_at(first)
    if checkpoint is not None:
        return checkpoint, reasons
    # A run that began from another one's checkpoint has no step 0.
    origin = run.saved.get("origin")
    changed = run.changed_since_the_start(recipe)
    if first == 0 and origin is None and not changed:
        return None, reasons
    steps = [str(step) for step, _ in run.checkpoints]
    remedy = ", or --steps 0:N for a replay from the beginning"
    if first == 0 and changed:
        remedy = f" (it began with other options, which it no longer has: {', '.join(changed)})"
    elif origin or changed:
        remedy = ""
    refused = "".join(f"\n  refused: {reason}" for reason in reasons)
    raise UsageError(
        f"--steps {first}:...: {run.directory} has no checkpoint at or before step {first} from which it can continue; "
        f"it has {shortened(steps, 12)}; begin at one of these{remedy}{refused}"
    )


def _nearest(run: RecordedRun, first: int, last: int) -> str:
    steps = list(run.lines("train"))
    before = [step for step in steps if step <= first][-1:]
    after = [step for step in steps if step > last][:1]
    return shortened([str(step) for step in (*before, *after)], 2, " and ")


def _notices(plan: _Plan, reasons: Sequence[str]) -> list[str]:
    """Describe the beginning of the replay, and the comparable part of the window."""
    first, last = plan.window
    lines = [f"passed over: {reason}" for reason in reasons]
    recipe = recorded.name_of(plan.recipe)
    lines.append(f"trained again: steps {plan.start_step + 1} to {last}, from {plan.beginning}, with recipe {recipe}")
    if plan.start_step < first:
        lines.append(f"no checkpoint of step {first}: steps up to there are trained to reach it, and compared as well")
    missing = last - plan.start_step - len(plan.logged)
    if missing:
        lines.append(f"the run logged {len(plan.logged)} of these steps, and only those are compared")
    if plan.checkpoint is not None:
        changed = recorded.changed_since(plan.run, plan.checkpoint)
        if changed:
            lines.append(f"options are those of the checkpoint; changed since: {', '.join(changed)}")
    return lines


def _replay(request: Request, plan: _Plan, folder: Path) -> tuple[Result, dict[str, Sequence[Start]]]:
    """Train in ``folder`` and compare."""
    run = plan.run
    _, last = plan.window
    # The replay ends with the window, so that the last step is saved, and logged as a last step always is.
    options = training.set_length(recorded.options_at(run, plan.checkpoint), last)
    options = training.log_steps(options, plan.logged, last)
    directory = folder / "run"
    config = training.build_directory(directory, run, plan.checkpoint, options, plan.save_every)
    starts = run.starts(plan.start_step + 1, last)
    # A replay that began again at step 0 would compare nothing.
    resume = "auto" if plan.checkpoint is None else "must"
    command = request.machine.command(plan.recipe, [str(config), "--resume", resume])
    # A resume restores the number of threads by itself.
    threads = None
    if plan.checkpoint is None:
        threads = training.recorded_threads(starts)
    training.train(command, folder / "log", threads)
    replayed = recorded.open_run(str(directory))
    wanted = run.lines("train")
    rows = agreement.rows_of({step: wanted[step] for step in plan.logged}, replayed.lines("train"))
    compared = _compare_checkpoints(plan, replayed)
    # The last start is this one: the copied log has the earlier ones.
    ours = replayed.last_start()
    reasons = agreement.reasons_for_other_bits(starts, ours)
    if not starts:
        # Without a log, the manifests are the only record of the layout.
        reasons += _other_layouts(plan, replayed.newest_manifest())
    result = _judge(plan, rows, compared, reasons, request.tolerance)
    return result, {"recorded": starts, "replayed": [ours]}


def _judge(
    plan: _Plan, rows: Sequence[Row], compared: Sequence[Weights], reasons: Sequence[str], tolerance: float
) -> Result:
    """Judge the steps that the run trained with the options of the replay."""
    run = plan.run
    _, last = plan.window
    # From the beginning, nothing has changed since (`_beginning`).
    changes: dict[int, list[str]] = {}
    if plan.checkpoint is not None:
        used = recorded.values_of(plan.checkpoint.manifest)
        changes = run.allowed_changes(plan.start_step + 1, last, used, plan.recipe)
    end = min(changes, default=last)
    judged = [row for row in rows if row.step <= end]
    verdict = agreement.verdict(judged, [one for one in compared if one.step <= end], reasons, tolerance)
    return Result(plan.window, plan.start_step, rows, compared, reasons, tolerance, verdict, changes)


def _other_layouts(plan: _Plan, ours: Mapping[str, Any]) -> list[str]:
    """List the differences between the layout of a replay, in its manifest, and those of the compared checkpoints."""
    checkpoints = dict(plan.run.checkpoints)
    differences: dict[str, None] = {}
    for step in plan.saved:
        # A damaged checkpoint differs anyway, whatever its layout.
        with suppress(ValueError):
            theirs = manifest.read(checkpoints[step])
            differences |= dict.fromkeys(agreement.other_layouts(theirs.get("layout", {}), ours.get("layout", {})))
    return list(differences)


def _compare_checkpoints(plan: _Plan, replayed: RecordedRun) -> list[Weights]:
    ours = dict(replayed.checkpoints)
    theirs = dict(plan.run.checkpoints)
    compared: list[Weights] = []
    for step in plan.saved:
        # Still a result: a missing checkpoint must not pass for an equal one.
        if step in ours:
            compared.append(weights.compare_weights(step, theirs[step], ours[step]))
        else:
            compared.append(Weights(step, theirs[step].name, ["the replay did not reach it"], False, float("inf")))
    return compared


def report(result: Result) -> list[str]:
    """Return the table, the checkpoints and the verdict as lines."""
    return [*agreement.table(result.rows, result.weights), *_verdict_lines(result)]


def _verdict_lines(result: Result) -> list[str]:
    lines: list[str] = []
    first = result.first_difference
    if first is not None:
        lines.append(f"first differing step: {first.step} ({', '.join(first.differing)})")
    for step, changed in result.changes.items():
        lines.append(f"options changed with --allow when the run was resumed at step {step}: {', '.join(changed)}")
    until = ""
    if result.changes:
        until = f" up to step {min(result.changes)}"
        lines.append(f"the replay keeps the options of its checkpoint, so only steps{until} are judged")
    if result.reasons:
        lines += agreement.allowed_lines(result.reasons, result.tolerance)
    else:
        lines.append(f"the same layout, machine and versions as recorded: every bit{until} must be the same")
    return [*lines, f"verdict: {result.verdict}"]
