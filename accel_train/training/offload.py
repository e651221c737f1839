"""AdamW for one GPU whose state and arithmetic are in host memory: 8 bytes less per parameter on the device.

torchao's CPUOffloadOptimizer copies each gradient while the backward runs, before the norm of all of them is known,
so it can neither clip nor undo a loss scale. Here the gradients travel in ``step``, as they are by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Copied to the host while the CPU works on the bucket before."""


class _Host(NamedTuple):
    weights: Tensor
    gradient: Tensor


class HostAdamW(torch.optim.Optimizer):
    """torch's fused AdamW on host copies of the parameters. One process, any precision of the computation.

    Gradients and weights travel to the host and weights back in every step: 12 bytes per parameter over the bus, and
    12 of locked host memory beside the 8 of the state. ``step`` waits for the device.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self._settings: dict[str, Any] = {"betas": betas, "eps": eps, "fused": True}
        self._hosts: dict[Tensor, _Host] = {}
        self._adamw: torch.optim.AdamW | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = list(self._buckets())
        arrivals = [self._bring(bucket) for bucket in buckets]
        for bucket, arrival in zip(buckets, arrivals, strict=True):
            if arrival is not None:
                arrival.synchronize()
            self._update(bucket)
        return loss

    def _buckets(self) -> Iterator[list[dict[str, Any]]]:
        """Groups cut into runs of ``BUCKET_BYTES``, with parameters that have a gradient."""
        bucket: list[dict[str, Any]] = []
        filled = 0
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                if not bucket or bucket[-1]["of"] is not group:
                    bucket.append({**group, "params": [], "of": group})
                bucket[-1]["params"].append(parameter)
                filled += parameter.nbytes
                if filled >= BUCKET_BYTES:
                    yield bucket
                    bucket, filled = [], 0
        if bucket:
            yield bucket

    def _bring(self, bucket: list[dict[str, Any]]) -> torch.cuda.Event | None:
        """Start the copies to the host; the event says when they are there."""
        parameters: list[Tensor] = [p for group in bucket for p in group["params"]]
        for parameter in parameters:
            host = self._hosts.get(parameter) or self._new_host(parameter)
            assert parameter.grad is not None
            host.gradient.copy_(parameter.grad, non_blocking=True)
            # Each time, for others write to the weights too: restoring, and the average during an evaluation.
            host.weights.copy_(parameter, non_blocking=True)
        if not parameters[0].is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _new_host(self, parameter: Tensor) -> _Host:
        def buffer() -> Tensor:
            return torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.is_cuda)

        self._hosts[parameter] = host = _Host(buffer(), buffer())
        host.weights.grad = host.gradient
        return host

    def _update(self, bucket: list[dict[str, Any]]) -> None:
        parameters: list[Tensor] = [p for group in bucket for p in group["params"]]
        groups = [{**group, "params": [self._hosts[p].weights for p in group["params"]]} for group in bucket]
        if self._adamw is None:
            self._adamw = torch.optim.AdamW(groups, **self._settings)
        for host, parameter in ((self._hosts[p].weights, p) for p in parameters):
            self._adamw.state[host] = self.state[parameter]  # one dictionary, under both
        defaults: dict[str, Any] = self._adamw.defaults
        self._adamw.param_groups = [{**defaults, **group} for group in groups]
        self._adamw.step()
        for parameter in parameters:
            parameter.copy_(self._hosts[parameter].weights, non_blocking=True)
