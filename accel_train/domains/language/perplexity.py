"""The next-token loss, and held-out perplexity next to that of unigrams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.data.datasets import Batch
from accel_train.domains.language.packing import IGNORED

VALUES_AT_ONCE = 1 << 24
"""Logits converted to fp32 at a time: 64 MiB."""
METRICS = ("nll", "perplexity", "accuracy", "unigram_perplexity")
BASELINES = ("unigram",)


def targets(batch: Batch) -> Tensor:
    """Return the label of the next token at each place, (B, S), and -100 where none counts, as at the last place.

    Rows of weight 0, which only keep the processes in step, count nowhere.
    """
    following = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return following.masked_fill(batch["weight"].unsqueeze(-1) == 0, IGNORED)


def losses(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the cross entropy of each token in nats, (N,) fp32, of logits (N, V) against targets (N,)."""
    found: Tensor = _CrossEntropy.apply(logits, expected)
    return found


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each row in fp32, (N,), of logits (N, V), which needs no fp32 copy of the logits.

    With a vocabulary of 152k, the copy, its log-softmax and their gradients take 12 bytes for each logit, several times
    the memory of a small model. Some rows at a time are computed here, and again in the backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, expected: Tensor) -> Tensor:
        ctx.save_for_backward(logits, expected)
        pairs = zip(_some_rows(logits, logits), _some_rows(expected, logits), strict=True)
        return torch.cat([F.cross_entropy(x.float(), y, ignore_index=IGNORED, reduction="none") for x, y in pairs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, expected = ctx.saved_tensors
        (gradient,) = gradients
        scale = gradient.masked_fill(expected == IGNORED, 0).unsqueeze(-1)
        result = torch.empty_like(logits)
        parts = (_some_rows(each, logits) for each in (result, logits, expected.clamp(min=0).unsqueeze(-1), scale))
        for rows, x, y, weight in zip(*parts, strict=True):
            # softmax(x) less 1 at the target.
            difference = x.softmax(-1, dtype=torch.float32)
            difference.scatter_add_(-1, y, torch.full_like(weight, -1.0))
            rows.copy_(difference.mul_(weight))
        return result, None


def _some_rows(values: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Split ``values``, whose rows belong to those of ``logits``, into parts of about ``VALUES_AT_ONCE`` logits."""
    return values.split(max(1, VALUES_AT_ONCE // logits.shape[-1]))


def losses_and_hits(logits: Tensor, expected: Tensor) -> Tensor:
    """Return for each token its loss and 1 if it is the most likely one, (N, 2) fp32."""
    return torch.stack([losses(logits, expected), (logits.argmax(-1) == expected).float()], -1)


def metric_sums(found: Tensor, expected: Tensor, unigram: Tensor) -> dict[str, Tensor]:
    """Sum the values ``found`` by ``losses_and_hits`` over the targets (B, S) of a batch.

    ``unigram`` (V,) is the log-probability of each token without a context.
    """
    counted = expected != IGNORED
    nll, hits = found.unbind(-1)
    return {
        "nll": nll.sum(-1).sum(),
        "unigram_nll": -unigram[expected[counted]].sum(),
        "correct": (hits.bool() & counted).sum(),
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
    unigrams = metrics["unigram_perplexity"]
    share = metrics["perplexity"] / unigrams
    return (
        f"held-out perplexity {metrics['perplexity']:.4g}, {share:.2f} times the {unigrams:.4g} of unigrams; "
        f"{metrics['accuracy']:.0%} of tokens are the most likely one"
    )


def trained_tokens(batch: Batch) -> Tensor:
    """Count the targets of each row, (B,): its weight in the loss."""
    return (targets(batch) != IGNORED).sum(-1).float()


def real_tokens(batch: Batch) -> Tensor:
    """Count the tokens of a batch without padding and without rows of weight 0."""
    return (batch["length"] * batch["weight"]).sum()
