"""Proof of recorded attention calls: forward and backward on their own shapes and masks, against fp64."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from accel_train.config import UsageError
from accel_train.speed.attention.calls import AttentionCall, Drawn, in_fp64
from accel_train.speed.attention.kernels import RESTRICTED
from accel_train.speed.attention.proof import (
    Proof,
    gradient_error,
    operators_of,
    relative_error,
    tolerance_of,
)

CANNOT_RUN = (RuntimeError, ImportError, NotImplementedError, ValueError, TypeError, KeyError)
"""Errors that other libraries raise where a kernel cannot run."""


class CannotRunError(UsageError):
    """A call, or its reference, raises on this device. Its correctness is unknown."""


def prove_calls(
    calls: Sequence[AttentionCall],
    references: Sequence[AttentionCall],
    label: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Proof:
    """Compare each kind of call on ``device`` with the reference at the same position, in fp64.

    ``dtype`` is that of the computation, ``label`` names attention and model in messages. Raises ``UsageError`` with
    the numbers for a call that is not finite or differs by more than the tolerance, and ``CannotRunError`` for one that
    raises.
    """
    started = time.perf_counter()
    tolerance = tolerance_of(dtype, device)
    different = {kind_of(call): (call, reference) for call, reference in zip(calls, references, strict=True)}
    worst_forward = 0.0
    worst_backward = 0.0
    for call, reference in different.values():
        where = f"{class_of(call)} with queries {call.inputs[0].shape}"
        try:
            with torch.enable_grad():
                forward, backward = _errors(call, reference, device, dtype)
        except CANNOT_RUN as error:
            raise CannotRunError(
                f"{label}: cannot be used: {where}: {one_line(error)}. Use auto, sdpa or sdpa_math."
            ) from None
        if not (forward <= tolerance and backward <= tolerance):  # NaN fails as well
            raise UsageError(
                f"{label}: differs from fp64 in {where} by {forward:.2g} forward and {backward:.2g} backward "
                f"(relative, L2), more than the allowed {tolerance:.2g}. Choose another, such as sdpa_math."
            )
        worst_forward = max(worst_forward, forward)
        worst_backward = max(worst_backward, backward)
    return Proof(worst_forward, worst_backward, tolerance, time.perf_counter() - started)


def kernels_of(call: AttentionCall, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the operators in a forward of the call on ``device``, for the run info."""
    inputs = _drawn(call, device)
    return operators_of(lambda: _attend(call, inputs, device, dtype), device)


def in_precision(device_type: str, dtype: torch.dtype) -> torch.autocast:
    """Return autocast as in training: on for bf16 and fp16."""
    is_low = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device_type, dtype if is_low else None, is_low)


def class_of(call: AttentionCall) -> str:
    """Return the class that attends: the processor of an attention module of diffusers, else the module."""
    return type(getattr(call.module, "processor", None) or call.module).__name__


def one_line(error: Exception) -> str:
    """Return an error for a message, shortened."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def kind_of(call: AttentionCall) -> tuple[object, ...]:
    """Return a key that is equal for calls of one kind, of which one is proven."""
    mask = tuple(call.mask.shape) if isinstance(call.mask, Tensor) else type(call.mask)
    window = getattr(call.module, "sliding_window", None)
    return type(call.module), call.chosen, call.inputs, mask, window


def _errors(
    call: AttentionCall, reference: AttentionCall, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the relative errors of the forward and of the worst gradient."""
    inputs = _drawn(call, device)
    exact = in_fp64(reference.attend, *inputs)
    result = _attend(call, inputs, device, dtype)
    if result.shape != exact.shape or not bool(result.isfinite().all()):
        return float("nan"), float("nan")
    valid = _with_keys(reference.mask, exact)
    forward = relative_error(((result.double() - exact) * valid).detach(), exact.detach())
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(exact.shape, generator=generator).to(device) * valid
    return forward, gradient_error(result, exact, inputs, weights)


def _attend(call: AttentionCall, inputs: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    allowed = [RESTRICTED[name] for name in call.kernels]
    with in_precision(device.type, dtype), sdpa_kernel(allowed):
        return call.attend(*inputs)


def _drawn(call: AttentionCall, device: torch.device) -> list[Tensor]:
    """Draw inputs of a call, (B, H, N, D) views of (B, N, H, D) as in models. On the host, to be equal everywhere."""
    generator = torch.Generator().manual_seed(0)

    def draw(drawn: Drawn) -> Tensor:
        batch, heads, length, size = drawn.shape
        values = torch.randn(batch, length, heads, size, generator=generator)
        return values.to(device, drawn.dtype).transpose(1, 2).requires_grad_()

    return [draw(drawn) for drawn in call.inputs]


def _with_keys(mask: Any, result: Tensor) -> Tensor:
    """Return 1 for a query that sees a key, else 0: its result is meaningless. Broadcasts to (B, H, N, D)."""
    if not isinstance(mask, Tensor):
        return result.new_ones(())
    sees = mask
    if mask.is_floating_point():
        sees = mask > torch.finfo(mask.dtype).min / 2
    return sees.any(-1, keepdim=True).to(result.device, result.dtype)
