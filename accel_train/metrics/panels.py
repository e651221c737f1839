"""The panels of a run's curves, from ``metrics.jsonl``: which metrics share axes, and in which order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from accel_train.metrics.progress import BY_TIME, TERM, Labels, is_own, is_term
from accel_train.metrics.records import Records, last_pass

HEAD = ("event", "step", "time", "elapsed_seconds", "processor_seconds")
# Last words of the names of evaluation values that describe the evaluation itself, not its result.
NOT_DRAWN = ("seconds", "samples", "steps", "tokens")
# Number of points from which a noisy curve is drawn with a smoothed one on top.
SMOOTH_FROM = 40


@dataclass
class Series:
    """One line of a panel."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])

    def add(self, step: int, value: object) -> None:
        # True would be drawn as 1. Values that are not finite are left out, and `_marks` shows those of the loss.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if isfinite(value):
            self.steps.append(step)
            self.values.append(float(value))


@dataclass
class Panel:
    """One set of axes with lines by label, or with text."""

    title: str
    unit: str
    lines: dict[str, Series]
    smooth: bool = False
    from_zero: bool = False
    last_value: bool = False
    text: str = ""

    def drawn(self) -> dict[str, Series]:
        """Return the lines of two points or more, since a single point is no curve."""
        return {label: series for label, series in self.lines.items() if len(series.values) > 1}


def panels_of(records: Records) -> list[Panel]:
    """Return the panels with content, in order: losses, evaluations, then the other training metrics."""
    labels = labels_of(records)
    losses, course = _train_panels(last_pass(records, "train"), labels)
    evaluations = _evaluation_panels(last_pass(records, "evaluation"), labels)
    return [panel for panel in losses + evaluations + course if panel.drawn() or panel.text]


def labels_of(records: Records) -> Labels:
    """Return the labels of the last start that recorded any, or empty labels."""
    for record in reversed(records):
        labels = record.get("labels")
        if record.get("event") == "environment" and labels:
            units = labels.get("units", {})
            titles = labels.get("titles", {})
            return Labels(labels.get("loss_of"), units, titles, tuple(labels.get("baselines", ())))
    return Labels()


def _column(lines: Records, key: str, scale: float = 1.0) -> Series:
    series = Series()
    for line in lines:
        value = line.get(key)
        if isinstance(value, (int, float)):
            series.add(line["step"], value * scale)
    return series


def _keys(lines: Records) -> list[str]:
    return list(dict.fromkeys(key for line in lines for key in line if key not in HEAD))


def _by_kind(lines: Records, key: str, label: str, of: str | None) -> dict[str, Series]:
    """Return one line per value of the field ``of``, because their losses are not comparable."""
    # Losses of different modes have different scales: one line through all of them would be a zigzag.
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if of is not None and of in line:
            kind = str(line[of])
            by_kind.setdefault(kind, []).append(line)
    # A single kind needs no legend of its own.
    if len(by_kind) < 2:
        return {label: _column(lines, key)}
    return {kind: _column(by_kind[kind], key) for kind in sorted(by_kind)}


def _terms(lines: Records, terms: Sequence[str], of: str | None) -> dict[str, Series]:
    """Return one line per term, and per kind of loss where several kinds have that term. Empty for a single term."""
    found: dict[str, Series] = {}
    # A single term equals the loss up to its coefficient.
    if len(terms) < 2:
        return found
    for key in terms:
        name = _words(key.removeprefix(TERM))
        for kind, series in _by_kind([line for line in lines if key in line], key, name, of).items():
            label = name
            if kind != name:
                label += f" ({kind})"
            found[label] = series
    return found


def _train_panels(lines: Records, labels: Labels) -> tuple[list[Panel], list[Panel]]:
    """Return the panels of the losses, and those of the other training metrics."""
    keys = _keys(lines)
    own = [key for key in keys if is_own(key)]
    terms = [key for key in keys if is_term(key) or (key.endswith("_loss") and key not in own)]
    memory = [key for key in keys if key.endswith("_gib")]
    loss = _by_kind(lines, "loss", "training loss", labels.loss_of)
    of_terms = _terms(lines, terms, labels.loss_of)
    by_time = {_words(key): _column(lines, key) for key in keys if BY_TIME.search(key)}
    losses = [
        Panel("Loss", "loss", loss, smooth=True),
        Panel("Loss terms", "loss", of_terms, smooth=True),
        Panel("Loss by time", "loss", by_time, smooth=True),
        *_metric_panels(lines, own, labels, "Training", smooth=True),
    ]
    norm = _by_kind(lines, "grad_norm", "grad_norm", labels.loss_of)
    lr = _column(lines, "lr")
    used = {_words(key.removesuffix("_gib")): _column(lines, key) for key in memory}
    others = [
        Panel("Gradient norm", "L2 norm before clipping", norm, smooth=True),
        Panel("Learning rate", "learning rate", {"lr": lr}, from_zero=True),
        _throughput_panel(lines),
        _step_time_panel(lines),
        Panel("Memory", "GiB", used, from_zero=True),
    ]
    return losses, others


