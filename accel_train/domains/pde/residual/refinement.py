"""Refinement of a prediction by diffusion: its residual is sampled from noise in a few steps and added.

The residual, truth - prediction, is small. Noise of unit variance would drown it, and a fixed scale would only suit one
equation at one point of training. Its size is therefore learned as well, and residuals here are in units of that size.
The diffusion is a rectified flow (Liu et al. 2022) from noise at time 1 to the residual at time 0. The network predicts
the clean residual, and the drift (residual - noise) follows. Lippe et al. 2023, arXiv 2308.05732, refine PDE solutions
in this way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accel_train import rng
from accel_train.data.datasets import Batch
from accel_train.domains.diffusion import latents
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, sample_latents
from accel_train.domains.diffusion.timesteps import training_times

FLOW = latents.LatentDiffusionConfig(kind="flow", prediction="x0")
SIZE_WEIGHT = 1 / 32
"""Weight of the size's loss. A larger one would dominate the gradient norm until the size has converged."""
_TINY = 1e-24

Correct = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Network: guesses (B, C, H, W) of a residual at times (B,) -> corrections, and the log size (C,)."""


def draw_noise(batch: Batch, seed: int, step: int, global_batch_size: int, steps: int) -> dict[str, Tensor]:
    """Draw ``time`` (B,) and ``noise`` (B, C, H, W) of a training step, keyed by sample.

    Only the times 1 - k / steps occur, equally often: those of ``refine`` with the same number of ``steps``. Training
    at other times would not help, and would cost accuracy at time 1, where the mean is predicted.
    """
    keys = rng.sample_keys(seed, "residual/noise", step, batch["occurrence"])
    time = training_times(batch, seed, "residual/time", step, global_batch_size)
    return {
        # `floor` maps the drawn times onto these steps.
        "time": 1 - (time * steps).floor() / steps,
        "noise": rng.normal(keys, batch["target"].shape[1:]),
    }


def denoise(correct: Correct, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Denoise residuals (B, C, H, W) of unit size at times (B,). Returns clean ones and their log size (C,).

    The network receives the best linear guess from the noisy residual and corrects it in units of the guess's error
    (Karras et al. 2022, arXiv 2206.00364). Pure noise never reaches the network. An untrained network leaves the guess
    unchanged, which is 0 at time 1.
    """
    signal, noise = latents.coefficients(time, FLOW)
    signal = signal.view(-1, 1, 1, 1)
    noise = noise.view(-1, 1, 1, 1)
    power = signal**2 + noise**2  # variance of the noisy residual, whose own is 1
    # The linear estimate with the least squared error. Its error has the variance noise^2 / power.
    guess = noisy * (signal / power)
    correction, log_size = correct(guess, time)
    deviation = noise / power.sqrt()  # of the guess's error
    return guess + correction.float() * deviation, log_size


def losses(correct: Correct, missed: Tensor, log_size: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    """Compute the loss (B,) of the residual ``missed`` (B, C, H, W) in units of its size, plus that of the size.

    ``log_size`` (C,) is detached: the error of the residual must not shrink because its unit grows. The size itself is
    fitted by a squared error to the mean logarithm of the samples' root mean squares, which converges fast and without
    steep gradients.
    """
    # The diffusion works at unit size, whatever the error of the prediction.
    unit = missed.float() / _per_channel(log_size).exp()
    noisy = latents.add_noise(unit, noise, time, FLOW)
    denoised, learned_log = denoise(correct, noisy, time)
    squares = missed.float().square()
    mean_square = squares.flatten(2).mean(-1)  # (B, C)
    # The residual of a perfect prediction is 0, which has no logarithm.
    true_log = mean_square.clamp(min=_TINY).log() / 2
    size_loss = (learned_log - true_log).square().mean(-1)
    residual_loss = latents.losses(denoised, unit, FLOW)
    return residual_loss + SIZE_WEIGHT * size_loss


@torch.no_grad()
def refine(correct: Correct, prediction: Tensor, log_size: Tensor, steps: int, seed: int, sample: Tensor) -> Tensor:
    """Add a residual to ``prediction`` (B, C, H, W), sampled from noise in ``steps`` Euler steps of one forward each.

    One step gives the mean of the possible residuals. More steps sample one of them. Its expected squared error is
    larger by the variance of the residual, so twice as large if the residual is unpredictable. ``sample`` (B,) keys
    the noise of each row.
    """

    def predict(noisy: Tensor, time: Tensor) -> Tensor:
        denoised, _ = denoise(correct, noisy, time)
        return denoised

    config = LatentSamplingConfig(steps)
    unit = sample_latents(predict, prediction.shape[1:], FLOW, config, seed, sample)
    size = _per_channel(log_size).exp()
    return prediction + size * unit


def _per_channel(log_size: Tensor) -> Tensor:
    """Reshape (C,) to (C, 1, 1), behind a stop-gradient."""
    return log_size.detach().float()[:, None, None]
