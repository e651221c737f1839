"""Baselines for operator learning: persistence, the training mean and the best linear map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from accel_train.data.datasets import Batch
from accel_train.domains.pde.fields import Scale, least_squares, relative_l2

BASELINES = ("training_mean", "persistence", "linear_fit")
RIDGES = (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridge strengths relative to the mean square of the inputs."""
STRONGER = (1.0, 10.0, 100.0, 1e3, 1e4)
"""Strengths tried in turn as long as the strongest so far is the best. The last one shrinks the map almost to 0."""
MAX_TRAINING_ROWS = 8192
MAX_FEATURES = 4096
MIN_ROWS = 8
BLOCK_VALUES = 1 << 22


class Rows(Protocol):
    """Normalised input (B, C, H, W), target (B, C', H, W) and parameters (B, P) by index, as in `FieldRows`."""

    def __len__(self) -> int: ...
    def batch(self, indices: list[int], /) -> Batch: ...


def nrmse(prediction: Tensor, target: Tensor, least: Tensor) -> Tensor:
    """Compute sqrt(mean((prediction - target)^2) / mean(target^2)) of each sample: (B, ...) -> (B,) or fewer.

    As in the model's nRMSE, zero targets are left out: those with a mean square of at most ``least``.
    """
    squared_error = (prediction - target).flatten(1) ** 2
    square = target.flatten(1) ** 2
    error, has_size = relative_l2(squared_error.mean(1), square.mean(1), least)
    return error[has_size > 0]


def baselines(train: Rows, heldout: Rows, scale: Scale, *, same_fields: bool) -> dict[str, list[float]]:
    """Score the baselines by nRMSE in physical units, averaged over the held-out rows whose target is not zero.

    Returns the nRMSE of all channels together, followed by that of each channel if there are several.

    training_mean: the mean target of the training rows, point by point. persistence: the input unchanged, if
    `same_fields` (the target is the input's fields at a later time). linear_fit: ridge regression of the flattened
    target on the flattened input, the parameters and 1, with the strength chosen on the last eighth of the training
    rows. It is left out above 4096 inputs or outputs, where it would take minutes, and below 8 rows.

    Reads at most 8192 training rows, evenly spaced. Only the linear fit holds them in memory together, up to 0.6 GB.
    Runs in float64 on one process. `scale` maps targets to physical units, in multiples of `Scale.unit`.
    """
    shape = train.batch([0])["target"].shape[1:]
    mean, weights = _fit(train)
    names = baseline_names(train, same_fields=same_fields)
    errors: dict[str, list[list[Tensor]]] = {name: [] for name in names}
    for features, targets in _blocks(heldout, torch.arange(len(heldout))):
        predictions = {"training_mean": mean.expand_as(targets)}
        if same_fields:
            # The input's values are the first features, and its fields are those of the target.
            predictions["persistence"] = features[:, : targets.shape[1]]
        if weights is not None:
            predictions["linear_fit"] = features @ weights
        physical_target = scale.denormalise(targets.reshape(-1, *shape))
        for name, prediction in predictions.items():
            physical = scale.denormalise(prediction.reshape(-1, *shape))
            errors[name].append(_errors(physical, physical_target, scale))
    scores: dict[str, list[float]] = {}
    for name in names:
        per_row = [torch.cat(blocks) for blocks in zip(*errors[name], strict=True)]
        scores[name] = [float(error.mean()) for error in per_row]
    return scores


def _errors(prediction: Tensor, target: Tensor, scale: Scale) -> list[Tensor]:
    """Return the ``nrmse`` of physical fields (B, C, H, W) over all channels, then per channel if there are several."""
    least = least_squares(scale, target)
    errors = [nrmse(prediction, target, least.mean())]
    if len(least) > 1:
        of_channels = zip(prediction.unbind(1), target.unbind(1), least, strict=True)
        errors += [nrmse(*channel) for channel in of_channels]
    return errors


