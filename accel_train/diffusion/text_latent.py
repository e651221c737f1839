"""Both directions of a model of text and latents: sampling, and held-out figures of merit.

The model is called as ``model(tokens, latents, text_time, latent_time, text_mask)`` and returns ``text_logits`` and
``latents``. A modality is given clean at time 0 and absent at time 1 (wholly masked, pure noise), as in UniDiffuser
(Bao et al. 2023), so that guidance needs no null embeddings. Sums are added over batches and processes by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from accel_train import rng
from accel_train.config import NonNegativeInt, PositiveInt
from accel_train.diffusion.latents import LatentDiffusionConfig
from accel_train.diffusion.masked_text import correct_counts, corrupt, loss_sums, term_weight
from accel_train.diffusion.sampling import (
    LatentSamplingConfig,
    Predict,
    TextSamplingConfig,
    sample_latents,
    sample_text,
)
from accel_train.diffusion.timesteps import stratified

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class BothWays:
    """A model and what sampling from it needs. Every process must call its methods equally often."""

    model: nn.Module
    mask_id: int
    seed: int
    diffusion: LatentDiffusionConfig
    text: TextSamplingConfig = field(default_factory=TextSamplingConfig)
    latent: LatentSamplingConfig = field(default_factory=LatentSamplingConfig)

    def text_given(self, batch: Batch, latent: Tensor | None) -> Predict:
        """Text logits given a clean latent (B, L, Dz), or none."""
        latent_time = torch.full_like(batch["weight"], float(latent is None))
        given = self._absent_latent(batch) if latent is None else latent
        return lambda tokens, t: self.model(tokens, given, t, latent_time, batch["text_mask"]).text_logits

    def latent_given(self, batch: Batch, text_is_given: bool = True) -> Predict:
        """Latent predictions given the batch's clean text, or none."""
        text_time = torch.full_like(batch["weight"], float(not text_is_given))
        absent = batch["tokens"].masked_fill(batch["maskable"], self.mask_id)
        given = batch["tokens"] if text_is_given else absent
        return lambda latent, t: self.model(given, latent, text_time, t, batch["text_mask"]).latents

    def sample_text(self, batch: Batch) -> Tensor:
        """(B, S) tokens from the batch's latents, at the batch's text lengths."""
        given, absent = self.text_given(batch, batch["latent"]), self.text_given(batch, None)
        tokens, maskable = batch["tokens"], batch["maskable"]
        return sample_text(given, tokens, maskable, self.mask_id, self.text, self.seed, batch["sample"], absent)

    def sample_latents(self, batch: Batch) -> Tensor:
        """(B, L, Dz) latents from pure noise, given the batch's text."""
        given, absent = self.latent_given(batch), self.latent_given(batch, text_is_given=False)
        shape = batch["latent"].shape[1:]
        return sample_latents(given, shape, self.diffusion, self.latent, self.seed, batch["sample"], absent)

    @torch.no_grad()
    def figures(self, batch: Batch, shuffled: Batch, timesteps: int) -> dict[str, Tensor]:
        """Sums over one batch: right and shuffled latents, right and shuffled text, and neither.

        ``x_nll`` / ``tokens`` is a bound in nats per maskable token, ``x_cosine`` / ``samples`` a cosine between
        latents sampled from pure noise and true ones. A model that ignores its condition gives equal pairs.
        """
        right = text_nll_sums(self.text_given(batch, batch["latent"]), batch, self.mask_id, self.seed, timesteps)
        wrong = text_nll_sums(self.text_given(batch, shuffled["latent"]), batch, self.mask_id, self.seed, timesteps)
        alone = text_nll_sums(self.text_given(batch, None), batch, self.mask_id, self.seed, timesteps)
        sampled = self.sample_latents(batch)
        return {
            "l2t_nll": right["nll"],
            "l2t_nll_shuffled": wrong["nll"],
            "unconditional_nll": alone["nll"],
            "l2t_accuracy": right["correct"],
            "t2l_cosine": cosine_sum(sampled, batch["latent"], batch["weight"]),
            "t2l_cosine_shuffled": cosine_sum(sampled, shuffled["latent"], batch["weight"]),
            "tokens": right["tokens"],
            "masked": right["masked"],
            "samples": batch["weight"].sum(),
        }

    def _absent_latent(self, batch: Batch) -> Tensor:
        return rng.normal(rng.sample_keys(self.seed, "absent", 0, batch["sample"]), batch["latent"].shape[1:])


