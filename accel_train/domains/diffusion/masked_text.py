"""Absorbing-state text diffusion (MDLM, Sahoo et al. 2024) with the linear schedule.

A token is masked with probability (1 - eps) t. With sigma(t) = -log(1 - (1 - eps) t), the weight of the
evidence lower bound (ELBO) is sigma'(t) / expm1(sigma(t)). For this schedule it is exactly 1 / t.

Losses are sums per sample. Their divisor, `term_weight`, is known over the whole global batch before any forward.
For the ELBO it counts maskable tokens, not masked ones: the factor 1 / t already corrects for the masked
fraction. The loss is then a bound on the negative log-likelihood in nats per token.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Weighting = Literal["elbo", "uniform"]

SCHEDULE_EPSILON = 1e-4
MASK_LOGIT = -1e6
"""Replaces the model's logit for MASK. Its softmax is exactly 0, because MASK is never a target. A loss with label
smoothing must leave MASK out: its term would be 1e6."""


@dataclass(frozen=True)
class TextDiffusionConfig:
    """Weighting of masked tokens in the text loss."""

    weighting: Weighting = "elbo"
    """elbo: weight 1 / t per masked token, normalised by maskable tokens. The loss bounds the negative
    log-likelihood (nats per token) and varies more between steps. uniform: weight 1, normalised by masked
    tokens. No bound, less variance."""


def mask_probability(time: Tensor) -> Tensor:
    """Return (1 - eps) t.

    Exactly 1 at t = 1, beyond the trained times: an absent text is fully masked.
    """
    return torch.where(time < 1, time * (1 - SCHEDULE_EPSILON), 1.0)


def elbo_weight(time: Tensor) -> Tensor:
    """Return sigma'(t) / expm1(sigma(t)) = 1 / t.

    0 at t = 0, where nothing is masked and 0 * inf would be NaN.
    """
    return torch.where(time > 0, 1 / time, 0.0)


def corrupt(
    tokens: Tensor,
    maskable: Tensor,
    time: Tensor,
    draws: Tensor,
    mask_id: int,
) -> tuple[Tensor, Tensor]:
    """Return the tokens at `time` and the mask of replaced positions, both (B, S).

    Positions outside `maskable` (padding, special tokens) never change. `draws` (B, S) are uniform in [0, 1), as
    from `rng.uniform(keys, (S,))`. t = 0 masks nothing, t = 1 everything.
    """
    probability = mask_probability(time).unsqueeze(-1)  # (B, 1)
    masked = maskable & (draws < probability)
    return tokens.masked_fill(masked, mask_id), masked


def loss_sums(
    logits: Tensor,
    tokens: Tensor,
    masked: Tensor,
    time: Tensor,
    mask_id: int,
    weighting: Weighting = "elbo",
) -> Tensor:
    """Return weight * cross-entropy in nats, summed over the masked positions of each sample: (B,) fp32.

    logits (B, S, V) of any float dtype, tokens (B, S) uncorrupted. A sample without masked positions gives 0. The
    caller multiplies by each sample's `weight` and divides by the sum of `term_weight` over the global batch.
    """
    # At all positions: selecting the masked ones would wait for the device, which alone knows how many there are.
    flat_logits = _without_mask(logits, mask_id).flatten(0, -2)  # (B * S, V)
    losses = F.cross_entropy(flat_logits, tokens.flatten(), reduction="none").view_as(tokens)
    # `where`, not a product: 0 * inf of an unmasked position would be NaN.
    sums = torch.where(masked, losses, 0.0).sum(-1)  # (B,)
    if weighting == "elbo":
        return sums * elbo_weight(time)
    return sums


def term_weight(
    masked: Tensor,
    maskable: Tensor,
    weight: Tensor,
    weighting: Weighting = "elbo",
) -> Tensor:
    """Return each sample's share of the divisor of the summed loss: (B,) fp32, computed without a forward.

    Counts maskable positions (elbo) or masked ones (uniform). Each sample counts `weight` (B,) times.
    """
    counted = maskable if weighting == "elbo" else masked
    return counted.sum(-1) * weight


def correct_counts(
    logits: Tensor,
    tokens: Tensor,
    masked: Tensor,
    mask_id: int,
) -> Tensor:
    """Count the masked positions whose most likely token is correct: (B,) int64."""
    predicted = _without_mask(logits, mask_id).argmax(-1)  # (B, S)
    return ((predicted == tokens) & masked).sum(-1)


def gain(nll: float, other: float) -> float:
    """Return the share by which ``nll`` is below ``other``. Returns 0 if ``other`` is 0, as for texts without words."""
    if other == 0:
        return 0.0
    return 1 - nll / other


def _without_mask(logits: Tensor, mask_id: int) -> Tensor:
    """Return fp32 logits with MASK ruled out, in one pass and without changing the model's own tensor."""
    penalty = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
    penalty[mask_id] = MASK_LOGIT
    return logits + penalty
