"""Stand-ins for bitsandbytes' frozen linear layers in a memory simulation: their size in bytes, without values.

bitsandbytes computes scales from values and makes a tensor subclass of the weight. Fake tensors support neither. What
its kernels allocate follows from the shapes: at rest, in a forward, kept for the backward, and in the backward.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64
"""Number of values of a 4-bit weight that share a scale."""
BLOCKS = 256
"""Number of scales that share a scale of their own, of the second level."""


class SimulatedLinear4bit(nn.Linear):
    """``bitsandbytes.nn.Linear4bit`` with double quantisation (arXiv:2305.14314), in bytes."""

    @classmethod
    def of(cls, layer: nn.Linear, compute: torch.dtype, second_code: Tensor) -> SimulatedLinear4bit:
        """Take the place of ``layer``, with half a byte for a value, on the device of ``second_code``, (256,)."""
        device = second_code.device
        made = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        values = layer.weight.numel()
        blocks = ceil(values / BLOCK)
        made.weight = _frozen((ceil(values / 2), 1), torch.uint8, device)
        second = ceil(blocks / BLOCKS)
        # Scales, those of the scales and their offset, and the 16 values.
        sizes = [
            ((blocks,), torch.uint8),
            ((second,), torch.float32),
            ((), torch.float32),
            ((16,), torch.float32),
        ]
        statistics = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
        # No buffers, as in bitsandbytes: DDP would send them to the other processes.
        made.statistics = [second_code, *statistics]
        made.bias = layer.bias
        made.compute = compute
        made.stored = layer.weight.dtype
        return made

    statistics: list[Tensor]
    """Tensors that decode the weight."""
    compute: torch.dtype
    """Dtype of the product."""
    stored: torch.dtype
    """Dtype of the weight before quantisation, which the backward decodes to."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the compute dtype."""
        bias: Any = self.bias
        if bias is not None:
            bias = bias.to(self.compute)
        product = _Product4bit.apply(input.to(self.compute), self.weight, bias, self)
        return product.to(input.dtype)


class SimulatedLinear8bit(nn.Linear):
    """``bitsandbytes.nn.Linear8bitLt`` (arXiv:2208.07339), in bytes, without outliers."""

    scales: Tensor

    @classmethod
    def of(cls, layer: nn.Linear, device: torch.device) -> SimulatedLinear8bit:
        """Take the place of ``layer``, with a byte for a value on ``device``."""
        made = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        made.weight = _frozen(layer.weight.shape, torch.int8, device)
        made.scales = torch.empty(layer.out_features, device=device)
        made.bias = layer.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the decoded weight, as on a CPU. On a GPU integers are multiplied, and take memory for each row."""
        return _Product8bit.apply(input, self.weight, self.bias, self)


def _frozen(size: Any, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)


def _decoded(layer: Any, dtype: torch.dtype) -> Tensor:
    return layer.weight.new_empty((layer.out_features, layer.in_features), dtype=dtype)


class _Product4bit(torch.autograd.Function):
    """Product that keeps only the packed weight for the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: SimulatedLinear4bit) -> Tensor:
        ctx.layer = layer
        return functional.linear(input, _decoded(layer, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        weight = _decoded(ctx.layer, ctx.layer.stored)
        return gradient @ weight.to(gradient.dtype), None, None, None


class _Product8bit(torch.autograd.Function):
    """Product that keeps its input for the backward, although only the dtype is needed."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: SimulatedLinear8bit) -> Tensor:
        ctx.layer = layer
        ctx.kept = input
        decoded = weight.to(input.dtype).mul_(layer.scales.unsqueeze(1).mul(1.0))
        return functional.linear(input, decoded, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        layer = ctx.layer
        scales = layer.scales.unsqueeze(1).mul(1.0)
        weight = layer.weight.to(ctx.kept.dtype, copy=True).mul_(scales)
        return gradient.to(ctx.kept.dtype) @ weight, None, None, None
