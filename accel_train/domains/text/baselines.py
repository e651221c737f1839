"""Linear baselines for a model of text and latents. They ignore the order of the tokens.

Ridge regression maps a bag of tokens to the latent. A log-linear model maps the latent to a bag of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.data.datasets import Batch

RIDGES = (1.0, 10.0, 100.0)
"""Ridge strengths, added to the diagonal of the Gram matrix of token counts."""
MAX_TRAINING_ROWS = 32_768
MAX_FEATURES = 4096
"""Number of most frequent tokens that the linear map counts. A constant feature is added to them."""
MAX_LINEAR_WEIGHTS = 1 << 23
"""Features times latent values. Above it, ridge regression would take minutes of a core: 19 s for 2,048 texts here."""
MAX_LOG_LINEAR_WEIGHTS = 1 << 20
"""Vocabulary times latent values. Above this, the log-linear fit would take minutes."""
BLOCK_ROWS = 4096

# Adam for the log-linear fit. A third epoch no longer lowers the error on unseen texts.
BATCH_ROWS = 512
EPOCHS = 2
LEARNING_RATE = 0.02
BETAS = (0.9, 0.99)


class Rows(Protocol):
    """Tokens and maskable (B, S) and normalised latents (B, L, Dz) by index, as in `TextLatentDataset`."""

    def __len__(self) -> int: ...
    def batch(self, indices: list[int], /) -> Batch: ...


@dataclass(frozen=True)
class TextBaselines:
    """Baselines fitted on training texts. Each output is a function of one text or of one latent."""

    texts: int
    """Number of training texts used for the fit."""
    columns: Tensor  # (V,) int64: the column of a counted token, F for all others
    linear: Tensor | None  # (F + 1, L * Dz); None where it was left out
    unigram: Tensor  # (V,) log frequency
    log_linear: Tensor | None  # (L * Dz + 1, V); None where it was left out

    def latents(self, tokens: Tensor, maskable: Tensor) -> Tensor:
        """Predict latents by ridge regression on the token counts: (B, S) and (B, S) -> (B, L * Dz)."""
        assert self.linear is not None, "left out"
        return bags(tokens, maskable, self.columns) @ self.linear

    def logits(self, latents: Tensor) -> Tensor:
        """Return log probabilities of the text's tokens, the same at every position: (B, L, Dz) -> (B, V)."""
        assert self.log_linear is not None, "left out"
        logits = _append_one(latents) @ self.log_linear
        return logits.log_softmax(-1)


def fit_baselines(train: Rows, vocabulary_size: int) -> TextBaselines:
    """Fit all baselines on at most 32,768 evenly chosen texts, read in blocks.

    The linear map is ridge regression on the counts of the 4096 most frequent tokens. Its strength is chosen on an
    eighth of the texts. The log-linear map is softmax(W latent + b), fitted by Adam in two epochs. The first is left
    out above eight million weights, the second above one million. The result is deterministic. Call it on one process:
    the demo takes about 8 seconds of one core.
    """
    rows = _training_rows(len(train))
    counts = torch.zeros(vocabulary_size)
    for batch in _blocks(train, rows):
        counted = batch["maskable"].flatten().float()
        counts.scatter_add_(0, batch["tokens"].flatten(), counted)
    columns = _feature_columns(counts)
    # Adding half an occurrence to each token keeps the logarithm of an unseen one finite.
    unigram = (counts + 0.5).log().log_softmax(0)
    log_linear = None
    if fits_log_linear(train, vocabulary_size):
        log_linear = _fit_log_linear(train, rows, unigram)
    linear = None
    if fits_linear(train, vocabulary_size):
        linear = _fit_linear(train, rows, columns)
    return TextBaselines(len(rows), columns, linear, unigram, log_linear)


def _training_rows(total: int) -> Tensor:
    """Choose evenly spaced rows, in a fixed random order."""
    # Shuffled, because the first eighth validates and the batches of the log-linear fit should be mixed.
    count = min(total, MAX_TRAINING_ROWS)
    # In fp64: in fp32 the last index may round up past the end of more than 2^24 rows.
    rows = torch.linspace(0, total - 1, count, dtype=torch.float64).round().long()
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(rows), generator=generator)
    return rows[shuffled]


def _feature_columns(counts: Tensor) -> Tensor:
    """Map each token to a column: (V,) counts -> (V,) int64. The rarest tokens share the last one."""
    occurring = int((counts > 0).sum())
    features = min(MAX_FEATURES, occurring)
    # Stable, so that the order of equally frequent tokens does not depend on the machine.
    by_frequency = counts.argsort(descending=True, stable=True)
    columns = torch.full((len(counts),), features)
    columns[by_frequency[:features]] = torch.arange(features)
    return columns


def fits_linear(train: Rows, vocabulary_size: int) -> bool:
    """Return True if the linear map is small enough to fit, even if every token of the vocabulary occurs."""
    latent = train.batch([0])["latent"]
    return min(MAX_FEATURES, vocabulary_size) * latent.numel() <= MAX_LINEAR_WEIGHTS


