"""Training times of samples, for text and latents alike: 0 is clean, 1 is pure noise or fully masked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from accel_train import rng
from accel_train.config import PositiveFloat, refuse_without_effect

TimeSampling = Literal["low_discrepancy", "uniform"]

TIME_EPSILON = 1e-4
"""Trained times lie in [TIME_EPSILON, 1 - TIME_EPSILON]. Exactly 0 marks a clean condition, exactly 1 an absent
one."""

_LARGEST_BELOW_ONE = 1 - 2.0**-24
_LATTICE_CANDIDATES = 64
_LARGEST_MODE_SCALE = 2 / (math.pi - 2)
"""The mode density's map from draws to times is monotone up to here (Esser et al. 2024, eq. 20)."""

Finite = Annotated[float, Interval(gt=float("-inf"), lt=float("inf"))]


@dataclass(frozen=True)
class TimeConfig:
    """Density of training times and weighting of the loss over them (Esser et al. 2024, arXiv 2403.03206)."""

    density: Literal["uniform", "logit_normal", "mode", "cosmap"] = "uniform"
    """uniform: all times alike. logit_normal: sigmoid of a normal draw, most around logit_mean, none at the ends.
    mode: more or less around the middle by mode_scale, and some everywhere. cosmap: twice as many in the middle as at
    the ends, so that the logarithm of the signal-to-noise ratio has the distribution of DDPM's cosine schedule."""
    logit_mean: Finite = 0.0
    """logit_normal: mean of the normal draw. Above 0: noisier times; in diffusers' scripts, cleaner ones."""
    logit_std: PositiveFloat = 1.0
    """logit_normal: standard deviation of the normal draw."""
    mode_scale: Annotated[float, Interval(ge=-1, le=_LARGEST_MODE_SCALE)] = 1.29
    """mode: above 0 favours the middle, below 0 the ends, 0 is uniform. -1 to 1.75."""
    shift: PositiveFloat = 1.0
    """Factor s of t' = s t / (1 + (s - 1) t), after the density. Above 1: noisier times. Large pictures need more noise
    to hide as much: sqrt(tokens / tokens of the resolution that times were tuned at), 3 for SD3 at 1024 pixels. For
    adapters on a diffusers base it comes on top of the scheduler's own shift, such as SD3's 3: leave it at 1."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """Weight of a sample's loss by its time t. none: 1. sigma_sqrt: 1 / t^2. cosmap: 2 / (pi (1 - 2 t + 2 t^2)), with
    the same mean as drawing times of density cosmap."""

    def __post_init__(self) -> None:
        needed = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
        for name, density in needed.items():
            if self.density != density:
                because = f"with times.density: {self.density}"
                refuse_without_effect(self, "times", [name], because, f"set times.density to {density}")


def training_times(
    batch: Mapping[str, Tensor],
    seed: int,
    stream: str,
    step: int,
    global_batch_size: int,
    sampling: TimeSampling = "low_discrepancy",
    axis: Literal[0, 1] = 0,
    config: TimeConfig | None = None,
) -> Tensor:
    """Return times (B,) float32 in [TIME_EPSILON, 1 - TIME_EPSILON]. No device wait.

    They are uniform, or follow the density and shift of `config`. Both are monotone, so draws stay evenly spread.

    Keyed by the batch's `position` (low_discrepancy) or `occurrence` (uniform). low_discrepancy (Kingma et al.
    2021, appendix I.1) spreads the whole global batch evenly: the loss varies less between steps and keeps its
    mean. Where two modalities are noised at independent times, pass `axis=1` for one of them.
    """
    if sampling == "uniform":
        keys = rng.sample_keys(seed, stream, step, batch["occurrence"])
        time = rng.uniform(keys)
    else:
        # One shift for the whole global batch. From the host: equal on every process, and no wait for the device.
        shift = rng.host_uniform(seed, stream, step)
        time = low_discrepancy(batch["position"], global_batch_size, shift, axis)
    if config is not None:
        time = shifted(with_density(time, config), config.shift)
    return _rescale(time)


def with_density(draws: Tensor, config: TimeConfig) -> Tensor:
    """Map uniform draws in [0, 1) to times of `config.density`, monotonically: float32 in [0, 1].

    Each map is the inverse of the distribution function: evenly spread draws give times spread evenly under the
    density. mode maps 1 - draw, because its formula decreases.
    """
    if config.density == "uniform":
        return draws
    # float32 draws near 1 would lose the last digits of the tail.
    u = draws.to(torch.float64)
    if config.density == "logit_normal":
        # A draw of 0 gives -inf, and the sigmoid of it is 0.
        normal = torch.special.ndtri(u)
        time = torch.sigmoid(config.logit_mean + config.logit_std * normal)
    elif config.density == "mode":
        v = 1 - u
        time = 1 - v - config.mode_scale * ((math.pi * v / 2).cos().square() - 1 + v)
    else:
        # 1 - 1 / (tan(pi u / 2) + 1), without the pole at 1.
        angle = math.pi * u / 2
        time = angle.sin() / (angle.sin() + angle.cos())
    return time.to(draws.dtype)


def shifted(time: Tensor, shift: float) -> Tensor:
    """Return s t / (1 + (s - 1) t), the resolution shift of SD3 (Esser et al. 2024, eq. 23). 1 changes nothing."""
    if shift == 1:
        return time
    return shift * time / (1 + (shift - 1) * time)


def loss_weight(time: Tensor, weighting: str) -> Tensor:
    """Return the weight of a sample's loss at `time` (B,), fp32: `TimeConfig.weighting`."""
    if weighting == "none":
        return torch.ones_like(time)
    if weighting == "sigma_sqrt":
        # A condition is clean at time 0 and its loss is not counted.
        return time.clamp(min=TIME_EPSILON).pow(-2)
    return 2 / (math.pi * (1 - 2 * time + 2 * time.square()))


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
        # Reduced as integers: the product of a large batch would lose its fraction in floating point.
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


# Called in every step, mostly with the same count.
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