def figures_from_sums(sums: dict[str, float], timesteps: int) -> dict[str, float]:
    """Divide what ``BothWays.figures`` summed. ``tokens`` and ``masked`` were counted at every timestep."""
    per = {"l2t_accuracy": "masked", "t2l_cosine": "samples", "t2l_cosine_shuffled": "samples"}
    names = [n for n in sums if n not in ("tokens", "masked", "samples")]
    figures = {name: sums[name] / max(sums[per.get(name, "tokens")], 1e-12) for name in names}
    figures["l2t_gain"] = 1 - figures["l2t_nll"] / figures["l2t_nll_shuffled"]
    return figures | {"evaluated_samples": sums["samples"], "evaluated_tokens": sums["tokens"] / timesteps}


def text_nll_sums(predict: Predict, batch: Batch, mask_id: int, seed: int, timesteps: int) -> dict[str, Tensor]:
    """Sums for the likelihood bound and the accuracy of a masked text model, over one batch.

    ``nll`` / ``tokens`` is the ELBO-weighted bound in nats per maskable token, averaged over ``timesteps`` stratified
    times; ``correct`` / ``masked`` the share of masked tokens whose likeliest prediction is right. Noise is keyed by
    ``batch["sample"]``, so that two models, or two conditions, meet the same masks. ``timesteps`` forwards.
    """
    tokens, maskable, weight = batch["tokens"], batch["maskable"], batch["weight"]
    names: list[str] = ["nll", "tokens", "correct", "masked"]
    sums = dict.fromkeys(names, torch.zeros((), device=tokens.device))
    for stratum in range(timesteps):
        keys = rng.sample_keys(seed, "evaluation", stratum, batch["sample"])
        time = stratified(keys, stratum, timesteps)
        draws = rng.uniform(rng.sample_keys(seed, "evaluation/mask", stratum, batch["sample"]), tokens.shape[1:])
        noisy, masked = corrupt(tokens, maskable, time, draws, mask_id)
        logits = predict(noisy, time)
        added = {
            "nll": (loss_sums(logits, tokens, masked, time, mask_id) * weight).sum(),
            "tokens": term_weight(masked, maskable, weight),
            "correct": (correct_counts(logits, tokens, masked, mask_id) * weight).sum(),
            "masked": (masked.sum(-1) * weight).sum(),
        }
        sums = {k: sums[k] + v for k, v in added.items()}
    return sums


def cosine_sum(sampled: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Sum over samples of the cosine between latents (B, ..., Dz), mean over their tokens."""
    cosines = F.cosine_similarity(sampled.float(), wanted.float(), dim=-1).flatten(1).mean(-1)
    return (cosines * weight).sum()


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out text, with the averaged weights."""

    every: NonNegativeInt = 0
    """Optimizer steps between evaluations; there is always one at the end, and 0 makes only that."""
    samples: Annotated[int, Ge(2)] = 512
    """Held-out samples, over all processes; at least 2, for each is also paired with another's latent."""
    batch_size: PositiveInt = 64
    """Samples per process per forward."""
    timesteps: PositiveInt = 16
    """Stratified noise levels per sample of the likelihood bound."""
    shown: PositiveInt = 6
    """Samples written to samples.md, in both directions."""
    text: TextSamplingConfig = field(default_factory=TextSamplingConfig)
    latent: LatentSamplingConfig = field(default_factory=LatentSamplingConfig)

    def due(self, step: int, max_steps: int) -> bool:
        """Whether to evaluate after ``step`` steps."""
        return step == max_steps or (self.every > 0 and step % self.every == 0)


def summary(figures: dict[str, float]) -> list[str]:
    """The proof of multimodal learning in two sentences."""
    gain = round(100 * figures["l2t_gain"], 1)
    effect = f"{abs(gain):.1f}% {'more' if gain < 0 else 'less'}"
    return [
        f"l2t: {figures['l2t_nll']:.3f} nats per token with the right latent, {figures['l2t_nll_shuffled']:.3f} with a "
        f"shuffled one ({effect}), {figures['unconditional_nll']:.3f} without; masked-token accuracy "
        f"{figures['l2t_accuracy']:.1%}",
        f"t2l: cosine {figures['t2l_cosine']:z.3f} between sampled and true latents, "
        f"{figures['t2l_cosine_shuffled']:z.3f} against shuffled ones",
    ]
