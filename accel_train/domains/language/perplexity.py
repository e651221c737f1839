"""The loss of next tokens, and held-out perplexity beside that of unigrams."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from accel_train.data.datasets import Batch
from accel_train.domains.language.packing import IGNORED

METRICS = ("nll", "perplexity", "accuracy", "unigram_perplexity")


def targets(batch: Batch) -> Tensor:
    """Return the label of the next token at each place, (B, S), -100 where none counts, as after the last one.

    Rows of weight 0, which only keep the processes in step, count nowhere.
    """
    following = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return following.masked_fill(batch["weight"].unsqueeze(-1) == 0, IGNORED)


def loss_sums(logits: Tensor, expected: Tensor) -> Tensor:
    """Sum the cross entropy of each row in nats, (B,) fp32, of logits (B, S, V) against targets (B, S)."""
    # All logits, because a slice of them would be copied, forward and backward.
    flat = logits.flatten(0, 1).float()
    losses = F.cross_entropy(flat, expected.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(expected).sum(-1)


def metric_sums(logits: Tensor, batch: Batch, unigram: Tensor) -> dict[str, Tensor]:
    """Sum over the targets of a batch. ``unigram`` (V,) is the log-probability of each token without a context."""
    expected = targets(batch)
    counted = expected != IGNORED
    found = logits.argmax(-1)
    return {
        "nll": loss_sums(logits, expected).sum(),
        "unigram_nll": -unigram[expected[counted]].sum(),
        "correct": ((found == expected) & counted).sum(),
        "tokens": counted.sum(),
    }


def metrics_from_sums(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of all processes' sums: means over tokens, never over rows or batches."""
    tokens = float(sums["tokens"])
    nll = float(sums["nll"]) / tokens
    return {
        "nll": nll,
        "perplexity": _exp(nll),
        "accuracy": float(sums["correct"]) / tokens,
        "unigram_perplexity": _exp(float(sums["unigram_nll"]) / tokens),
    }


def _exp(nll: float) -> float:
    # A model that has diverged may have a loss beyond any perplexity.
    return math.exp(min(nll, 700.0))


def summary(metrics: Mapping[str, float]) -> str:
    """Describe an evaluation in one line."""
    share = metrics["perplexity"] / metrics["unigram_perplexity"]
    return (
        f"held-out perplexity {metrics['perplexity']:.4g}, {share:.2f} of the {metrics['unigram_perplexity']:.4g} of "
        f"unigrams; {metrics['accuracy']:.0%} of tokens are the most likely one"
    )


def trained_tokens(batch: Batch) -> Tensor:
    """Count the targets of each row, (B,): its weight in the loss."""
    return (targets(batch) != IGNORED).sum(-1).float()


def real_tokens(batch: Batch) -> Tensor:
    """Count the tokens of a batch without padding and without rows of weight 0."""
    return (batch["length"] * batch["weight"]).sum()
