"""The state of a run: its progress and its newest values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from accel_train.metrics.panels import HEAD, is_count, labels_of
from accel_train.metrics.records import last_pass
from accel_train.watching.run_files import Condition, Record, RunFiles, Status, number

CURVE_POINTS = 48
"""Points of the small curve beside a loss."""


@dataclass(frozen=True)
class Loss:
    """The loss of one mode or task."""

    mode: str
    """Empty if the run has one loss only."""
    step: int
    value: float
    curve: Sequence[float]
    """Means of equal stretches of the finite values, oldest first."""


@dataclass(frozen=True)
class Extremum:
    """A value of an evaluation metric and its step."""

    value: float
    step: int


@dataclass(frozen=True)
class Metric:
    """One metric over all evaluations."""

    name: str
    latest: Extremum
    lowest: Extremum | None
    """None if no value was finite."""
    highest: Extremum | None
    best: Extremum | None
    """The best one by ``checkpoints.best_metric`` and ``best_mode``. None for any other metric, since a name alone does
    not tell whether less is better."""


@dataclass(frozen=True)
class Speed:
    """Throughput of the last start."""

    samples_per_second: float
    median_samples_per_second: float
    change: float
    """The newest line against the median: -0.2 is a fifth slower."""
    log_lines: int


@dataclass(frozen=True)
class RunState:
    """One moment of a run. Fields missing from its files are None or empty."""

    name: str
    directory: str
    status: Status
    reason: str
    """Explanation of the status. Empty if the status says enough."""
    step: int
    max_steps: int | None
    eta_seconds: float | None
    """Training time left, without evaluation and saving."""
    last_line_seconds: float | None
    """Age of the newest line of ``metrics.jsonl``."""
    losses: Sequence[Loss]
    metrics: Sequence[Metric]
    speed: Speed | None
    memory_gib: Mapping[str, float]
    gpu: Mapping[str, float | str]
    """Fields of the newest training line about the main process's GPU, without ``gpu_`` and without its memory."""
    memory_by_category: Mapping[str, Any]
    """Fields of the event ``memory`` of the last start: ``held_bytes``, ``host_bytes`` and totals."""
    checkpoint_step: int | None
    checkpoint_seconds: float | None
    """Age of the newest checkpoint."""


def state_of(files: RunFiles, condition: Condition) -> RunState:
    """Return the state of a run at the time its files were read."""
    lines = files.training
    eta_seconds = None
    # A run that is not training gets no closer to its end.
    if condition.status == "training" and lines:
        eta_seconds = _eta_seconds(files, lines[-1])
    saved_step, saved_seconds = _checkpoint(files)
    return RunState(
        name=files.directory.name,
        directory=str(files.directory),
        status=condition.status,
        reason=condition.reason,
        step=newest_step(files),
        max_steps=files.max_steps(),
        eta_seconds=eta_seconds,
        last_line_seconds=_age(files, _last_time(files)),
        losses=losses_of(files),
        metrics=metrics_of(files),
        speed=speed_of(files),
        memory_gib=_memory(lines),
        gpu=_gpu(lines),
        memory_by_category=_memory_by_category(files.last_start),
        checkpoint_step=saved_step,
        checkpoint_seconds=saved_seconds,
    )


def _eta_seconds(files: RunFiles, line: Record) -> float | None:
    max_steps = files.max_steps()
    step_seconds = number(line, "step_seconds")
    if max_steps is None or step_seconds is None or not math.isfinite(step_seconds):
        return None
    # A run whose length was reduced may be past its end.
    steps_left = max(0, max_steps - newest_step(files))
    return steps_left * step_seconds


def newest_step(files: RunFiles) -> int:
    """Return the step reached by the last start: the highest in its lines, or the one it resumed from."""
    if files.without_records and files.checkpoint is not None:
        return files.checkpoint.step
    # Not the highest of all starts: a resume goes back to its checkpoint.
    steps = [record.get("step") for record in files.last_start]
    return max((step for step in steps if isinstance(step, int)), default=0)


def _last_time(files: RunFiles) -> float | None:
    if not files.records:
        return None
    return number(files.records[-1], "time")


def _age(files: RunFiles, then: float | None) -> float | None:
    if then is None:
        return None
    # The clock of the machine that wrote it may be ahead of this one.
    return max(0.0, files.now - then)


def lines_by_mode(files: RunFiles) -> dict[str, list[Record]]:
    """Return the training lines of each mode or task, whose losses are not comparable, in the order of their names.

    A run with one loss has them under an empty name. Of a repeated step the last line counts.
    """
    mode_field = labels_of(files.records).loss_of
    by_mode: dict[str, list[Record]] = {}
    for line in files.training:
        if number(line, "loss") is None:
            continue
        mode = ""
        if mode_field is not None:
            mode = str(line.get(mode_field, ""))
        by_mode.setdefault(mode, []).append(line)
    return dict(sorted(by_mode.items()))


