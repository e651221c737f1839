"""RMSNorm as on CUDA: one operator, which saves its input and one number per row for the backward.

On a CPU, torch composes it of seven operators, and autograd saves the normalised input as well.
``aten::_fused_rms_norm`` decomposes in the same way there, so it cannot stand in for the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("accel_train_simulation", "DEF")
_LIBRARY.define("rms_norm(Tensor x, int width, Tensor? weight, float eps) -> (Tensor, Tensor)")
_LIBRARY.define(
    "rms_norm_backward(Tensor gradient, Tensor x, int width, Tensor? weight, Tensor scale) -> (Tensor, Tensor?)"
)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute ``torch.nn.functional.rms_norm``, with the same arguments, as a single operator."""
    if eps is None:
        eps = torch.finfo(input.dtype).eps
    normed: Any = _RMSNorm.apply(input, math.prod(normalized_shape), weight, eps)
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, weight: Tensor | None, eps: float) -> Tensor:
        # The kernel reads contiguous rows, but the tensor is saved as it was given.
        normed, scale = torch.ops.accel_train_simulation.rms_norm(x.contiguous(), width, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.width = width
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight, scale = ctx.saved_tensors
        to_x, to_weight = torch.ops.accel_train_simulation.rms_norm_backward(
            gradient.contiguous(), x.contiguous(), ctx.width, weight, scale
        )
        return to_x, None, to_weight, None


def _forward(x: Tensor, width: int, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    rows = _wide(x, width)
    scale = torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
    normed = rows * scale
    if weight is not None:
        normed = normed * weight.reshape(-1)
    return normed.to(x.dtype).view_as(x), scale


def _backward(
    gradient: Tensor, x: Tensor, width: int, weight: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor | None]:
    rows, given = _wide(x, width), _wide(gradient, width)
    normed = rows * scale
    to_weight: Tensor | None = None
    if weight is not None:
        to_weight = (given * normed).sum(0).to(weight.dtype).view_as(weight)
        given = given * weight.reshape(-1)
    to_x = (given - normed * (given * normed).mean(1, keepdim=True)) * scale
    return to_x.to(x.dtype).view_as(x), to_weight


def _wide(x: Tensor, width: int) -> Tensor:
    """Return the rows (N, width) in the dtype in which the kernel accumulates."""
    return x.reshape(-1, width).to(_sum_type(x))


def _sum_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _forward_shapes(x: Tensor, width: int, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.numel() // width, 1, dtype=_sum_type(x))


def _backward_shapes(
    gradient: Tensor, x: Tensor, width: int, weight: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


_LIBRARY.impl("rms_norm", _forward, "CPU")
_LIBRARY.impl("rms_norm", _forward_shapes, "Meta")
_LIBRARY.impl("rms_norm_backward", _backward, "CPU")
_LIBRARY.impl("rms_norm_backward", _backward_shapes, "Meta")
