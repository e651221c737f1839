"""Both directions of a model of text and latents: sampling and held-out evaluation.

The model is called as ``model(tokens, latents, text_time, latent_time, text_mask)`` and returns ``text_logits`` and
``latents``. A modality at time 0 is clean. At time 1 it is absent: all tokens masked, or pure noise. As in UniDiffuser
(Bao et al. 2023), guidance therefore needs no null embeddings. The caller adds sums over batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from accel_train import rng
from accel_train.config import NonNegativeInt, PositiveInt
from accel_train.data.datasets import Batch
from accel_train.domains.diffusion.latents import LatentDiffusionConfig, add_noise, predicted_x0
from accel_train.domains.diffusion.masked_text import correct_counts, corrupt, elbo_weight, gain, loss_sums, term_weight
from accel_train.domains.diffusion.sampling import (
    LatentSamplingConfig,
    Predict,
    TextSamplingConfig,
    sample_latents,
    sample_text,
)
from accel_train.domains.diffusion.timesteps import stratified
from accel_train.metrics.progress import Labels

Scores = Callable[[Batch, Batch, Tensor, Tensor], dict[str, Tensor]]
"""Function of a batch, its shuffled partner, and the latents and tokens sampled for it, to sums over the batch."""
METRICS = (
    "l2t_nll",
    "l2t_nll_shuffled",
    "unconditional_nll",
    "l2t_accuracy",
    "t2l_cosine",
    "t2l_cosine_shuffled",
    "t2l_mean_cosine",
)
"""Sums returned by ``BothWays.metric_sums``, in addition to the counts of tokens, masked tokens and samples."""


LABELS = Labels(
    loss_of="mode",
    units=dict.fromkeys(("accuracy", "gain", "words", "exact"), "fraction")
    | dict.fromkeys(("distance", "true"), "root mean square difference")
    | {"nll": "nats per token", "cosine": "cosine similarity", "error": "mean squared error"},
    titles={"nll": "NLL"},
    baselines=("unigram", "ridge", "log_linear"),
    own_summary=True,
)
"""Labels of the metrics in both directions, and of the loss."""


class Sampled(NamedTuple):
    """Samples of one batch."""

    tokens: Tensor
    """(B, S), each from the row's latent."""
    latents: Tensor
    """(B, L, Dz), each from the row's text."""
    unconditional: Tensor | None
    """(B, L, Dz), sampled without a text. None if not requested."""


