"""Every allocation of torch's CUDA allocator with its Python stack, as a snapshot for https://pytorch.org/memory_viz.

The recorder is one for the process, and so is the state here.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)
SNAPSHOT = "memory_snapshot.pickle"
MOST_ENTRIES = 100_000
"""Allocations and releases that are kept, the newest. Each takes up to a few kilobytes of host memory."""

_is_recording = False


def start() -> None:
    """Record from here on. What is allocated already has no stack."""
    global _is_recording
    # Of Python alone: the frames of C++ below them make a snapshot several times as large.
    _record(max_entries=MOST_ENTRIES, stacks="python")
    _is_recording = True


def stop() -> None:
    """End the recording and forget what was recorded."""
    global _is_recording
    _record(None)
    _is_recording = False


def write(path: Path) -> bool:
    """Write a snapshot if a recording is on, and return True. A write error is logged: training goes on without it."""
    if not _is_recording:
        return False
    try:
        path.parent.mkdir(exist_ok=True)
        # torch writes in place, so the file gets its name when it is whole.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".profile-") as folder:
            written = Path(folder) / SNAPSHOT
            torch.cuda.memory._dump_snapshot(str(written))  # pyright: ignore[reportPrivateUsage]
            os.replace(written, path)
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", path, error)
        return False
    return True


def _record(*enabled: None, **options: object) -> None:
    record: Any = torch.cuda.memory._record_memory_history  # pyright: ignore[reportPrivateUsage]
    record(*enabled, **options)
