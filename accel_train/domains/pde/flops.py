"""Work of a `PdeTransformer` in closed form: what a sample costs, forward and in training."""

from __future__ import annotations

import math

from accel_train.domains.models.flops import TRAINING_FACTOR
from accel_train.domains.models.layers import TIME_FEATURES
from accel_train.domains.pde.residual_network import residual_products
from accel_train.domains.pde.tokens import FieldGrid, decoder_products, encoder_products
from accel_train.domains.pde.transformer import (
    ALL_PARTS,
    PREDICTION,
    Parts,
    PdeModelConfig,
    PdeTransformerConfig,
    TaskShape,
    parameter_features,
)


def flops_per_sample(
    config: PdeTransformerConfig, task: int, queries: int | None = None, parts: Parts = ALL_PARTS, target: bool = True
) -> int:
    """Multiplications and additions of one sample's forward, with a target or without, in products of matrices and
    convolutions.

    What torch's FlopCounterMode counts and grows with the batch. `queries` None: the whole grid, whose points are
    embedded once for all samples.
    """
    shape, grid, model = config.tasks[task], config.grid(config.tasks[task]), config.model
    decoder = model.decoder()
    encoding = encoder_products(grid, model.latent, model.stem_width)
    total = encoding * (shape.input_channels + shape.target_channels * target)
    if parts.operator or parts.prediction:
        total += _operator_products(shape, grid, model)
    if latents := 2 * parts.reconstruction + parts.prediction:
        total += decoder_products(grid, shape.heads, decoder, queries, latents)
    if parts.reencoding:
        total += decoder_products(grid, shape.heads, decoder, None) + encoding * shape.target_channels
    return 2 * total


def correction_flops_per_sample(config: PdeTransformerConfig, task: int) -> int:
    """The same of one `ResidualGuess`."""
    shape, model = config.tasks[task], config.model
    channels, sizes = (shape.input_channels, shape.target_channels), (model.block(), model.residual_depth)
    products = residual_products(config.grid(shape), *channels, *sizes, model.stem_width)
    return 2 * (products + _conditioning_products(shape, model.width))


def training_flops_per_sample(config: PdeTransformerConfig, task: int, queries: int | None, parts: Parts | None) -> int:
    """Forward and backward, see `models.flops`. No fewer `queries` than the grid has points are the whole grid.

    `parts` None: the residual's stage, which predicts without gradient.
    """
    if parts is not None:
        some = queries if queries is not None and queries < math.prod(config.tasks[task].grid) else None
        return TRAINING_FACTOR * flops_per_sample(config, task, some, parts)
    predicting = flops_per_sample(config, task, None, PREDICTION, target=False)
    return predicting + TRAINING_FACTOR * correction_flops_per_sample(config, task)


def _operator_products(shape: TaskShape, grid: FieldGrid, model: PdeModelConfig) -> int:
    width, middle = model.width, len(model.stages) // 2
    halvings = [min(stage, 2 * middle - stage) for stage in range(len(model.stages))]
    lengths = [-(-math.prod(grid.cells) // 2**n) for n in halvings]
    total = _conditioning_products(shape, width)
    total += lengths[0] * model.latent * width * (1 if model.latent == width else 2)  # out, and in
    total += sum(length * width**2 for length in lengths[middle + 1 :])  # skips
    return total + sum(
        n * model.block().multiplications(length) for n, length in zip(model.stages, lengths, strict=True)
    )


def _conditioning_products(shape: TaskShape, width: int) -> int:
    return width * (TIME_FEATURES + 2 * width + parameter_features(shape.parameters))
