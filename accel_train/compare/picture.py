"""``compare.png``: step times and losses of all runs of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from accel_train.compare.figures import Window, interval_seconds, window_of
from accel_train.compare.runs import Line, Run, Variant
from accel_train.metrics.panels import SMOOTH_FROM, smoothed

LABELS = (
    ("Step time", "step", "ms per step"),
    ("Loss", "step", "loss"),
    ("Loss by clock", "seconds", "loss"),
)
"""Title and labels of both axes of each panel."""


def draw(variants: Sequence[Variant], rounds: Sequence[Sequence[Run]], window: Window, path: Path) -> None:
    """Draw step time by step, loss by step and loss by wall time, with a thin line for each round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.3), dpi=110, layout="constrained")
    panels: Any = figure.subplots(1, 3)
    for axis, labels in zip(panels, LABELS, strict=True):
        _label(axis, *labels)
    for index, variant in enumerate(variants):
        for number, runs in enumerate(rounds):
            # C0 to C9 are all colours of matplotlib's default cycle.
            style: dict[str, Any] = {"color": f"C{index % 10}", "alpha": 0.6, "linewidth": 1.0}
            if number == 0:  # one legend entry per variant
                style["label"] = f"{variant.letter}  {variant.name}"
            _draw_run(panels, runs[index], style)
    panels[0].axvline(window.first, color="0.55", linestyle=":", label="warm-up ends")
    highest = _step_time_limit(rounds, window)
    panels[0].set_ylim(bottom=0, top=highest)
    for axis in panels:
        # loc is also the default, but the default warns if the search for a place is slow.
        axis.legend(fontsize=7.5, loc="best", framealpha=0.85)
    figure.savefig(path, format="png")


def _label(axis: Any, title: str, x_label: str, y_label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x_label, fontsize=8)
    axis.set_ylabel(y_label, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(True, alpha=0.25)
    if x_label == "step":
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _draw_run(panels: Any, run: Run, style: Mapping[str, Any]) -> None:
    # The run's own window has all its log lines, not only those common to all runs.
    last = window_of([run]).last
    logged = [int(line["step"]) for line in run.lines]
    points = (0, *logged)
    seconds = interval_seconds(run, Window(0, last, points))
    times = [1000 * each for each in seconds]
    # `step` takes a value for every point. With the first one repeated, the curve begins without a jump.
    from_start = [times[0], *times]
    panels[0].step(points, from_start, where="pre", **style)
    lines = _lines_with_loss(run)
    losses = [float(line["loss"]) for line in lines]
    for axis, x_field in zip(panels[1:], ("step", "elapsed_seconds"), strict=True):
        x = [line.get(x_field, 0.0) for line in lines]
        if len(losses) < SMOOTH_FROM:
            axis.plot(x, losses, marker="o", markersize=4, **style)
            continue
        axis.plot(x, smoothed(losses), **style)
        if run.round == 1:
            axis.plot(x, losses, color=style["color"], linewidth=0.7, alpha=0.25)


def _lines_with_loss(run: Run) -> list[Line]:
    lines: list[Line] = []
    for line in run.lines:
        loss = line.get("loss")
        # One NaN would make every smoothed value after it NaN.
        if isinstance(loss, (int, float)) and isfinite(loss):
            lines.append(line)
    return lines


def _step_time_limit(rounds: Sequence[Sequence[Run]], window: Window) -> float:
    """Return the upper limit of the first panel in ms. The first step may take a minute and is cut off."""
    seconds: list[float] = []
    for run in chain.from_iterable(rounds):
        seconds += interval_seconds(run, window)
    rank = ceil(0.9 * len(seconds))
    percentile_90 = sorted(seconds)[rank - 1]
    return max(1.6e3 * percentile_90, 1e-3)  # in ms, with headroom; matplotlib warns of a limit of 0
