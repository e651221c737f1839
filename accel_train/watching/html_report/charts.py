"""Curves of one or several runs as the data of charts, thinned so that a long run stays a small page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel_train.metrics.panels import SMOOTH_FROM, Panel, Series, panels_of, smoothed

BUCKETS = 300
"""Number of stretches of a long curve. Each keeps its lowest and its highest point."""
LOG_FROM = 10.0
"""Ratio of the largest to the smallest value above which a noisy positive curve is drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    color: int
    dashed: bool
    steps: Sequence[int]
    values: Sequence[float]
    smooth: Sequence[float]
    """The smoothed curve at the same steps, computed from all logged points. Empty for a smooth curve."""
    logged: int
    """Number of finite values in the log, more than are drawn if the curve was thinned."""


@dataclass(frozen=True)
class Chart:
    """One set of axes."""

    title: str
    unit: str
    curves: Sequence[Curve]
    logarithmic: bool = False
    from_zero: bool = False

    def extent(self) -> tuple[float, float]:
        """Return the lowest and the highest value."""
        lows = [min(curve.values) for curve in self.curves]
        highs = [max(curve.values) for curve in self.curves]
        return min(lows), max(highs)


@dataclass
class _Group:
    """Lines of one chart."""

    panel: Panel
    title: str
    lines: list[tuple[str, int, Series]] = field(default_factory=list[tuple[str, int, Series]])
    """Label, color and points."""


def charts_of(runs: Sequence[tuple[str, Sequence[Any]]]) -> list[Chart]:
    """Return the charts of (name, records) pairs.

    A single run has a chart for each kind of metric, with a line for each mode. Several runs have a chart for each mode
    and metric, with a line for each run.
    """
    if len(runs) == 1:
        _, records = runs[0]
        groups = _groups_of_one(records)
    else:
        groups = _groups_of_several(runs)
    return [_chart(group) for group in groups]


def _groups_of_one(records: Sequence[Any]) -> list[_Group]:
    groups: list[_Group] = []
    for panel in panels_of(records):
        group = _Group(panel, panel.title)
        colors: dict[str, int] = {}
        for label, series in panel.drawn().items():
            # A shuffled metric has the color of its partner, dashed.
            color = colors.setdefault(_partner(label), len(colors))
            group.lines.append((label, color, series))
        # A panel of text, for a single evaluation, becomes rows of the table instead.
        if group.lines:
            groups.append(group)
    return groups


def _groups_of_several(runs: Sequence[tuple[str, Sequence[Any]]]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for color, (name, records) in enumerate(runs):
        for panel in panels_of(records):
            for label, series in panel.drawn().items():
                title = f"{panel.title}: {label}"
                # The label of a panel's only line may contain numbers, which differ between runs.
                if len(panel.lines) == 1:
                    title = panel.title
                # The first run with a panel decides its axes.
                group = groups.setdefault(title, _Group(panel, title))
                group.lines.append((name, color, series))
    return list(groups.values())


def _partner(label: str) -> str:
    return label.removesuffix(" shuffled")


def _chart(group: _Group) -> Chart:
    panel = group.panel
    curves: list[Curve] = []
    for label, color, series in group.lines:
        curves.append(_curve(label, color, series, panel.smooth))
    chart = Chart(group.title, panel.unit, curves)
    low, high = chart.extent()
    return replace(
        chart,
        logarithmic=panel.smooth and low > 0 and high > LOG_FROM * low,
        from_zero=panel.from_zero and low >= 0,
    )


def _curve(label: str, color: int, series: Series, noisy: bool) -> Curve:
    kept = kept_points(series.values)
    smooth: list[float] = []
    # Smoothed over all logged points, before any is left out.
    if noisy and len(series.values) >= SMOOTH_FROM:
        curve = smoothed(series.values)
        smooth = [curve[index] for index in kept]
    return Curve(
        label=label,
        color=color,
        dashed=label != _partner(label),
        steps=[series.steps[index] for index in kept],
        values=[series.values[index] for index in kept],
        smooth=smooth,
        logged=len(series.values),
    )


def kept_points(values: Sequence[float]) -> list[int]:
    """Return the indices to draw: all, or the first, the last, and the lowest and highest of each bucket."""
    count = len(values)
    # Up to here, thinning would save nothing.
    if count <= 2 * BUCKETS:
        return list(range(count))
    kept = {0, count - 1}
    for bucket in range(BUCKETS):
        first = bucket * count // BUCKETS
        end = (bucket + 1) * count // BUCKETS
        stretch = range(first, end)
        # Not means, which would hide a spike of a single line.
        kept.add(min(stretch, key=values.__getitem__))
        kept.add(max(stretch, key=values.__getitem__))
    return sorted(kept)
