"""Training curves, drawn from ``metrics.jsonl``."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from accel_train.metrics.panels import SMOOTH_FROM, Panel, Series, panels_of, smoothed
from accel_train.metrics.records import Records, last_pass, read_metrics
from accel_train.store.atomic_files import replace_file

AXIS_HEIGHT = 2.45
"""Height of a panel in inches."""
MOST_INSIDE = 5
"""Maximum number of curves for a legend inside the axes. With more curves the legend goes below them."""
MARKS = 2
"""Number of kinds of vertical lines, which a legend may list beside the curves."""


def plot_curves(metrics_jsonl: str | os.PathLike[str], png_path: str | os.PathLike[str]) -> Path:
    """Draw losses, evaluations, learning rate, gradient norm, throughput, step time and memory.

    Main process only. Metrics that the run did not record get no panel. A run with nothing to draw gets a picture with
    a note. Vertical lines mark resumes and non-finite losses. The file is replaced atomically.
    """
    records = read_metrics(metrics_jsonl)
    panels = panels_of(records)
    figure, axes = _grid(panels)
    for axis, panel in zip(axes, panels, strict=False):
        _draw(axis, panel)
    with_curves = {axis: panel for axis, panel in zip(axes, panels, strict=False) if not panel.text}
    _draw_marks(list(with_curves), _marks(records))
    _align(with_curves, _last_step(records))
    # A fixed distance in inches from the top: in a tall figure a fraction would put the title onto the panels.
    title_top = 1 - 0.12 / figure.get_figheight()
    figure.suptitle(_title(records, Path(metrics_jsonl)), fontsize=11, y=title_top, va="top")
    if not panels:
        axes[0].text(
            0.5, 0.5, "nothing to draw yet: a curve needs two training lines", ha="center", va="center", color="0.4"
        )
    path = Path(png_path)
    # Drawn in memory, so that an error in the drawing leaves the last picture.
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())
    return path


def _grid(panels: Sequence[Panel]) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, at least one. All sizes are in inches.

    Axes are placed by hand: a layout engine would draw everything twice to measure it, while the training loop waits.
    """
    # Not pyplot, which picks a backend for the process and keeps every figure until it is closed.
    from matplotlib.figure import Figure

    columns = _columns(len(panels))
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)] or [[]]
    below = [max((_legend_height(panel) for panel in row), default=0.0) for row in rows]
    width = max(4.9 * columns, 7.0)
    height = 3.1 * len(rows) + 0.7 + sum(below)
    figure = Figure(figsize=(width, height), dpi=110)
    axis_width = (width - 0.9 - 0.8 * (columns - 1)) / columns
    axes: list[Any] = []
    top = height - 0.85
    for row, legend in zip(rows, below, strict=True):
        for column in range(max(len(row), 1)):
            left = 0.75 + column * (axis_width + 0.8)
            place = (left / width, (top - AXIS_HEIGHT) / height, axis_width / width, AXIS_HEIGHT / height)
            axes.append(figure.add_axes(place))
        top -= AXIS_HEIGHT + 0.65 + legend
    return figure, axes


def _legend_height(panel: Panel) -> float:
    """Return the height in inches of the legend below a panel, 0 if the legend is inside the axes."""
    lines = len(panel.drawn())
    if lines <= MOST_INSIDE:
        return 0.0
    return 0.1 + 0.13 * ceil((lines + MARKS) / 2)


def _align(axes: Mapping[Any, Panel], last_step: int) -> None:
    """Give all panels the same range of steps, so that events line up, and add their legends."""
    from matplotlib.ticker import MaxNLocator

    for axis, panel in axes.items():
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.set_xlim(0, 1.02 * max(last_step, 1))
        _add_legend(axis, panel)


def _marks(records: Records) -> list[tuple[int, str, str]]:
    """Return (step, label, color) of the vertical lines."""
    resumes: set[int] = set()
    for record in records:
        step = record.get("step")
        if record.get("event") == "resume" and isinstance(step, int):
            resumes.add(step)
    marks = [(step, "resumed", "0.55") for step in sorted(resumes)]
    for line in last_pass(records, "train"):
        loss = line.get("loss")
        if isinstance(loss, float) and not isfinite(loss):
            marks.append((line["step"], "loss not finite", "tab:red"))
    return marks


