"""From runs to numbers that may be compared: the same steps of each, medians over rounds, effects with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import fmean, median
from typing import Any, Literal

from accel_train.compare.runs import Run
from accel_train.metrics.bootstrap import ROUNDS_FOR_LEVEL, Estimate, estimate
from accel_train.metrics.gates import over

WINDOW_STEPS = 50
"""Steps that a training line's rates cover at least, in whole log intervals (docs/metrics.md)."""
WARMUP_SHARE = 0.25
TAIL_SHARE = 0.1
LINES_AT_EQUAL_TIME = 5
"""At equal time the runs are at different steps, whose losses differ by chance: fewer lines than this say nothing."""
RATIOS = ("_seconds", "_per_second", "_gib", "mfu")
"""Metrics that end so have a zero that means none: compared as B / A. All others as B - A."""
WITHIN_A_RUN = ("step_seconds", "samples_per_second")
"""Metrics that have a value for each log interval as well."""

Observations = Mapping[str, Sequence[float]]
"""Metric -> its values: one a round, in order; with one round those of its log intervals, where there are enough."""


@dataclass(frozen=True)
class Window:
    """The steps that are measured: after ``first``, to ``last``. Every run has a log line at each of ``points``."""

    first: int
    last: int
    points: tuple[int, ...]

    def tail(self) -> tuple[int, ...]:
        """The points in the last tenth of the steps."""
        return tuple(p for p in self.points if p > self.last * (1 - TAIL_SHARE))

    def __str__(self) -> str:
        left_out = f"steps 1 to {self.first} are warm-up" if self.first else "nothing is left out: no log line between"
        return f"steps {self.first + 1} to {self.last} are measured, {left_out}"


@dataclass(frozen=True)
class Effect:
    """One metric in A and B."""

    metric: str
    a: float
    b: float
    """Medians over the rounds."""
    form: Literal["ratio", "difference"]
    estimate: Estimate
    """Median and interval of B / A or B - A within a pair, where a pair is a round or a log interval."""
    over: Literal["rounds", "log intervals", "one round"]
    reading: str


def window_of(runs: Sequence[Run]) -> Window:
    """The steps measured in every run: between log lines that all have, after the first quarter of the steps.

    Where no line is there, the last common one before it takes its place, so that something is measured.
    """
    common = sorted(set.intersection(*({int(line["step"]) for line in run.lines} for run in runs)))
    last = common[-1] if common else 0
    wanted = math.ceil(WARMUP_SHARE * last)
    before = [p for p in common if p < last] or [0]
    first = next((p for p in before if p >= wanted), before[-1])
    return Window(first, last, tuple(p for p in common if p >= first) if first else (0, *common[-1:]))


def training_seconds(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of training alone from the start to each log line, recovered from the windowed ``step_seconds``.

    A line's window begins at the newest earlier log line that is at least ``WINDOW_STEPS`` steps back, else at the
    start, and the time until then is known; the sum is exact but for rounding.
    """
    seconds: dict[int, float] = {0: 0.0}
    for line in lines:
        step = int(line["step"])
        begin = max((p for p in seconds if step - p >= WINDOW_STEPS), default=0)
        seconds[step] = seconds[begin] + float(line["step_seconds"]) * (step - begin)
    return seconds


def interval_seconds(run: Run, window: Window) -> list[float]:
    """Mean time of a step in each interval between two of the window's points."""
    total = training_seconds(run.lines)
    return [(total[e] - total[b]) / (e - b) for b, e in pairwise(window.points)]


def figures(run: Run, window: Window, equal_seconds: float) -> dict[str, float]:
    """Every metric of one run. ``equal_seconds`` is the clock at which ``loss_equal_time`` is read.

    ``step_seconds`` is training alone; ``loop_step_seconds`` is the clock between the same two log lines, with the
    saving and evaluation in between, ``loop_step_cpu_seconds`` the main process's processor time; ``run_seconds`` and
    ``run_cpu_seconds`` are of the whole run.
    """
    lines = {int(line["step"]): line for line in run.lines}
    total = training_seconds(run.lines)
    steps = window.last - window.first
    values: dict[str, float] = {}
    if steps > 0:
        step_seconds = (total[window.last] - total[window.first]) / steps
        values["step_seconds"] = step_seconds
        if (batch := lines[window.last].get("global_batch_size")) is not None:
            values["samples_per_second"] = over(float(batch), step_seconds)
    for name, field in (("loop_step_seconds", "elapsed_seconds"), ("loop_step_cpu_seconds", "processor_seconds")):
        if window.first in lines and field in lines[window.last]:
            begin, end = (float(lines[p][field]) for p in (window.first, window.last))
            values[name] = (end - begin) / steps
    values |= {"run_seconds": run.seconds, "run_cpu_seconds": run.cpu_seconds}
    measured = [line for step, line in lines.items() if step > window.first]
    for name in ("data_wait_fraction", "mfu"):
        if seen := _column(measured, name):
            values[name] = median(seen)
    for name in ("memory_peak_gib", "process_rss_gib"):
        if seen := _column(run.lines, name):
            values[name] = max(seen)
    values |= _losses(run, lines, window, equal_seconds)
    return values | {(f"evaluation_{k}" if k in values else k): v for k, v in run.evaluation.items()}


def _losses(run: Run, lines: Mapping[int, Mapping[str, Any]], window: Window, equal_seconds: float) -> dict[str, float]:
    tail = [lines[p] for p in window.tail()]
    losses = {"loss": _column([lines[window.last]], "loss"), "loss_last_tenth": _column(tail, "loss")}
    reached = [line for line in run.lines if line.get("elapsed_seconds", math.inf) <= equal_seconds]
    since = (int(reached[-1]["step"]) if reached else 0) - TAIL_SHARE * window.last
    parts = {k: _column([lines[window.last]], k) for k in lines[window.last] if k.startswith("loss_")}
    losses |= {name: values for name, values in parts.items() if values}  # each term apart, for sums of other terms
    recent = _column([line for line in reached if line["step"] > since], "loss")
    if len(recent) >= LINES_AT_EQUAL_TIME:
        losses["loss_equal_time"] = recent
    return {name: fmean(values) for name, values in losses.items() if values}


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(line[name]) for line in lines if isinstance(line.get(name), (int, float))]


