"""Factors of loss terms as tensors on their device, made without a wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor


def term_factor(coefficient: float, weight: Tensor) -> Tensor:
    """Return coefficient over weight in fp32, 0 for a term without weight in this step."""
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    return (constant(coefficient, weight.device, dtype) / weight).nan_to_num_(0.0, 0.0, 0.0).float()


def quotient_of_step(
    coefficients: Mapping[str, float],
    weights: Mapping[str, Tensor],
    local: Mapping[str, Tensor],
    inputs: Mapping[str, object],
) -> Tensor | None:
    """Return a value that is not finite if no trained term has a weight in the global batch, or None if one surely has.

    ``weights`` are those of the terms in the global batch, ``local`` those in a micro-batch of this process with these
    ``inputs``.
    """
    trained = [name for name, coefficient in coefficients.items() if coefficient != 0]
    of_loader = inputs.get("weight")
    for name in trained:
        # Those are never all 0, but in steps that the loop leaves out by itself.
        if local[name] is of_loader:
            return None
    if not trained:
        return None
    total = weights[trained[0]]
    for name in trained[1:]:
        total = total + weights[name]
    return total.reciprocal()


@lru_cache(maxsize=64)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on the device in fp32, (K,)."""
    return torch.stack([constant(value, device, torch.float32) for value in values])


@lru_cache(maxsize=64)
def constant(value: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number on the device, filled there because a copy from the host would wait.

    An operator takes a tensor in half the time of a number, which it would turn into a tensor in every call.
    """
    with torch.inference_mode(False):  # the first caller may be an evaluation
        return torch.full((), value, device=device, dtype=dtype)
