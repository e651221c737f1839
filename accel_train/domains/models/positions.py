"""Positions of picture tokens on a grid: the fixed sinusoids of DiT and SD3."""

from __future__ import annotations

import torch
from torch import Tensor

from accel_train.domains.models.layers import MAX_PERIOD


def centred_places(grid: tuple[int, int], whole: tuple[int, int], device: torch.device) -> Tensor:
    """Return the indices (h * w,) of a grid (h, w) cut from the centre of a `whole` grid (H, W), row by row.

    Pictures of another shape get the positions of a centre crop, as in SD3. Made on ``device``, because a copy from the
    host would wait for it in every forward.
    """
    height, width = grid
    top = (whole[0] - height) // 2
    left = (whole[1] - width) // 2
    rows = torch.arange(top, top + height, device=device)
    columns = torch.arange(left, left + width, device=device)
    return (rows[:, None] * whole[1] + columns).flatten()


def sincos_2d(width: int, grid: tuple[int, int], base: int | None = None, interpolation: float = 1.0) -> Tensor:
    """Return sinusoids (h * w, width) fp32 of the places of a grid (h, w), row by row.

    The first half of the channels encodes the column, the second half the row. Each half has width / 4 sines, then as
    many cosines, of frequencies 1 down to nearly 1 / 10,000. `base` stretches a grid of any size to `base` units a
    side, so that a model meets the coordinates it was trained on (DiT's interpolation). None counts places from 0.
    `interpolation` divides the units further. The width is a multiple of 4.
    """
    quarter = width // 4
    # In fp64 as in diffusers: the largest angles lose digits in fp32.
    frequencies = MAX_PERIOD ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    axes: list[Tensor] = []
    for count in grid:
        unit = 1.0 if base is None else count / base
        # In float32 as in diffusers, so that coordinates that are no whole numbers round alike.
        coordinates = torch.arange(count, dtype=torch.float32) / unit / interpolation
        angles = torch.outer(coordinates.double(), frequencies)  # (n, width / 4)
        axes.append(torch.cat((angles.sin(), angles.cos()), dim=1))  # (n, width / 2)
    rows, columns = axes
    height, across = grid
    by_column = columns[None].expand(height, -1, -1)  # (h, w, width / 2)
    by_row = rows[:, None].expand(-1, across, -1)  # (h, w, width / 2)
    return torch.cat((by_column, by_row), dim=-1).flatten(0, 1).float()