def losses_of(files: RunFiles) -> list[Loss]:
    """Return the newest loss and the curve of each mode or task."""
    losses: list[Loss] = []
    for mode, lines in lines_by_mode(files).items():
        values = [float(line["loss"]) for line in lines]
        # The newest value may be NaN, but a curve cannot show it.
        finite = [value for value in values if math.isfinite(value)]
        curve = means(finite, CURVE_POINTS)
        losses.append(Loss(mode, lines[-1]["step"], values[-1], curve))
    return losses


def means(values: Sequence[float], points: int) -> list[float]:
    """Return the means of at most ``points`` stretches of equal length."""
    count = min(points, len(values))
    means: list[float] = []
    for index in range(count):
        first = index * len(values) // count
        end = (index + 1) * len(values) // count
        stretch = values[first:end]
        means.append(sum(stretch) / len(stretch))
    return means


def metrics_of(files: RunFiles) -> list[Metric]:
    """Return the metrics of all evaluations, in the order of the newest one."""
    lines = files.evaluations
    if not lines:
        return []
    metrics: list[Metric] = []
    # A metric that is no longer measured has no newest value.
    for name in lines[-1]:
        # As in curves.png: durations and counts describe the evaluation, not its result.
        if name in HEAD or is_count(name):
            continue
        if number(lines[-1], name) is not None:
            metrics.append(_metric(name, lines, files.options))
    return metrics


def _metric(name: str, lines: Sequence[Record], options: Mapping[str, Any]) -> Metric:
    values: list[Extremum] = []
    for line in lines:
        value = number(line, name)
        if value is not None:
            values.append(Extremum(value, line["step"]))
    # Every comparison with NaN is False, so min and max could return any value.
    finite = [one for one in values if math.isfinite(one.value)]
    lowest = min(finite, key=lambda one: one.value, default=None)
    highest = max(finite, key=lambda one: one.value, default=None)
    best = None
    if options.get("checkpoints.best_metric") == name:
        best = lowest
        if options.get("checkpoints.best_mode") == "max":
            best = highest
    return Metric(name, values[-1], lowest, highest, best)


def speed_of(files: RunFiles) -> Speed | None:
    """Return the throughput of the last start. Earlier starts may have run on another machine."""
    values: list[float] = []
    for line in last_pass(files.last_start, "train"):
        value = number(line, "samples_per_second")
        # A custom script that does not count samples may write 0.
        if value is not None and math.isfinite(value) and value > 0:
            values.append(value)
    if not values:
        return None
    middle = median(values)
    change = values[-1] / middle - 1
    return Speed(values[-1], middle, change, len(values))


def _memory(lines: Sequence[Record]) -> dict[str, float]:
    if not lines:
        return {}
    sizes: dict[str, float] = {}
    for name in lines[-1]:
        value = number(lines[-1], name)
        # Which of these fields exist depends on the device.
        if name.endswith("_gib") and value is not None:
            sizes[name] = value
    return sizes


def _gpu(lines: Sequence[Record]) -> dict[str, float | str]:
    fields: dict[str, float | str] = {}
    for name, value in lines[-1].items() if lines else ():
        if name.startswith("gpu_") and not name.endswith("_gib") and isinstance(value, (int, float, str)):
            fields[name.removeprefix("gpu_")] = value
    return fields


def gpu_in_words(gpu: Mapping[str, float | str]) -> str:
    """Describe utilization, power, temperature and throttling. Empty if none of them is known."""
    parts: list[str] = []
    forms = {"utilization": "{:.0%} busy", "power_watts": "{:.0f} W", "temperature_celsius": "{:.0f} °C"}
    for name, form in forms.items():
        value = gpu.get(name)
        if isinstance(value, (int, float)):
            parts.append(form.format(value))
    if "throttled" in gpu:
        parts.append(f"clock lowered ({gpu['throttled']})")
    return ", ".join(parts)


def _memory_by_category(last_start: Sequence[Record]) -> dict[str, Any]:
    for record in last_start:
        if record.get("event") == "memory":
            return {name: value for name, value in record.items() if name.endswith("_bytes")}
    return {}


def _checkpoint(files: RunFiles) -> tuple[int | None, float | None]:
    # From the directory, not from the events: retention deletes checkpoints, and a new one may have no line yet.
    if files.checkpoint is None:
        return None, None
    return files.checkpoint.step, _age(files, files.checkpoint.written_at)
