"""Objective of a latent operator: its stages, the loss terms of each step and the query points.

Stage 1 trains encoder and decoder to be inverse to each other, stage 2 the operator between them, stage 3 the residual
of their prediction. The terms of a step are a function of the step, and an unused term has coefficient 0. Every
process and strategy therefore does the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.datasets import Batch
from accel_train.domains.pde import fields, losses
from accel_train.domains.pde.data.assets import FieldTask
from accel_train.domains.pde.losses import TERMS
from accel_train.domains.pde.options import ObjectiveConfig
from accel_train.domains.pde.shape import PdeModelConfig, PdeTransformerConfig, TaskShape
from accel_train.domains.pde.tokens import grid_coordinates
from accel_train.domains.pde.transformer import Parts

Stage = Literal["autoencode", "operator", "residual"]
AUTOENCODER = ("encoders", "target_encoders", "decoder")
"""Modules the operator stage can freeze."""
RESIDUAL = "residual"
"""Module trained in the residual stage alone."""


def model_shape(config: PdeModelConfig, tasks: Iterable[FieldTask]) -> PdeTransformerConfig:
    """Return the shape of the model for these tasks. Raises ``UsageError`` for a patch size that no task uses."""
    shapes = tuple(task_shape(task) for task in tasks)
    for space in (1, 2):
        name = f"patch_{space}d"
        value, default = getattr(config, name), getattr(PdeModelConfig, name)
        if value != default and not any((shape.grid[0] == 1) == (space == 1) for shape in shapes):
            raise UsageError(
                f"model.{name} {value}: has no effect, because no task of data.tasks has {space}-D fields. Leave it at "
                f"{default}, or add such a task."
            )
    return PdeTransformerConfig(shapes, config)


def task_shape(task: FieldTask) -> TaskShape:
    """Return the shape of a task, from which the model is built."""
    return TaskShape(
        task.name,
        task.input_channels,
        task.target_channels,
        task.grid,
        len(task.parameters),
        periodic=task.boundary == "periodic",
        same_fields=task.has_time,
    )


def stage_of_step(config: ObjectiveConfig, step: int) -> Stage:
    """Return the stage of optimizer step ``step``."""
    if config.residual_from is not None and step >= config.residual_from:
        return "residual"
    if step < config.autoencode_steps:
        return "autoencode"
    return "operator"


def smoke_values(config: ObjectiveConfig) -> dict[str, Any]:
    """Return the options of ``--smoke``: one step of each stage, so that every term of the loss is tried."""
    values: dict[str, Any] = {"evaluation.samples": 2, "objective.autoencode_steps": 1}
    if config.residual_from is not None:
        values |= {"objective.residual_from": 2, "max_steps": 3}
    return values


def place_in_schedule(config: ObjectiveConfig, step: int, decay_steps: int) -> tuple[int, int]:
    """Return the position of optimizer step ``step`` in its learning-rate schedule, and the schedule's length.

    The first two stages share one schedule, which ends where their weights are frozen. The residual stage has its own
    schedule over the rest of ``decay_steps``.
    """
    start = config.residual_from
    if start is None:
        return step, decay_steps
    if step < start:
        return step, min(start, decay_steps)
    return step - start, decay_steps - start


def coefficients(config: ObjectiveConfig, step: int, conserved: bool, boundary: str) -> dict[str, float]:
    """Return the coefficient of every term of ``TERMS`` in this step, 0 for terms unused by the step or its task."""
    stage = stage_of_step(config, step)
    if stage == "residual":
        return dict.fromkeys(TERMS, 0.0) | {"residual": 1.0}
    if stage == "autoencode":
        return dict.fromkeys(TERMS, 0.0) | {"reconstruction": 1.0, "reencoding": config.inverse_weight}
    # The inverse terms keep it an autoencoder. Not in every step, because they cost two more decodings.
    inverse = 0.0
    if step % config.inverse_every == 0 and not config.freeze_autoencoder:
        inverse = config.inverse_weight
    return {
        "prediction": 1.0,
        "latent": config.latent_weight,
        "reconstruction": inverse,
        "reencoding": inverse,
        "spectral": config.spectral_weight,
        "boundary": config.boundary_weight if boundary == "dirichlet" else 0.0,
        "conservation": config.conservation_weight if conserved else 0.0,
        "residual": 0.0,
    }


def freezable(config: ObjectiveConfig, model: nn.Module) -> dict[str, list[str]]:
    """Map each part frozen by some stage to its module prefixes, for the optimizer's groups. Mostly empty."""
    names = [name for name, _ in model.named_parameters()]
    # From the parameters rather than the modules, because a prefix without parameters is refused.
    modules = list(dict.fromkeys(name.split(".")[0] for name in names))
    autoencoder = [name for name in modules if name in AUTOENCODER]
    if config.residual_from is not None:
        others = [name for name in modules if name not in (*AUTOENCODER, RESIDUAL)]
        return {"autoencoder": autoencoder, "operator": others, RESIDUAL: [RESIDUAL]}
    if config.freeze_autoencoder:
        return {"autoencoder": autoencoder}
    return {}


