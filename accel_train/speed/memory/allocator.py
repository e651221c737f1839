"""torch's allocator on a GPU: how much it may take, and how it grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from accel_train import simulated
from accel_train.config import UsageError
from accel_train.speed.options import MemoryConfig

EXPANDABLE = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""In the order in which torch reads them: the first that is set counts."""


def apply_memory(config: MemoryConfig, device: torch.device) -> list[str]:
    """Set up the allocator of ``device`` for this process, and return notices. Call it before anything is allocated.

    Every process calls it. Raises ``UsageError`` for a device without the allocator, a CPU among them.
    """
    asked: dict[str, Any] = {}
    if config.fraction < 1:
        asked["fraction"] = config.fraction
    if config.expandable_segments:
        asked["expandable_segments"] = "true"
    # A simulation counts bytes, and its device does not exist.
    if not asked or simulated.active() is not None:
        return []
    if device.type != "cuda":
        option, value = next(iter(asked.items()))
        raise UsageError(
            f"memory.{option}: {value}: a GPU is required, whose memory torch's allocator manages, and this run is on "
            f"{device.type}; leave it out"
        )
    notices: list[str] = []
    if config.expandable_segments:
        _allocator_settings()(_with_expandable_segments())
        notices.append("memory.expandable_segments: the allocator extends its segments")
    if config.fraction < 1:
        # The limit is per process: others on the same device are not counted.
        torch.cuda.set_per_process_memory_fraction(float(config.fraction), gpu_index(device))
        total = torch.cuda.get_device_properties(device).total_memory
        notices.append(f"memory.fraction: {config.fraction:g}: {config.fraction * total / 2**30:.2f} GiB of {device}")
    return notices


def gpu_index(device: torch.device) -> int:
    """Return the index of a GPU: of the current one for a device without an index, as in a run of one process."""
    index: Any = device.index
    return torch.cuda.current_device() if index is None else index


def _with_expandable_segments() -> str:
    """Return the environment's settings plus this one, because torch resets all that a change does not name."""
    name = next((each for each in VARIABLES if os.environ.get(each)), VARIABLES[0])
    given = os.environ.get(name, "")
    parts = [part.strip() for part in given.split(",") if part.strip()]
    if "expandable_segments:false" in (part.replace(" ", "").lower() for part in parts):
        raise UsageError(
            f"memory.expandable_segments: true, but {name} is {given!r}; remove expandable_segments from one of the two"
        )
    return ",".join([*(part for part in parts if not part.startswith("expandable_segments")), EXPANDABLE])


def _allocator_settings() -> Callable[[str], None]:
    """Return torch's function that changes the settings of ``PYTORCH_ALLOC_CONF`` in a running process."""
    # The public way is the variable, which has no effect once the process has touched the device.
    bindings: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return bindings._accelerator_setAllocatorSettings
