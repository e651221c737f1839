"""Length of a text, estimated from its latent, to sample text from a latent alone.

In training the model receives the true length of each text, as its padding mask, and does not predict it. The estimate
is a ridge regression of the logarithm of the length on the latent, in closed form over the training split. If latents
say nothing about the length, it is the geometric mean. Training is unaffected.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

MOST_ROWS = 65_536
"""Most texts to fit on. More would hardly change the fit, and every start waits for it."""
BLOCK_ROWS = 4096
FILE = "length.json"


class Latents(Protocol):
    """Latents by row, as in `LatentTable`."""

    def __len__(self) -> int: ...
    def rows(self, indices: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class LengthEstimate:
    """log(length) = bias + weights . features. Features are the latent, averaged over its tokens, and its RMS."""

    weights: Tensor
    """(Dz + 1,) float64"""
    bias: float
    mean_error: float
    """Mean absolute error in tokens on the texts of the fit."""
    shortest: int
    longest: int
    """Shortest and longest text of the training split. Estimates are clamped to this range."""

    def __call__(self, latents: Tensor) -> Tensor:
        """Estimate the number of tokens, special ones included, from normalised latents (B, L, Dz): (B,) int64."""
        logarithms = _features(latents) @ self.weights + self.bias
        lengths = logarithms.exp().round().long()
        return lengths.clamp(self.shortest, self.longest)

    def typical(self) -> int:
        """Estimate the number of tokens of a text without its latent, from a latent with mean 0 and RMS 1."""
        # This is the mean of the features, for which the fit gives the geometric mean of the lengths.
        length = round(math.exp(float(self.weights[-1]) + self.bias))
        return min(max(length, self.shortest), self.longest)

    def save(self, directory: Path) -> None:
        """Write length.json into an existing folder."""
        facts = {
            "weights": self.weights.tolist(),
            "bias": self.bias,
            "mean_error": self.mean_error,
            "shortest": self.shortest,
            "longest": self.longest,
        }
        (directory / FILE).write_text(json.dumps(facts), "utf-8")


def load_length(directory: Path) -> LengthEstimate:
    """Read the length.json of `LengthEstimate.save`."""
    facts = json.loads((directory / FILE).read_text("utf-8"))
    weights = torch.tensor(facts.pop("weights"), dtype=torch.float64)
    return LengthEstimate(weights, **facts)


def fit_length(table: Latents, lengths: Tensor, mean: Tensor, std: float, rows: Tensor | None = None) -> LengthEstimate:
    """Fit the estimate to lengths (N,) of texts with latents in ``table``, normalised by ``mean`` (Dz,) and ``std``.

    ``rows`` (N,) are the texts' rows in the table, by default all. Uses at most ``MOST_ROWS`` texts, evenly spread.
    The penalty weighs as much as one extra text of the mean length for each feature.
    """
    if rows is None:
        rows = torch.arange(len(table))
    step = -(-len(rows) // MOST_ROWS)
    rows = rows[::step]
    # The range is that of all texts, so it is taken before sampling.
    shortest, longest = int(lengths.min()), int(lengths.max())
    lengths = lengths[::step]
    blocks: list[Tensor] = []
    for block in rows.split(BLOCK_ROWS):
        normalised = (table.rows(block) - mean) / std
        blocks.append(_features(normalised))
    x = torch.cat(blocks)  # (n, Dz + 1)
    # In logarithms, so that every estimate is a positive length.
    y = lengths.double().log()
    centre = x.mean(0)
    bias = float(y.mean())
    # Centred, so that the penalty does not shrink the bias.
    x = x - centre
    gram = x.T @ x
    size = float(gram.diagonal().mean())
    # The 1e-9 keeps the system solvable if all features are constant.
    gram.diagonal().add_(x.shape[1] * size / len(x) + 1e-9)
    weights = torch.linalg.solve(gram, x.T @ (y - bias))
    estimates = (x @ weights + bias).exp()
    error = float((estimates - lengths).abs().mean())
    return LengthEstimate(weights, bias - float(centre @ weights), error, shortest, longest)


def _features(latents: Tensor) -> Tensor:
    """Return the mean over the latent tokens and the root mean square: (B, L, Dz) -> (B, Dz + 1) float64."""
    values = latents.double().cpu()
    size = values.square().mean(dim=(1, 2)).sqrt()  # (B,)
    return torch.cat((values.mean(1), size[:, None]), dim=1)