@dataclass(frozen=True)
class BothWays:
    """A model with its samplers. Every process must call its methods equally often: the forward may be collective."""

    model: Callable[..., Any]
    mask_id: int
    seed: int
    diffusion: LatentDiffusionConfig
    text: TextSamplingConfig = field(default_factory=TextSamplingConfig)
    latent: LatentSamplingConfig = field(default_factory=LatentSamplingConfig)

    def with_sampling(
        self, steps: int | None = None, temperature: float | None = None, guidance: float | None = None
    ) -> BothWays:
        """Return these samplers with other settings in both directions. None keeps a setting."""
        asked = {"steps": steps, "temperature": temperature, "guidance": guidance}
        changed: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        text = replace(self.text, **changed)
        # Latents have no temperature: they are computed from noise, not drawn from a distribution.
        changed.pop("temperature", None)
        return replace(self, text=text, latent=replace(self.latent, **changed))

    def text_predictor(self, batch: Batch, latent: Tensor | None) -> Predict:
        """Return a predictor of text logits, conditioned on a clean latent (B, L, Dz) or on none."""
        # Time 1 tells the model that its condition is absent, time 0 that it is clean.
        latent_time = torch.full_like(batch["weight"], float(latent is None))
        condition = latent
        if condition is None:
            condition = self._absent_latent(batch)
        return lambda tokens, t: self.model(tokens, condition, t, latent_time, batch["text_mask"]).text_logits

    def latent_predictor(self, batch: Batch, with_text: bool = True) -> Predict:
        """Return a predictor of latents, conditioned on the batch's clean text or on none."""
        text_time = torch.full_like(batch["weight"], float(not with_text))
        condition = batch["tokens"]
        if not with_text:
            # Special tokens and padding stay: the model has never seen them masked.
            condition = batch["tokens"].masked_fill(batch["maskable"], self.mask_id)
        return lambda latent, t: self.model(condition, latent, text_time, t, batch["text_mask"]).latents

    def sample_text(self, batch: Batch) -> Tensor:
        """Sample tokens (B, S) from the batch's latents, at the batch's text lengths."""
        return sample_text(
            self.text_predictor(batch, batch["latent"]),
            batch["tokens"],
            batch["maskable"],
            self.mask_id,
            self.text,
            self.seed,
            batch["sample"],
            unconditional=self.text_predictor(batch, None),
        )

    def sample_latents(self, batch: Batch, with_text: bool = True) -> Tensor:
        """Sample latents (B, L, Dz) from pure noise, conditioned on the batch's text or on none."""
        without = self.latent_predictor(batch, with_text=False)
        return sample_latents(
            self.latent_predictor(batch) if with_text else without,
            batch["latent"].shape[1:],
            self.diffusion,
            self.latent,
            self.seed,
            batch["sample"],
            unconditional=without,
        )

    def sample_all(self, batch: Batch, unconditional: bool = False) -> Sampled:
        """Sample in both directions, and with ``unconditional`` also latents without a text."""
        tokens = self.sample_text(batch)
        latents = self.sample_latents(batch)
        free = self.sample_latents(batch, with_text=False) if unconditional else None
        return Sampled(tokens, latents, free)

    @torch.no_grad()
    def metric_sums(
        self, batch: Batch, shuffled: Batch, timesteps: int, scores: Scores | None = None
    ) -> dict[str, Tensor]:
        """Sum the metrics of one batch, with matching conditions, with shuffled ones and with none.

        ``x_nll`` / ``tokens`` is a bound in nats per maskable token. ``x_cosine`` / ``samples`` is a cosine between
        latents sampled from pure noise and true ones. ``t2l_mean_cosine`` samples in one step, so it scores the mean
        of the model's distribution. A model that ignores its condition scores the same with a shuffled one. With
        ``scores``, its sums and those of ``latent_error_sums`` are added.
        """

        def nll_sums(latent: Tensor | None) -> dict[str, Tensor]:
            return text_nll_sums(self.text_predictor(batch, latent), batch, self.mask_id, self.seed, timesteps)

        # The same masks in all three, so that they differ only by the condition.
        matching = nll_sums(batch["latent"])
        mismatched = nll_sums(shuffled["latent"])
        unconditional = nll_sums(None)
        sampled = self.sample_latents(batch)
        # One step from pure noise ends at the mean of all latents that fit the condition.
        mean = replace(self, latent=LatentSamplingConfig(steps=1)).sample_latents(batch)
        return {
            "l2t_nll": matching["nll"],
            "l2t_nll_shuffled": mismatched["nll"],
            "unconditional_nll": unconditional["nll"],
            "l2t_accuracy": matching["correct"],
            "t2l_cosine": cosine_sum(sampled, batch["latent"], batch["weight"]),
            "t2l_cosine_shuffled": cosine_sum(sampled, shuffled["latent"], batch["weight"]),
            "t2l_mean_cosine": cosine_sum(mean, batch["latent"], batch["weight"]),
            "tokens": matching["tokens"],
            "masked": matching["masked"],
            "samples": batch["weight"].sum(),
        } | self._more_sums(batch, shuffled, sampled, timesteps, scores)

    def _more_sums(
        self, batch: Batch, shuffled: Batch, sampled: Tensor, timesteps: int, scores: Scores | None
    ) -> dict[str, Tensor]:
        if scores is None:
            return {}
        errors = self.latent_error_sums(batch, shuffled, timesteps)
        return errors | scores(batch, shuffled, sampled, self.sample_text(batch))

    def latent_error_sums(self, batch: Batch, shuffled: Batch, timesteps: int) -> dict[str, Tensor]:
        """Sum the squared error of the latents predicted from noised ones, a mean over the elements of each sample.

        ``t2l_error`` is with the sample's own text, ``t2l_error_shuffled`` with another one's, and
        ``unconditional_error`` without a text. They are averaged over ``timesteps`` stratified times, with the same
        noise for all three. Latents have variance 1, so predicting their mean has an error of 1.
        """
        # Another text, but this batch's samples and weights: the noise is keyed by sample.
        other = dict(batch)
        for name in ("tokens", "text_mask", "maskable"):
            other[name] = shuffled[name]
        predictors = {
            "t2l_error": self.latent_predictor(batch),
            "t2l_error_shuffled": self.latent_predictor(other),
            "unconditional_error": self.latent_predictor(batch, with_text=False),
        }
        return {name: self._latent_error(predict, batch, timesteps) for name, predict in predictors.items()}

    def _latent_error(self, predict: Predict, batch: Batch, timesteps: int) -> Tensor:
        latent = batch["latent"]
        total = torch.zeros_like(batch["weight"])
        for stratum in range(timesteps):
            time = stratified(self._keys("evaluation/latent", stratum, batch), stratum, timesteps)
            noise = rng.normal(self._keys("evaluation/noise", stratum, batch), latent.shape[1:])
            noisy = add_noise(latent, noise, time, self.diffusion)
            # In fp32, because bf16 would round the difference of two latents that are almost equal.
            denoised = predicted_x0(predict(noisy, time).float(), noisy, time, self.diffusion)
            total += (denoised - latent).square().flatten(1).mean(-1)
        return (total * batch["weight"]).sum() / timesteps

    def _keys(self, stream: str, step: int, batch: Batch) -> Tensor:
        return rng.sample_keys(self.seed, stream, step, batch["sample"])

    def _absent_latent(self, batch: Batch) -> Tensor:
        return rng.normal(self._keys("absent", 0, batch), batch["latent"].shape[1:])


