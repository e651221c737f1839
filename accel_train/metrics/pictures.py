"""Pictures of fields: what was given, what is true, what was predicted, and where they differ."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

logger = logging.getLogger(__name__)


class Panel(NamedTuple):
    """One field of a row of panels."""

    title: str
    values: Tensor
    """(H, W): rows downwards, as an image."""
    group: str
    """Panels of a row with the same group share one colour scale, so that truth and prediction can be compared."""


def write_fields(path: Path, rows: Sequence[tuple[str, Sequence[Panel]]]) -> None:
    """One row of panels for each (label, panels), each with its own colour bar, as a PNG. Main process.

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
        limits = {p.group: _limits([q for q in panels if q.group == p.group]) for p in panels}
        for axis, panel in zip(axes, panels, strict=False):
            low, high = limits[panel.group]
            image = axis.imshow(panel.values.numpy(), vmin=low, vmax=high, aspect="auto", interpolation="nearest")
            axis.set_title(panel.title, fontsize=9)
            axis.tick_params(labelsize=7)
            figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        axes[0].set_ylabel(label, fontsize=9)
    try:
        temporary = path.with_name(f".{path.stem}.tmp.png")
        figure.savefig(temporary, dpi=100)
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", path, error)
    finally:
        plt.close(figure)


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    return min(float(p.values.min()) for p in panels), max(float(p.values.max()) for p in panels)
