"""Embedding of an equation's time step and parameters, which modulates the blocks of the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.domains.models.layers import Float32Linear, TimestepEmbedder
from accel_train.domains.pde.tokens import wave_features, waves

PARAMETER_OCTAVES = 4
PARAMETER_RANGE = 4.0
"""Half the longest wavelength over a parameter. Normalised parameters lie between -4 and 4."""


class Conditioning(nn.Module):
    """Embedding of time step (B,) and equation parameters (B, P) to one vector (B, width), in fp32."""

    def __init__(self, width: int, parameters: Sequence[int]) -> None:
        """Build it for tasks with these numbers of parameters."""
        super().__init__()
        self.time = TimestepEmbedder(width)
        self.counts = list(parameters)
        features = [parameter_features(count) for count in self.counts]
        self.parameters_of = nn.ModuleList(Float32Linear(count, width) for count in features)
        self.project = Float32Linear(width, width)

    def forward(self, dt: Tensor, parameters: Tensor, task: int) -> Tensor:
        """Embed a batch. Columns of `parameters` beyond the task's own are not read."""
        # In fp32: in bf16, two close parameter values would round to the same number.
        own = parameters[:, : self.counts[task]].float()
        # The constant serves tasks without parameters. Its weights also distinguish the tasks.
        constant = torch.ones_like(dt)[:, None]  # (B, 1)
        own_waves = waves(own / PARAMETER_RANGE, PARAMETER_OCTAVES, periodic=False)  # (B, features)
        features = torch.cat((constant, own_waves), dim=-1)
        embedded = self.time(dt) + self.parameters_of[task](features)
        return self.project(F.silu(embedded))


def parameter_features(count: int) -> int:
    """Count the features of `Conditioning` for an equation with this many parameters."""
    return 1 + wave_features(count, PARAMETER_OCTAVES, periodic=False)
