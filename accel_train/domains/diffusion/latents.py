"""Diffusion of continuous latents (B, ..., Dz), one family of processes: x_t = a(t) x0 + b(t) eps.

Rectified flow (Liu et al. 2022) has a = 1 - t, b = t, and predicts the velocity eps - x0. DDPM (Ho et al.
2020) has a = sqrt(alpha_bar), b = sqrt(1 - alpha_bar), with continuous t. Discrete step k of 1000 is t = k / 1000.
Latents must be normalised to mean 0 and variance 1 over all their elements.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config import UsageError

_DDPM_STEPS = 1000
# Ends of the linear beta schedule of Ho et al. 2020.
_FIRST_BETA = 1e-4
_LAST_BETA = 0.02
# The linear schedule ends here. At 0, x0 = (x_t - b eps) / a would not exist.
_MIN_ALPHA_BAR = 4e-5
# Bounds the gradient of a direction where the prediction is 0, as at initialisation.
_MIN_NORM = 1e-3
# Keeps the noise of the first steps above 0 (Nichol and Dhariwal 2021, section 3.2).
_COSINE_OFFSET = 0.008

_PREDICTIONS = {"flow": ("velocity", "x0"), "ddpm": ("epsilon", "x0", "v")}
_SCHEDULES = {"flow": ("straight",), "ddpm": ("linear", "cosine")}


@dataclass(frozen=True)
class LatentDiffusionConfig:
    """Noising process and training objective of latents."""

    kind: Literal["flow", "ddpm"] = "flow"
    """flow: straight path from latent to noise. ddpm: variance-preserving path with a schedule."""
    schedule: Literal["straight", "linear", "cosine"] = "straight"
    """Noise schedule. flow: straight. ddpm: linear (1e-4 to 0.02 over 1000 steps) or cosine (slower at both
    ends)."""
    prediction: Literal["velocity", "epsilon", "x0", "v"] = "velocity"
    """Prediction target of the model. flow: velocity (noise - latent) or x0. ddpm: epsilon, x0 or v."""
    loss: Literal["mse", "normalised_mse", "cosine"] = "mse"
    """mse: mean over the elements. cosine: 1 - cos. normalised_mse: mean squared difference of the
    directions, equal to (2 / Dz) (1 - cos): 16 times less than cosine for 32 dimensions, 512 times for
    1024. normalised_mse and cosine learn a direction only, need prediction x0, and sample latents of length
    sqrt(Dz)."""

    def __post_init__(self) -> None:
        predictions = _PREDICTIONS[self.kind]
        schedules = _SCHEDULES[self.kind]
        if self.prediction not in predictions or self.schedule not in schedules:
            raise UsageError(
                f"kind={self.kind} with schedule={self.schedule}, prediction={self.prediction}: "
                f"{self.kind} supports schedule {' or '.join(schedules)}, prediction {' or '.join(predictions)}. "
                "Set both, or change kind."
            )
        if self.loss != "mse" and self.prediction != "x0":
            raise UsageError(
                f"loss={self.loss} with prediction={self.prediction}: this loss compares directions only, but "
                f"sampling needs the length of the predicted {self.prediction}. "
                "Set loss to mse, or prediction to x0."
            )


def coefficients(time: Tensor, config: LatentDiffusionConfig) -> tuple[Tensor, Tensor]:
    """Return (a, b) of x_t = a x0 + b eps in the shape and dtype of `time`.

    Computed in fp64. For ddpm, a^2 + b^2 = 1.
    """
    # alpha_bar near t = 1 is a small difference of large logarithms.
    t = time.to(torch.float64)
    if config.kind == "flow":
        a = 1 - t
        b = t
    else:
        alpha_bar = _linear_alpha_bar(t) if config.schedule == "linear" else _cosine_alpha_bar(t)
        a = alpha_bar.sqrt()
        b = (1 - alpha_bar).clamp(min=0).sqrt()
    return a.to(time.dtype), b.to(time.dtype)


def add_noise(
    latents: Tensor,
    noise: Tensor,
    time: Tensor,
    config: LatentDiffusionConfig,
) -> Tensor:
    """Return x_t for `time` (B,).

    t = 0 returns the latents and t = 1 the noise, both exactly, so an absent latent leaks nothing.
    """
    a, b = _coefficients_like(latents, time, config)
    t = _expand_like(latents, time)
    # ddpm's a(1) is small but not 0, hence the explicit choice.
    return torch.where(t < 1, a * latents + b * noise, noise)


def target(
    latents: Tensor,
    noise: Tensor,
    time: Tensor,
    config: LatentDiffusionConfig,
) -> Tensor:
    """Return the training target: eps - x0, eps, x0, or v = a eps - b x0 (Salimans and Ho 2022)."""
    if config.prediction == "velocity":
        return noise - latents
    if config.prediction == "epsilon":
        return noise
    if config.prediction == "x0":
        return latents
    a, b = _coefficients_like(latents, time, config)
    return a * noise - b * latents


def predicted_x0(
    prediction: Tensor,
    noisy: Tensor,
    time: Tensor,
    config: LatentDiffusionConfig,
) -> Tensor:
    """Convert a prediction at `time` (B,) to x0. With a direction-only loss, set its length to sqrt(Dz)."""
    if config.loss != "mse":
        length = math.sqrt(prediction.shape[-1])
        return F.normalize(prediction, dim=-1) * length
    if config.prediction == "x0":
        return prediction
    if config.prediction == "velocity":
        return noisy - _expand_like(noisy, time) * prediction
    a, b = _coefficients_like(noisy, time, config)
    if config.prediction == "epsilon":
        # a is above 0 at all times: both schedules end at an alpha_bar of 4e-5.
        return (noisy - b * prediction) / a
    return a * noisy - b * prediction


def losses(prediction: Tensor, target: Tensor, config: LatentDiffusionConfig) -> Tensor:
    """Return the loss of each sample (B,) in fp32: a mean over its elements (mse) or its tokens (otherwise).

    The caller multiplies by each sample's `weight`, sums, and divides by the sum of weights over the global batch.
    """
    prediction = prediction.float()
    target = target.float()
    if config.loss == "mse":
        return (prediction - target).square().flatten(1).mean(-1)
    predicted_direction = F.normalize(prediction, dim=-1, eps=_MIN_NORM)
    target_direction = F.normalize(target, dim=-1, eps=_MIN_NORM)
    # |p - q|^2 / 2 = 1 - cos, without the cancellation of 1 - cos near 1.
    squared_distance = (predicted_direction - target_direction).square().sum(-1)  # (B, ...)
    one_minus_cosine = squared_distance.div(2).flatten(1).mean(-1)  # (B,)
    if config.loss == "cosine":
        return one_minus_cosine
    return one_minus_cosine * normalised_mse_per_cosine(prediction.shape[-1])


def normalised_mse_per_cosine(dimension: int) -> float:
    """Return normalised_mse / (1 - cos). Divide a loss weight by it when changing from cosine to normalised_mse."""
    return 2 / dimension


def _linear_alpha_bar(t: Tensor) -> Tensor:
    """Return the product of the first 1000 t factors 1 - beta_k, interpolated between the steps.

    Consecutive factors differ by a constant d. With f the first factor, the product of the first n is
    d^n Gamma(f / d + 1) / Gamma(f / d + 1 - n): exact at the discrete steps and smooth between them.
    """
    difference = (_LAST_BETA - _FIRST_BETA) / (_DDPM_STEPS - 1)
    start = (1 - _FIRST_BETA) / difference + 1
    steps = t * _DDPM_STEPS
    # The Gamma functions overflow by themselves, so the product is computed as a logarithm.
    logarithm = steps * math.log(difference) + math.lgamma(start) - torch.lgamma(start - steps)
    return logarithm.exp()


def _cosine_alpha_bar(t: Tensor) -> Tensor:
    """Return alpha_bar of Nichol and Dhariwal 2021.

    The last 0.4 % of times are clamped to the end of the linear schedule.
    """
    scale = 1 + _COSINE_OFFSET
    start = _COSINE_OFFSET / scale * math.pi / 2
    angle = start + t / scale * math.pi / 2
    alpha_bar = (angle.cos() / math.cos(start)).square()
    return alpha_bar.clamp(min=_MIN_ALPHA_BAR)


def _coefficients_like(latents: Tensor, time: Tensor, config: LatentDiffusionConfig) -> tuple[Tensor, Tensor]:
    """Return `coefficients`, reshaped to broadcast over `latents`."""
    a, b = coefficients(time, config)
    return _expand_like(latents, a), _expand_like(latents, b)


def _expand_like(latents: Tensor, per_sample: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, ...) to broadcast over `latents`."""
    return per_sample.view(-1, *[1] * (latents.dim() - 1))
