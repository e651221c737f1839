"""Whether a model's training state can fit at all, by arithmetic, before a byte of it is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.training.optimizer_choice import OptimizerName

GIB = 1 << 30
FP32_BYTES = 4
OPTIMIZER_BYTES: dict[OptimizerName, int] = {"adamw": 8, "muon": 4, "adamw8bit": 2, "adamw_offload": 0}
"""Of its state on the training device, per parameter: the least that it takes."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def parameters_of(build: Callable[[], nn.Module]) -> int:
    """Parameters of the model that ``build`` makes, which is built without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def refuse_what_cannot_fit(
    parameters: int,
    optimizer: OptimizerName,
    *,
    training: bool,
    has_average: bool,
    sharded: bool,
    world_size: int,
    device: torch.device,
    given: Sequence[str] = (),
) -> None:
    """Raise ``UsageError`` where weights, gradients, optimizer state and average exceed all the memory there is.

    A lower bound: activations are not counted, and where a strategy shards, all of it counts as sharded, and host
    memory as the device's, for it may be offloaded there. The fp32 weights are built whole on each process. ``given``
    are the options that a person set, for the message.
    """
    each = FP32_BYTES
    if has_average:
        each += FP32_BYTES
    if training:
        each += FP32_BYTES + OPTIMIZER_BYTES[optimizer]  # a gradient, and the optimizer's state
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host, on_host = host_bytes(), device.type == "cpu"
    share = parameters * each / (world_size if sharded else 1)
    device_memory = 0 if on_host else _device_bytes(device)
    what = f"{', '.join(given) or 'the model'}: {parameters:,} parameters"
    built = local * parameters * FP32_BYTES
    if built > host:
        raise UsageError(
            f"{what} take {_gib(built)} as fp32 weights, which each of {local} process(es) on this host builds whole, "
            f"and it has {_gib(host)} of memory; make the model smaller, or start fewer processes on a host"
        )
    held, there = (local * share, host) if on_host else (share, device_memory + (host / local if sharded else 0))
    if held > there:
        place = f"this host with {local} process(es)" if on_host else f"{device} and host memory" if sharded else device
        raise UsageError(
            f"{what} take {_gib(held)} ({each} bytes each: weights"
            f"{', average' if has_average else ''}{f', gradient, state of {optimizer}' if training else ''}"
            f"{f'; divided by {world_size} processes' if sharded else ''}), and "
            f"{place} has {_gib(there)}; make the model smaller, or divide it over more devices with "
            "accelerate_configs/fsdp2.yaml"
        )


def host_bytes(limits: Sequence[str] = LIMITS) -> int:
    """Memory of this host, or what the container's limit leaves of it."""
    found = [Path(path).read_text().strip() for path in limits if Path(path).is_file()]
    return min([psutil.virtual_memory().total, *(int(text) for text in found if text.isdigit())])


def _device_bytes(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB"
