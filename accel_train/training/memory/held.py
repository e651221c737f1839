"""Bytes held by the tensors of a training, by category, on this process, under any strategy.

Measured on the tensors themselves: each storage counts once, under the first category that has it. So tied weights,
gradients in one bucket and ZeRO's flat groups are counted once, padding is counted, and what FSDP2 has freed is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_train.training.optimizer_classes.offload import HostAdamW
from accel_train.training.sharding import fixed_shard

if TYPE_CHECKING:
    from accel_train.training.ema import Ema
    from accel_train.training.shards import Shards

WEIGHTS = "weights"
FROZEN = "frozen_weights"
MASTERS = "master_weights"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer_state"
EMA = "ema"


@dataclass
class Held:
    """Bytes by category. Empty categories are left out."""

    device: dict[str, int] = field(default_factory=dict[str, int])
    """On the device that trains."""
    host: dict[str, int] = field(default_factory=dict[str, int])
    """Offloaded to host memory. Empty on a CPU, whose memory is the device's."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    def raise_to(self, other: Held) -> None:
        """Take the larger of both for each category."""
        for ours, theirs in ((self.device, other.device), (self.host, other.host)):
            for category, size in theirs.items():
                ours[category] = max(size, ours.get(category, 0))


def held(ema: Ema, device: torch.device) -> Held:
    """Count what the training of ``ema.shards`` holds now. Allocates nothing, and does not wait for the device.

    ``weights`` are those of the forward, trained: this process's shard under FSDP2 and ZeRO-3. ``master_weights`` are
    fp32 weights of the optimizer where they are a second copy, under ZeRO. ``gradients`` are the ``grad`` of parameters
    and masters, not the buffers of DDP or of DeepSpeed's engine beside them.
    """
    return count(_categories(ema), device)


def held_gradients(shards: Shards, device: torch.device) -> Held:
    """Count the gradients alone."""
    return count({GRADIENTS: _gradients(shards)}, device)


def count(categories: Mapping[str, Iterable[Tensor]], device: torch.device) -> Held:
    """Count the storages of each category that no earlier one has."""
    counted = Held()
    seen: set[int] = set()
    for category, tensors in categories.items():
        for tensor in plain(tensors):
            storage: Any = tensor.untyped_storage()
            # The address of the C++ storage, which all views of it share.
            if storage._cdata in seen or not storage.nbytes():
                continue
            seen.add(storage._cdata)
            place = counted.device if tensor.device.type == device.type else counted.host
            place[category] = place.get(category, 0) + storage.nbytes()
    return counted


def plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the inner tensors of DTensors and quantised tensors, and other tensors as they are."""
    for tensor in tensors:
        wrapper: Any = tensor
        if hasattr(wrapper, "__tensor_flatten__"):
            names, _ = wrapper.__tensor_flatten__()
            # A DTensor names its mesh among them.
            yield from plain(_tensors(getattr(wrapper, name) for name in names))
        else:
            yield tensor


def _categories(ema: Ema) -> dict[str, Iterable[Tensor]]:
    shards = ema.shards
    return {
        WEIGHTS: _weights(shards, shards.parameters.values()),
        FROZEN: _weights(shards, shards.frozen.values()),
        MASTERS: [shards.master(name) for name in shards.parameters],
        BUFFERS: shards.module.buffers(),
        GRADIENTS: _gradients(shards),
        OPTIMIZER: _state(shards.optimizer),
        EMA: ema.held(),
    }


def _weights(shards: Shards, parameters: Iterable[Any]) -> Iterator[Tensor]:
    for parameter in parameters:
        yield parameter
        # ZeRO-3 keeps the shard beside a parameter that is empty between its uses. A strided copy would be a new one.
        if not shards.replicated and parameter.is_contiguous():
            yield fixed_shard(parameter).values
        # bitsandbytes keeps the scales of a 4-bit weight there, and the scales of those scales in `state2`.
        scales: Any = getattr(parameter, "quant_state", None)
        while scales is not None:
            yield from _tensors(vars(scales).values())
            scales = getattr(scales, "state2", None)


def _gradients(shards: Shards) -> list[Tensor]:
    holders = [*shards.parameters.values(), *shards.stepped()]
    return [holder.grad for holder in holders if holder.grad is not None]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from _tensors(state.values())
    if isinstance(optimizer, HostAdamW):
        yield from optimizer.host_copies()


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
