"""Factors of loss terms as tensors on their device, created without waiting for it."""

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
    """Return a tensor that is not finite if no trained term has weight in the global batch. None if one surely has.

    ``weights`` are those of the terms in the global batch, ``local`` those in a micro-batch of this process with these
    ``inputs``.
    """
    trained = [name for name, coefficient in coefficients.items() if coefficient != 0]
    of_loader = inputs.get("weight")
    for name in trained:
        # The loader's weights are never all 0, except in steps that the loop leaves out by itself.
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
    """Return numbers as a tensor on the device in fp32, (K,). Cached."""
    return torch.stack([constant(value, device, torch.float32) for value in values])


@lru_cache(maxsize=64)
def constant(value: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a number as a tensor, filled on the device because a copy from the host would wait. Cached.

    An operator takes half the time with a tensor as with a Python number, which it would convert in every call.
    """
    with torch.inference_mode(False):  # the first caller may be an evaluation
        return torch.full((), value, device=device, dtype=dtype)
