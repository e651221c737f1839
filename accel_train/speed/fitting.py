"""Refuse a model whose training state cannot fit into memory, by arithmetic, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import nn

from accel_train.config import UsageError

GIB = 1 << 30
FP32_BYTES = 4
OPTIMIZER_BYTES = {"adamw": 8, "muon": 4, "adamw8bit": 2, "adamw_offload": 0}
"""Bytes of optimizer state per parameter on the training device: a lower bound. Unknown for module:Class, hence 0."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def parameters_of(build: Callable[[], nn.Module]) -> int:
    """Count the parameters of the model of ``build``, on the meta device and so without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def refuse_what_cannot_fit(
    parameters: int,
    optimizer: str,
    *,
    training: bool,
    has_average: bool,
    sharded: bool,
    world_size: int,
    device: torch.device,
    given: Sequence[str] = (),
) -> None:
    """Raise ``UsageError`` if weights, gradients, optimizer state and EMA exceed all available memory.

    A lower bound: activations are not counted. Under a sharding strategy everything counts as sharded, and host
    memory as the device's, because of offloading. Each process builds the fp32 weights whole. ``given`` are the
    options set by the user, for the message.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun and accelerate launch
    host = host_bytes()
    model = f"{', '.join(given) or 'the model'}: {parameters:,} parameters"
    built = local * parameters * FP32_BYTES
    if built > host:
        raise UsageError(
            f"{model} take {_gib(built)} as fp32 weights, which each of {local} process(es) on this host builds whole, "
            f"and it has {_gib(host)} of memory; make the model smaller, or start fewer processes on a host"
        )

    bytes_each = FP32_BYTES
    parts = "weights"
    if has_average:
        bytes_each += FP32_BYTES
        parts += ", average"
    if training:
        bytes_each += FP32_BYTES + OPTIMIZER_BYTES.get(optimizer, 0)
        parts += f", gradient, state of {optimizer}"
    required = parameters * bytes_each
    if sharded:
        required /= world_size
        parts += f"; divided by {world_size} processes"
    if device.type == "cpu":
        required *= local
        available = host
        place = f"this host with {local} process(es)"
    else:
        available = _device_bytes(device)
        place = str(device)
        if sharded:  # may be offloaded to the host
            available += host / local
            place = f"{device} and host memory"
    if required > available:
        raise UsageError(
            f"{model} take {_gib(required)} ({bytes_each} bytes each: {parts}), and {place} has {_gib(available)}; "
            "make the model smaller, or divide it over more devices with accelerate_configs/fsdp2.yaml"
        )


def host_bytes(limits: Sequence[str] = LIMITS) -> int:
    """Memory of this host, or the container's limit where it is lower."""
    available = psutil.virtual_memory().total
    for path in limits:
        if Path(path).is_file():
            limit = Path(path).read_text().strip()
            if limit.isdigit():  # without a limit "max", or in version 1 a number beyond all memory
                available = min(available, int(limit))
    return available


def _device_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    return torch.cuda.get_device_properties(device).total_memory


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB"
