"""Noise of a training step, keyed by sample: Gaussian, with an offset for each channel, or of several resolutions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train import rng

COARSEST_FACTOR = 2.0
"""Level n of multi-resolution noise is r^n times coarser, with r drawn from 2 to 4, as in kohya's sd-scripts."""


class NoiseKey(NamedTuple):
    """Key of the draws: equal keys give equal draws."""

    seed: int
    stream: str
    step: int
    occurrence: Tensor
    """Occurrence number of each sample, (B,) int64."""

    def normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return standard normal draws (B, *shape) of their own stream, fp32 on the device of ``occurrence``."""
        return rng.normal(rng.sample_keys(self.seed, f"{self.stream}/{name}", self.step, self.occurrence), shape)


def shaped_noise(
    key: NoiseKey, shape: tuple[int, int, int], *, offset: float = 0.0, iterations: int = 0, discount: float = 0.3
) -> Tensor:
    """Return noise (B, *shape) for latents of ``shape`` (C, H, W).

    ``offset`` is the factor of one added draw per channel (Guttenberg 2023, "Diffusion with offset noise").
    ``iterations`` is the number of levels of upsampled noise to add, from the full resolution to coarser ones, each
    ``discount`` times as strong as the one before. The sum is then divided by the standard deviation of each sample
    (Whitaker 2023, "Multi-resolution noise").
    """
    noise = key.normal("noise", shape)  # (B, C, H, W)
    if offset > 0:
        noise = noise + offset * key.normal("offset", (shape[0], 1, 1))
    if iterations > 0:
        noise = _with_coarser(noise, key, iterations, discount)
    return noise


def _with_coarser(noise: Tensor, key: NoiseKey, iterations: int, discount: float) -> Tensor:
    channels, height, width = noise.shape[1:]
    # From 0, as in kohya's sd-scripts: the first level has the full resolution and the full strength.
    for number in range(iterations):
        # One factor for the whole step, because the samples of a micro-batch must have the same size.
        draw = rng.host_uniform(key.seed, f"{key.stream}/factor{number}", key.step)
        factor = (COARSEST_FACTOR + COARSEST_FACTOR * draw) ** number
        rows = max(1, int(height / factor))
        columns = max(1, int(width / factor))
        coarse = key.normal(f"coarse{number}", (channels, rows, columns))  # (B, C, rows, columns)
        noise = noise + discount**number * F.interpolate(coarse, size=(height, width), mode="bilinear")
        # A level that is one value high or wide has no coarser one.
        if rows == 1 or columns == 1:
            break
    # Each level added variance, but the noise schedule assumes a variance of 1.
    return noise / noise.flatten(1).std(1).view(-1, 1, 1, 1)


def caption_dropped(key: NoiseKey, probability: float) -> Tensor:
    """Draw for each sample whether its caption is left out, (B,) bool."""
    keys = rng.sample_keys(key.seed, f"{key.stream}/caption", key.step, key.occurrence)
    return rng.uniform(keys) < torch.tensor(probability, device=keys.device)