def _step_time_panel(lines: Records) -> Panel:
    parts = {"whole step": _column(lines, "step_seconds", 1000.0)}
    timed = [line for line in lines if isinstance(line.get("step_seconds"), (int, float))]
    for name in ("forward", "backward", "update", "data_wait"):
        part = Series()
        for line in timed:
            if f"{name}_fraction" in line:  # absent on some devices
                part.add(line["step"], 1000 * line["step_seconds"] * line[f"{name}_fraction"])
        parts[_words(name)] = part
    return Panel("Step time", "ms per step", parts, from_zero=True)


def _throughput_panel(lines: Records) -> Panel:
    samples = _column(lines, "samples_per_second")
    tokens = _column(lines, "tokens_per_second")
    label = "samples/s"
    if any(tokens.values):
        median_samples = _short(median(samples.values or [0]))
        median_tokens = _short(median(tokens.values))
        # In the label, because a second axis for tokens would show the same curve again.
        label += f" (median {median_samples}; {median_tokens} tokens/s)"
    return Panel("Throughput", "samples per second", {label: samples}, from_zero=True)


def _evaluation_panels(lines: Records, labels: Labels) -> list[Panel]:
    """Return the panels of the metrics. A single evaluation becomes a panel of text."""
    drawn = [key for key in _keys(lines) if not is_count(key)]
    # One point is no curve, but its values should be seen.
    if len(lines) == 1:
        return _text_panels(lines[0], drawn)
    return _metric_panels(lines, drawn, labels, "Evaluation", last_value=True)


def _metric_panels(
    lines: Records, keys: Sequence[str], labels: Labels, of: str, *, smooth: bool = False, last_value: bool = False
) -> list[Panel]:
    """Return one panel per last word of a name, so that ``a_loss`` and ``a_loss_shuffled`` share one."""
    # Metrics with the same last word have the same unit, so they can share an axis.
    panels: dict[str, Panel] = {}
    for key in keys:
        kind = _last_word(key)
        if kind not in panels:
            title = f"{of}: {labels.titles.get(kind, kind)}"
            unit = labels.units.get(kind, kind)
            panels[kind] = Panel(title, unit, {}, smooth=smooth, last_value=last_value)
        panels[kind].lines[_words(key)] = _column(lines, key)
    return list(panels.values())


def is_count(key: str) -> bool:
    """Return True for a value that describes an evaluation itself, such as the number of its samples."""
    return _last_word(key) in NOT_DRAWN


def _last_word(key: str) -> str:
    # `band` for `loss_band_1`: numbered metrics are of one kind.
    return re.sub(r"(_shuffled|_\d+)$", "", key).rsplit("_", 1)[-1]


def _text_panels(line: Mapping[str, Any], keys: Sequence[str]) -> list[Panel]:
    numbers = [key for key in keys if isinstance(line[key], (int, float))]
    if not numbers:
        return []
    values = [f"{_words(key)}: {line[key]:.4g}" for key in numbers]
    title = f"Evaluation at step {line['step']:,}"
    return [Panel(title, "", {}, text="\n".join(values))]


def _words(key: str) -> str:
    return key.replace("_", " ")


def _short(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the bias-corrected EMA with a horizon of about a fiftieth of the curve."""
    # Relative to the length of the curve, so that a long run is as smooth to the eye as a short one.
    decay = 1 - 1 / max(2.0, len(values) / 50)
    total = 0.0
    weight = 0.0
    result: list[float] = []
    for value in values:
        total = decay * total + (1 - decay) * value
        # The sum of the weights so far. Without it the curve would start near 0.
        weight = decay * weight + (1 - decay)
        result.append(total / weight)
    return result