def _fit(train: Rows) -> tuple[Tensor, Tensor | None]:
    """Return the mean target (D,) and the weights (F, D) of the linear fit, None if it is left out."""
    count = min(len(train), MAX_TRAINING_ROWS)
    # Evenly over the split: the first samples may all be from one file, with one value of the parameter.
    # In fp64: in fp32 the last index may round up past the end of more than 2^24 rows.
    places = torch.linspace(0, len(train) - 1, count, dtype=torch.float64)
    wanted = places.round().long()
    # Shuffled, because the linear fit validates on the last eighth.
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(wanted), generator=generator)
    wanted = wanted[shuffled]
    if has_linear_fit(train):
        features, targets = _load(train, wanted)
        return targets.mean(0), ridge_fit(features, targets)
    # Block by block, because rows too wide for the fit may not fit into memory together.
    total = sum(targets.sum(0) for _, targets in _blocks(train, wanted))
    return torch.as_tensor(total / len(wanted)), None


def has_linear_fit(train: Rows) -> bool:
    """Return True if the linear fit is affordable and there are enough rows for it."""
    width = max(_widths(train))
    return width <= MAX_FEATURES and len(train) >= MIN_ROWS


def baseline_names(train: Rows, *, same_fields: bool) -> list[str]:
    """List the keys of ``baselines``."""
    names = ["training_mean"]
    if same_fields:
        names.append("persistence")
    if has_linear_fit(train):
        names.append("linear_fit")
    return names


def ridge_fit(features: Tensor, targets: Tensor) -> Tensor:
    """Fit (N, F) -> (N, D) by the normal equations, in about N F^2 + 8 F^3 operations. Returns weights (F, D)."""
    kept = len(features) - len(features) // 8
    fitted = features[:kept]
    gram = fitted.T @ fitted  # (F, F)
    cross = fitted.T @ targets[:kept]  # (F, D)

    def validation_error(ridge: float) -> float:
        weights = _solve(gram, cross, ridge)
        error = features[kept:] @ weights - targets[kept:]
        return float(error.square().mean())

    errors = {ridge: validation_error(ridge) for ridge in RIDGES}
    best = min(RIDGES, key=errors.__getitem__)
    for ridge in STRONGER:
        # Go on only while the strongest ridge is the best: the optimum may lie beyond it.
        if best != max(errors):
            break
        errors[ridge] = validation_error(ridge)
        best = min(errors, key=errors.__getitem__)
    # Fit again, now with the validation rows as well.
    whole_gram = features.T @ features
    whole_cross = features.T @ targets
    return _solve(whole_gram, whole_cross, best)


def _solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    identity = torch.eye(len(gram), dtype=gram.dtype)
    # Relative to the inputs, so that the same strengths suit fields of any scale.
    damping = ridge * gram.diagonal().mean() * identity
    return torch.linalg.solve(gram + damping, cross)


def _widths(rows: Rows) -> tuple[int, int]:
    """Count the features F (input, parameters and 1) and the target values D of a row."""
    first = rows.batch([0])
    features = first["input"].numel() + first["parameters"].numel() + 1
    return features, first["target"].numel()


def _load(rows: Rows, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Read features (N, F) and targets (N, D) of all wanted rows into memory."""
    width, target_width = _widths(rows)
    features = torch.empty(len(wanted), width, dtype=torch.float64)
    targets = torch.empty(len(wanted), target_width, dtype=torch.float64)
    start = 0
    for block_features, block_targets in _blocks(rows, wanted):
        stop = start + len(block_features)
        features[start:stop] = block_features
        targets[start:stop] = block_targets
        start = stop
    return features, targets


def _blocks(rows: Rows, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features (n, F) and targets (n, D) in float64, some megabytes at a time."""
    first = rows.batch([0])
    values = first["input"].numel() + first["target"].numel()
    size = max(1, BLOCK_VALUES // values)
    for indices in wanted.split(size):
        batch = rows.batch(indices.tolist())
        # The constant lets the map have an offset.
        one = torch.ones(len(indices), 1)
        input = batch["input"].flatten(1)
        features = torch.cat([input, batch["parameters"], one], dim=1)
        targets = batch["target"].flatten(1)
        # In fp64, because the normal equations square the condition number of the features.
        yield features.double(), targets.double()
