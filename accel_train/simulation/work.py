"""Count the work of a step as its operators run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from accel_train.cost_model.work import Work
from accel_train.simulation.tensors.fake_tensors import tensors_in

if TYPE_CHECKING:
    from accel_train.simulation.collectives import Collective

COLLECTIVES = ("c10d", "_c10d_functional")
COPY = "aten::copy_"
ONLY_WRITTEN = (COPY, "aten::fill_", "aten::zero_")
"""In-place operators that only write: they do not read the values that they overwrite."""
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class Flops:
    """FLOPs so far, by torch's formulas, with attention on the CPU added, which torch does not count."""

    total: int = 0

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        """Add the FLOPs of one operator, and return them."""
        # The registry has one entry for all overloads of an operator.
        packet = func._overloadpacket
        operations = 0
        if packet is _FORWARD:
            query, key, value = args[:3]
            operations = sdpa_flop_count(query.shape, key.shape, value.shape)
        elif packet is _BACKWARD:
            gradient, query, key, value = args[:4]
            operations = sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)
        elif packet in flop_registry:
            operations = flop_registry[packet](*args, **kwargs, out_val=result)
        self.total += operations
        return operations


class WorkCounter:
    """Adds up the work of operators as they run. ``is_on_host`` returns True for tensors in host memory."""

    def __init__(self, is_on_host: Callable[[Tensor], bool] = lambda _: False) -> None:
        self.flops = Flops()
        self._is_on_host = is_on_host
        self._on_host = 0
        self._copied = 0
        self._copies = 0
        self._products = 0
        self._attention = 0
        self._moved = 0
        self._kernels = 0

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Add the work of one operator."""
        if func.namespace in COLLECTIVES:
            return
        # Zero-dimensional tensors are ignored: they may be in either memory, such as an optimizer's step count.
        memories = {self._is_on_host(tensor) for tensor in tensors_in([*args, *kwargs.values()]) if tensor.dim()}
        if memories == {True}:
            self._on_host += 0 if func.is_view else moved_bytes(func, args, kwargs, result)
            return
        if len(memories) == 2 and func._schema.name == COPY:
            # torch converts before it copies, so the bytes sent have the dtype of the target.
            self._copied += _bytes(args[0])
            self._copies += 1
            return
        operations = self.flops.watch(func, args, kwargs, result)
        if "attention" in func._schema.name:
            self._attention += operations
            self._kernels += 1
            return
        if operations:
            self._products += operations
            self._kernels += 1
            return
        moved = 0 if func.is_view else moved_bytes(func, args, kwargs, result)
        self._moved += moved
        self._kernels += moved > 0

    def work(self, calls: Sequence[Collective] = ()) -> Work:
        """Return all work so far, together with the traffic of the collectives in ``calls``."""
        sent = {kind: [call.sent for call in calls if call.kind == kind] for kind in ("all-gather", "reduce-scatter")}
        return Work(
            self._products,
            self._attention,
            self._moved,
            self._kernels,
            sent=sum(call.sent for call in calls),
            collectives=len(calls),
            gathered=sum(sent["all-gather"]),
            gathers=len(sent["all-gather"]),
            scattered=sum(sent["reduce-scatter"]),
            scatters=len(sent["reduce-scatter"]),
            on_host=self._on_host,
            copied=self._copied,
            copies=self._copies,
        )


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the bytes read and written by an operator."""
    name = func._schema.name
    # An allocation does not write anything.
    if "empty" in name:
        return 0
    total = 0
    known: set[int] = set()
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        tensors = list(tensors_in(given.get(argument.name)))
        size = sum(map(_bytes, tensors))
        known |= {_storage(tensor) for tensor in tensors}
        if argument.is_write:
            total += size
        # A factory such as zeros_like only takes the shape of its input and reads no values.
        is_read = not (argument.is_write and name in ONLY_WRITTEN) and not _is_factory(name)
        if is_read:
            total += size
    made = [tensor for tensor in tensors_in(result) if _storage(tensor) not in known]
    # No new storage and no write: it is a view.
    if not made and not any(argument.is_write for argument in func._schema.arguments):
        return 0
    return total + sum(map(_bytes, made))


def _is_factory(name: str) -> bool:
    return name.endswith("_like") or name.startswith("aten::new_")


def _bytes(tensor: Tensor) -> int:
    # An expanded tensor has more elements than memory.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata
