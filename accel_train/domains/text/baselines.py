"""What a model of text and latents must beat: the best linear map from a bag of tokens to the latent, and the best
log-linear one from the latent to a bag of tokens. Neither knows the order of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

RIDGES = (1.0, 10.0, 100.0)
"""Added to the diagonal of a Gram matrix of token counts: in occurrences of a token."""
MAX_TRAINING_ROWS = 32_768
MAX_FEATURES = 4096
"""Tokens that the linear map counts, the most frequent ones; the constant comes on top."""
MAX_LOG_LINEAR_WEIGHTS = 1 << 20
"""Vocabulary times latent values: above, the log-linear fit would cost minutes."""
BATCH_ROWS, EPOCHS, LEARNING_RATE, BETAS = 512, 2, 0.02, (0.9, 0.99)
BLOCK_ROWS = 4096


class Rows(Protocol):
    """Tokens and maskable (B, S) and normalised latents (B, L, Dz) of some texts, as `TextLatentDataset` has them."""

    def __len__(self) -> int: ...
    def batch(self, indices: list[int], /) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class TextBaselines:
    """Fitted on training texts; what they give is a function of one text or of one latent."""

    texts: int
    """How many training texts they saw."""
    columns: Tensor  # (V,) int64: the column of a counted token, F where it is not counted
    linear: Tensor  # (F + 1, L * Dz)
    unigram: Tensor  # (V,) log frequency
    log_linear: Tensor | None  # (L * Dz + 1, V); None where it was left out

    def latents(self, tokens: Tensor, maskable: Tensor) -> Tensor:
        """(B, S) and (B, S) -> (B, L * Dz): ridge regression on the counts of the tokens and 1."""
        return bags(tokens, maskable, self.columns) @ self.linear

    def logits(self, latents: Tensor) -> Tensor:
        """(B, L, Dz) -> (B, V): log probability of a token of the text, the same at every position."""
        assert self.log_linear is not None, "left out"
        return (_with_one(latents) @ self.log_linear).log_softmax(-1)


def fit_baselines(train: Rows, vocabulary_size: int) -> TextBaselines:
    """On one process, deterministic; some 8 seconds of one core for the demo. At most 32,768 texts are read, evenly
    chosen, block by block.

    The linear map is ridge regression on the counts of the 4096 most frequent tokens, its strength chosen on an eighth
    of the texts. The log-linear one is softmax(W latent + b), fitted by Adam in two passes over the texts, where more
    passes no longer help unseen texts; left out where it has more than a million weights.
    """
    wanted = torch.linspace(0, len(train) - 1, min(len(train), MAX_TRAINING_ROWS)).round().long()
    wanted = wanted[torch.randperm(len(wanted), generator=torch.Generator().manual_seed(0))]
    counts = torch.zeros(vocabulary_size)
    for batch in _blocks(train, wanted):
        counts.scatter_add_(0, batch["tokens"].flatten(), batch["maskable"].flatten().float())
    kept = counts.argsort(descending=True, stable=True)[: min(MAX_FEATURES, int((counts > 0).sum()))]
    columns = torch.full((vocabulary_size,), len(kept)).index_copy_(0, kept, torch.arange(len(kept)))
    unigram = (counts + 0.5).log().log_softmax(0)
    log_linear = _fit_log_linear(train, wanted, unigram) if fits_log_linear(train, vocabulary_size) else None
    return TextBaselines(len(wanted), columns, _fit_linear(train, wanted, columns), unigram, log_linear)


def fits_log_linear(train: Rows, vocabulary_size: int) -> bool:
    """Whether the log-linear map is small enough to be fitted."""
    return vocabulary_size * train.batch([0])["latent"].numel() <= MAX_LOG_LINEAR_WEIGHTS


def bags(tokens: Tensor, maskable: Tensor, columns: Tensor) -> Tensor:
    """(B, S) -> (B, F + 1) float32: how often each counted token is in a text, and 1."""
    features = int(columns.max())
    bag = torch.zeros(len(tokens), features + 1)
    bag.scatter_add_(1, columns[tokens], maskable.float())
    bag[:, features] = 1.0  # where the tokens fell that are not counted
    return bag


def _fit_linear(train: Rows, wanted: Tensor, columns: Tensor) -> Tensor:
    """By the normal equations: some N F^2 + 2 F^3 operations. Counts are exact in fp32, the solution is fp64."""
    unseen = len(wanted) // 8
    kept, tried = (_moments(train, rows, columns) for rows in (wanted[unseen:], wanted[:unseen]))

    def unseen_error(ridge: float) -> float:
        weights, (gram, cross) = _solve(*kept, ridge), tried
        return float((weights * (gram @ weights - 2 * cross)).sum())

    best = min(RIDGES, key=unseen_error) if unseen else RIDGES[0]
    return _solve(kept[0] + tried[0], kept[1] + tried[1], best).float()


def _moments(train: Rows, wanted: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """(F + 1, F + 1) and (F + 1, L * Dz) float64: sums over texts of bag x bag and bag x latent."""
    size, width = int(columns.max()) + 1, train.batch([0])["latent"].numel()
    gram, cross = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, width, dtype=torch.float64)
    for batch in _blocks(train, wanted):
        bag = bags(batch["tokens"], batch["maskable"], columns)
        gram += bag.T @ bag
        cross += bag.T @ batch["latent"].flatten(1)
    return gram, cross


def _solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    damped = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    return torch.cholesky_solve(cross, torch.linalg.cholesky(damped))


def _fit_log_linear(train: Rows, wanted: Tensor, unigram: Tensor) -> Tensor:
    """Adam on the mean cross-entropy of a batch's tokens, from the unigram distribution, to a learning rate of 0."""
    width = train.batch([0])["latent"].numel() + 1
    weights = torch.zeros(width, len(unigram)).index_copy_(0, torch.tensor([width - 1]), unigram[None])
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    order = torch.cat([wanted] * EPOCHS)
    batches = order.split(BATCH_ROWS)
    for step, rows in enumerate(batches):
        batch = train.batch(rows.tolist())
        latents, maskable = _with_one(batch["latent"]), batch["maskable"].float()
        # of the sum over a text's tokens: the gradient of the logits is tokens * probabilities - counts
        error = maskable.sum(1, keepdim=True) * F.softmax(latents @ weights, dim=-1)
        error.scatter_add_(1, batch["tokens"], -maskable)
        gradient = latents.T @ error / maskable.sum().clamp(min=1)
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square_(), 1 - BETAS[1])
        unbiased = (second / (1 - BETAS[1] ** (step + 1))).sqrt_().add_(1e-8)
        rate = LEARNING_RATE * (1 - step / len(batches)) / (1 - BETAS[0] ** (step + 1))
        weights.addcdiv_(first, unbiased, value=-rate)
    return weights


def _with_one(latents: Tensor) -> Tensor:
    return F.pad(latents.flatten(1), (0, 1), value=1.0)


def _blocks(train: Rows, wanted: Tensor) -> Iterator[dict[str, Tensor]]:
    return (train.batch(rows.tolist()) for rows in wanted.split(BLOCK_ROWS))
