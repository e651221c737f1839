"""Timed workloads: pieces of a transformer's training step, each counted in the units of the cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.cost_model.work import Work
from accel_train.simulation.work import WorkCounter

Compute = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Sizes of the transformer that stands in for the models to be planned."""

    rows: int
    length: int
    width: int
    heads: int
    depth: int
    copied_bytes: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


SHAPES = {
    "cpu": Shape(rows=8, length=128, width=256, heads=8, depth=2, copied_bytes=2**26),
    "cuda": Shape(rows=8, length=1024, width=2048, heads=16, depth=2, copied_bytes=2**28),
}
"""Shape by device type. A larger one would take a CPU seconds, a smaller one would not fill a GPU."""
TINY = Shape(rows=2, length=8, width=32, heads=2, depth=8, copied_bytes=0)
"""Shape whose operators are so small that only the host's launch overhead is left."""
OPTIMIZED = 12
"""Weights of a block in units of width x width: queries, keys, values and projection, and 4 + 4 for the MLP."""
HOST_VALUES = 2**24
"""Values that AdamW updates in host memory: 256 MiB with gradients and states, more than a CPU's caches hold."""


@dataclass(frozen=True)
class Workload:
    """One piece of a step."""

    compute: Compute
    unit: str
    how: str
    amount: Callable[[Work], int]
    """Part of the counted work that is divided by the time to give the rate."""


def workloads(device: torch.device, dtype: torch.dtype) -> Mapping[str, Workload]:
    """Return the workloads to time, by the name of the rate that they measure."""
    shape = SHAPES[device.type]
    each = f"{shape.tokens} tokens, width {shape.width}"
    heads = f"{shape.rows} x {shape.length} tokens, {shape.heads} heads of {shape.width // shape.heads}"
    return {
        "products": Workload(
            products(shape, device, dtype),
            "FLOP/s",
            f"products of a transformer block, forward and backward: {each}",
            lambda work: work.products,
        ),
        "attention": Workload(
            attention(shape, device, dtype),
            "FLOP/s",
            f"scaled_dot_product_attention, forward and backward: {heads}",
            lambda work: work.attention,
        ),
        "operators": Workload(
            operators(shape, device, dtype),
            "B/s",
            f"norm, modulation, gelu, heads, residual, loss, AdamW, EMA: {each}",
            lambda work: work.moved,
        ),
        "copy": Workload(
            copying(shape, device),
            "B/s",
            f"copy of {shape.copied_bytes >> 20} MiB, read and written",
            lambda work: work.moved,
        ),
        "host": Workload(
            small_operators(device, dtype),
            "kernels/s",
            f"transformer blocks of width {TINY.width}, {TINY.tokens} tokens, back to back without waiting",
            lambda work: work.kernels,
        ),
        "adamw": Workload(
            adamw_on_host(HOST_VALUES),
            "B/s",
            f"fused AdamW of {HOST_VALUES >> 20} Mi values in host memory, on {torch.get_num_threads()} thread(s)",
            lambda work: work.moved,
        ),
        "transfer": Workload(
            transfer(shape, device),
            "B/s",
            f"copy of {shape.copied_bytes >> 20} MiB of page-locked host memory to the device"
            if device.type == "cuda"
            else "as copy, counted once: host and device are one memory",
            lambda work: work.moved // 2,
        ),
    }


def count(compute: Compute) -> Work:
    """Count the work of one call."""
    counter = WorkCounter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            counter.watch(func, args, kwargs or {}, result)
            return result

    with Counting():
        compute()
    return counter.work()


def products(shape: Shape, device: torch.device, dtype: torch.dtype) -> Compute:
    """Build the matrix products of ``depth`` blocks: forward, and the gradients of each layer's input and weight."""
    made = partial(torch.randn, device=device, dtype=dtype)
    w = shape.width
    layers: list[tuple[Tensor, Tensor, Tensor]] = []
    of_a_block = [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)]
    # Each layer has operands of its own, as in a real step, so that no product finds its operands in a cache.
    for columns, inner in of_a_block * shape.depth:
        layers.append((made(shape.tokens, inner), made(columns, inner), made(shape.tokens, columns)))

    def compute() -> None:
        for inputs, weight, _ in layers:
            torch.mm(inputs, weight.t())
        for inputs, weight, gradient in reversed(layers):
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), inputs)

    return compute


