"""Options for speed and memory that concern the device alone, before data and model are prepared."""

from __future__ import annotations

import torch

from accel_train.precision import Precision
from accel_train.speed.float8 import refuse_float8
from accel_train.speed.memory.allocator import apply_memory
from accel_train.speed.options import Float8, MemoryConfig


def set_up_device(
    device: torch.device, memory: MemoryConfig, float8: Float8, precision: Precision, strategy: str
) -> list[str]:
    """Set up the allocator of ``device`` and return notices. Every process calls it, before anything is allocated.

    Raises ``UsageError`` for a device that cannot obey these options.
    """
    refuse_float8(float8, device, precision, strategy)
    return apply_memory(memory, device)
