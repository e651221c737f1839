"""Alerts: problems of a run for a person to look at. An alert stands as long as its cause does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from accel_train.metrics.progress import is_term
from accel_train.watching.event_texts import straggler
from accel_train.watching.run_files import Record, RunFiles
from accel_train.watching.run_state import RunState, lines_by_mode

SLOWER = 0.3
"""Fraction below the median throughput of the last start from which an alert is raised."""
SPEED_LINES = 10
"""Training lines that a start needs before its throughput is judged. The first intervals include warm-up."""
SPIKE_BEFORE = 50
"""Lines of the same mode and terms to compare a loss with. A tenth of them suffices at the start."""
SPIKE_RECENT = 10
"""Number of lines of its mode for which a spike stands."""
SPIKE_DEVIATIONS = 8.0
"""Distance above the median from which a loss is a spike, in standard deviations from the median deviation."""
SPIKE_SHARE = 0.2
"""Distance above the median, as a fraction of it, that a spike needs as well: a converged loss hardly varies."""
NORMAL = 1.4826
"""Ratio of the standard deviation of normally distributed values to their median deviation."""
SAVES_MISSED = 2
"""Intervals of ``checkpoints.save_every`` that may pass without a checkpoint. One save may still be in progress."""


@dataclass(frozen=True)
class Alert:
    """Something for a person to look at."""

    kind: str
    """One word for scripts: ``crashed``, ``silent``, ``non_finite``, ``loss_spike``, ``throughput``, ``straggler``,
    ``save``, ``push`` or ``warning``."""
    message: str
    step: int | None = None


def alerts_of(files: RunFiles, state: RunState) -> list[Alert]:
    """Return the standing alerts, the most severe first."""
    alerts: list[Alert] = []
    # `stopped` is no alert: the run saved, as requested.
    if state.status in ("crashed", "silent"):
        alerts.append(Alert(state.status, state.reason, state.step))
    alerts += _non_finite(files)
    alerts += _spikes(files)
    alerts += _slow(state)
    alerts += _stragglers(files)
    alerts += _overdue_save(files, state)
    # The push worker has given up on these checkpoints, and training continues.
    for name, reason in files.failed_pushes.items():
        alerts.append(Alert("push", f"{name} was not pushed: {reason}"))
    # The causes of warnings of an earlier start may have been fixed since.
    for record in files.last_start:
        if record.get("event") == "warning":
            alerts.append(Alert("warning", str(record.get("message")), record.get("step")))
    return alerts


def _non_finite(files: RunFiles) -> list[Alert]:
    """Return an alert for the first non-finite value of each field. A resume drops the lines it repeats."""
    first: dict[str, Record] = {}
    for line in (*files.training, *files.evaluations):
        for name in _non_finite_fields(line):
            # The first line only: values that depend on it become non-finite as well.
            first.setdefault(name, line)
    alerts: list[Alert] = []
    for name, line in first.items():
        alerts.append(Alert("non_finite", f"{name} is {line[name]}", line["step"]))
    return alerts


def _non_finite_fields(line: Record) -> list[str]:
    # JSON reads whole numbers as int, and those are finite.
    return [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]


def _spikes(files: RunFiles) -> list[Alert]:
    """Return an alert for the highest recent spike of each mode."""
    alerts: list[Alert] = []
    for mode, lines in lines_by_mode(files).items():
        # A loss that is not finite has its own alert.
        finite = [line for line in lines if math.isfinite(line["loss"])]
        name = f"loss ({mode})" if mode else "loss"
        alerts += _highest_spike(name, finite)
    return alerts


def _highest_spike(name: str, lines: Sequence[Record]) -> list[Alert]:
    highest: list[Alert] = []
    highest_loss = -math.inf
    # Sums of different terms are not comparable: the loss jumps where a stage of the training adds a term.
    kinds = [_terms(line) for line in lines]
    losses = [float(line["loss"]) for line in lines]
    for index in range(max(0, len(lines) - SPIKE_RECENT), len(lines)):
        before = [losses[other] for other in range(index) if kinds[other] == kinds[index]][-SPIKE_BEFORE:]
        # A median of fewer lines would be mostly chance.
        if len(before) < SPIKE_BEFORE // 10:
            continue
        loss = losses[index]
        if loss <= max(highest_loss, _limit(before)):
            continue
        highest_loss = loss
        text = f"{name} {loss:.4g}, against a median of {median(before):.4g} in the {len(before)} lines before"
        highest = [Alert("loss_spike", text, lines[index]["step"])]
    return highest


def _terms(line: Record) -> frozenset[str]:
    """Return the terms of the loss of a line. Empty if the recipe names none."""
    return frozenset(name for name in line if is_term(name))


def _limit(before: Sequence[float]) -> float:
    """Return the highest loss that is not a spike after the losses ``before``."""
    middle = median(before)
    deviation = NORMAL * median(abs(value - middle) for value in before)
    # Medians, because one earlier spike would widen a mean and a standard deviation.
    by_deviation = middle + SPIKE_DEVIATIONS * deviation
    by_share = middle + SPIKE_SHARE * abs(middle)
    # A few lines may vary little by chance, so their maximum counts too.
    return max(by_deviation, by_share, max(before))


def _slow(state: RunState) -> list[Alert]:
    speed = state.speed
    # The median of few lines is that of the warm-up.
    if speed is None or speed.log_lines < SPEED_LINES or speed.change > -SLOWER:
        return []
    # Nothing can be done about the last interval of a run that has ended.
    if state.status not in ("training", "silent"):
        return []
    text = f"{speed.samples_per_second:.4g} samples/s, {-speed.change:.0%} below the median of this start"
    return [Alert("throughput", text, state.step)]


def _stragglers(files: RunFiles) -> list[Alert]:
    """Return an alert for each process of the last start that is slower than the others, and has not recovered."""
    standing: dict[tuple[object, object], Alert] = {}
    for record in files.last_start:
        if record.get("event") == "straggler":
            key = (record.get("process"), record.get("measure"))
            standing.pop(key, None)
            if not record.get("recovered"):
                standing[key] = Alert("straggler", straggler(record), record.get("step"))
    return list(standing.values())


def _overdue_save(files: RunFiles, state: RunState) -> list[Alert]:
    """Return an alert for a run that trains without saving, as with ``checkpoints.on_error continue``."""
    every = files.options.get("checkpoints.save_every")
    # Saves by minutes or epochs have no step at which one is overdue.
    if not isinstance(every, int) or every <= 0 or state.status != "training":
        return []
    saved = state.checkpoint_step or 0
    # Judged by the missing checkpoint, because a save that fails writes no line.
    if state.step - saved <= SAVES_MISSED * every:
        return []
    text = f"the newest checkpoint is of step {saved}, with checkpoints.save_every {every}; see logs/rank_0.log"
    return [Alert("save", text, state.step)]
