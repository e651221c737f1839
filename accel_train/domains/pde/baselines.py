"""What a model of fields must beat, measured on the same held-out rows: no change, the mean, the best linear map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

RIDGES = (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Relative to the mean square of the inputs."""
MAX_TRAINING_ROWS = 8192
MAX_FEATURES = 4096
FEWEST_ROWS = 8
BLOCK_NUMBERS = 1 << 22


class Rows(Protocol):
    """Normalised input (B, C, H, W), target (B, C', H, W) and parameters (B, P) of some rows, as `FieldRows` has."""

    def __len__(self) -> int: ...
    def batch(self, indices: list[int], /) -> dict[str, Tensor]: ...


def nrmse(prediction: Tensor, target: Tensor) -> Tensor:
    """(B, ...) in physical units -> (B,): sqrt(mean((prediction - target)^2) / mean(target^2)) of each sample."""
    error, size = (prediction - target).flatten(1), target.flatten(1)
    return ((error**2).mean(1) / (size**2).mean(1)).sqrt()


def baselines(
    train: Rows, heldout: Rows, denormalise: Callable[[Tensor], Tensor], *, same_fields: bool, samples: int
) -> dict[str, float]:
    """nRMSE in physical units, averaged over the first `samples` held-out rows, of what needs no model.

    On one process, in float64. persistence: the input unchanged, where `same_fields` says that the target is the
    input's own fields later on. training_mean: the mean target of the training rows, point by point. linear_fit: ridge
    regression of the flattened target on the flattened input, the parameters and 1, its strength chosen on the last
    eighth of the training rows; left out above 4096 inputs or outputs, where it would cost minutes, and below 8 rows.
    At most 8192 training rows are read, evenly chosen, and held at once for the linear fit alone: up to 0.6 GB.
    `denormalise` is that of the target.
    """
    wanted = torch.linspace(0, len(train) - 1, min(len(train), MAX_TRAINING_ROWS)).round().long()
    wanted = wanted[torch.randperm(len(wanted), generator=torch.Generator().manual_seed(0))]
    first = train.batch([0])
    shape, width = first["target"].shape[1:], first["input"].numel() + first["parameters"].numel() + 1
    if has_linear_fit(train):
        features, targets = (torch.empty(len(wanted), n, dtype=torch.float64) for n in (width, first["target"].numel()))
        start = 0
        for given, sought in _matrices(train, wanted):
            rows = slice(start, start := start + len(given))
            features[rows], targets[rows] = given, sought
        mean, weights = targets.mean(0), ridge_fit(features, targets)
    else:
        mean, weights = sum(targets.sum(0) for _, targets in _matrices(train, wanted)) / len(wanted), None
    errors: dict[str, list[Tensor]] = {"training_mean": []}
    for given, sought in _matrices(heldout, torch.arange(min(samples, len(heldout)))):
        made = {"training_mean": torch.as_tensor(mean).expand_as(sought)}
        made |= {"persistence": given[:, : sought.shape[1]]} if same_fields else {}
        made |= {} if weights is None else {"linear_fit": given @ weights}
        for name, prediction in made.items():
            physical = (denormalise(values.reshape(-1, *shape)) for values in (prediction, sought))
            errors.setdefault(name, []).append(nrmse(*physical))
    names = baseline_names(train, same_fields=same_fields)
    return {name: float(torch.cat(errors[name]).mean()) for name in names}


def has_linear_fit(train: Rows) -> bool:
    """Whether the linear fit is neither left out for its cost nor for too few rows."""
    first = train.batch([0])
    width = first["input"].numel() + first["parameters"].numel() + 1
    return max(width, first["target"].numel()) <= MAX_FEATURES and min(len(train), MAX_TRAINING_ROWS) >= FEWEST_ROWS


def baseline_names(train: Rows, *, same_fields: bool) -> list[str]:
    """The keys of ``baselines``."""
    fit = ["linear_fit"] if has_linear_fit(train) else []
    return ["training_mean", *(["persistence"] if same_fields else []), *fit]


def ridge_fit(features: Tensor, targets: Tensor) -> Tensor:
    """(N, F) and (N, D) -> weights (F, D), by the normal equations: some N F^2 + 8 F^3 operations."""
    kept = len(features) - len(features) // 8
    gram, cross = features[:kept].T @ features[:kept], features[:kept].T @ targets[:kept]

    def unseen_error(ridge: float) -> float:
        weights = _solve(gram, cross, ridge)
        return float((features[kept:] @ weights - targets[kept:]).square().mean())

    best = min(RIDGES, key=unseen_error)
    return _solve(features.T @ features, features.T @ targets, best)


def _solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    damping = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + damping, cross)


def _matrices(rows: Rows, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs, parameters and 1 as (n, F), and targets as (n, D), in float64: block after block of some megabytes."""
    first = rows.batch([0])
    size = max(1, BLOCK_NUMBERS // (first["input"].numel() + first["target"].numel()))
    for part in wanted.split(size):
        batch = rows.batch(part.tolist())
        one = torch.ones(len(part), 1)
        features = torch.cat([batch["input"].flatten(1), batch["parameters"], one], dim=1).double()
        yield features, batch["target"].flatten(1).double()
