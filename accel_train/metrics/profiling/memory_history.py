"""Every allocation of torch's CUDA allocator with its Python stack, as a snapshot for https://pytorch.org/memory_viz.

torch has one recorder per process, so the state here is global too.
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
"""Number of allocations and releases that are kept, the newest. Each takes up to a few kilobytes of host memory."""

_is_recording = False


def start() -> None:
    """Start recording. Earlier allocations have no stack."""
    global _is_recording
    # Python frames only: the C++ frames below them make a snapshot several times as large.
    _record(max_entries=MOST_ENTRIES, stacks="python")
    _is_recording = True


def stop() -> None:
    """Stop recording and discard the history."""
    global _is_recording
    _record(None)
    _is_recording = False


def write(path: Path) -> bool:
    """Write a snapshot, and return True if it was written. False without a recording, or after a logged write error."""
    if not _is_recording:
        return False
    try:
        path.parent.mkdir(exist_ok=True)
        # torch writes in place, so the file gets its final name once it is complete.
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
