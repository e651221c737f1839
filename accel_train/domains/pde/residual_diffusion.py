"""Refining a prediction by diffusion: what it misses is drawn from noise in a few steps, and added.

The residual, truth - prediction, is small: noise of unit variance would drown it, and a fixed scale would fit one
equation and one moment of the training. So its size is learned beside it, and all here is in units of that size.
Rectified flow (Liu et al. 2022) from noise at time 1 to the residual at time 0; the clean residual is predicted, from
which the drift (residual - noise) follows. Lippe et al. 2023, arXiv 2308.05732, refine PDE solutions in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from accel_train import rng
from accel_train.domains.diffusion import latents
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, sample_latents
from accel_train.domains.diffusion.timesteps import training_times

FLOW = latents.LatentDiffusionConfig(kind="flow", prediction="x0")
SIZE_WEIGHT = 1 / 32
"""Of the size's loss. Larger, its gradient would fill the gradient norm while the size is being found."""
_TINY = 1e-24

Correct = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A network: guesses (B, C, H, W) of a residual at times (B,) -> what they lack, and the log of the size (C,)."""


def drawn(batch: Mapping[str, Tensor], seed: int, step: int, global_batch_size: int, steps: int) -> dict[str, Tensor]:
    """``time`` (B,) and ``noise`` (B, C, H, W) of a training step, keyed by sample.

    The times are those that ``refined`` visits in so many ``steps``, each as often as the others: 1 - k / steps. What
    is learned between them would be of no use, and takes much of what the mean, at time 1, could have learned.
    """
    keys = rng.sample_keys(seed, "residual/noise", step, batch["occurrence"])
    time = training_times(batch, seed, "residual/time", step, global_batch_size)
    return {"time": 1 - (time * steps).floor() / steps, "noise": rng.normal(keys, batch["target"].shape[1:])}


def clean(correct: Correct, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy residuals (B, C, H, W) of unit size at times (B,) -> clean ones, and the logarithm of their size (C,).

    The network sees the best guess that is linear in the noisy residual, and says what that lacks in units of its
    error (Karras et al. 2022, arXiv 2206.00364). So pure noise does not reach it, and what it has not learned yet
    leaves the guess as it is: 0 at time 1.
    """
    a, b = (c.view(-1, 1, 1, 1) for c in latents.coefficients(time, FLOW))
    guess = noisy * (a / (a**2 + b**2))
    lacking, log_size = correct(guess, time)
    return guess + lacking.float() * (b / (a**2 + b**2).sqrt()), log_size


def losses(correct: Correct, missed: Tensor, log_size: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    """(B,) fp32: squared error of the residual ``missed`` (B, C, H, W) in units of its size, and that of the size.

    ``log_size`` (C,) is held still: the error of the residual must not shrink because the unit grows. The size learns
    the mean logarithm of the samples' root mean squares, by a squared error, which is quick and never steep.
    """
    unit = missed.float() / _beside(log_size).exp()
    found, learned = clean(correct, latents.add_noise(unit, noise, time, FLOW), time)
    true_log = missed.float().square().flatten(2).mean(-1).clamp(min=_TINY).log() / 2
    wrong_size = (learned - true_log).square().mean(-1)
    return latents.losses(found, unit, FLOW) + SIZE_WEIGHT * wrong_size


@torch.no_grad()
def refined(correct: Correct, prediction: Tensor, log_size: Tensor, steps: int, seed: int, sample: Tensor) -> Tensor:
    """``prediction`` (B, C, H, W) with a residual drawn from noise in ``steps`` Euler steps, one forward each.

    One step gives the mean of what may be missed. More give a likely one, whose error is larger by as much as is not
    known: 2 times its square where nothing is. ``sample`` (B,) names the noise of each row.
    """
    config = LatentSamplingConfig(steps)
    unit = sample_latents(lambda x, t: clean(correct, x, t)[0], prediction.shape[1:], FLOW, config, seed, sample)
    return prediction + _beside(log_size).exp() * unit


def _beside(log_size: Tensor) -> Tensor:
    """(C,) to (C, 1, 1), behind a stop-gradient."""
    return log_size.detach().float()[:, None, None]
