"""Refuse a model whose training state cannot fit into memory, by arithmetic, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.speed.memory.allocator import gpu_index
from accel_train.speed.memory.frozen_offload import GIB, offloaded_bytes

FP32_BYTES = 4
OPTIMIZER_BYTES = {"adamw": 8, "muon": 4, "adamw8bit": 2, "adamw_offload": 0}
"""Bytes of optimizer state per parameter on the training device: a lower bound. Unknown for module:Class, hence 0."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Kept(NamedTuple):
    """Memory that a run needs for each trained parameter, besides its weight."""

    optimizer: str
    training: bool = True
    has_ema: bool = False
    saves_state: bool = True
    """Saves hold the optimizer state."""
    saved_bytes: int = FP32_BYTES
    """Bytes of a saved value of weights and EMA."""

    def snapshot_bytes(self) -> int:
        """Return the bytes per trained parameter in the snapshot of a save, over all processes."""
        if not self.training:
            return 0
        values = 2 if self.has_ema else 1
        if not self.saves_state:
            return values * self.saved_bytes
        # Rounded values are saved together with exact ones.
        exact = values * FP32_BYTES if self.saved_bytes < FP32_BYTES else 0
        return values * self.saved_bytes + exact + OPTIMIZER_BYTES.get(self.optimizer, 0)


class Size(NamedTuple):
    """Size of a model."""

    parameters: int
    trained: int
    """Trained parameters."""
    weight_bytes: int
    offloaded_bytes: int = 0
    """Weights kept in host memory."""

    @property
    def frozen_bytes(self) -> int:
        """Bytes of weights on the device that are not trained. Trained ones are fp32."""
        return max(0, self.weight_bytes - self.offloaded_bytes - FP32_BYTES * self.trained)


def size_of(build: Callable[[], nn.Module], *, offload_frozen: bool = False) -> Size:
    """Return the size of the model of ``build``, built on the meta device and so without memory."""
    with torch.device("meta"):
        # Built whole, because only the recipe's own code knows what it builds.
        model = build()
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"build_model: the function returned a {type(model).__name__}: a torch.nn.Module is required; return the "
            "model alone"
        )
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    weight_bytes = sum(p.numel() * p.element_size() for p in parameters)
    offloaded = offloaded_bytes(model) if offload_frozen else 0
    return Size(sum(p.numel() for p in parameters), trained, weight_bytes, offloaded)


def refuse_what_cannot_fit(
    size: Size,
    kept: Kept,
    *,
    sharded: bool,
    world_size: int,
    device: torch.device,
    once_per_host: bool = False,
    given: Sequence[str] = (),
) -> None:
    """Raise ``UsageError`` if weights, gradients, optimizer state and EMA exceed all available memory.

    A lower bound: activations are not counted. Under a sharding strategy everything counts as sharded, and host
    memory as the device's, because of offloading. Each process builds the weights whole, or with ``once_per_host`` one
    process of each host. On a CPU the snapshot of a save counts as well, which is taken at the end at the latest.
    ``given`` are the options set by the user, for the message.
    """
    local = _local_processes()
    host = host_bytes()
    model = f"{', '.join(given) or 'the model'}: {size.parameters:,} parameters"
    if size.trained < size.parameters:
        model += f", {size.trained:,} of them trained,"
    _refuse_whole_weights(model, size, once_per_host)
    state_bytes, state_parts = _state_of_trained(kept)
    on_device = size.weight_bytes - size.offloaded_bytes
    required = on_device + size.trained * state_bytes
    parts = ", ".join([f"weights {_gib(on_device)}", *state_parts])
    if sharded:
        # At best: what FSDP2 and ZeRO gather for a moment is not counted.
        required /= world_size
        parts += f"; divided by {world_size} processes"
    if device.type == "cpu":
        # There is no other memory to keep them in.
        required = (required + size.offloaded_bytes) * local
        # By then the gradients are freed. The processes divide one snapshot, but divide a gradient only with sharding.
        gradient = FP32_BYTES / (world_size if sharded else 1)
        more = size.trained * local * (kept.snapshot_bytes() / world_size - gradient)
        if kept.training and more > 0:
            required += more
            parts += (
                f"; during a save without the gradient, but with a snapshot of {kept.snapshot_bytes()} bytes for each"
            )
        available = host
        place = f"this host with {local} process(es)"
    else:
        available = device_bytes(device)
        place = str(device)
        if sharded:  # may be offloaded to the host
            # All processes of the host share its memory.
            available += host / local
            place = f"{device} and host memory"
    if required > available:
        raise UsageError(
            f"{model} take {_gib(required)} ({parts}), but {place} has {_gib(available)}; make the model smaller, or "
            "divide it over more devices with accelerate_configs/fsdp2.yaml"
        )


def _local_processes() -> int:
    """Return the number of processes on this host, which torchrun and accelerate launch set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _refuse_whole_weights(model: str, size: Size, once_per_host: bool) -> None:
    """Raise ``UsageError`` if the host cannot hold all copies of the weights, before they are sharded or moved."""
    host = host_bytes()
    copies = 1 if once_per_host else _local_processes()
    built = copies * size.weight_bytes
    if built <= host:
        return
    builders, remedy = "one process of this host builds", "make the model smaller"
    if copies > 1:
        builders = f"each of {copies} processes on this host builds"
        remedy += ", start fewer processes on a host, or use FSDP2, for which one process builds them"
    raise UsageError(
        f"{model} take {_gib(built)} as weights, which {builders} whole, but the host has only {_gib(host)} of "
        f"memory; {remedy}"
    )


def _state_of_trained(kept: Kept) -> tuple[int, list[str]]:
    """Return the bytes per trained parameter besides its weight, and a description of them."""
    bytes_each = 0
    parts: list[str] = []
    if kept.has_ema:
        bytes_each += FP32_BYTES
        parts.append("EMA")
    if kept.training:
        # The gradient is fp32, as the masters are.
        bytes_each += FP32_BYTES + OPTIMIZER_BYTES.get(kept.optimizer, 0)
        parts += ["gradient", f"state of {kept.optimizer}"]
    if parts:
        parts[-1] += f" at {bytes_each} bytes for each trained parameter"
    return bytes_each, parts


def host_bytes(limits: Sequence[str] = LIMITS) -> int:
    """Return the memory of this host in bytes, or the container's limit where it is lower."""
    available = psutil.virtual_memory().total
    for path in limits:
        if Path(path).is_file():
            limit = Path(path).read_text().strip()
            if limit.isdigit():  # without a limit "max", or in version 1 a number beyond all memory
                available = min(available, int(limit))
    return available


def device_bytes(device: torch.device) -> float:
    """Return the bytes of a GPU that this process may allocate. Infinite for any other device."""
    if device.type != "cuda":
        return float("inf")
    total = torch.cuda.get_device_properties(device).total_memory
    return total * torch.cuda.get_per_process_memory_fraction(gpu_index(device))


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB"
