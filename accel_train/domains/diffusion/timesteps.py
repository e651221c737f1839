"""Which time each sample trains at: 0 is clean, 1 is pure noise or fully masked, for text and latents
alike."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from accel_train import rng

TimeSampling = Literal["low_discrepancy", "uniform"]

TIME_EPSILON = 1e-4
"""Trained times lie in [TIME_EPSILON, 1 - TIME_EPSILON]. Exactly 0 and exactly 1 are left to what is not
trained: a clean condition and an absent one."""


def training_times(
    batch: Mapping[str, Tensor],
    seed: int,
    stream: str,
    step: int,
    global_batch_size: int,
    sampling: TimeSampling = "low_discrepancy",
    axis: Literal[0, 1] = 0,
) -> Tensor:
    """(B,) float32 in [TIME_EPSILON, 1 - TIME_EPSILON], from the batch's `position` or `occurrence`. No
    device wait.

    low_discrepancy (Kingma et al. 2021, appendix I.1) spreads the whole global batch evenly: the spread of
    the loss over steps falls, its mean stays. Where two modalities are noised at independent times, give
    one of them `axis=1`.
    """
    if sampling == "uniform":
        time = rng.uniform(rng.sample_keys(seed, stream, step, batch["occurrence"]))
    else:
        time = low_discrepancy(batch["position"], global_batch_size, rng.host_uniform(seed, stream, step), axis)
    return _inside(time)


def low_discrepancy(position: Tensor, count: int, shift: float, axis: Literal[0, 1] = 0) -> Tensor:
    """frac(position / count + shift) as float32 in [0, 1): `count` evenly spaced times, one for each
    position.

    With axis=1, frac(a * position / count + shift), a prime to `count`: the second coordinate of a rank-1
    lattice, so that the pairs (axis 0, axis 1) of one batch fill the square evenly. Two shifts alone would
    put them on a line.
    """
    place = position if axis == 0 else (position * _lattice_multiplier(count)) % count
    # In float64: position / count of a large batch would lose the last digits of the shift in float32.
    time = (place.to(torch.float64) / count + shift) % 1.0
    return time.to(torch.float32).clamp_(max=1 - 2.0**-24)


def stratified(keys: Tensor, stratum: int, strata: int) -> Tensor:
    """A trained time in the stratum-th of `strata` equal parts of [0, 1], uniform within it: shape of
    `keys`.

    The mean over all strata estimates the integral over time without bias and with little spread: for
    evaluation.
    """
    return _inside((rng.uniform(keys) + stratum).div_(strata))


def _inside(time: Tensor) -> Tensor:
    return time.mul_(1 - 2 * TIME_EPSILON).add_(TIME_EPSILON)


@lru_cache(maxsize=16)
def _lattice_multiplier(count: int) -> int:
    """The number prime to `count` whose lattice keeps its points furthest apart, of 64 about the golden
    section."""
    golden = count * (math.sqrt(5) - 1) / 2
    candidates = sorted((a for a in range(1, count + 1) if math.gcd(a, count) == 1), key=lambda a: abs(a - golden))

    def closest(a: int) -> int:  # squared; no shortest vector is longer than sqrt(2 / sqrt(3) count)
        return min(k * k + min(a * k % count, -a * k % count) ** 2 for k in range(1, math.isqrt(2 * count) + 1))

    return max(candidates[:64], key=closest)
