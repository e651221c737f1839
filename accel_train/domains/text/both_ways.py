"""Both directions of a model of text and latents: sampling, and held-out figures of merit.

The model is called as ``model(tokens, latents, text_time, latent_time, text_mask)`` and returns ``text_logits`` and
``latents``. A modality is given clean at time 0 and absent at time 1 (wholly masked, pure noise), as in UniDiffuser
(Bao et al. 2023), so that guidance needs no null embeddings. Sums are added over batches and processes by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from accel_train import rng
from accel_train.config import NonNegativeInt, PositiveInt
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.masked_text import correct_counts, corrupt, elbo_weight, loss_sums, term_weight
from accel_train.domains.diffusion.sampling import (
    LatentSamplingConfig,
    Predict,
    TextSamplingConfig,
    sample_latents,
    sample_text,
)
from accel_train.domains.diffusion.timesteps import stratified

Batch = dict[str, Tensor]
METRICS = (
    "l2t_nll",
    "l2t_nll_shuffled",
    "unconditional_nll",
    "l2t_accuracy",
    "t2l_cosine",
    "t2l_cosine_shuffled",
    "t2l_mean_cosine",
)
"""What ``BothWays.figures`` sums, beside the numbers of tokens and samples."""


@dataclass(frozen=True)
class BothWays:
    """A model and what sampling from it needs. Every process must call its methods equally often."""

    model: Callable[..., Any]
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
        latents sampled from pure noise and true ones; ``t2l_mean_cosine`` is that of one step, which gives the mean
        of all latents that the model thinks possible. A model that ignores its condition gives equal pairs.
        """
        right = text_nll_sums(self.text_given(batch, batch["latent"]), batch, self.mask_id, self.seed, timesteps)
        wrong = text_nll_sums(self.text_given(batch, shuffled["latent"]), batch, self.mask_id, self.seed, timesteps)
        alone = text_nll_sums(self.text_given(batch, None), batch, self.mask_id, self.seed, timesteps)
        sampled = self.sample_latents(batch)
        mean = replace(self, latent=LatentSamplingConfig(steps=1)).sample_latents(batch)
        return {
            "l2t_nll": right["nll"],
            "l2t_nll_shuffled": wrong["nll"],
            "unconditional_nll": alone["nll"],
            "l2t_accuracy": right["correct"],
            "t2l_cosine": cosine_sum(sampled, batch["latent"], batch["weight"]),
            "t2l_cosine_shuffled": cosine_sum(sampled, shuffled["latent"], batch["weight"]),
            "t2l_mean_cosine": cosine_sum(mean, batch["latent"], batch["weight"]),
            "tokens": right["tokens"],
            "masked": right["masked"],
            "samples": batch["weight"].sum(),
        }

    def _absent_latent(self, batch: Batch) -> Tensor:
        return rng.normal(rng.sample_keys(self.seed, "absent", 0, batch["sample"]), batch["latent"].shape[1:])


def figures_from_sums(sums: dict[str, float], timesteps: int) -> dict[str, float]:
    """Divide what ``BothWays.figures`` summed. ``tokens`` and ``masked`` were counted at every timestep."""
    per = {n: "masked" if n.endswith("accuracy") else "samples" for n in METRICS if "nll" not in n}
    figures = {name: sums[name] / max(sums[per.get(name, "tokens")], 1e-12) for name in METRICS}
    figures["l2t_gain"] = 1 - figures["l2t_nll"] / figures["l2t_nll_shuffled"]
    return figures | {"evaluated_samples": sums["samples"], "evaluated_tokens": sums["tokens"] / timesteps}


def metric_names() -> list[str]:
    """The keys of ``figures_from_sums``."""
    return list(figures_from_sums(dict.fromkeys((*METRICS, "tokens", "masked", "samples"), 1.0), 1))