def samplers(model: Callable[..., Any], described: Mapping[str, Any], steps: int | None = None) -> BothWays:
    """Build the samplers that a model's config.json describes. ``steps``, if given, replaces their number of steps."""
    sampler = described["sampler"]
    both = BothWays(
        model,
        sampler["mask_id"],
        sampler["seed"],
        LatentDiffusionConfig(**described["objective"]["latent"]),
        TextSamplingConfig(**sampler["text"]),
        LatentSamplingConfig(**sampler["latent"]),
    )
    return both.with_sampling(steps=steps)


def tokens_from_latents(
    model: Callable[..., Any],
    described: Mapping[str, Any],
    latents: Tensor,
    tokens: Tensor,
    text_mask: Tensor,
    maskable: Tensor,
    sample: Tensor,
    steps: int | None = None,
) -> Tensor:
    """Sample text from normalised latents (B, L, Dz): ``tokens`` (B, S) with every ``maskable`` position replaced.

    ``text_mask`` (B, S) is False at padding. ``sample`` (B,) int64 keys the noise of each row. ``described`` is
    config.json.
    """
    batch = {"latent": latents, "tokens": tokens, "text_mask": text_mask, "maskable": maskable, "sample": sample}
    batch["weight"] = torch.ones(len(tokens), device=tokens.device)
    return samplers(model, described, steps).sample_text(batch)


def latents_from_tokens(
    model: Callable[..., Any],
    described: Mapping[str, Any],
    tokens: Tensor,
    text_mask: Tensor,
    maskable: Tensor,
    sample: Tensor,
    steps: int | None = None,
) -> Tensor:
    """Sample normalised latents (B, L, Dz) from texts, with the arguments of ``tokens_from_latents``."""
    shape = described["max_latent_length"], described["latent_dim"]
    batch = {"tokens": tokens, "text_mask": text_mask, "maskable": maskable, "sample": sample}
    batch["weight"] = torch.ones(len(tokens), device=tokens.device)
    batch["latent"] = torch.zeros(len(tokens), *shape, device=tokens.device)
    return samplers(model, described, steps).sample_latents(batch)


def metrics_from_sums(sums: Mapping[str, Tensor | float], timesteps: int) -> dict[str, float]:
    """Divide the sums of ``BothWays.metric_sums`` by their counts.

    ``tokens`` and ``masked`` were counted at every timestep.
    """
    totals = {name: float(total) for name, total in sums.items()}
    metrics: dict[str, float] = {}
    for name in METRICS:
        count = totals[_count_of(name)]
        metrics[name] = totals[name] / max(count, 1e-12)
    metrics["l2t_gain"] = gain(metrics["l2t_nll"], metrics["l2t_nll_shuffled"])
    metrics["evaluated_samples"] = totals["samples"]
    metrics["evaluated_tokens"] = totals["tokens"] / timesteps
    return metrics


def _count_of(metric: str) -> str:
    """Return the name of the count that a metric's sum is divided by."""
    if "nll" in metric:
        return "tokens"
    if metric.endswith("accuracy"):
        return "masked"
    return "samples"


def metric_names() -> list[str]:
    """List the keys of ``metrics_from_sums``."""
    sums: list[str] = [*METRICS, "tokens", "masked", "samples"]
    return list(metrics_from_sums(dict.fromkeys(sums, 1.0), timesteps=1))


