"""Frozen linear layers with weights stored in float8, e4m3 (arXiv:2209.05433), and a scale for each output.

They are multiplied in the compute dtype. The 8 bits halve the memory of bf16 and need no package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FLOAT8 = torch.float8_e4m3fn
STORED = torch.int8
"""Dtype that the float8 bits are stored in, because peft would give adapters the dtype of a float8 weight."""
LARGEST = torch.finfo(FLOAT8).max


class Float8Linear(nn.Linear):
    """A frozen linear layer: the bits of its weight, (out, in), and the scale of each row, (out, 1) in fp32."""

    scale: Tensor

    @classmethod
    def of(cls, layer: nn.Linear, device: torch.device) -> Float8Linear:
        """Round the weight of ``layer`` to float8 on ``device``. A weight on the meta device stays there."""
        # On the meta device, because its weight is replaced at once.
        made = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = layer.weight.detach()
        if not weight.is_meta:
            weight = weight.to(device)
        scale, bits = encode(weight)
        made.weight = nn.Parameter(bits, requires_grad=False)
        # Not in checkpoints: it follows from the base, which they name.
        made.register_buffer("scale", scale, persistent=False)
        made.bias = layer.bias
        return made

    def values(self) -> Tensor:
        """Return the decoded weight, (out, in) in fp32."""
        return decode(self.weight, self.scale, torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the dtype of autocast, or of the input (..., in)."""
        return _Product.apply(input, self.weight, self.scale, self.bias)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, (out, 1) in fp32, and the bits of the rounded weight, (out, in) int8."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1, keepdim=True)  # (out, 1)
    # Maps a row's largest magnitude to the largest value of the format. A row of zeros takes scale 1, and stays finite.
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return scale, (weight / scale).to(FLOAT8).view(STORED)


def decode(bits: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in ``dtype``. The product with the scale is rounded once."""
    return (bits.view(FLOAT8).float() * scale).to(dtype)


class _Product(torch.autograd.Function):
    """Linear layer that keeps only the bits. Autograd would keep every layer's decoded weight until the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bits: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(bits, scale)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        shift = None if bias is None else bias.to(dtype)
        return functional.linear(input.to(dtype), decode(bits, scale, dtype), shift)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        bits, scale = ctx.saved_tensors
        # Decoded again, which costs less than the memory of keeping it.
        return gradient @ decode(bits, scale, gradient.dtype), None, None, None
