"""What a run leaves behind for a person: the figures and the picture."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.metrics.curves import plot_curves
from accel_train.metrics.records import write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


def write_report(accelerator: Accelerator, directory: Path, step: int, figures: Mapping[str, object]) -> None:
    """Write ``evaluation.json`` and, where there are metrics, ``curves.png``. Any process; the main one writes."""
    if not accelerator.is_main_process:
        return
    try:
        write_json(directory / "evaluation.json", {"step": step, **figures})
        if (directory / "metrics.jsonl").exists():
            plot_curves(directory / "metrics.jsonl", directory / "curves.png")
    except OSError as error:
        logger.warning("the report in %s could not be written (%s); training is not affected", directory, error)
