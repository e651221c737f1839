"""Comparable metrics of finished runs: the same steps of each run, medians over rounds, effects with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import fmean, median
from typing import Literal

from accel_train.compare.runs import Line, Run
from accel_train.config import UsageError
from accel_train.metrics.bootstrap import ROUNDS_FOR_LEVEL, Estimate, estimate
from accel_train.metrics.gates import ratio
from accel_train.metrics.progress import OWN, TERM
from accel_train.wording import shortened

# A training line's throughput covers at least this many steps, in whole log intervals (docs/metrics.md).
WINDOW_STEPS = 50
WARMUP_SHARE = 0.25
TAIL_SHARE = 0.1
# At equal time the runs are at different steps, and losses of single steps differ by chance. The mean of fewer lines
# is mostly noise.
LINES_AT_EQUAL_TIME = 5
# Name suffixes of metrics with a true zero, which are compared as B / A. All others are compared as B - A.
RATIOS = ("_seconds", "_per_second", "_gib", "mfu")
EQUAL_TIME = "loss_equal_time"
# Metric -> field of a log line. The metric is the mean increase of the field per step, in wall or CPU time.
LOOP_TIMES = {"loop_step_seconds": "elapsed_seconds", "loop_step_cpu_seconds": "processor_seconds"}
# Metrics with one value per log interval.
WITHIN_A_RUN = ("step_seconds", "samples_per_second")

Observations = Mapping[str, Sequence[float]]
"""Metric -> one value per round, in order. A single round has one value per log interval if there are enough."""


@dataclass(frozen=True)
class Window:
    """The measured steps: after ``first``, up to ``last``. Every run has a log line at each of ``points``."""

    first: int
    last: int
    points: tuple[int, ...]

    def tail(self) -> tuple[int, ...]:
        """Return the points in the last tenth of the steps."""
        begin = self.last * (1 - TAIL_SHARE)
        return tuple(point for point in self.points if point > begin)

    def __str__(self) -> str:
        measured = f"steps {self.first + 1} to {self.last} are measured"
        if self.first == 0:
            return f"{measured}, nothing is left out: no log line between"
        return f"{measured}, steps 1 to {self.first} are warm-up"


@dataclass(frozen=True)
class Effect:
    """One metric in A and B."""

    metric: str
    a: float
    b: float
    """Medians over the rounds."""
    form: Literal["ratio", "difference"]
    estimate: Estimate
    """Median and interval of B / A or B - A over the pairs. A pair is a round or a log interval."""
    over: Literal["rounds", "log intervals", "one round"]
    reading: str


def window_of(runs: Sequence[Run]) -> Window:
    """Return the steps measured in every run: between common log lines, after the first quarter of the steps.

    If no common line follows the first quarter, the last one before the end is the start. Raises ``UsageError`` for
    runs without a common line.
    """
    logged = [{int(line["step"]) for line in run.lines} for run in runs]
    # Only steps that every run has logged can be compared: a variant may log at other steps.
    common = sorted(set.intersection(*logged))
    if not common:
        steps = [f"{run.letter}: step {shortened([str(line['step']) for line in run.lines], 3)}" for run in runs]
        raise UsageError(
            f"log.log_every: no step was logged by every run ({'; '.join(steps)}), and only common ones are compared; "
            "give one that divides the number of steps of each variant, such as --log.log_every 1"
        )
    last = common[-1]
    warmup = math.ceil(WARMUP_SHARE * last)
    earlier = [p for p in common if p < last] or [0]
    # After the first quarter, compilation is done, caches are warm and buffers no longer grow.
    warm = [p for p in earlier if p >= warmup] or earlier[-1:]
    first = warm[0]
    if first == 0:
        # No common line before the last: the whole run is measured.
        return Window(0, last, (0, *common[-1:]))
    points = tuple(p for p in common if p >= first)
    return Window(first, last, points)


def training_seconds(lines: Sequence[Line]) -> dict[int, float]:
    """Return the seconds of pure training up to each log line, recovered from the windowed ``step_seconds``.

    The window of a line begins at the newest earlier line at least ``WINDOW_STEPS`` steps back, or else at the start.
    The time up to there is known, so the sum is exact but for rounding.
    """
    seconds: dict[int, float] = {0: 0.0}
    for line in lines:
        step = int(line["step"])
        far_enough = [p for p in seconds if step - p >= WINDOW_STEPS]
        begin = max(far_enough, default=0)
        window = float(line["step_seconds"]) * (step - begin)
        seconds[step] = seconds[begin] + window
    return seconds


def interval_seconds(run: Run, window: Window) -> list[float]:
    """Return the mean step time of each interval between two points of the window."""
    total = training_seconds(run.lines)
    means: list[float] = []
    for begin, end in pairwise(window.points):
        seconds = total[end] - total[begin]
        means.append(seconds / (end - begin))
    return means


def run_metrics(run: Run, window: Window, equal_seconds: float) -> dict[str, float]:
    """Return every metric of one run. ``loss_equal_time`` is read ``equal_seconds`` after the start.

    ``step_seconds`` is training alone. ``loop_step_seconds`` is wall time between the same two log lines, including
    saves and evaluations, and ``loop_step_cpu_seconds`` is CPU time of the main process. ``run_seconds`` and
    ``run_cpu_seconds`` cover the whole run.
    """
    lines = {int(line["step"]): line for line in run.lines}
    values = _step_times(run, lines, window)
    values["run_seconds"] = run.seconds
    values["run_cpu_seconds"] = run.cpu_seconds
    measured = [line for step, line in lines.items() if step > window.first]
    for name in ("data_wait_fraction", "mfu"):
        column = _column(measured, name)
        if column:
            # A median, because one save or one evaluation in an interval would move a mean.
            values[name] = median(column)
    # Over the whole run, because the warm-up must fit into memory too.
    for name in ("memory_peak_gib", "process_rss_gib"):
        column = _column(run.lines, name)
        if column:
            values[name] = max(column)
    values |= _losses(run, lines, window, equal_seconds)
    evaluation: dict[str, float] = {}
    for name, value in run.evaluation.items():
        # An evaluation may use a name of the training lines, such as loss.
        unique = f"evaluation_{name}" if name in values else name
        evaluation[unique] = value
    return values | evaluation


def _step_times(run: Run, lines: Mapping[int, Line], window: Window) -> dict[str, float]:
    steps = window.last - window.first
    values: dict[str, float] = {}
    if steps > 0:
        total = training_seconds(run.lines)
        seconds = total[window.last] - total[window.first]
        step_seconds = seconds / steps
        values["step_seconds"] = step_seconds
        # From the log and not the options: a recipe may derive it.
        batch = lines[window.last].get("global_batch_size")
        if batch is not None:
            values["samples_per_second"] = ratio(float(batch), step_seconds)
    # Step 0 has no log line, so a run measured from its start has no such times.
    if window.first in lines:
        first_line = lines[window.first]
        last_line = lines[window.last]
        for name, field in LOOP_TIMES.items():
            if field in last_line:
                seconds = float(last_line[field]) - float(first_line[field])
                values[name] = seconds / steps
    return values


def _losses(run: Run, lines: Mapping[int, Line], window: Window, equal_seconds: float) -> dict[str, float]:
    """Return the losses at the end, over the last tenth and at equal time.

    Each loss term and each metric of the recipe's own (``train_NAME``) is a metric too.
    """
    last_line = lines[window.last]
    last_tenth = [lines[point] for point in window.tail()]
    losses = {
        "loss": _column([last_line], "loss"),
        "loss_last_tenth": _column(last_tenth, "loss"),
    }
    for name in last_line:
        if not name.startswith((TERM, OWN)):
            continue
        column = _column([last_line], name)
        if column:
            losses[name] = column
    recent = _recent_losses(run, window, equal_seconds)
    if len(recent) >= LINES_AT_EQUAL_TIME:
        losses[EQUAL_TIME] = recent
    return {name: fmean(values) for name, values in losses.items() if values}


def _recent_losses(run: Run, window: Window, seconds: float) -> list[float]:
    """Return the losses of a tenth of the steps, up to the one reached after ``seconds``."""
    reached = [line for line in run.lines if line.get("elapsed_seconds", math.inf) <= seconds]
    steps = [int(line["step"]) for line in reached]
    # A tenth of all steps, as at the end of the run, so that both means are over as many steps.
    tail_start = max(steps, default=0) - TAIL_SHARE * window.last
    recent = [line for line in reached if line["step"] > tail_start]
    return _column(recent, "loss")


def _column(lines: Sequence[Line], name: str) -> list[float]:
    values = [line.get(name) for line in lines]
    return [float(value) for value in values if isinstance(value, (int, float))]


def observations(rounds: Sequence[Sequence[Run]], window: Window) -> list[Observations]:
    """Return the values of every metric, variant by variant. Each round lists its runs in the variants' order.

    The loss at equal time is read at the end of the round's fastest run. A metric missing from any run is left out.
    """
    per_round: list[list[dict[str, float]]] = []
    for runs in rounds:
        last_lines = [run.lines[-1] for run in runs]
        # The fastest run's end: beyond it there is no loss of that run to compare with.
        ends = [float(line.get("elapsed_seconds", 0.0)) for line in last_lines]
        equal_seconds = min(ends)
        per_round.append([run_metrics(run, window, equal_seconds) for run in runs])
    every_run = [metrics for of_round in per_round for metrics in of_round]
    # Values are compared in pairs, so one run without a metric leaves its partners without one.
    names = [name for name in every_run[0] if all(name in metrics for metrics in every_run)]
    per_variant = zip(*per_round, strict=True)
    by_variant = [_columns(variant_metrics, names) for variant_metrics in per_variant]
    # With fewer log intervals the bootstrap interval is too narrow for its level.
    if len(rounds) == 1 and len(window.points) > ROUNDS_FOR_LEVEL:
        for values, run in zip(by_variant, rounds[0], strict=True):
            values |= _interval_metrics(run, window, values)
    return list(by_variant)


def is_about_machine(metric: str) -> bool:
    """Return True for times, rates and memory, which vary between rounds of one seed."""
    # The times of a round decide at which step the loss at equal time is read.
    return metric in ("speedup", EQUAL_TIME) or metric.endswith((*RATIOS, "data_wait_fraction"))


def _columns(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, Sequence[float]]:
    return {name: [row[name] for row in rows] for name in names}


def _interval_metrics(run: Run, window: Window, whole: Observations) -> dict[str, list[float]]:
    """Return ``WITHIN_A_RUN`` for each log interval, as far as ``whole`` has these metrics."""
    seconds = interval_seconds(run, window)
    values: dict[str, list[float]] = {}
    if "step_seconds" in whole:
        values["step_seconds"] = seconds
    if "samples_per_second" in whole:
        (step_seconds,) = whole["step_seconds"]
        (per_second,) = whole["samples_per_second"]
        samples = step_seconds * per_second
        # From the interval's own time: the logged throughput is an average over at least WINDOW_STEPS steps.
        values["samples_per_second"] = [ratio(samples, s) for s in seconds]
    return values


def effects(a: Observations, b: Observations, rounds: int, tolerance: float) -> list[Effect]:
    """Return the effect of B over A on each common metric. ``tolerance`` is the value of ``--tolerance``."""
    common = [name for name in a if name in b]
    return [_effect(name, a[name], b[name], rounds, tolerance) for name in common]


def _effect(name: str, a: Sequence[float], b: Sequence[float], rounds: int, tolerance: float) -> Effect:
    median_a = median(a)
    pairs = list(zip(a, b, strict=True))
    if name.endswith(RATIOS):
        form = "ratio"
        change = estimate([ratio(y, x) for x, y in pairs])
        reading = describe_effect(change, neutral=1.0, tolerated=0.0)
    else:
        form = "difference"
        change = estimate([y - x for x, y in pairs])
        tolerated = tolerance * abs(median_a)
        reading = describe_effect(change, neutral=0.0, tolerated=tolerated)
    if rounds > 1:
        over = "rounds"
    elif len(pairs) > 1:
        over = "log intervals"
    else:
        over = "one round"
    return Effect(name, median_a, median(b), form, change, over, reading)


def describe_effect(found: Estimate, neutral: float, tolerated: float) -> str:
    """Describe an effect in words. ``neutral`` means no effect. Within ``tolerated`` of it, values count as equal."""
    if not isfinite(found.median):
        return "not a number"
    if found.low is None or found.high is None:
        low = high = found.median
    else:
        low = found.low
        high = found.high
    # Losses of one seed are often equal bit for bit.
    if low == high == neutral:
        return "equal"
    if tolerated and neutral - tolerated <= low and high <= neutral + tolerated:
        return "equal within the tolerance"
    if found.low is None:
        return "no interval"
    if found.includes(neutral):
        return "no effect"
    direction = "lower" if found.median < neutral else "higher"
    # The size of a difference depends on the metric's unit.
    if neutral == 0.0:
        return direction
    return f"{direction} by {abs(found.median - 1):.1%}"
