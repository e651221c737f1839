"""Pictures, or latents of an autoencoder, as sequences of patches, and back."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_RANGE = 127.5


def to_patches(pictures: Tensor, patch: int) -> Tensor:
    """Cut pictures (N, H, W, 3) uint8 into patches (N, L, patch * patch * 3) fp32 in [-1, 1], row by row.

    Both sides are multiples of `patch`.
    """
    return as_tokens(cut(to_values(pictures), patch)).contiguous()


def from_patches(patches: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return pictures (N, H, W, 3) uint8 of patches (N, h * w, patch * patch * 3). Values are clamped to [-1, 1]."""
    return from_values(joined(as_grid(patches.float(), grid), patch))


def to_values(pictures: Tensor) -> Tensor:
    """Return pictures (N, H, W, 3) uint8 as pixels (N, 3, H, W) fp32 in [-1, 1]."""
    return pictures.permute(0, 3, 1, 2).float() / HALF_RANGE - 1


def from_values(pixels: Tensor) -> Tensor:
    """Return pixels (N, 3, H, W) as pictures (N, H, W, 3) uint8. Values are clamped to [-1, 1]."""
    levels = (pixels.permute(0, 2, 3, 1) + 1) * HALF_RANGE
    return levels.round().clamp(0, 255).to(torch.uint8)


def cut(values: Tensor, patch: int) -> Tensor:
    """Cut pixels or latents (B, C, H, W) into a grid of patches (B, patch * patch * C, h, w).

    Both sides are multiples of `patch`.
    """
    parts = values.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, P, w, P)
    return parts.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)  # (B, P P C, h, w)


def joined(grid: Tensor, patch: int) -> Tensor:
    """Return the pixels or latents (B, C, H, W) of a grid of patches (B, patch * patch * C, h, w)."""
    parts = grid.unflatten(1, (patch, patch, -1))  # (B, P, P, C, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)  # (B, C, h P, w P)


def as_tokens(grid: Tensor) -> Tensor:
    """Return a grid (B, D, h, w) as tokens (B, h * w, D), row by row."""
    return grid.flatten(2).transpose(1, 2)


def as_grid(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return tokens (B, h * w, D) as a grid (B, D, h, w)."""
    return tokens.transpose(1, 2).unflatten(2, grid)
