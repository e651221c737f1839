"""From noise to text and to latents, with classifier-free guidance. The loops are here; the model stays the
caller's.

A `Predict` is called with what is known so far and the time (B,) of each sample, and returns what the model
predicts. It is called the same number of times on every process, so that a sharded model may stand behind
it. It runs without gradients. Noise is keyed by (seed, sampling step, sample): a sample does not depend on
the others drawn with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import NonNegativeFloat, PositiveInt, UsageError
from accel_train.domains.diffusion.latents import LatentDiffusionConfig, coefficients, predicted_x0
from accel_train.domains.diffusion.masked_text import MASK_LOGIT, corrupt, mask_probability

Predict = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TextSamplingConfig:
    """How text is sampled from a latent."""

    steps: PositiveInt = 64
    """Forward passes for one text (twice as many with guidance). Beyond the number of tokens they gain
    little."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits. 1 samples what the model learned, less is safer and more repetitive, 0 takes the
    likeliest."""
    guidance: NonNegativeFloat = 1.0
    """Strength of the condition. 1: as learned, one forward a step. Above 1: exaggerated, less varied, two
    forwards a step; needs a model trained with conditioning dropout."""


@dataclass(frozen=True)
class LatentSamplingConfig:
    """How latents are sampled from text."""

    steps: PositiveInt = 32
    """Forward passes for one latent (twice as many with guidance)."""
    guidance: NonNegativeFloat = 1.0
    """Strength of the condition. 1: as learned, one forward a step. Above 1: exaggerated, less varied, two
    forwards a step; needs a model trained with conditioning dropout."""


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """unconditional + scale * (conditional - unconditional) (Ho and Salimans 2022), for logits and for x0."""
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
    """(B, S) int64: `tokens` with every `maskable` position drawn anew by ancestral sampling; the others
    are kept.

    From t to s a masked position stays masked with probability m(s) / m(t), else a token is drawn from the
    model; once drawn it stays. `predict(tokens, time)` gives logits (B, S, V). `sample` (B,) names the
    noise of each row.
    """
    _check_guidance(config.guidance, unconditional)
    times = _times(config.steps, tokens)
    state, masked = corrupt(tokens, maskable, times[0], torch.zeros_like(tokens, dtype=torch.float32), mask_id)
    for step, (time, next_time) in enumerate(pairwise(times)):
        logits = predict(state, time).float()
        if config.guidance != 1 and unconditional is not None:
            logits = guided(logits, unconditional(state, time), config.guidance)
        draws = rng.uniform(rng.sample_keys(seed, "sampling/text", step, sample), (*tokens.shape[1:], 2))
        stay = (mask_probability(next_time) / mask_probability(time)).unsqueeze(-1)
        drawn = masked & (draws[..., 0] >= stay)
        state[drawn] = _draw_tokens(logits[drawn], draws[..., 1][drawn], mask_id, config.temperature)
        masked = masked & ~drawn
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
    """(B, *shape) fp32 latents x0 from pure noise, on the device of `sample` (B,), which names the noise of
    each row.

    `predict(x, time)` gives whatever `diffusion.prediction` says. A step finds the x0 and the noise that x
    stands for and mixes them anew for the next time: Euler's method for flow, DDIM (Song et al. 2021, eta
    0) for ddpm. Guidance acts on x0, which is the same as on epsilon, v or velocity, and right for
    directions too.
    """
    _check_guidance(config.guidance, unconditional)
    x = rng.normal(rng.sample_keys(seed, "sampling/latent", 0, sample), shape)
    times = _times(config.steps, sample)
    for time, next_time in pairwise(times):
        x0 = predicted_x0(predict(x, time).float(), x, time, diffusion)
        if config.guidance != 1 and unconditional is not None:
            without = predicted_x0(unconditional(x, time).float(), x, time, diffusion)
            x0 = guided(x0, without, config.guidance)
        (a, b), (next_a, next_b) = coefficients(time[0], diffusion), coefficients(next_time[0], diffusion)
        x = next_a * x0 + next_b * ((x - a * x0) / b)
    return x


def _draw_tokens(logits: Tensor, draws: Tensor, mask_id: int, temperature: float) -> Tensor:
    """One token for each row of logits (N, V), never MASK."""
    logits[:, mask_id] = MASK_LOGIT
    if temperature == 0:
        return logits.argmax(-1)
    return rng.inverse_cdf(draws, (logits / temperature).softmax(-1, dtype=torch.float64))


def _times(steps: int, like: Tensor) -> list[Tensor]:
    """steps + 1 times from 1 to 0, each (B,) float32."""
    return [torch.full((like.shape[0],), 1 - k / steps, device=like.device) for k in range(steps + 1)]


def _check_guidance(guidance: float, unconditional: Predict | None) -> None:
    if guidance != 1 and unconditional is None:
        raise UsageError(
            f"guidance={guidance}: needs the prediction without the condition. "
            "Pass `unconditional`, or set guidance to 1."
        )
