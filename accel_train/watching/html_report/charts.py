"""Curves of one or several runs as the data of charts, thinned so that a long run stays a small page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel_train.metrics.curves import SMOOTH_FROM, Panel, Series, panels_of, smoothed

BUCKETS = 300
"""Stretches of a long curve. Each keeps its lowest and its highest point."""
LOG_FROM = 10.0
"""A noisy positive curve over more than this range is drawn on a logarithmic axis, as in curves.png."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    color: int
    dashed: bool
    steps: Sequence[int]
    values: Sequence[float]
    smooth: Sequence[float]
    """The smoothed curve at the same steps, computed from all logged points. Empty for a curve that is not noisy."""
    logged: int
    """Finite values in the log. More than are drawn if the curve was thinned."""


@dataclass(frozen=True)
class Chart:
    """One set of axes."""

    title: str
    unit: str
    curves: Sequence[Curve]
    logarithmic: bool
    from_zero: bool

    def extent(self) -> tuple[float, float]:
        """Return the lowest and the highest value."""
        lows = [min(curve.values) for curve in self.curves]
        highs = [max(curve.values) for curve in self.curves]
        return min(lows), max(highs)


@dataclass
class _Group:
    """Lines that share a chart."""

    panel: Panel
    title: str
    lines: list[tuple[str, int, Series]] = field(default_factory=list[tuple[str, int, Series]])
    """Label, color and points."""


def charts_of(runs: Sequence[tuple[str, Sequence[Any]]]) -> list[Chart]:
    """Return the charts of (name, records) pairs.

    A single run has a chart for each kind of metric, with a line for each mode. Several runs have a chart for each mode
    and metric, with a line for each run.
    """
    groups = _groups_of_one(runs[0][1]) if len(runs) == 1 else _groups_of_several(runs)
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
        if group.lines:
            groups.append(group)
    return groups


def _groups_of_several(runs: Sequence[tuple[str, Sequence[Any]]]) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    for index, (name, records) in enumerate(runs):
        for panel in panels_of(records):
            for label, series in panel.drawn().items():
                # The label of the only line of a panel may hold numbers of the run.
                line = label if len(panel.lines) > 1 else ""
                title = f"{panel.title}: {line}" if line else panel.title
                group = groups.setdefault((panel.title, line), _Group(panel, title))
                group.lines.append((name, index, series))
    return list(groups.values())


def _partner(label: str) -> str:
    return label.removesuffix(" shuffled")


def _chart(group: _Group) -> Chart:
    curves: list[Curve] = []
    for label, color, series in group.lines:
        dashed = label != _partner(label)
        curves.append(_curve(Curve(label, color, dashed, series.steps, series.values, (), 0), group.panel.smooth))
    chart = Chart(group.title, group.panel.unit, curves, False, group.panel.from_zero)
    low, high = chart.extent()
    logarithmic = group.panel.smooth and low > 0 and high > LOG_FROM * low
    return replace(chart, logarithmic=logarithmic, from_zero=chart.from_zero and low >= 0)


def _curve(curve: Curve, noisy: bool) -> Curve:
    smooth: Sequence[float] = ()
    if noisy and len(curve.values) >= SMOOTH_FROM:
        smooth = smoothed(curve.values)
    kept = kept_points(curve.values)
    return replace(
        curve,
        steps=[curve.steps[index] for index in kept],
        values=[curve.values[index] for index in kept],
        smooth=[smooth[index] for index in kept] if smooth else [],
        logged=len(curve.values),
    )


def kept_points(values: Sequence[float]) -> list[int]:
    """Return the indices to draw: all, or of each bucket the lowest and the highest, with the first and the last."""
    count = len(values)
    if count <= 2 * BUCKETS:
        return list(range(count))
    kept = {0, count - 1}
    for bucket in range(BUCKETS):
        stretch = range(bucket * count // BUCKETS, (bucket + 1) * count // BUCKETS)
        kept.add(min(stretch, key=values.__getitem__))
        kept.add(max(stretch, key=values.__getitem__))
    return sorted(kept)
