"""What a prediction on a grid misses: the network of a residual diffusion.

It works on fields and not on latents. A latent is whatever makes a decoder's output right, so that of the truth need
not decode better than a predicted one; and a field on a grid has fewer numbers than its tokens have channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.domains.models.layers import NORM_EPS, TIME_FEATURES, TimestepEmbedder
from accel_train.domains.models.token_blocks import BlockShape, ModulatedBlock
from accel_train.domains.pde.tokens import IDLE_TOKENS, FieldGrid, GridEncoder, encoder_products

LOG_SIZE_START = -3.0
"""Fields are normalised, and a prediction that is worth refining misses a few per cent of them."""
LOG_SIZE_RATE = 32.0
"""What a step of the learning rate moves a logarithm by, in learning rates. An optimizer moves each weight by about
one, and a size that is wrong by a factor of ten would otherwise take thousands of steps."""


class ResidualGuess(NamedTuple):
    """What is known of a residual, and what stands beside it. All (B, channels, H, W) on the task's grid."""

    guess: Tensor
    """Of C' channels, in units of the residual's size."""
    time: Tensor
    """(B,): how little the guess is worth, from 0 (it is the residual) to 1 (nothing)."""
    prediction: Tensor
    """Of C' channels: what is refined."""
    input: Tensor
    """Of C channels: what it was predicted from."""


class ResidualSize(nn.Module):
    """The logarithm of each target channel's residual, learned: (C',) of a task, in fp32."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = list(channels)
        self.deviation = nn.Parameter(torch.zeros(sum(channels)))

    def forward(self, task: int) -> Tensor:
        first = sum(self.channels[:task])
        return LOG_SIZE_START + LOG_SIZE_RATE * self.deviation[first : first + self.channels[task]].float()


class FieldResidual(nn.Module):
    """What a guess of the residual lacks (B, C', H, W). Starts at zero.

    Encoders and heads belong to a task, the blocks are shared.
    """

    def __init__(
        self,
        grids: Sequence[FieldGrid],
        inputs: Sequence[int],
        targets: Sequence[int],
        block: BlockShape,
        depth: int,
        stem_width: int,
        octaves: int,
    ) -> None:
        super().__init__()
        self.grids = list(grids)
        self.channels = list(zip(targets, inputs, strict=True))

        def encoder(grid: FieldGrid, fields: tuple[int, int]) -> GridEncoder:
            return GridEncoder(2 * fields[0] + fields[1], grid, block.width, stem_width, octaves)

        self.encoders = nn.ModuleList(map(encoder, self.grids, self.channels))
        self.time = TimestepEmbedder(block.width)
        self.blocks = nn.ModuleList(ModulatedBlock(block) for _ in range(depth))
        self.heads = nn.ModuleList(
            nn.Linear(block.width, count * math.prod(_cell(grid))) for grid, count in zip(grids, targets, strict=True)
        )
        self.size = ResidualSize(targets)

    def start_at_zero(self) -> None:
        """Call it once all layers have their starting values."""
        for head in self.heads:
            nn.init.zeros_(cast(nn.Linear, head).weight)

    def forward(self, fields: ResidualGuess, conditioning: Tensor, task: int) -> Tensor:
        """conditioning (B, width) before SiLU. Takes fields of any number of whole tokens."""
        x = self.encoders[task](torch.cat((fields.guess, fields.prediction, fields.input), dim=1))
        conditioning = F.silu(self.time(fields.time) + conditioning).to(x.dtype)
        for block in self.blocks:
            x = block(x, conditioning, None)
        points = self.heads[task](F.layer_norm(x, x.shape[-1:], eps=NORM_EPS))  # (B, N, C' * p * q)
        (p, q), rows = _cell(self.grids[task]), fields.guess.shape[2]
        points = points.unflatten(2, (-1, p, q)).unflatten(1, (rows // p, -1))  # (B, rows, columns, C', p, q)
        return points.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

    def idle(self, ran: int | None, like: Tensor) -> Iterator[Tensor]:
        """What those modules make of a few zeros that did not run for task `ran`; None: nothing ran."""
        if ran is None:
            yield self.size(0)
        for task, (grid, (target, given)) in enumerate(zip(self.grids, self.channels, strict=True)):
            if ran is None and task == 0:
                rows, columns = _cell(grid)
                targets, inputs = (like.new_zeros(1, n, rows, IDLE_TOKENS * columns) for n in (target, given))
                fields = ResidualGuess(targets, like.new_zeros(1), targets, inputs)
                yield self(fields, like.new_zeros(1, 1), task)
            elif task != ran:
                yield self.heads[task](self.encoders[task](like.new_zeros(1, 2 * target + given, *_cell(grid))))


def _cell(grid: FieldGrid) -> tuple[int, int]:
    """Points of a token along each axis."""
    rows, columns = (p * m for p, m in zip(grid.patch, grid.merged, strict=True))
    return rows, columns


def residual_products(
    grid: FieldGrid, inputs: int, targets: int, block: BlockShape, depth: int, stem_width: int
) -> int:
    """Multiplications of one sample's way through `FieldResidual`, beside what is done once for a batch."""
    tokens, width = math.prod(grid.cells), block.width
    total = (2 * targets + inputs) * encoder_products(grid, width, stem_width)
    total += width * (TIME_FEATURES + width) + depth * block.multiplications(tokens)
    return total + targets * math.prod(grid.points) * width
