"""Sampling loops for text and latents, with classifier-free guidance. The model stays with the caller.

A `Predict` takes the current state and the time (B,) of each sample, and returns the model's prediction. Every
process calls it equally often, so it may wrap a sharded model. It runs without gradients. Noise is keyed by
(seed, sampling step, sample): a sample does not depend on the rest of its batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import NonNegativeFloat, PositiveFloat, PositiveInt, UsageError
from accel_train.domains.diffusion.latents import LatentDiffusionConfig, coefficients, predicted_x0
from accel_train.domains.diffusion.masked_text import MASK_LOGIT, corrupt, mask_probability
from accel_train.domains.diffusion.timesteps import shifted

Predict = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TextSamplingConfig:
    """Sampling of text from a latent."""

    steps: PositiveInt = 64
    """Forward passes per text (twice as many with guidance). More steps than tokens gain little."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits. 1 samples the learned distribution, less is more conservative and repetitive, 0 takes
    the most likely token."""
    guidance: NonNegativeFloat = 1.0
    """Strength of the condition. 1: as learned, one forward per step. Above 1: stronger and less varied, two
    forwards per step. Needs a model trained with conditioning dropout."""


@dataclass(frozen=True)
class LatentSamplingConfig:
    """Sampling of latents from text."""

    steps: PositiveInt = 32
    """Forward passes per latent (twice as many with guidance)."""
    guidance: NonNegativeFloat = 1.0
    """Strength of the condition. 1: as learned, one forward per step. Above 1: stronger and less varied, two
    forwards per step. Needs a model trained with conditioning dropout."""
    shift: PositiveFloat = 1.0
    """Factor s of t' = s t / (1 + (s - 1) t) on the evenly spaced times of the steps. Above 1: more of them at noisy
    times, where a picture takes shape; as times.shift of training."""


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return unconditional + scale * (conditional - unconditional), of logits or x0 (Ho and Salimans 2022)."""
    # In fp32: the scale multiplies the difference of two similar predictions, and with it the rounding of bf16.
    return torch.lerp(unconditional.float(), conditional.float(), scale)


@torch.no_grad()
def sample_text(
    predict: Predict,
    tokens: Tensor,
    maskable: Tensor,
    mask_id: int,
    config: TextSamplingConfig,
    seed: int,
    sample: Tensor,
    unconditional: Predict | None = None,
) -> Tensor:
    """Return `tokens` (B, S) int64 with every `maskable` position resampled by ancestral sampling.

    From t to s a masked position stays masked with probability m(s) / m(t), otherwise its token is drawn from
    the model and kept. `predict(tokens, time)` returns logits (B, S, V). `sample` (B,) keys the noise of each row.
    """
    _check_guidance(config.guidance, unconditional)
    times = _times(config.steps, tokens)
    # At t = 1 any draw masks every maskable position.
    draws = torch.zeros_like(tokens, dtype=torch.float32)
    state, masked = corrupt(tokens, maskable, times[0], draws, mask_id)
    for step, (time, next_time) in enumerate(pairwise(times)):
        logits = predict(state, time).float()  # (B, S, V)
        if config.guidance != 1 and unconditional is not None:
            logits = guided(logits, unconditional(state, time), config.guidance)
        keys = rng.sample_keys(seed, "sampling/text", step, sample)
        draws = rng.uniform(keys, (*tokens.shape[1:], 2))  # (B, S, 2): unmask or not, and the token
        stay_masked = mask_probability(next_time) / mask_probability(time)
        # The last step ends at time 0, where none stays masked: the probability is 0, and no draw is below it.
        unmasked = masked & (draws[..., 0] >= stay_masked.unsqueeze(-1))
        token_draws = draws[..., 1][unmasked]
        state[unmasked] = _draw_tokens(logits[unmasked], token_draws, mask_id, config.temperature)
        masked = masked & ~unmasked
    return state


@torch.no_grad()
def sample_latents(
    predict: Predict,
    shape: Sequence[int],
    diffusion: LatentDiffusionConfig,
    config: LatentSamplingConfig,
    seed: int,
    sample: Tensor,
    unconditional: Predict | None = None,
) -> Tensor:
    """Return latents x0 (B, *shape) fp32 from pure noise, on the device of `sample` (B,).

    `predict(x, time)` returns a prediction of kind `diffusion.prediction`. `sample` keys the noise of each row.
    Each step estimates x0 and the noise from x, and mixes them for the next time: Euler's method for flow, DDIM
    (Song et al. 2021, eta 0) for ddpm. Guidance acts on x0. This equals guidance on epsilon, v or velocity and
    is also correct for direction-only losses.
    """
    _check_guidance(config.guidance, unconditional)
    # The only draw: Euler's method, and DDIM with eta 0, are deterministic from here on.
    x = rng.normal(rng.sample_keys(seed, "sampling/latent", 0, sample), shape)  # (B, *shape)
    times = _times(config.steps, sample, config.shift)
    for time, next_time in pairwise(times):
        x0 = predicted_x0(predict(x, time).float(), x, time, diffusion)
        if config.guidance != 1 and unconditional is not None:
            unconditional_x0 = predicted_x0(unconditional(x, time).float(), x, time, diffusion)
            x0 = guided(x0, unconditional_x0, config.guidance)
        # All rows share the time, so one pair of factors serves the batch.
        a, b = coefficients(time[0], diffusion)
        next_a, next_b = coefficients(next_time[0], diffusion)
        # Here b is above 0: only next_time reaches 0.
        noise = (x - a * x0) / b
        x = next_a * x0 + next_b * noise
    return x


def _draw_tokens(
    logits: Tensor,
    draws: Tensor,
    mask_id: int,
    temperature: float,
) -> Tensor:
    """Draw one token per row of logits (N, V), never MASK."""
    # In place, because the caller's selection by a mask is a copy.
    logits[:, mask_id] = MASK_LOGIT
    # The limit of a low temperature, where the division below would give NaN.
    if temperature == 0:
        return logits.argmax(-1)
    # In fp64, as in `rng.categorical`: a cumulative sum in fp32 skips tokens rarer than its rounding near 1.
    probabilities = (logits / temperature).softmax(-1, dtype=torch.float64)
    return rng.inverse_cdf(draws, probabilities)


def _times(steps: int, like: Tensor, shift: float = 1.0) -> list[Tensor]:
    """Return steps + 1 times from 1 to 0, each (B,) float32."""
    batch_size = like.shape[0]
    # By division and not by adding up, so that the last one is exactly 0: all tokens unmasked, no noise left.
    times = [1 - k / steps for k in range(steps + 1)]
    even = [torch.full((batch_size,), time, device=like.device) for time in times]
    return [shifted(time, shift) for time in even]


def _check_guidance(guidance: float, unconditional: Predict | None) -> None:
    if guidance != 1 and unconditional is None:
        raise UsageError(
            f"guidance={guidance}: needs the prediction without the condition. "
            "Pass `unconditional`, or set guidance to 1."
        )