def frozen_parts(config: ObjectiveConfig, step: int) -> list[str]:
    """List the parts frozen in this step."""
    stage = stage_of_step(config, step)
    if stage == "residual":
        return ["autoencoder", "operator"]
    frozen: list[str] = []
    if config.freeze_autoencoder and stage == "operator":
        frozen.append("autoencoder")
    if config.residual_from is not None:
        # Weight decay must not shrink the residual network before its stage.
        frozen.append(RESIDUAL)
    return frozen


def active_terms(coefficients: Mapping[str, float]) -> set[str]:
    """Return the terms with a coefficient above 0."""
    return {term for term, coefficient in coefficients.items() if coefficient}


def trained_terms(config: ObjectiveConfig, tasks: Iterable[FieldTask]) -> set[str]:
    """Return the terms that are trained in at least one step of the whole objective."""
    first = config.autoencode_steps
    # The first step of each stage, and the first step of the second stage that has the inverse terms.
    steps = [0, first, first + -first % config.inverse_every]
    if config.residual_from is not None:
        steps.append(config.residual_from)
    terms: set[str] = set()
    for step, task in itertools.product(steps, tasks):
        terms |= active_terms(coefficients(config, step, task.conserved, task.boundary))
    return terms


@dataclass(frozen=True)
class StepObjective:
    """Objective of one optimizer step, the same on every process."""

    number: int
    """Number of the task, in the order of the data."""
    task: FieldTask
    coefficients: Mapping[str, float]
    """Coefficient of every term of ``TERMS``."""
    frozen: Sequence[str]
    """Frozen parts of the model."""
    train_encoder: bool
    """True: losses on the operator's output also train the encoder."""

    @property
    def terms(self) -> set[str]:
        return active_terms(self.coefficients)

    @property
    def parts(self) -> Parts | None:
        """Parts of the forward. None: the residual stage, with a prediction without gradient."""
        return losses.parts_of(self.terms, train_encoder=self.train_encoder)


def objective_of_step(config: ObjectiveConfig, step: int, number: int, task: FieldTask) -> StepObjective:
    """Return the objective of optimizer step ``step``, which trains task ``number``.

    Raises ``UsageError`` for a loss term that is missing from ``TERMS`` or from ``coefficients``.
    """
    weights = coefficients(config, step, task.conserved, task.boundary)
    for name in sorted(weights.keys() ^ TERMS.keys()):
        places = ["TERMS of domains/pde/losses.py", "coefficients of domains/pde/operator_learning.py"]
        present, absent = places if name in TERMS else reversed(places)
        raise UsageError(f"loss term {name!r}: it is in {present} but not in {absent}; add it there")
    return StepObjective(
        number,
        task,
        weights,
        frozen_parts(config, step),
        train_encoder=not config.freeze_autoencoder,
    )


def query_count(config: ObjectiveConfig, points: int) -> int | None:
    """Return the number of query points per sample on a grid of ``points``. None: all of them."""
    if config.queries is None or config.queries >= points:
        return None
    return config.queries


BOUNDARY_POINTS = 64
"""Points of the boundary term, drawn again for each sample and step."""


def add_queries(
    config: ObjectiveConfig,
    batch: Batch,
    draws: Callable[..., Tensor],
    terms: Collection[str],
) -> dict[str, Tensor]:
    """Add the query points, at which fields are decoded, to a batch.

    The result has ``query_input`` and ``query_target`` (B, C, Q), and ``queries`` unless the whole grid is decoded.
    ``draws(stream, *shape)`` returns uniform draws (B, *shape) keyed by sample. With the boundary term in ``terms``,
    ``BOUNDARY_POINTS`` more queries follow the Q.
    """
    coordinates = grid_coordinates(batch["input"].shape[2:], batch["input"].device)  # (H * W, d)
    result = dict(batch)
    result["query_input"] = batch["input"].flatten(2)
    result["query_target"] = batch["target"].flatten(2)
    count = query_count(config, len(coordinates))
    if count is not None:
        stratified = config.query_sampling == "stratified"
        index = fields.sample_points(draws("queries", count), len(coordinates), stratified)  # (B, Q)
        result["queries"] = coordinates[index]  # (B, Q, d)
        result["query_input"] = fields.at_points(batch["input"], index)
        result["query_target"] = fields.at_points(batch["target"], index)
    if "boundary" in terms:
        edge = fields.boundary_points(draws("boundary", BOUNDARY_POINTS), coordinates.shape[1])
        # The whole grid is repeated for each sample, because their boundary points differ.
        inner = result.get("queries", coordinates.expand(len(edge), -1, -1))
        # Appended, so that the losses on data, which read the first Q points, leave them out.
        result["queries"] = torch.cat((inner, edge), dim=1)
    return result


def mirror_fields(batch: Batch, draws: Tensor, share: float) -> Batch:
    """Mirror ``input`` and ``target`` of a batch along the same axes."""
    mirrored = dict(batch)
    for name in ("input", "target"):
        mirrored[name] = mirror(batch[name], draws, share)
    return mirrored


def mirror(values: Tensor, draws: Tensor, share: float) -> Tensor:
    """Mirror samples (B, C, H, W) along each axis with a draw below ``share``. Uniform draws are (B, 2)."""
    for axis in (2, 3):
        chosen = (draws[:, axis - 2] < share)[:, None, None, None]  # (B, 1, 1, 1)
        # Not by indexing: its shape would depend on the draws, which requires waiting for the device.
        values = torch.where(chosen, values.flip(axis), values)
    return values
