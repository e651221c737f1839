"""A chart as SVG. Colors are classes, so that the page's style sheet decides for light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from accel_train.metrics.progress import short_exponent
from accel_train.watching.html_report.charts import Chart, Curve
from accel_train.watching.html_report.events import Event

WIDTH = 420
HEIGHT = 250
LEFT = 54
RIGHT = 408
TOP = 10
BOTTOM = 212
DIGIT_WIDTH = 8
"""Maximum width of a digit in the font of the labels."""
COLORS = 8
"""Number of colors in the style sheet. A ninth line gets the first one again."""
POINTS_SHOWN = 30
"""Maximum number of points for a curve with a dot at each value."""
TICKS = ("save", "evaluation")
"""Events too frequent for a line across the chart."""


@dataclass(frozen=True)
class Axes:
    """The mapping of steps and values to points of the drawing."""

    last_step: int
    low: float
    high: float
    logarithmic: bool

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / max(1, self.last_step)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value, which must be positive on a logarithmic axis."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)


def axes_of(chart: Chart, last_step: int) -> Axes:
    """Return axes with room around the values."""
    low, high = chart.extent()
    if chart.logarithmic:
        return Axes(last_step, low / 1.1, high * 1.1, True)
    if chart.from_zero:
        # 1.0 if all values are 0, since an axis needs a length.
        return Axes(last_step, 0.0, 1.1 * high or 1.0, False)
    # A constant curve runs through the middle.
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Axes(last_step, low - room, high + room, False)


def draw(chart: Chart, events: Sequence[tuple[str, Event]], last_step: int) -> str:
    """Return the SVG element. Each event comes with the CSS class of its color."""
    axes = axes_of(chart, last_step)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)} against step">']
    parts += _grid(axes)
    parts.append('<g class="events">')
    parts += [_mark(color, event, axes) for color, event in events]
    parts.append("</g>")
    for index, curve in enumerate(chart.curves):
        parts.append(f'<g data-curve="{index}" class="{_classes(curve)}">')
        parts += _lines(curve, axes)
        parts.append("</g>")
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}" visibility="hidden"/>')
    parts.append("</svg>")
    return "\n".join(parts)


def _classes(curve: Curve) -> str:
    color = f"c{curve.color % COLORS}"
    if curve.dashed:
        return f"{color} dashed"
    return color


def _lines(curve: Curve, axes: Axes) -> list[str]:
    raw = _path(curve.steps, curve.values, axes)
    # The style sheet draws the raw line faint and the smoothed one strong.
    if curve.smooth:
        smooth = _path(curve.steps, curve.smooth, axes)
        return [f'<path class="raw" d="{raw}"/>', f'<path class="smooth" d="{smooth}"/>']
    parts = [f'<path class="line" d="{raw}"/>']
    if len(curve.values) <= POINTS_SHOWN:
        for step, value in zip(curve.steps, curve.values, strict=True):
            parts.append(f'<circle cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="2.4"/>')
    return parts


def _path(steps: Sequence[int], values: Sequence[float], axes: Axes) -> str:
    # One decimal: a tenth of a unit is about a tenth of a pixel on most screens.
    points = [f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in zip(steps, values, strict=True)]
    return "M" + " ".join(points)


def _mark(color: str, event: Event, axes: Axes) -> str:
    kind = event.kind.replace(" ", "-")
    x = axes.x(event.step)
    title = f"<title>{escape(event.kind)} at step {event.step:,}: {escape(event.text)}</title>"
    if event.kind in TICKS:
        # Triangles on the axis: saves touch it from below, evaluations from above.
        side = -5
        if event.kind == "save":
            side = 5
        path = f"M{x:.1f},{BOTTOM} l-3,{side} h6 z"
        return f'<path class="event {kind} {color}" d="{path}">{title}</path>'
    return f'<line class="event {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}">{title}</line>'


def _step_label(x: float, text: str) -> str:
    anchor = "middle"
    # The drawing ends shortly after the axis, where a long number would be cut off.
    if x + DIGIT_WIDTH * len(text) / 2 > WIDTH:
        anchor = "end"
        x = WIDTH
    return f'<text x="{x:.1f}" y="{BOTTOM + 19}" text-anchor="{anchor}">{text}</text>'


def _grid(axes: Axes) -> list[str]:
    parts: list[str] = []
    for value in value_ticks(axes):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for step in linear_ticks(0, axes.last_step):
        # A short run has ticks between two steps, such as 0.5.
        if step != int(step):
            continue
        parts.append(_step_label(axes.x(step), short(step)))
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    return parts


def value_ticks(axes: Axes) -> list[float]:
    """Return the values that get a grid line and a number."""
    if not axes.logarithmic:
        return linear_ticks(axes.low, axes.high)
    first = math.floor(math.log10(axes.low))
    last = math.ceil(math.log10(axes.high))
    # Over many decades one number per decade is enough.
    factors = (1,)
    if last - first <= 2:
        factors = (1, 2, 5)
    ticks = [factor * 10.0**exponent for exponent in range(first, last + 1) for factor in factors]
    return [tick for tick in ticks if axes.low <= tick <= axes.high]


def linear_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in a range, with distances of 1, 2 or 5 times a power of 10."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    # 0.999 and the 1e-9 below absorb rounding, so that a round end of the range keeps its tick.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def short(value: float) -> str:
    """Format a number for an axis: ``12k``, ``0.25``, ``1.5e-4``."""
    size = abs(value)
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Numbers of up to four digits fit on an axis without a suffix.
        if size >= max(factor, 1e4):
            return f"{value / factor:.4g}{suffix}"
    if 0 < size < 1e-3:
        return short_exponent(value)
    return f"{value:.4g}"
