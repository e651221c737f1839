"""Replacements for two parts of DDP and FSDP2 that cannot run on fake tensors. All the rest is torch's own.

DDP's ``Reducer`` is C++ and reads memory, which fake tensors do not have. ``BucketReducer`` treats the gradients in the
same way: buckets of the same sizes, with gradients as views of them, rebuilt after the first backward in the order in
which gradients arrive, and all-reduced as soon as they are full. ``Chunks`` divides FSDP2's parameters lazily.
``tests/simulation`` compares both with real processes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class BucketReducer:
    """Stands in for ``torch.distributed.Reducer``, with the methods called by ``DistributedDataParallel``."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *settings: Any,
    ) -> None:
        # torch passes its settings by position.
        # The first bucket is small, so that the first reduction starts early.
        self._limits = settings[10] or [settings[7], settings[3]]
        self._group = settings[1]
        self._as_views = settings[5]
        self._parameters = list(parameters)
        self._arrived: list[int] = []
        self._rebuilt = False
        self._expects = False
        self._make_buckets(buckets)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))

    def _make_buckets(self, buckets: Sequence[Sequence[int]]) -> None:
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._memory: list[Tensor] = []
        self._views: dict[int, Tensor] = {}
        for bucket in self._buckets:
            sizes = [self._parameters[index].numel() for index in bucket]
            memory = self._parameters[bucket[0]].new_empty(sum(sizes), requires_grad=False)
            self._memory.append(memory)
            for index, view in zip(bucket, memory.split(sizes), strict=True):
                self._views[index] = view.view(self._parameters[index].shape)

    def prepare_for_forward(self) -> None:
        """Do nothing: the C++ reducer starts its timers here."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Expect a gradient of every parameter in the next backward."""
        assert not outputs, "no search for unused parameters"
        self._expects = True
        self._pending = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def _hook(self, index: int) -> Any:
        def arrived(parameter: Tensor) -> None:
            # Under `no_sync` DDP prepares no backward, and gradients only accumulate.
            if self._expects:
                self._ready(index, parameter)

        return arrived

    @torch.no_grad()
    def _ready(self, index: int, parameter: Tensor) -> None:
        """Copy a gradient into its bucket, divided by the number of processes, and reduce full buckets."""
        if not self._rebuilt:
            self._arrived.append(index)
        view = self._views[index]
        gradient = parameter.grad
        assert gradient is not None
        torch.mul(gradient, 1.0 / self._group.size(), out=view)
        # As in DDP, the gradient becomes a view of the bucket, and its own memory is released at once.
        if self._as_views:
            parameter.grad = view
        number = self._bucket_of[index]
        self._pending[number] -= 1
        # In order, so that all processes reduce the buckets in the same sequence.
        while self._next < len(self._buckets) and self._pending[self._next] == 0:
            dist.all_reduce(self._memory[self._next], group=self._group)
            self._next += 1
        if self._next == len(self._buckets):
            self._finish()

    def _finish(self) -> None:
        self._expects = False
        if self._as_views:
            return
        for index, view in self._views.items():
            gradient = self._parameters[index].grad
            assert gradient is not None
            gradient.copy_(view)

    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets in the order in which gradients arrived. Returns True once, before the second forward."""
        if self._rebuilt or len(self._arrived) < len(self._parameters):
            return False
        in_order: list[Tensor] = [self._parameters[index] for index in self._arrived]
        # The old buckets are released before the new ones are made, as in the C++ reducer.
        self._memory = []
        self._views = {}
        buckets, _ = dist._compute_bucket_assignment_by_size(  # pyright: ignore[reportPrivateUsage]
            in_order, self._limits, [False] * len(in_order), self._arrived
        )
        self._make_buckets(buckets)
        self._rebuilt = True
        return True

    def set_logger(self, logger: object) -> None:
        """Do nothing: there is no logger."""

    def _set_static_graph(self) -> None:
        """Do nothing: a simulation sees the same graph in every step."""


class NoLogger:
    """Stands in for ``torch.distributed.Logger``, which reads the C++ reducer."""

    def __init__(self, reducer: BucketReducer) -> None:
        del reducer

    def set_construction_data_and_log(self, *facts: object) -> None:
        """Do nothing."""

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing."""

    def _set_static_graph(self) -> None:
        """Do nothing."""


class Chunks:
    """FSDP2's shards of a parameter over ``count`` processes, made only when they are asked for.

    torch builds the list of all shards to take one. With fake tensors and 1,024 processes, this took four fifths of a
    simulation's time.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor = tensor
        self._count = count
        self._dim = dim

    def __getitem__(self, number: int) -> Tensor:
        size = self._tensor.shape[self._dim]
        each = -(-size // self._count)  # rounded up, as torch.chunk does
        start = number * each
        if number > 0 and start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(each, size - start))


@contextmanager
def without_memory() -> Generator[None]:
    """Let ``DistributedDataParallel`` and ``fully_shard`` use these replacements in the body."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with (
        mock.patch.object(dist, "Reducer", BucketReducer),
        mock.patch.object(dist, "Logger", NoLogger),
        # It compares shapes with the other processes, which do not exist.
        mock.patch.object(dist, "_verify_params_across_processes", return_value=None),
        # Fake weights have no values to broadcast.
        mock.patch.object(dist, "_broadcast_coalesced", return_value=None),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", Chunks),
    ):
        yield


@contextmanager
def gradients_of_step(model: nn.Module) -> Generator[list[Tensor]]:
    """Yield a list that gets the gradients when the optimizer steps. Under DDP they are views of its buckets."""
    gradients: list[Tensor] = []

    def collect(*_: Any) -> None:
        gradients.extend(p.grad for p in model.parameters() if p.grad is not None)

    handle = register_optimizer_step_pre_hook(collect)
    try:
        yield gradients
    finally:
        handle.remove()
