"""Scores of the text baselines, measured like the model's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from accel_train.data.datasets import Batch
from accel_train.data.heldout import heldout_pairs
from accel_train.domains.diffusion.masked_text import gain
from accel_train.domains.text import both_ways
from accel_train.domains.text.baselines import TextBaselines, fit_baselines, fits_linear, fits_log_linear
from accel_train.domains.text.both_ways import bag_nll_sum, cosine_sum
from accel_train.domains.text.dataset import PreparedData

BATCH_SIZE = 512
RIDGE = "t2l_ridge_cosine"
UNIGRAM = "unigram_nll"
LOG_LINEAR = ("l2t_log_linear_nll", "l2t_log_linear_nll_shuffled", "l2t_log_linear_gain")


def metric_names(data: PreparedData) -> list[str]:
    """List every metric of an evaluation on this data: the model's, then the baselines'."""
    return [*both_ways.metric_names(), *_baseline_names(data)]


def _baseline_names(data: PreparedData) -> tuple[str, ...]:
    vocabulary_size = data.tokenizer.vocab_size
    names = [UNIGRAM]
    if fits_linear(data.train, vocabulary_size):
        names.insert(0, RIDGE)
    if fits_log_linear(data.train, vocabulary_size):
        names += LOG_LINEAR
    return tuple(names)


@lru_cache(maxsize=1)
def baseline_metrics(data: PreparedData, samples: int, timesteps: int, seed: int) -> Mapping[str, float]:
    """Score the baselines on the first ``samples`` held-out texts, with the model's own masks and shuffled partners.

    Returns ``t2l_ridge_cosine``, ``unigram_nll``, ``l2t_log_linear_nll``, its ``_shuffled`` and
    ``l2t_log_linear_gain``. The first one and the last three are absent where their fit would take minutes. Call it on
    one process only. It takes seconds once per run.
    """
    fitted = fit_baselines(data.train, data.tokenizer.vocab_size)
    mask_id = data.tokenizer.mask_id
    sums: dict[str, float] = {}
    # Rank 0 of 1: one process scores all samples, however many processes the run has.
    pairs = heldout_pairs(data.heldout, samples, BATCH_SIZE, 0, 1, torch.device("cpu"))
    for batch, shuffled in pairs:
        added = _batch_sums(fitted, batch, shuffled, mask_id, seed, timesteps)
        for name, value in added.items():
            sums[name] = sums.get(name, 0.0) + float(value)

    # The cosine is a mean over samples, all others are means over tokens.
    counts = {RIDGE: sums["samples"]}
    metrics: dict[str, float] = {}
    for name, value in sums.items():
        count = counts.get(name, sums["tokens"])
        metrics[name] = value / max(count, 1e-12)
    if fitted.log_linear is not None:
        metrics["l2t_log_linear_gain"] = gain(metrics["l2t_log_linear_nll"], metrics["l2t_log_linear_nll_shuffled"])
    return {name: metrics[name] for name in _baseline_names(data)}


def _batch_sums(
    fitted: TextBaselines,
    batch: Batch,
    shuffled: Batch,
    mask_id: int,
    seed: int,
    timesteps: int,
) -> dict[str, Tensor]:
    """Sum the scores of one batch, and count its samples and tokens."""
    weight = batch["weight"]
    unigram = fitted.unigram.expand(len(weight), -1)
    sums = {
        UNIGRAM: bag_nll_sum(unigram, batch, mask_id, seed, timesteps),
        "samples": weight.sum(),
        "tokens": (batch["maskable"].sum(-1) * weight).sum() * timesteps,
    }
    if fitted.linear is not None:
        predicted = fitted.latents(batch["tokens"], batch["maskable"]).view_as(batch["latent"])
        sums[RIDGE] = cosine_sum(predicted, batch["latent"], weight)
    if fitted.log_linear is not None:
        conditions = {"nll": batch["latent"], "nll_shuffled": shuffled["latent"]}
        for name, latent in conditions.items():
            sums[f"l2t_log_linear_{name}"] = bag_nll_sum(fitted.logits(latent), batch, mask_id, seed, timesteps)
    return sums
