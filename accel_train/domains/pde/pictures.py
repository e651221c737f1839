"""Pictures of fields: what was given, what is true, what was predicted, where they differ, and how errors grow."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from accel_train.atomic_files import replace_file
from accel_train.metrics.records import write_json

logger = logging.getLogger(__name__)


class Panel(NamedTuple):
    """One field of a row of panels."""

    title: str
    values: Tensor
    """(H, W): rows downwards, as an image."""
    group: str
    """Panels of a row with the same group share one colour scale, so that truth and prediction can be compared."""
    down: str = "y (points)"
    """What the rows of ``values`` are."""
    signed: bool = False
    """An error, whose sign matters: colours that diverge from 0, which is white."""


class Lines(NamedTuple):
    """Numbers that belong together, drawn over one axis."""

    title: str
    horizontal: str
    vertical: str
    at: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    """Name -> as many numbers as ``at`` has."""


def write_fields(path: Path, rows: Sequence[tuple[str, Sequence[Panel | Lines]]]) -> None:
    """One row of panels for each (label, panels), fields with a colour bar, as a PNG; the numbers of ``Lines`` go to a
    JSON file of the same name beside it. Main process.

    A directory that cannot be written is a warning: training goes on.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(len(panels) for _, panels in rows)
    figure, grid = plt.subplots(
        len(rows), columns, figsize=(3.2 * columns, 2.9 * len(rows)), squeeze=False, layout="constrained"
    )
    for (label, panels), axes in zip(rows, grid, strict=True):
        fields = [p for p in panels if isinstance(p, Panel)]
        scales = {p.group: limits([q for q in fields if q.group == p.group]) for p in fields}
        for axis, panel in zip(axes, panels, strict=False):
            if isinstance(panel, Lines):
                _draw_lines(axis, panel)
                continue
            low, high = scales[panel.group]
            colours = {"vmin": low, "vmax": high, "cmap": "RdBu_r" if panel.signed else "viridis"}
            image = axis.imshow(panel.values.numpy(), aspect="auto", interpolation="nearest", **colours)
            axis.set_title(panel.title, fontsize=9)
            axis.set_xlabel("x (points)", fontsize=8)
            axis.set_ylabel(panel.down, fontsize=8)
            axis.locator_params(integer=True)
            axis.tick_params(labelsize=7)
            figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        axes[0].annotate(
            label, (0, 0.5), (-42, 0), "axes fraction", "offset points", rotation=90, ha="right", va="center"
        )
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=100)
        replace_file(path, picture.getvalue())
        numbers = {label: {p.title: p._asdict() for p in panels if isinstance(p, Lines)} for label, panels in rows}
        write_json(path.with_suffix(".json"), {label: found for label, found in numbers.items() if found})
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", path, error)
    finally:
        plt.close(figure)


def _draw_lines(axis: Any, panel: Lines) -> None:
    for name, values in panel.lines.items():
        axis.plot(panel.at, values, marker=".", markersize=3, linewidth=1, label=name)
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(panel.horizontal, fontsize=8)
    axis.set_ylabel(panel.vertical, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="best")  # the default warns where the machine is busy


def limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Ends of the colour scale that these panels share; of signed ones 0 is in the middle."""
    low, high = min(float(p.values.min()) for p in panels), max(float(p.values.max()) for p in panels)
    if any(p.signed for p in panels):
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    return low, high
