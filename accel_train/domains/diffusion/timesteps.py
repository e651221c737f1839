"""Training times of samples, for text and latents alike: 0 is clean, 1 is pure noise or fully masked."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from accel_train import rng

TimeSampling = Literal["low_discrepancy", "uniform"]

TIME_EPSILON = 1e-4
"""Trained times lie in [TIME_EPSILON, 1 - TIME_EPSILON]. Exactly 0 marks a clean condition, exactly 1 an absent
one."""

_LARGEST_BELOW_ONE = 1 - 2.0**-24
_LATTICE_CANDIDATES = 64


def training_times(
    batch: Mapping[str, Tensor],
    seed: int,
    stream: str,
    step: int,
    global_batch_size: int,
    sampling: TimeSampling = "low_discrepancy",
    axis: Literal[0, 1] = 0,
) -> Tensor:
    """Return times (B,) float32 in [TIME_EPSILON, 1 - TIME_EPSILON]. No device wait.

    Keyed by the batch's `position` (low_discrepancy) or `occurrence` (uniform). low_discrepancy (Kingma et al.
    2021, appendix I.1) spreads the whole global batch evenly: the loss varies less between steps and keeps its
    mean. Where two modalities are noised at independent times, pass `axis=1` for one of them.
    """
    if sampling == "uniform":
        keys = rng.sample_keys(seed, stream, step, batch["occurrence"])
        time = rng.uniform(keys)
    else:
        shift = rng.host_uniform(seed, stream, step)
        time = low_discrepancy(batch["position"], global_batch_size, shift, axis)
    return _rescale(time)


def low_discrepancy(
    position: Tensor,
    count: int,
    shift: float,
    axis: Literal[0, 1] = 0,
) -> Tensor:
    """Return frac(position / count + shift): `count` evenly spaced times, float32 in [0, 1).

    With axis=1, return frac(a * position / count + shift), with a coprime to `count`. This is the second
    coordinate of a rank-1 lattice: the pairs (axis 0, axis 1) of one batch fill the square evenly. Two shifts
    alone would put them on a line.
    """
    if axis == 1:
        position = (position * _lattice_multiplier(count)) % count
    # In float64: position / count of a large batch would lose the last digits of the shift in float32.
    time = (position.to(torch.float64) / count + shift) % 1.0
    # Rounding to float32 may give 1.
    return time.to(torch.float32).clamp_(max=_LARGEST_BELOW_ONE)


def stratified(keys: Tensor, stratum: int, strata: int) -> Tensor:
    """Return times uniform within one of `strata` equal parts of [0, 1], in the shape of `keys`.

    For evaluation: the mean over all strata estimates the integral over time without bias and with low variance.
    """
    return _rescale((rng.uniform(keys) + stratum).div_(strata))


def _rescale(time: Tensor) -> Tensor:
    """Map [0, 1] to the trained times, in place."""
    return time.mul_(1 - 2 * TIME_EPSILON).add_(TIME_EPSILON)


@lru_cache(maxsize=16)
def _lattice_multiplier(count: int) -> int:
    """Return the multiplier coprime to `count` with the largest distance between lattice points.

    Searches the 64 candidates nearest the golden section.
    """
    golden = count * (math.sqrt(5) - 1) / 2
    numbers = range(1, count + 1)
    coprime = [a for a in numbers if math.gcd(a, count) == 1]
    candidates = sorted(coprime, key=lambda a: abs(a - golden))[:_LATTICE_CANDIDATES]
    # Hermite's bound: no shortest vector is longer than sqrt(2 / sqrt(3) count).
    longest = math.isqrt(2 * count)

    def squared_distance(a: int) -> int:
        squares: list[int] = []
        for k in range(1, longest + 1):
            wrapped = min(a * k % count, -a * k % count)
            squares.append(k * k + wrapped**2)
        return min(squares)

    return max(candidates, key=squared_distance)
