"""Pictures of fields: input, truth, prediction and error, and the growth of errors in time."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.metrics.records import write_json
from accel_train.store.atomic_files import replace_file

logger = logging.getLogger(__name__)

# Not x and y: files differ in which of the two runs along H.
ACROSS = "points along W"
DOWN = "points along H"
STEPS = "step in time"
"""Label of the vertical axis of a 1-D field over time. Step 0 is the input, step 1 the first prediction."""


class Panel(NamedTuple):
    """One field in a row of panels."""

    title: str
    values: Tensor
    """Field (H, W) with rows downwards, like an image."""
    group: str
    """Panels of a row with the same group share one colour scale, to compare truth and prediction."""
    down: str = DOWN
    """Label of the vertical axis, the rows of ``values``."""
    signed: bool = False
    """True for errors: the colours diverge from white at 0."""
    first: int = 0
    """Number of the first row on the vertical axis."""


class Lines(NamedTuple):
    """Curves over one axis."""

    title: str
    horizontal: str
    vertical: str
    at: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    """Name -> values at the positions ``at``."""


Panels = list[Panel | Lines]
"""Pictures of one task, in a row of fields.png."""


def write_fields(path: Path, rows: Sequence[tuple[str, Sequence[Panel | Lines]]]) -> None:
    """Draw one row of panels per (label, panels) to a PNG, and write the values of ``Lines`` to a JSON file beside it.

    Call it on the main process. A write error is logged as a warning, and training continues.
    """
    import matplotlib

    # A training machine has no display.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(len(panels) for _, panels in rows)
    size = (3.2 * columns, 2.9 * len(rows))
    figure, grid = plt.subplots(len(rows), columns, figsize=size, squeeze=False, layout="constrained")
    for (label, panels), axes in zip(rows, grid, strict=True):
        _draw_row(figure, axes, label, panels)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Drawn in memory first, so that a reader never sees half of a picture.
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=100)
        replace_file(path, picture.getvalue())
        write_json(path.with_suffix(".json"), _curve_values(rows))
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", path, error)
    finally:
        plt.close(figure)  # pyplot keeps every figure until it is closed


def _draw_row(figure: Any, axes: Any, label: str, panels: Sequence[Panel | Lines]) -> None:
    """Draw the panels of a row from the left, and leave its remaining axes empty."""
    groups: dict[str, list[Panel]] = {}
    for panel in panels:
        if isinstance(panel, Panel):
            groups.setdefault(panel.group, []).append(panel)
    scales = {group: limits(members) for group, members in groups.items()}
    for axis, panel in zip(axes, panels, strict=False):
        if isinstance(panel, Lines):
            _draw_lines(axis, panel)
        else:
            image = _draw_field(axis, panel, scales[panel.group])
            figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    # Placed to the left of the first panel's axis label.
    style: Any = {"rotation": 90, "ha": "right", "va": "center"}
    axes[0].annotate(label, (0, 0.5), (-42, 0), "axes fraction", "offset points", **style)


def _curve_values(rows: Sequence[tuple[str, Sequence[Panel | Lines]]]) -> dict[str, Any]:
    """Collect the values of all curves: row label -> title -> fields of ``Lines``."""
    values: dict[str, Any] = {}
    for label, panels in rows:
        lines = {panel.title: panel._asdict() for panel in panels if isinstance(panel, Lines)}
        if lines:
            values[label] = lines
    return values


def _draw_field(axis: Any, panel: Panel, scale: tuple[float, float]) -> Any:
    low, high = scale
    rows, columns = panel.values.shape
    top = panel.first - 0.5
    image = axis.imshow(
        panel.values.numpy(),
        extent=(-0.5, columns - 0.5, top + rows, top),
        aspect="auto",
        interpolation="nearest",
        vmin=low,
        vmax=high,
        cmap="RdBu_r" if panel.signed else "viridis",
    )
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(ACROSS, fontsize=8)
    axis.set_ylabel(panel.down, fontsize=8)
    axis.locator_params(integer=True)
    axis.tick_params(labelsize=7)
    return image


def _draw_lines(axis: Any, panel: Lines) -> None:
    for name, values in panel.lines.items():
        axis.plot(panel.at, values, marker=".", markersize=3, linewidth=1, label=name)
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(panel.horizontal, fontsize=8)
    axis.set_ylabel(panel.vertical, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    # An explicit location: the default warns that it is slow on a busy machine.
    axis.legend(fontsize=7, loc="best")


def limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Return the ends of the colour scale shared by these panels. Signed panels have 0 in the middle."""
    low = min(float(panel.values.min()) for panel in panels)
    high = max(float(panel.values.max()) for panel in panels)
    if any(panel.signed for panel in panels):
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    return low, high


def titled(title: str, channel: int, channels: int) -> str:
    """Add the number of the channel that a panel shows, if there are several."""
    if channels > 1:
        return f"{title}, channel {channel}"
    return title


def error_panel(predicted: Tensor, target: Tensor, title: str = "error", down: str = DOWN, first: int = 0) -> Panel:
    """Show the signed error, with the nRMSE of this panel in the title."""
    error = predicted - target
    # Avoids a division by zero for an all-zero target. Fields may be as small as fp32 allows.
    size = target.double().norm().clamp_min(torch.finfo(torch.float32).tiny)
    nrmse = float(error.double().norm() / size)
    return Panel(f"{title} (nRMSE {nrmse:.3g})", error, "e", down, True, first)
