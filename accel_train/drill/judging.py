"""Judge the effect of a fault on a run: its end, its checkpoints, its resume, and the bits of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel_train.drill.faults import Fault, Sizes
from accel_train.drill.runs import Ended
from accel_train.rerun import agreement
from accel_train.rerun.agreement import TOLERANCE, Row, Weights
from accel_train.store import commit, manifest
from accel_train.store.run_file import recall

if TYPE_CHECKING:
    from accel_train.rerun.recorded import RecordedRun

Verdict = Literal["passed", "FAILED", "not applicable"]
CODES = {"stopped": 75, "error": 1, "trained": 0}
NOT_KILLED = (0, 2, 75)
"""Exit codes of a run that ended by itself."""
STEPS_TO_STOP = 2
"""Most steps after a stop request: it is obeyed at the end of its step, and by several processes one step later."""
ENDING_SECONDS = 90.0
"""Longest time that the launcher may take to end the other processes, beyond the timeout of their collectives."""


@dataclass(frozen=True)
class Found:
    """The checkpoints left by a fault."""

    newest: int
    """Step of the newest committed one, 0 for none."""
    damaged: Sequence[str]
    """Checkpoints under their final names that do not verify."""


@dataclass(frozen=True)
class Compared:
    """Two runs of the same steps, bit by bit."""

    rows: Sequence[Row]
    weights: Weights
    reasons: Sequence[str]
    """Reasons why bits may differ. Empty if every bit must be the same."""
    verdict: agreement.Verdict

    @property
    def same_losses(self) -> bool:
        return not any(row.differing for row in self.rows)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    fault: Fault
    verdict: Verdict
    reasons: Sequence[str] = ()
    """Reasons why it failed or does not apply."""
    ending: str = ""
    """Exit code, or the signal that ended the run."""
    resumed_from: int | None = None
    steps_lost: int | None = None
    restart_seconds: float | None = None
    compared: Compared | None = field(default=None, repr=False)

    def seconds_lost(self, step_seconds: float) -> float | None:
        """Return the time until the run was back where the fault hit it, None without a number of lost steps."""
        if self.steps_lost is None:
            return None
        return (self.restart_seconds or 0.0) + self.steps_lost * step_seconds

    def as_json(self, step_seconds: float) -> dict[str, Any]:
        """Return the row."""
        compared = self.compared
        return {
            "fault": self.fault.name,
            "what": self.fault.title,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "exit_code": self.ending,
            "resumed_from": self.resumed_from,
            "steps_lost": self.steps_lost,
            "restart_seconds": self.restart_seconds,
            "seconds_lost": self.seconds_lost(step_seconds),
            "losses_identical": None if compared is None else compared.same_losses,
            "weights_identical": None if compared is None else compared.weights.identical,
        }


def checkpoints_of(directory: Path) -> Found:
    """Verify every committed checkpoint of a run."""
    newest = 0
    damaged: list[str] = []
    for step, path in manifest.committed(directory / "checkpoints"):
        try:
            commit.verify(path)
            # They come oldest first.
            newest = step
        except ValueError as error:
            damaged.append(str(error))
    return Found(newest, damaged)


def steps_done(ended: Ended) -> int:
    """Return how many optimizer steps a start had done at its end."""
    # An evaluation and a save belong to a step whose end the loop has not reported yet.
    return max([*ended.steps("done"), *ended.steps("evaluation"), *ended.steps("saving")], default=0)


def judge(
    fault: Fault, sizes: Sizes, struck: Ended, found: Found, resumed: Ended | None, compared: Compared | None
) -> Result:
    """Return the row of a fault. ``resumed`` is None if training continued."""
    problems = [*_of_the_end(fault, struck), *(f"a damaged checkpoint: {reason}" for reason in found.damaged)]
    lost = 0
    begun: int | None = None
    restart: float | None = None
    if resumed is not None and fault.ending != "trained":
        lost = steps_done(struck) - found.newest
        # A start that finds every step saved begins none.
        begun = next(iter(resumed.steps("begin")), found.newest)
        restart = resumed.first_step
        # Looked at even if the fault itself went wrong, since one cause may show in both.
        problems += _of_the_resume(fault, sizes, found, resumed, begun)
        if fault.ending == "stopped" and lost > 0:
            problems.append(f"{lost} step(s) done before the stop were not saved")
    if compared is not None:
        problems += _of_the_bits(compared)
    verdict = "FAILED" if problems else "passed"
    return Result(fault, verdict, problems, struck.ending, begun, lost, restart, compared)


def _of_the_end(fault: Fault, struck: Ended) -> list[str]:
    if struck.timed_out:
        return [f"the run did not end: it was killed after {struck.seconds:.0f} s\n{struck.last_lines}"]
    was_killed = struck.code not in NOT_KILLED
    happened = struck.was_struck
    if fault.action == "failpoint" and fault.ending == "killed":
        # A killed writer prints nothing, so the exit code has to tell.
        happened = was_killed
    elif fault.action == "failpoint":
        happened = "(failpoint " in struck.output
    said = f"exit code {struck.ending}\n{struck.last_lines}"
    if not happened and fault.ending == "stopped":
        return [f"the stop request did not arrive: {said}"]
    if not happened:
        return [f"the fault did not happen: {said}"]
    if fault.ending == "killed" and not was_killed:
        return [f"the run did not end by the signal: {said}"]
    if fault.ending == "killed":
        return []
    asked = struck.steps("fault")
    if fault.ending == "stopped" and steps_done(struck) > asked[0] + STEPS_TO_STOP:
        return [f"asked to stop after step {asked[0]}, the run continued to step {steps_done(struck)}"]
    expected = CODES[fault.ending]
    if struck.code != expected:
        return [f"exit code {expected} was expected: {said}"]
    return []


def took_too_long(struck: Ended, timeout_seconds: float) -> list[str]:
    """Return the problem of a run with a hanging process that outlived the timeout, or nothing."""
    hung = [event.at for event in struck.events if event.name == "fault"]
    # Another problem already says that the fault did not happen.
    if not hung:
        return []
    seconds = struck.began + struck.seconds - hung[0]
    limit = timeout_seconds + ENDING_SECONDS
    if seconds <= limit:
        return []
    return [f"it ended {seconds:.0f} s after the process hung; at most {limit:.0f} s were expected"]


def _of_the_resume(fault: Fault, sizes: Sizes, found: Found, resumed: Ended, begun: int) -> list[str]:
    if resumed.timed_out or resumed.code != 0:
        return [f"the same command again ended with exit code {resumed.ending}\n{resumed.last_lines}"]
    problems: list[str] = []
    if begun != found.newest:
        problems.append(f"the same command continued from step {begun}, although step {found.newest} is committed")
    if fault.action in ("kill", "hang") and found.newest != sizes.save_every:
        problems.append(f"the newest checkpoint is of step {found.newest}; one of step {sizes.save_every} was due")
    return problems


def compare(reference: RecordedRun, ours: RecordedRun, step: int) -> Compared | str:
    """Compare every logged step and the checkpoint of ``step`` with the undisturbed run, or return why not."""
    # Here, because it imports torch.
    from accel_train.rerun import weights

    path = dict(ours.checkpoints).get(step)
    if path is None:
        return f"there is no checkpoint of step {step} to compare"
    rows = agreement.rows_of(reference.lines("train"), ours.lines("train"))
    compared = weights.compare_weights(step, dict(reference.checkpoints)[step], path)
    reasons = agreement.reasons_for_other_bits([reference.last_start()], ours.last_start())
    verdict = agreement.verdict(rows, [compared], reasons, TOLERANCE)
    return Compared(rows, compared, reasons, verdict)


def _of_the_bits(compared: Compared) -> list[str]:
    if compared.verdict != "different":
        return []
    problems: list[str] = []
    first = next((row for row in compared.rows if row.differing), None)
    if first is not None:
        problems.append(
            f"losses differ from the undisturbed run, first in step {first.step} ({', '.join(first.differing)}): state "
            "is outside the checkpoint, or is reset after the restore; `accel-train verify` looks for the cause"
        )
    if not compared.weights.identical:
        problems.append("; ".join(["final weights differ from the undisturbed run", *compared.weights.lines]))
    return problems


def waiting_for_the_hub(directory: Path, last: int) -> list[str]:
    """Return the problem if the last checkpoint is not queued for the Hub, or nothing."""
    saved, reason = recall(directory)
    if saved is None:
        return [f"run.json cannot be read ({reason})"]
    # Older checkpoints give way to the newest one, which alone has to wait there.
    pending = saved.get("hub", {}).get("pending", [])
    name = manifest.checkpoint_name(last)
    if name not in pending:
        return [f"{name} does not wait for the Hub; the queue has {pending or 'nothing'}"]
    return []
