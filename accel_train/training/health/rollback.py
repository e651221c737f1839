"""Going back after a step that is not finite: the samples a run leaves out from then on.

A resume is exact, so a run that starts again meets the same step again. What it needs to get past it is recorded in the
run directory: the samples concerned, which the next start does not read (``data/leaving_out.py``). A checkpoint holds
those of its run too, so a copy of it trains on in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accel_train.config import UsageError
from accel_train.store import atomic_files, strict_json
from accel_train.store.names import LEFT_OUT_FILE
from accel_train.training.health.evidence import BadStep
from accel_train.wording import shortened

MAX_BYTES = 1 << 24


class Rollback(NamedTuple):
    """A bad step, with the samples to leave out after it."""

    step: int
    """Counted from 1, as training lines do."""
    reason: str
    samples: list[int]
    """Indices in the training split, left out from then on."""
    data: str
    """Hash of the data that the indices refer to."""

    def concerns(self, data: str) -> bool:
        """Return True if the samples are from these data. In other data the same indices mean other samples."""
        return self.data == data


def recorded(directory: Path) -> list[Rollback]:
    """Return the rollbacks of a run, oldest first. Raises ``UsageError`` for a damaged file.

    Without them the run would train on what it had left out, so an unreadable file is not treated as empty.
    """
    path = directory / LEFT_OUT_FILE
    if not path.exists():
        return []
    rollbacks: list[Rollback] = []
    try:
        for one in strict_json.read_object(path, MAX_BYTES)["rollbacks"]:
            samples = [int(sample) for sample in one["samples"]]
            rollbacks.append(Rollback(int(one["step"]), str(one["reason"]), samples, str(one["data"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: cannot be read ({error}); it lists samples that this run leaves out. Restore it from a copy, or "
            "delete it to train on all samples again"
        ) from error
    return rollbacks


def left_out(rollbacks: Sequence[Rollback], data: str) -> list[int]:
    """Return the samples of all rollbacks in these data, in order."""
    return sorted({sample for rollback in rollbacks if rollback.concerns(data) for sample in rollback.samples})


def next_rollback(earlier: Sequence[Rollback], bad: BadStep, most: int, data: str) -> Rollback | str:
    """Return the rollback that gets past a bad step, or why there is none. The same on every rank."""
    samples = sorted({sample for rank in bad.samples for sample in rank} - set(left_out(earlier, data)))
    if len(earlier) >= most:
        return (
            f"the run has gone back {len(earlier)} times, and health.max_rollbacks allows {most}: this many bad "
            "samples mean that the run has diverged, so lower the learning rate, or raise the limit"
        )
    if not samples:
        return "going back would not help: every known sample of this step is already left out"
    return Rollback(bad.step + 1, bad.reason, samples, data)


def record(directory: Path, rollbacks: Sequence[Rollback]) -> None:
    """Write the rollbacks of a run for its next start. Main process. Raises ``OSError``."""
    content = {"rollbacks": [rollback._asdict() for rollback in rollbacks]}
    atomic_files.replace_json(directory / LEFT_OUT_FILE, content)


def notices(directory: Path, rollbacks: Sequence[Rollback], data: str) -> list[str]:
    """Return the log lines of a start with these data."""
    lines: list[str] = []
    for one in rollbacks:
        samples = shortened([str(sample) for sample in one.samples], 8)
        of_step = f"the samples {samples} of step {one.step}, which was not finite ({directory / LEFT_OUT_FILE})"
        if one.concerns(data):
            lines.append(f"without {of_step}")
        else:
            lines.append(f"{of_step} refer to different data, so none of them is left out")
    return lines
