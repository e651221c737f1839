"""Trial that decides if AdamW runs in one pass (`adamw_kernel`). That kernel is compiled on the machine itself."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW

SIZES = (3, 1000, 20_000)
STEPS = 3
TOLERANCE = 1e-5
"""Relative difference from torch's kernel, in weights and averages, allowed after `STEPS`: sums have another order."""


def one_pass_obstacle(device: torch.device, parameters: Iterable[Tensor]) -> str | None:
    """Return why torch's kernel has to run instead, or None. Collective on a GPU: one failure counts for all.

    Runs a few steps of both on ``device``, which compiles the kernel: a second, or milliseconds from Triton's cache.
    """
    parameters = list(parameters)
    if device.type != "cuda" or any(isinstance(parameter, FakeTensor) for parameter in parameters):
        return "it needs a GPU"
    if any(parameter.dtype is not torch.float32 for parameter in parameters):
        return "it needs weights in fp32"
    obstacle = _failure(device) if find_spec("triton") is not None else "Triton is not installed"
    # Replicas must not differ in their last bits, so the processes take the same kernel.
    if dist.is_initialized() and dist.get_world_size() > 1:
        failed = torch.tensor(obstacle is not None, dtype=torch.int32, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if bool(failed) and obstacle is None:
            return "it does not run on another process"
    return obstacle


def _failure(device: torch.device) -> str | None:
    """Compare both kernels; return what failed, or None."""
    try:
        results = [_run(device, one_pass=one_pass) for one_pass in (True, False)]
    except Exception as error:  # of Triton, a C compiler or a driver, which raise anything
        return f"a trial failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for one, other in zip(*results, strict=True):
        difference = float((one - other).norm() / other.norm())
        if not difference <= TOLERANCE:  # NaN fails as well
            return f"a trial differs from torch's kernel by {difference:.1e}, more than the allowed {TOLERANCE:.0e}"
    return None


@torch.no_grad()
def _run(device: torch.device, *, one_pass: bool) -> list[Tensor]:
    """Return weights and averages after a few steps with clipping."""
    generator = torch.Generator(device).manual_seed(0)
    weights = [nn.Parameter(_draw(size, generator)) for size in SIZES]
    averages: dict[Tensor, Tensor] = {weight: weight.detach().clone() for weight in weights}
    groups = [{"params": weights, "weight_decay": 0.1}]
    optimizer: Any = FusedAdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, one_pass=one_pass)
    optimizer.grad_scale = torch.full((), 2.0, device=device)
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = _draw(weight.numel(), generator)
        optimizer.average_next(averages, 0.1)
        optimizer.step()
        if one_pass:
            continue
        for weight, average in averages.items():
            average.lerp_(weight, 0.1)
    return [*(weight.detach() for weight in weights), *averages.values()]


def _draw(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, device=generator.device, generator=generator)
