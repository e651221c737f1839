"""FLOPs of a `PdeTransformer` per sample in closed form, for a forward and for a training step."""

from __future__ import annotations

import math

from accel_train.domains.models.flops import TRAINING_FACTOR
from accel_train.domains.models.layers import TIME_FEATURES
from accel_train.domains.pde.conditioning import parameter_features
from accel_train.domains.pde.residual.network import residual_multiplications
from accel_train.domains.pde.shape import PdeModelConfig, PdeTransformerConfig, TaskShape
from accel_train.domains.pde.tokens import FieldGrid, decoder_multiplications, encoder_multiplications
from accel_train.domains.pde.transformer import ALL_PARTS, PREDICTION, Parts


def flops_per_sample(
    config: PdeTransformerConfig, task: int, queries: int | None = None, parts: Parts = ALL_PARTS, target: bool = True
) -> int:
    """Count multiplications and additions of one sample's forward, in matrix products and convolutions.

    Equals the batch-dependent part of torch's FlopCounterMode. `queries` None: the whole grid, with its points embedded
    once for all samples. `target`: the target is encoded as well.
    """
    shape = config.tasks[task]
    grid = config.grid(shape)
    model = config.model
    decoder = model.decoder()
    encoding = encoder_multiplications(grid, model.latent, model.stem_width)  # per channel
    total = encoding * shape.input_channels
    if target:
        total += encoding * shape.target_channels
    if parts.operator or parts.prediction:
        total += _operator_multiplications(shape, grid, model)
    # Reconstruction decodes both the input and the target.
    latents = 2 * parts.reconstruction + parts.prediction
    if latents:
        total += decoder_multiplications(grid, shape.heads, decoder, queries, latents)
    if parts.reencoding:
        # On the whole grid whatever the queries, because the encoder reads nothing less.
        total += decoder_multiplications(grid, shape.heads, decoder, None)
        total += encoding * shape.target_channels
    return 2 * total


def correction_flops_per_sample(config: PdeTransformerConfig, task: int) -> int:
    """Count multiplications and additions of one sample's correction of a `ResidualGuess`."""
    shape = config.tasks[task]
    model = config.model
    products = residual_multiplications(
        config.grid(shape),
        shape.input_channels,
        shape.target_channels,
        model.block(),
        model.residual_depth,
        model.stem_width,
    )
    return 2 * (products + _conditioning_multiplications(shape, model.width))


def training_flops_per_sample(config: PdeTransformerConfig, task: int, queries: int | None, parts: Parts | None) -> int:
    """Count forward and backward, see `models.flops`. As many `queries` as grid points mean the whole grid.

    `parts` None: the residual stage, with a prediction without gradient.
    """
    if parts is None:
        predicting = flops_per_sample(config, task, None, PREDICTION, target=False)
        return predicting + TRAINING_FACTOR * correction_flops_per_sample(config, task)
    if queries is not None and queries >= math.prod(config.tasks[task].grid):
        queries = None
    return TRAINING_FACTOR * flops_per_sample(config, task, queries, parts)


def _operator_multiplications(shape: TaskShape, grid: FieldGrid, model: PdeModelConfig) -> int:
    width = model.width
    block = model.block()
    middle = len(model.stages) // 2
    tokens = math.prod(grid.cells)
    projections = 1 if model.latent == width else 2  # none into the operator where the widths agree
    total = _conditioning_multiplications(shape, width)
    total += tokens * model.latent * width * projections
    for stage, depth in enumerate(model.stages):
        halvings = min(stage, 2 * middle - stage)
        length = math.ceil(tokens / 2**halvings)
        total += depth * block.multiplications(length)
        if stage > middle:
            total += length * width**2  # the skip connection
    return total


def _conditioning_multiplications(shape: TaskShape, width: int) -> int:
    # Two layers for the time step, one for the parameters, and the projection of their sum.
    features = TIME_FEATURES + 2 * width + parameter_features(shape.parameters)
    return width * features