def fits_log_linear(train: Rows, vocabulary_size: int) -> bool:
    """Return True if the log-linear map is small enough to fit."""
    latent = train.batch([0])["latent"]
    return vocabulary_size * latent.numel() <= MAX_LOG_LINEAR_WEIGHTS


def bags(tokens: Tensor, maskable: Tensor, columns: Tensor) -> Tensor:
    """Count the tokens of each text and append 1: (B, S) -> (B, F + 1) float32."""
    features = int(columns.max())
    bag = torch.zeros(len(tokens), features + 1)  # (B, F + 1)
    bag.scatter_add_(1, columns[tokens], maskable.float())
    # Uncounted tokens fell into the last column. The constant replaces their count.
    bag[:, features] = 1.0
    return bag


def _fit_linear(train: Rows, rows: Tensor, columns: Tensor) -> Tensor:
    """Solve the normal equations in about N F^2 + 2 F^3 operations. Counts are exact in fp32, the solution is fp64."""
    validation = len(rows) // 8
    # Keep the moments of both parts: the final fit on all rows then reads nothing again.
    gram, cross = _moments(train, rows[validation:], columns)
    validation_gram, validation_cross = _moments(train, rows[:validation], columns)

    def validation_error(ridge: float) -> float:
        weights = _solve(gram, cross, ridge)
        # |bags @ weights - latents|^2 without |latents|^2, which no ridge changes. It only needs the moments.
        slope = validation_gram @ weights - 2 * validation_cross
        return float((weights * slope).sum())

    best = RIDGES[0]
    # With fewer than 8 texts there is nothing to validate on.
    if validation:
        best = min(RIDGES, key=validation_error)
    whole_gram = gram + validation_gram
    whole_cross = cross + validation_cross
    return _solve(whole_gram, whole_cross, best).float()


def _moments(train: Rows, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Sum bag x bag (F + 1, F + 1) and bag x latent (F + 1, L * Dz) over the texts, in float64."""
    size = int(columns.max()) + 1
    width = train.batch([0])["latent"].numel()
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, width, dtype=torch.float64)
    for batch in _blocks(train, rows):
        bag = bags(batch["tokens"], batch["maskable"], columns)
        gram += bag.T @ bag
        cross += bag.T @ batch["latent"].flatten(1)
    return gram, cross


def _solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    # The ridge makes it positive definite, so Cholesky works, at half the cost of a general solver.
    damped = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    return torch.cholesky_solve(cross, torch.linalg.cholesky(damped))


def _fit_log_linear(train: Rows, rows: Tensor, unigram: Tensor) -> Tensor:
    """Minimise the mean cross-entropy of a batch's tokens, starting from the unigram distribution.

    Adam is written out because the gradient is known in closed form. The learning rate decays linearly to 0.
    """
    width = train.batch([0])["latent"].numel() + 1
    # Zero: the fit starts as the unigram distribution, whatever the latent.
    weights = torch.zeros(width, len(unigram))
    # The weights of the appended 1.
    weights[-1] = unigram
    first = torch.zeros_like(weights)
    second = torch.zeros_like(weights)
    batches = torch.cat([rows] * EPOCHS).split(BATCH_ROWS)
    for step, indices in enumerate(batches):
        batch = train.batch(indices.tolist())
        gradient = _log_linear_gradient(weights, batch)
        first.lerp_(gradient, 1 - BETAS[0])
        # Squared in place: `first` has already used the gradient itself.
        second.lerp_(gradient.square_(), 1 - BETAS[1])
        first_correction = 1 - BETAS[0] ** (step + 1)
        second_correction = 1 - BETAS[1] ** (step + 1)
        denominator = (second / second_correction).sqrt_().add_(1e-8)
        step_size = LEARNING_RATE * (1 - step / len(batches)) / first_correction
        weights.addcdiv_(first, denominator, value=-step_size)
    return weights


def _log_linear_gradient(weights: Tensor, batch: Batch) -> Tensor:
    """Compute the gradient of the mean cross-entropy of a batch's tokens: (L * Dz + 1, V)."""
    latents = _append_one(batch["latent"])
    maskable = batch["maskable"].float()
    # For the sum over a text's tokens, the gradient of the logits is tokens * probabilities - counts.
    probabilities = F.softmax(latents @ weights, dim=-1)
    error = maskable.sum(1, keepdim=True) * probabilities  # (B, V)
    error.scatter_add_(1, batch["tokens"], -maskable)
    return latents.T @ error / maskable.sum().clamp(min=1)


def _append_one(latents: Tensor) -> Tensor:
    return F.pad(latents.flatten(1), (0, 1), value=1.0)


def _blocks(train: Rows, rows: Tensor) -> Iterator[Batch]:
    for indices in rows.split(BLOCK_ROWS):
        yield train.batch(indices.tolist())
