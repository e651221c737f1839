"""Network of the residual diffusion, which predicts truth minus prediction on the grid.

It works on fields, not on latents. The latent of the true field need not decode better than a predicted latent, and a
field on a grid has fewer values than its tokens have channels.
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
from accel_train.domains.pde.tokens import IDLE_TOKENS, FieldGrid, GridEncoder, encoder_multiplications

LOG_SIZE_START = -3.0
"""Initial log size: a few per cent of the normalised fields, typical of a prediction worth refining."""
LOG_SIZE_RATE = 32.0
"""Change of a log size per step, in learning rates. An optimizer moves a weight by about one learning rate per step, so
without this factor a size that is off tenfold would take thousands of steps to correct."""


class ResidualGuess(NamedTuple):
    """A guess of the residual with its context. Fields are (B, channels, H, W) on the task's grid."""

    guess: Tensor
    """Noisy residual with C' channels, in units of the residual's size."""
    time: Tensor
    """Noise level (B,), from 0 (the guess is the residual) to 1 (it is pure noise)."""
    prediction: Tensor
    """Prediction to refine, with C' channels."""
    input: Tensor
    """Input of the prediction, with C channels."""


class ResidualSize(nn.Module):
    """Learned log size of the residual of each target channel, in fp32: task number -> (C',)."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = list(channels)
        self.deviation = nn.Parameter(torch.zeros(sum(channels)))

    def forward(self, task: int) -> Tensor:
        # A single parameter holds the sizes of all tasks, so that every forward uses it.
        first = sum(self.channels[:task])
        stop = first + self.channels[task]
        deviation = self.deviation[first:stop].float()
        return LOG_SIZE_START + LOG_SIZE_RATE * deviation


class FieldResidual(nn.Module):
    """Correction (B, C', H, W) of a guess of the residual. Starts at zero.

    Each task has its own encoder and head. The blocks are shared.
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
        self.encoders = nn.ModuleList()
        for grid, (target, input) in zip(self.grids, self.channels, strict=True):
            channels = 2 * target + input  # guess, prediction and input
            encoder = GridEncoder(channels, grid, block.width, stem_width, octaves)
            self.encoders.append(encoder)
        self.time = TimestepEmbedder(block.width)
        self.blocks = nn.ModuleList(ModulatedBlock(block) for _ in range(depth))
        self.heads = nn.ModuleList()
        for grid, target in zip(self.grids, targets, strict=True):
            points = math.prod(grid.points_per_token)
            self.heads.append(nn.Linear(block.width, target * points))
        self.size = ResidualSize(targets)

    def start_at_zero(self) -> None:
        """Zero the heads. Call it after the initialisation of all layers."""
        for head in self.heads:
            nn.init.zeros_(cast(nn.Linear, head).weight)

    def forward(self, fields: ResidualGuess, conditioning: Tensor, task: int) -> Tensor:
        """Correct a guess. conditioning (B, width) is before SiLU. Fields may have any number of whole tokens."""
        given = torch.cat((fields.guess, fields.prediction, fields.input), dim=1)  # (B, 2 C' + C, H, W)
        x = self.encoders[task](given)  # (B, N, D)
        conditioning = self.time(fields.time) + conditioning
        conditioning = F.silu(conditioning).to(x.dtype)
        for block in self.blocks:
            x = block(x, conditioning, None)
        x = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
        points = self.heads[task](x)  # (B, N, C' * p * q)
        p, q = self.grids[task].points_per_token
        rows = fields.guess.shape[2] // p
        points = points.unflatten(2, (-1, p, q))
        points = points.unflatten(1, (rows, -1))  # (B, rows, columns, C', p, q)
        points = points.permute(0, 3, 1, 4, 2, 5)  # (B, C', rows, p, columns, q)
        return points.flatten(4).flatten(2, 3)  # (B, C', H, W)

    def idle(self, ran: int | None, like: Tensor) -> Iterator[Tensor]:
        """Run the modules left idle by task `ran` on a few zeros and yield their outputs. None: all were idle."""
        if ran is None:
            # The sizes of all tasks are one parameter, so the size of any task uses it.
            yield self.size(0)
        for task, grid in enumerate(self.grids):
            target, input = self.channels[task]
            rows, columns = grid.points_per_token
            if ran is None and task == 0:
                # One full forward also runs the shared blocks.
                targets = like.new_zeros(1, target, rows, IDLE_TOKENS * columns)
                inputs = like.new_zeros(1, input, rows, IDLE_TOKENS * columns)
                fields = ResidualGuess(targets, like.new_zeros(1), targets, inputs)
                yield self(fields, like.new_zeros(1, 1), task)
            # One token is enough for an encoder and a head. Only attention refuses a single key.
            elif task != ran:
                zeros = like.new_zeros(1, 2 * target + input, rows, columns)
                encoded = self.encoders[task](zeros)
                yield self.heads[task](encoded)


def residual_multiplications(
    grid: FieldGrid, inputs: int, targets: int, block: BlockShape, depth: int, stem_width: int
) -> int:
    """Count the multiplications of `FieldResidual` per sample, without the part done once per batch."""
    width = block.width
    channels = 2 * targets + inputs
    encoders = channels * encoder_multiplications(grid, width, stem_width)
    time = width * (TIME_FEATURES + width)
    blocks = depth * block.multiplications(math.prod(grid.cells))
    head = targets * math.prod(grid.points) * width
    return encoders + time + blocks + head