def text_nll_sums(predict: Predict, batch: Batch, mask_id: int, seed: int, timesteps: int) -> dict[str, Tensor]:
    """Sum the likelihood bound and the accuracy of a masked text model over one batch, in ``timesteps`` forwards.

    ``nll`` / ``tokens`` is the ELBO-weighted bound in nats per maskable token, averaged over ``timesteps`` stratified
    times. ``correct`` / ``masked`` is the top-1 accuracy on masked tokens. Noise is keyed by ``batch["sample"]``, so
    two models or two conditions see the same masks.
    """
    tokens = batch["tokens"]
    maskable = batch["maskable"]
    weight = batch["weight"]
    sums = dict.fromkeys(["nll", "tokens", "correct", "masked"], torch.zeros((), device=tokens.device))
    for noisy, masked, time in _corruptions(batch, mask_id, seed, timesteps):
        logits = predict(noisy, time)
        added = {
            "nll": (loss_sums(logits, tokens, masked, time, mask_id) * weight).sum(),
            "tokens": term_weight(masked, maskable, weight).sum(),
            "correct": (correct_counts(logits, tokens, masked, mask_id) * weight).sum(),
            "masked": (masked.sum(-1) * weight).sum(),
        }
        sums = {name: sums[name] + value for name, value in added.items()}
    return sums


def bag_nll_sum(log_probabilities: Tensor, batch: Batch, mask_id: int, seed: int, timesteps: int) -> Tensor:
    """Compute ``nll`` of ``text_nll_sums``, at the same masks, for a model with one distribution (B, V) per text.

    Such a model predicts the same at every position, whatever the other tokens are.
    """
    token_nll = -log_probabilities.gather(1, batch["tokens"])  # (B, S)
    sums: list[Tensor] = []
    for _, masked, time in _corruptions(batch, mask_id, seed, timesteps):
        # Not multiplied by the mask: a token of probability 0 has an infinite loss, and 0 times infinity is NaN.
        text_nll = torch.where(masked, token_nll, 0.0).sum(-1)
        sums.append(text_nll * elbo_weight(time))
    return (torch.stack(sums).sum(0) * batch["weight"]).sum()


def _corruptions(batch: Batch, mask_id: int, seed: int, timesteps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the noisy tokens, their mask and the time of each sample, once per stratum of time."""
    tokens = batch["tokens"]
    for stratum in range(timesteps):
        time_keys = rng.sample_keys(seed, "evaluation", stratum, batch["sample"])
        mask_keys = rng.sample_keys(seed, "evaluation/mask", stratum, batch["sample"])
        time = stratified(time_keys, stratum, timesteps)
        draws = rng.uniform(mask_keys, tokens.shape[1:])
        noisy, masked = corrupt(tokens, batch["maskable"], time, draws, mask_id)
        yield noisy, masked, time


def cosine_sum(sampled: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Sum over samples the cosine between latents (B, ..., Dz), averaged over the latent tokens."""
    cosines = F.cosine_similarity(sampled.float(), target.float(), dim=-1)
    return (cosines.flatten(1).mean(-1) * weight).sum()


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out text with the EMA weights."""

    every: NonNegativeInt = 0
    """Optimizer steps between evaluations. 0: one evaluation, at the end. Every run has that one."""
    samples: Annotated[int, Ge(2)] = 512
    """Held-out samples over all processes. At least 2, because each is also paired with another sample's latent."""
    batch_size: PositiveInt | None = None
    """Samples per process and forward. None: as many as in a micro-batch, and so no more memory than training takes."""
    timesteps: PositiveInt = 16
    """Stratified noise levels per sample of the likelihood bound."""
    shown: PositiveInt = 6
    """Samples shown per direction in samples.md."""
    text: TextSamplingConfig = field(default_factory=TextSamplingConfig)
    latent: LatentSamplingConfig = field(default_factory=LatentSamplingConfig)

    def guidance(self) -> dict[str, float]:
        """Map the guidance option of each direction to its strength."""
        return {"evaluation.text.guidance": self.text.guidance, "evaluation.latent.guidance": self.latent.guidance}

    def due(self, step: int, max_steps: int) -> bool:
        """Return True if an evaluation follows ``step`` completed steps."""
        return step == max_steps or (self.every > 0 and step % self.every == 0)