def attention(shape: Shape, device: torch.device, dtype: torch.dtype) -> Compute:
    """Build the attention of ``depth`` blocks, forward and backward."""
    size = (shape.rows, shape.heads, shape.length, shape.width // shape.heads)
    made = partial(torch.randn, size, device=device, dtype=dtype)
    inputs = [[made(requires_grad=True) for _ in range(3)] for _ in range(shape.depth)]
    gradient = made()

    def compute() -> None:
        for query, key, value in inputs:
            mixed = F.scaled_dot_product_attention(query, key, value)
            torch.autograd.grad(mixed, (query, key, value), gradient)

    return compute


def copying(shape: Shape, device: torch.device) -> Compute:
    """Build a copy between two buffers in device memory."""
    source = torch.ones(shape.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def transfer(shape: Shape, device: torch.device) -> Compute:
    """Build a copy from host memory to the device. The source is page-locked on a GPU, as is DeepSpeed's default."""
    source = torch.ones(shape.copied_bytes // 4, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return lambda: target.copy_(source, non_blocking=True)


def adamw_on_host(values: int) -> Compute:
    """Build an AdamW step in host memory, as an offloaded optimizer takes it."""
    weights = torch.zeros(values)
    weights.grad = torch.full_like(weights, 1e-3)
    optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=True)
    # The first step makes the means, and belongs to none that is planned.
    optimizer.step()
    return optimizer.step


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the autocast context of a run in this precision. It does nothing in fp32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def operators(shape: Shape, device: torch.device, dtype: torch.dtype) -> Compute:
    """Build a step of ``depth`` blocks without products and attention: forward, backward, clip, AdamW and EMA.

    Where a layer would widen a tensor, copies of it are concatenated. Where it would narrow one, its parts are summed.
    """
    made = partial(torch.randn, device=device)
    inputs = made(shape.rows, shape.length, shape.width, requires_grad=True)
    modulation = [made(shape.rows, 1, shape.width, requires_grad=True) for _ in range(3)]
    targets = torch.zeros(shape.tokens, dtype=torch.long, device=device)
    matrices = [nn.Parameter(made(OPTIMIZED * shape.width, shape.width) * 0.02) for _ in range(shape.depth)]
    average = [parameter.detach().clone() for parameter in matrices]
    for parameter in matrices:
        parameter.grad = made(parameter.shape)
    optimizer = torch.optim.AdamW(matrices, lr=1e-6, fused=True)
    # The first step makes the means, and belongs to none that is planned.
    optimizer.step()

    def compute() -> None:
        with autocast(device, dtype):
            hidden = inputs
            for _ in range(shape.depth):
                hidden = _without_products(hidden, modulation, shape, dtype)
            logits = torch.cat([hidden] * 4, dim=-1).flatten(0, 1).float()
            loss = F.cross_entropy(logits, targets)
        torch.autograd.grad(loss, [inputs, *modulation])
        nn.utils.clip_grad_norm_(matrices, 1.0)
        optimizer.step()
        for mean, parameter in zip(average, matrices, strict=True):
            mean.lerp_(parameter.detach(), 0.01)

    return compute


def _without_products(hidden: Tensor, modulation: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
    shift, scale, gate = modulation
    normed = F.layer_norm(hidden, (shape.width,)) * (1 + scale) + shift
    projected = torch.cat([normed.to(dtype)] * 3, dim=-1)
    heads = projected.view(shape.rows, shape.length, 3, shape.heads, -1)
    query, key, value = (part.contiguous() for part in heads.permute(2, 0, 3, 1, 4))
    mixed = (query * key + value).transpose(1, 2).flatten(2)
    hidden = hidden + gate * mixed
    normed = F.layer_norm(hidden, (shape.width,)) * (1 + scale) + shift
    wide = F.gelu(torch.cat([normed.to(dtype)] * 4, dim=-1), approximate="tanh")
    return hidden + gate * wide.unflatten(-1, (4, -1)).sum(dim=-2)


class Block(nn.Module):
    """A transformer block built from modules, as in a real model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        w = shape.width
        self._heads = shape.heads
        self.norm_1 = nn.LayerNorm(w)
        self.project = nn.Linear(w, 3 * w)
        self.out = nn.Linear(w, w)
        self.norm_2 = nn.LayerNorm(w)
        self.widen = nn.Linear(w, 4 * w)
        self.narrow = nn.Linear(4 * w, w)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, L, D) to (B, L, D)."""
        projected = self.project(self.norm_1(hidden))
        heads = projected.unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # (B, H, L, D / H)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        return hidden + self.narrow(F.gelu(self.widen(self.norm_2(hidden)), approximate="tanh"))


def small_operators(device: torch.device, dtype: torch.dtype) -> Compute:
    """Build forward and backward of blocks so small that the host takes longer than their arithmetic."""
    model = nn.Sequential(*(Block(TINY) for _ in range(TINY.depth))).to(device)
    parameters = list(model.parameters())
    inputs = torch.randn(TINY.rows, TINY.length, TINY.width, device=device)

    def compute() -> None:
        with autocast(device, dtype):
            loss = model(inputs).float().square().mean()
        torch.autograd.grad(loss, parameters)

    return compute