def text_nll_sums(predict: Predict, batch: Batch, mask_id: int, seed: int, timesteps: int) -> dict[str, Tensor]:
    """Sums for the likelihood bound and the accuracy of a masked text model, over one batch.

    ``nll`` / ``tokens`` is the ELBO-weighted bound in nats per maskable token, averaged over ``timesteps`` stratified
    times; ``correct`` / ``masked`` the share of masked tokens whose likeliest prediction is right. Noise is keyed by
    ``batch["sample"]``, so that two models, or two conditions, meet the same masks. ``timesteps`` forwards.
    """
    tokens, maskable, weight = batch["tokens"], batch["maskable"], batch["weight"]
    names: list[str] = ["nll", "tokens", "correct", "masked"]
    sums = dict.fromkeys(names, torch.zeros((), device=tokens.device))
    for noisy, masked, time in _corruptions(batch, mask_id, seed, timesteps):
        logits = predict(noisy, time)
        added = {
            "nll": (loss_sums(logits, tokens, masked, time, mask_id) * weight).sum(),
            "tokens": term_weight(masked, maskable, weight),
            "correct": (correct_counts(logits, tokens, masked, mask_id) * weight).sum(),
            "masked": (masked.sum(-1) * weight).sum(),
        }
        sums = {k: sums[k] + v for k, v in added.items()}
    return sums


def bag_nll_sum(log_probabilities: Tensor, batch: Batch, mask_id: int, seed: int, timesteps: int) -> Tensor:
    """``nll`` of ``text_nll_sums`` at the same masks for a model that gives every position of a text one distribution
    (B, V), whatever the other tokens are."""
    each = -log_probabilities.gather(1, batch["tokens"])  # (B, S)
    times = _corruptions(batch, mask_id, seed, timesteps)
    sums = [torch.where(masked, each, 0.0).sum(-1) * elbo_weight(time) for _, masked, time in times]
    return (torch.stack(sums).sum(0) * batch["weight"]).sum()


def _corruptions(batch: Batch, mask_id: int, seed: int, timesteps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Masked tokens, which they are, and the time of each sample, at one time after another."""
    tokens, sample = batch["tokens"], batch["sample"]
    for stratum in range(timesteps):
        time = stratified(rng.sample_keys(seed, "evaluation", stratum, sample), stratum, timesteps)
        draws = rng.uniform(rng.sample_keys(seed, "evaluation/mask", stratum, sample), tokens.shape[1:])
        yield *corrupt(tokens, batch["maskable"], time, draws, mask_id), time


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
    """The proof of multimodal learning in two lines, each with what needs no network where that was measured."""
    l2t = (
        f"l2t: {figures['l2t_nll']:.3f} nats per token with the right latent, {figures['l2t_nll_shuffled']:.3f} with a "
        f"shuffled one ({_less(figures['l2t_gain'])}), {figures['unconditional_nll']:.3f} without; masked-token "
        f"accuracy {figures['l2t_accuracy']:.1%}"
    )
    t2l = (
        f"t2l: cosine {figures['t2l_cosine']:z.3f} between sampled and true latents, "
        f"{figures['t2l_cosine_shuffled']:z.3f} against shuffled ones, {figures['t2l_mean_cosine']:z.3f} in one step"
    )
    if "l2t_log_linear_nll" in figures:
        nll, shuffled = (figures[f"l2t_log_linear_nll{which}"] for which in ("", "_shuffled"))
        l2t += f"; log-linear: {nll:.3f}, {shuffled:.3f} ({_less(figures['l2t_log_linear_gain'])})"
    if "unigram_nll" in figures:
        l2t += f"; unigrams: {figures['unigram_nll']:.3f} without"
    if "t2l_ridge_cosine" in figures:
        t2l += f"; ridge regression on the counts of its tokens: {figures['t2l_ridge_cosine']:z.3f}"
    return [l2t, t2l]


def _less(gain: float) -> str:
    percent = round(100 * gain, 1)
    return f"{abs(percent):.1f}% {'more' if percent < 0 else 'less'}"
