"""AdamW for one GPU with state and arithmetic in host memory: 8 bytes less per parameter on the device.

torchao's CPUOffloadOptimizer copies each gradient during the backward, before the global norm is known, so it can
neither clip nor undo a loss scale. Here ``step`` copies the gradients, after both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.training.optimizer_classes.closures import loss_of
from accel_train.training.parameters import ParamGroup

BUCKET_BYTES = 64 << 20
"""Size of a bucket. One is copied to the host while the CPU works on the previous one."""


class _Host(NamedTuple):
    weights: Tensor
    gradient: Tensor


class HostAdamW(torch.optim.Optimizer):
    """torch's fused AdamW on host copies of the parameters. One process, any precision.

    Each step copies gradients and weights to the host and weights back: 12 bytes per parameter over the bus. Host
    memory: 12 pinned bytes and 8 bytes of state per parameter. ``step`` waits for the device.
    """

    def __init__(self, groups: list[ParamGroup], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self._settings: dict[str, Any] = {"betas": betas, "eps": eps, "fused": True}
        self._hosts: dict[Tensor, _Host] = {}
        self._adamw: torch.optim.AdamW | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        buckets = list(self._buckets())
        # All copies are queued before the first update, so that the bus is busy while the CPU works.
        arrivals = [self._bring(bucket) for bucket in buckets]
        for bucket, arrival in zip(buckets, arrivals, strict=True):
            if arrival is not None:
                arrival.synchronize()
            self._update(bucket)
        return loss

    def host_copies(self) -> Iterator[Tensor]:
        """Yield the copies of weights and gradients in host memory, none before the first step."""
        for host in self._hosts.values():
            yield from host

    def _buckets(self) -> Iterator[list[ParamGroup]]:
        """Yield groups split into buckets of ``BUCKET_BYTES``, with the parameters that have a gradient."""
        bucket: list[ParamGroup] = []
        filled = 0
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for parameter in with_gradient:
                if not bucket or bucket[-1]["of"] is not group:
                    # A group may go over several buckets, and each part needs the group's own settings.
                    bucket.append({**group, "params": [], "of": group})
                bucket[-1]["params"].append(parameter)
                filled += parameter.nbytes
                if filled >= BUCKET_BYTES:
                    yield bucket
                    bucket = []
                    filled = 0
        if bucket:
            yield bucket

    def _bring(self, bucket: list[ParamGroup]) -> torch.cuda.Event | None:
        """Start the copies to the host. The event completes when they have arrived; None on a CPU."""
        parameters: list[Tensor] = [p for group in bucket for p in group["params"]]
        for parameter in parameters:
            host = self._hosts.get(parameter) or self._new_host(parameter)
            assert parameter.grad is not None
            host.gradient.copy_(parameter.grad, non_blocking=True)
            # In every step, because others write to the weights too: a restore, and the EMA during an evaluation.
            host.weights.copy_(parameter, non_blocking=True)
        if not parameters[0].is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _new_host(self, parameter: Tensor) -> _Host:
        def buffer() -> Tensor:
            # A copy is asynchronous with pinned memory only.
            return torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.is_cuda)

        self._hosts[parameter] = host = _Host(buffer(), buffer())
        # Once: every step copies its gradient into the same buffer.
        host.weights.grad = host.gradient
        return host

    def _update(self, bucket: list[ParamGroup]) -> None:
        parameters: list[Tensor] = [p for group in bucket for p in group["params"]]
        groups: list[ParamGroup] = []
        for group in bucket:
            on_host = [self._hosts[p].weights for p in group["params"]]
            groups.append({**group, "params": on_host})
        if self._adamw is None:
            self._adamw = torch.optim.AdamW(groups, **self._settings)
        for parameter in parameters:
            # One dictionary under both tensors: AdamW fills it, and checkpoints read it from ``self.state``.
            self._adamw.state[self._hosts[parameter].weights] = self.state[parameter]
        defaults: dict[str, Any] = self._adamw.defaults
        # One AdamW for all buckets, which sees the bucket at hand with the learning rate of this step.
        self._adamw.param_groups = [{**defaults, **group} for group in groups]
        self._adamw.step()
        # On the stream of the gradients: a stream of its own for the way back changed nothing on an H200.
        for parameter in parameters:
            parameter.copy_(self._hosts[parameter].weights, non_blocking=True)
