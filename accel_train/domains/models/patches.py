"""Pictures as sequences of patches, and back."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_RANGE = 127.5


def to_patches(pictures: Tensor, patch: int) -> Tensor:
    """Cut pictures (N, H, W, 3) uint8 into patches (N, L, patch * patch * 3) fp32 in [-1, 1], row by row.

    Both sides are multiples of `patch`.
    """
    values = pictures.permute(0, 3, 1, 2).float() / HALF_RANGE - 1
    return as_tokens(cut(values, patch)).contiguous()


def from_patches(patches: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return pictures (N, H, W, 3) uint8 of patches (N, h * w, patch * patch * 3). Values outside [-1, 1] are cut."""
    values = joined(as_grid(patches.float(), grid), patch).permute(0, 2, 3, 1)
    return ((values + 1) * HALF_RANGE).round().clamp(0, 255).to(torch.uint8)


def cut(pixels: Tensor, patch: int) -> Tensor:
    """Cut pixels (B, 3, H, W) into a grid of patches (B, patch * patch * 3, h, w). Both sides are multiples of it."""
    parts = pixels.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, 3, h, P, w, P)
    return parts.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)  # (B, P P 3, h, w)


def joined(grid: Tensor, patch: int) -> Tensor:
    """Return the pixels (B, 3, H, W) of a grid of patches (B, patch * patch * 3, h, w)."""
    parts = grid.unflatten(1, (patch, patch, 3))  # (B, P, P, 3, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)  # (B, 3, h P, w P)


def as_tokens(grid: Tensor) -> Tensor:
    """Return a grid (B, D, h, w) as tokens (B, h * w, D), row by row."""
    return grid.flatten(2).transpose(1, 2)


def as_grid(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return tokens (B, h * w, D) as a grid (B, D, h, w)."""
    return tokens.transpose(1, 2).unflatten(2, grid)
