"""What a model of text and latents must beat, by the measures that the model itself is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from accel_train.data.heldout import heldout_pairs
from accel_train.domains.text import both_ways
from accel_train.domains.text.baselines import fit_baselines, fits_log_linear
from accel_train.domains.text.both_ways import bag_nll_sum, cosine_sum
from accel_train.domains.text.prepare import PreparedData

BATCH_SIZE = 512
BASELINES = ("t2l_ridge_cosine", "unigram_nll")
LOG_LINEAR = ("l2t_log_linear_nll", "l2t_log_linear_nll_shuffled", "l2t_log_linear_gain")


def metric_names(data: PreparedData) -> list[str]:
    """Everything that an evaluation on this data reports: the model's metrics and the baselines beside them."""
    return [*both_ways.metric_names(), *_baseline_names(data)]


def _baseline_names(data: PreparedData) -> tuple[str, ...]:
    return BASELINES + (LOG_LINEAR if fits_log_linear(data.train, data.tokenizer.vocab_size) else ())


@lru_cache(maxsize=1)
def baseline_figures(data: PreparedData, samples: int, timesteps: int, seed: int) -> Mapping[str, float]:
    """``t2l_ridge_cosine``, ``unigram_nll``, ``l2t_log_linear_nll``, its ``_shuffled`` and ``l2t_log_linear_gain``.

    On the first ``samples`` held-out texts, at the masks and with the shuffled partners that the model meets. One
    process; some seconds, once for a run. The last three are absent where the fit would cost minutes.
    """
    fitted = fit_baselines(data.train, data.tokenizer.vocab_size)
    sums: dict[str, float] = {}
    for batch, shuffled in heldout_pairs(data.heldout, samples, BATCH_SIZE, 0, 1, torch.device("cpu")):
        masks = batch, data.tokenizer.mask_id, seed, timesteps
        found = fitted.latents(batch["tokens"], batch["maskable"]).view_as(batch["latent"])
        unigram = fitted.unigram.expand(len(found), -1)
        added = {
            "t2l_ridge_cosine": cosine_sum(found, batch["latent"], batch["weight"]),
            "unigram_nll": bag_nll_sum(unigram, *masks),
            "samples": batch["weight"].sum(),
            "tokens": (batch["maskable"].sum(-1) * batch["weight"]).sum() * timesteps,
        }
        if fitted.log_linear is not None:
            for name, latent in (("nll", batch["latent"]), ("nll_shuffled", shuffled["latent"])):
                added[f"l2t_log_linear_{name}"] = bag_nll_sum(fitted.logits(latent), *masks)
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in added.items()}
    per = {"t2l_ridge_cosine": "samples"}
    figures = {name: value / max(sums[per.get(name, "tokens")], 1e-12) for name, value in sums.items()}
    if fitted.log_linear is not None:
        figures["l2t_log_linear_gain"] = 1 - figures["l2t_log_linear_nll"] / figures["l2t_log_linear_nll_shuffled"]
    return {name: figures[name] for name in _baseline_names(data)}
