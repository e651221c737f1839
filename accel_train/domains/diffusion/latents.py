"""Diffusion of continuous latents (B, ..., Dz), one family of processes: x_t = a(t) x0 + b(t) eps.

Rectified flow (Liu et al. 2022): a = 1 - t, b = t, and the velocity eps - x0 is predicted. DDPM (Ho et al.
2020): a = sqrt(alpha_bar), b = sqrt(1 - alpha_bar), with continuous t; t = k / 1000 is the k-th of the 1000
discrete steps. Latents are expected normalised: mean 0 and, over all their elements, variance 1.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config import UsageError

_DDPM_STEPS = 1000
_FIRST_BETA, _LAST_BETA = 1e-4, 0.02
_MIN_ALPHA_BAR = 4e-5  # where the linear schedule ends; at 0, x0 = (x_t - b eps) / a would not exist
_MIN_NORM = 1e-3  # bounds the gradient of a direction where the prediction is 0, as at the start


@dataclass(frozen=True)
class LatentDiffusionConfig:
    """How latents are noised, and what is learned of them."""

    kind: Literal["flow", "ddpm"] = "flow"
    """flow: straight path from latent to noise. ddpm: variance-preserving path, with a schedule."""
    schedule: Literal["straight", "linear", "cosine"] = "straight"
    """How fast the latent drowns in noise. flow: straight. ddpm: linear (1e-4 to 0.02 over 1000 steps) or
    cosine (slower at both ends)."""
    prediction: Literal["velocity", "epsilon", "x0", "v"] = "velocity"
    """What the model is asked for. flow: velocity (noise - latent) or x0. ddpm: epsilon, x0 or v."""
    loss: Literal["mse", "normalised_mse", "cosine"] = "mse"
    """mse: mean over the elements. cosine: 1 - cos. normalised_mse: mean squared difference of the
    directions, which is (2 / Dz) (1 - cos): 16 times less than cosine for 32 dimensions, 512 times for
    1024. The last two learn a direction only, need prediction x0, and sample latents of one length,
    sqrt(Dz)."""

    def __post_init__(self) -> None:
        predictions, schedules = {
            "flow": (("velocity", "x0"), ("straight",)),
            "ddpm": (("epsilon", "x0", "v"), ("linear", "cosine")),
        }[self.kind]
        if self.prediction not in predictions or self.schedule not in schedules:
            raise UsageError(
                f"kind={self.kind} with schedule={self.schedule}, prediction={self.prediction}: "
                f"{self.kind} knows schedule {' or '.join(schedules)}, prediction {' or '.join(predictions)}. "
                "Set both, or change kind."
            )
        if self.loss != "mse" and self.prediction != "x0":
            raise UsageError(
                f"loss={self.loss} with prediction={self.prediction}: this loss sees directions "
                f"only, and a sampler needs the length of the {self.prediction} to take the noise away. "
                "Set loss to mse, or prediction to x0."
            )


def coefficients(time: Tensor, config: LatentDiffusionConfig) -> tuple[Tensor, Tensor]:
    """(a, b) of x_t = a x0 + b eps, in the shape and type of `time`; computed in fp64, a^2 + b^2 = 1 for
    ddpm."""
    t = time.to(torch.float64)
    if config.kind == "flow":
        a, b = 1 - t, t
    else:
        alpha_bar = _linear_alpha_bar(t) if config.schedule == "linear" else _cosine_alpha_bar(t)
        a, b = alpha_bar.sqrt(), (1 - alpha_bar).clamp(min=0).sqrt()
    return a.to(time.dtype), b.to(time.dtype)


def add_noise(latents: Tensor, noise: Tensor, time: Tensor, config: LatentDiffusionConfig) -> Tensor:
    """x_t for `time` (B,). t = 0 returns the latents and t = 1 the noise, exactly: nothing of an absent
    latent leaks."""
    a, b = (_beside(c, latents) for c in coefficients(time, config))
    t = _beside(time, latents)
    return torch.where(t < 1, a * latents + b * noise, noise)


def target(latents: Tensor, noise: Tensor, time: Tensor, config: LatentDiffusionConfig) -> Tensor:
    """What the prediction is compared with: eps - x0, eps, x0, or v = a eps - b x0 (Salimans and Ho 2022)."""
    if config.prediction == "velocity":
        return noise - latents
    if config.prediction == "epsilon":
        return noise
    if config.prediction == "x0":
        return latents
    a, b = (_beside(c, latents) for c in coefficients(time, config))
    return a * noise - b * latents


def predicted_x0(prediction: Tensor, noisy: Tensor, time: Tensor, config: LatentDiffusionConfig) -> Tensor:
    """x0 that a prediction at `time` (B,) stands for. After a loss of directions its length is set to
    sqrt(Dz)."""
    if config.loss != "mse":
        return F.normalize(prediction, dim=-1) * math.sqrt(prediction.shape[-1])
    if config.prediction == "x0":
        return prediction
    if config.prediction == "velocity":
        return noisy - _beside(time, noisy) * prediction
    a, b = (_beside(c, noisy) for c in coefficients(time, config))
    return (noisy - b * prediction) / a if config.prediction == "epsilon" else a * noisy - b * prediction


def losses(prediction: Tensor, wanted: Tensor, config: LatentDiffusionConfig) -> Tensor:
    """(B,) fp32: the loss of each sample, a mean over its elements (mse) or its tokens (the others).

    The caller multiplies by the sample's `weight`, sums, and divides by the sum of weights of the global
    batch.
    """
    prediction, wanted = prediction.float(), wanted.float()
    if config.loss == "mse":
        return (prediction - wanted).square().flatten(1).mean(-1)
    directions = F.normalize(prediction, dim=-1, eps=_MIN_NORM), F.normalize(wanted, dim=-1, eps=_MIN_NORM)
    # |p - w|^2 / 2 = 1 - cos, without the cancellation of 1 - cos near 1.
    one_minus_cosine = (directions[0] - directions[1]).square().sum(-1).div(2).flatten(1).mean(-1)
    if config.loss == "cosine":
        return one_minus_cosine
    return one_minus_cosine * normalised_mse_per_cosine(prediction.shape[-1])


def normalised_mse_per_cosine(dimension: int) -> float:
    """normalised_mse = this * (1 - cos). Keep a term's strength when changing from cosine: divide its
    weight by this."""
    return 2 / dimension


def _linear_alpha_bar(t: Tensor) -> Tensor:
    """Product of the first 1000 t factors 1 - beta_k, between the steps too.

    The factors fall by a constant d, so that the product of the first n is d^n Gamma(f / d + 1) / Gamma(f /
    d + 1 - n), f being the first: exact at the discrete steps and smooth between them.
    """
    fall = (_LAST_BETA - _FIRST_BETA) / (_DDPM_STEPS - 1)
    start = (1 - _FIRST_BETA) / fall + 1
    steps = t * _DDPM_STEPS
    return (steps * math.log(fall) + math.lgamma(start) - torch.lgamma(start - steps)).exp()


def _cosine_alpha_bar(t: Tensor) -> Tensor:
    """Nichol and Dhariwal 2021, s = 0.008; the last 0.4 % of times are held at the linear schedule's end."""
    angle = 0.008 / 1.008 * math.pi / 2
    return ((angle + t / 1.008 * math.pi / 2).cos() / math.cos(angle)).square().clamp(min=_MIN_ALPHA_BAR)


def _beside(per_sample: Tensor, latents: Tensor) -> Tensor:
    """(B,) to (B, 1, ...), to multiply with latents."""
    return per_sample.view(-1, *[1] * (latents.dim() - 1))
