"""Pictures as sequences of patches, and back."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_RANGE = 127.5


def to_patches(pictures: Tensor, patch: int) -> Tensor:
    """Cut pictures (N, H, W, 3) uint8 into patches (N, L, patch * patch * 3) fp32 in [-1, 1], row by row.

    Both sides are multiples of `patch`.
    """
    values = pictures.float() / HALF_RANGE - 1
    cut = values.unflatten(1, (-1, patch)).unflatten(3, (-1, patch))  # (N, h, P, w, P, 3)
    return cut.transpose(2, 3).flatten(3).flatten(1, 2)


def from_patches(patches: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return pictures (N, H, W, 3) uint8 of patches (N, h * w, patch * patch * 3). Values outside [-1, 1] are cut."""
    cut = patches.float().unflatten(1, grid).unflatten(3, (patch, patch, 3))  # (N, h, w, P, P, 3)
    values = cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return ((values + 1) * HALF_RANGE).round().clamp(0, 255).to(torch.uint8)