def observations(rounds: Sequence[Sequence[Run]], window: Window) -> list[Observations]:
    """Of each variant, every metric's values. ``rounds`` holds the runs of one round in the variants' order.

    In each round the loss at equal time is read where the first of its runs had ended. A metric that a round lacks
    is left out, so that values stay in pairs.
    """
    per_round: list[list[dict[str, float]]] = []
    for runs in rounds:
        equal = min(float(run.lines[-1].get("elapsed_seconds", 0.0)) for run in runs)
        per_round.append([figures(run, window, equal) for run in runs])
    names = [n for n in per_round[0][0] if all(n in values for values_of in per_round for values in values_of)]
    variants = range(len(rounds[0]))
    found: list[dict[str, Sequence[float]]] = [{n: [r[v][n] for r in per_round] for n in names} for v in variants]
    if len(rounds) == 1 and len(window.points) > ROUNDS_FOR_LEVEL:  # fewer intervals would claim too much
        for variant, run in zip(found, rounds[0], strict=True):
            variant |= _within(run, window, variant)
    return list(found)


def _within(run: Run, window: Window, whole: Observations) -> dict[str, list[float]]:
    seconds = interval_seconds(run, window)
    samples = whole["step_seconds"][0] * whole["samples_per_second"][0] if "samples_per_second" in whole else 0.0
    values = {"step_seconds": seconds, "samples_per_second": [over(samples, s) for s in seconds]}
    return {name: v for name, v in values.items() if name in whole}


def effects(a: Observations, b: Observations, rounds: int, tolerance: float) -> list[Effect]:
    """Each common metric's effect of B over A, by pairs; ``tolerance`` is that of ``--tolerance``."""
    return [_effect(name, a[name], b[name], rounds, tolerance) for name in a if name in b]


def _effect(name: str, a: Sequence[float], b: Sequence[float], rounds: int, tolerance: float) -> Effect:
    pairs = list(zip(a, b, strict=True))
    ratio = name.endswith(RATIOS)
    found = estimate([over(y, x) if ratio else y - x for x, y in pairs])
    middle = median(a)
    where = "rounds" if rounds > 1 else "log intervals" if len(pairs) > 1 else "one round"
    reading = read_effect(found, 1.0 if ratio else 0.0, 0.0 if ratio else tolerance * abs(middle))
    return Effect(name, middle, median(b), "ratio" if ratio else "difference", found, where, reading)


def read_effect(found: Estimate, neutral: float, tolerated: float) -> str:
    """An effect in words. ``neutral`` is that of no effect; a difference within ``tolerated`` of it is none."""
    if not isfinite(found.median):
        return "not a number"
    low, high = (found.median, found.median) if found.low is None or found.high is None else (found.low, found.high)
    if low == high == neutral:
        return "equal"
    if tolerated and neutral - tolerated <= low and high <= neutral + tolerated:
        return "equal within the tolerance"
    if found.low is None:
        return "no interval"
    if found.includes(neutral):
        return "no effect"
    size = f" by {abs(found.median - 1):.1%}" if neutral else ""
    return f"{'lower' if found.median < neutral else 'higher'}{size}"
