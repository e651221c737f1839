"""Absorbing-state text diffusion (MDLM, Sahoo et al. 2024) with the linear schedule.

A token is masked with probability (1 - eps) t. With sigma(t) = -log(1 - (1 - eps) t) the weight of the
evidence lower bound is sigma'(t) / expm1(sigma(t)), which for this schedule is exactly 1 / t.

Losses are sums for each sample. What they are divided by is known before any forward, over the whole global
batch: `term_weight`. For the ELBO that is the number of maskable tokens, and not of masked ones: the 1 / t
already makes up for how many are masked, and dividing by the masked ones would undo it. Then the loss is a
bound of the negative log-likelihood in nats per token.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Weighting = Literal["elbo", "uniform"]

SCHEDULE_EPSILON = 1e-4
MASK_LOGIT = -1e6
"""In place of the model's logit for MASK, which is never a right answer: softmax gives exactly 0."""


@dataclass(frozen=True)
class TextDiffusionConfig:
    """How a masked token counts."""

    weighting: Weighting = "elbo"
    """elbo: a masked token counts 1 / t, per maskable token: the loss bounds the likelihood (nats per
    token), and its spread over steps is larger. uniform: every masked token counts 1, per masked token: no
    bound, calmer."""


def mask_probability(time: Tensor) -> Tensor:
    """(1 - eps) t; exactly 1 at t = 1, which trained times do not reach: an absent text is wholly masked."""
    return torch.where(time < 1, time * (1 - SCHEDULE_EPSILON), 1.0)


def elbo_weight(time: Tensor) -> Tensor:
    """sigma'(t) / expm1(sigma(t)) = 1 / t. 0 at t = 0, where nothing is masked and 0 * inf would be NaN."""
    return torch.where(time > 0, 1 / time, 0.0)


def corrupt(tokens: Tensor, maskable: Tensor, time: Tensor, draws: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """(tokens at `time`, which of them were masked), both (B, S). Outside `maskable` (padding, specials)
    nothing moves.

    `draws` (B, S) uniform in [0, 1), as `rng.uniform(keys, (S,))` gives. t = 0 masks nothing, t = 1
    everything.
    """
    masked = maskable & (draws < mask_probability(time).unsqueeze(-1))
    return tokens.masked_fill(masked, mask_id), masked


def loss_sums(
    logits: Tensor, tokens: Tensor, masked: Tensor, time: Tensor, mask_id: int, weighting: Weighting = "elbo"
) -> Tensor:
    """(B,) fp32: for each sample the sum over its masked positions of weight * cross-entropy, in nats.

    logits (B, S, V) of any float type, tokens (B, S) clean. A sample without masked positions gives 0. The
    caller multiplies by the sample's `weight`, sums, and divides by `term_weight` of the global batch.
    """
    losses = F.cross_entropy(_without_mask(logits, mask_id).flatten(0, -2), tokens.flatten(), reduction="none").view_as(
        tokens
    )
    sums = torch.where(masked, losses, 0.0).sum(-1)
    return sums * elbo_weight(time) if weighting == "elbo" else sums


def term_weight(masked: Tensor, maskable: Tensor, weight: Tensor, weighting: Weighting = "elbo") -> Tensor:
    """What the summed loss of these samples is divided by, summed over the global batch: scalar fp32, no
    forward.

    Number of maskable positions (elbo) or of masked ones (uniform), a sample counting as often as its
    `weight` (B,).
    """
    counted = maskable if weighting == "elbo" else masked
    return (counted.sum(-1) * weight).sum()


def correct_counts(logits: Tensor, tokens: Tensor, masked: Tensor, mask_id: int) -> Tensor:
    """(B,) int64: masked positions whose most likely token is the right one."""
    return ((_without_mask(logits, mask_id).argmax(-1) == tokens) & masked).sum(-1)


def _without_mask(logits: Tensor, mask_id: int) -> Tensor:
    """fp32 logits with MASK ruled out, in one pass, the model's own tensor left alone."""
    ruled_out = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
    ruled_out[mask_id] = MASK_LOGIT
    return logits + ruled_out