def _columns(panels: int) -> int:
    if panels > 4:
        return 3
    if panels > 1:
        return 2
    return 1


def _add_legend(axis: Any, panel: Panel) -> None:
    _, labels = axis.get_legend_handles_labels()
    if len(labels) <= 1 and panel.title == "Learning rate":
        return
    if _legend_height(panel):
        # Many entries would hide the curves.
        below = -0.42 / AXIS_HEIGHT
        axis.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, below), ncol=2, frameon=False)
        return
    # Passed although it is the default: without it, matplotlib warns when its search for a place is slow.
    axis.legend(fontsize=7.5, loc="best", framealpha=0.85)


def _draw(axis: Any, panel: Panel) -> None:
    lines = panel.drawn()
    axis.set_title(panel.title, fontsize=10, y=1.0)  # a title without y measures all labels to find its place
    if panel.text:
        axis.set_axis_off()
        axis.text(0.02, 0.98, panel.text, fontsize=7, va="top", transform=axis.transAxes)
        return
    colors: dict[str, str] = {}
    for label, series in lines.items():
        # A shuffled metric has the color of its partner, dashed.
        partner = label.removesuffix(" shuffled")
        color = colors.setdefault(partner, f"C{len(colors)}")
        linestyle = "-" if label == partner else "--"
        _draw_series(axis, series, panel, label, {"color": color, "linestyle": linestyle})
    values = [value for series in lines.values() for value in series.values]
    _set_scale(axis, panel, values)
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(True, alpha=0.25)


def _draw_series(axis: Any, series: Series, panel: Panel, label: str, style: dict[str, str]) -> None:
    if panel.last_value:
        label += f": {series.values[-1]:.4g}"
    if panel.smooth and len(series.values) >= SMOOTH_FROM:
        axis.plot(series.steps, series.values, linewidth=0.8, alpha=0.3, **style)
        smooth = smoothed(series.values)
        axis.plot(series.steps, smooth, linewidth=1.7, label=f"{label} (smoothed)", **style)
        return
    # Hollow markers, so that a shuffled metric differs from its partner in black and white as well.
    face = "white" if style["linestyle"] == "--" else style["color"]
    # Evaluations are few and their steps matter. Markers of a long curve would hide it.
    marker = "o" if len(series.values) <= 30 else ""
    axis.plot(
        series.steps,
        series.values,
        linewidth=1.5,
        marker=marker,
        markersize=4,
        markerfacecolor=face,
        label=label,
        **style,
    )


def _draw_marks(axes: Sequence[Any], marks: Iterable[tuple[int, str, str]]) -> None:
    """Draw the vertical lines into every panel, and label them in the legend of the first one."""
    labelled: set[str] = set()
    for step, label, color in marks:
        for axis in axes:
            shown = None
            # Each label once, or the legend would have a line for every resume of a long run.
            if axis is axes[0] and label not in labelled:
                shown = label
            axis.axvline(step, color=color, linestyle=":", linewidth=1.2, label=shown)
        labelled.add(label)


def _set_scale(axis: Any, panel: Panel, values: Sequence[float]) -> None:
    low = min(values)
    high = max(values)
    # Losses fall fast at first: on a linear axis the rest of a long run is one flat line.
    if panel.smooth and low > 0 and high > 10 * low:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())  # the default writes 2 x 10^0 between 1 and 5
    elif panel.from_zero and low >= 0:
        # Room above the curve for the legend.
        top = 1.25 * high if high > 0 else 1.0
        axis.set_ylim(0, top)
    if panel.title == "Learning rate":
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axis.yaxis.get_offset_text().set_fontsize(8)


def _title(records: Records, path: Path) -> str:
    environments = [record for record in records if record.get("event") == "environment"]
    facts = environments[-1] if environments else {}
    about = [f"step {_last_step(records):,}"]
    if "strategy" in facts:
        about.append(f"{facts['strategy']} × {facts.get('world_size', 1)}")
    known = [key for key in ("precision", "device_name") if facts.get(key)]
    about += [str(facts[key]) for key in known]
    return f"{path.resolve().parent.name}\n{' · '.join(about)}"


def _last_step(records: Records) -> int:
    found = [record.get("step") for record in records]
    steps = [step for step in found if isinstance(step, int)]
    return max(steps, default=0)
