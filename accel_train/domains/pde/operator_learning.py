"""The objective of a latent operator: its stages, the terms of its loss in each step, the points it is asked at.

Stage 1 teaches encoder and decoder to be each other's inverse, stage 2 the operator between them, stage 3 what their
prediction misses. Which terms a step has is a function of the step, and a term left out has coefficient 0, so that
every process and strategy does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from accel_train.config import Fraction, FractionBelowOne, NonNegativeFloat, NonNegativeInt, PositiveInt, UsageError
from accel_train.domains.pde import fields, losses
from accel_train.domains.pde.losses import TERMS
from accel_train.domains.pde.rollout import ConditioningConfig
from accel_train.domains.pde.rows import FieldTask
from accel_train.domains.pde.transformer import Parts

Stage = Literal["autoencode", "operator", "residual"]
AUTOENCODER = ("encoders", "target_encoders", "decoder")
"""Modules that the operator stage can freeze."""
RESIDUAL = "residual"
"""The module that the residual stage alone trains."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned, term by term, and in which order. All errors are of normalised fields."""

    autoencode_steps: NonNegativeInt = 0
    """Steps of the first stage, in which encoder and decoder alone learn to be inverse to each other. The rest is the
    second stage, in which the operator learns; a run goes from one to the other by itself, and so does a resume."""
    freeze_autoencoder: bool = False
    """Second stage: encoder and decoder keep what the first stage taught them. False: the prediction trains all."""
    latent_weight: NonNegativeFloat = 0.0
    """Second stage: of the squared distance from the predicted latent to that of the target, which is held still."""
    inverse_weight: NonNegativeFloat = 0.05
    """Of decoding what was encoded, and of encoding again what was decoded. In the first stage the first of the two
    counts 1 and the second this."""
    inverse_every: PositiveInt = 1
    """Second stage: steps between two with the inverse terms, which cost a decoding and an encoding more."""
    spectral_weight: NonNegativeFloat = 0.0
    """Of the error of the prediction's Fourier amplitudes, relative to the target's energy. Needs the whole grid."""
    boundary_weight: NonNegativeFloat = 0.0
    """Tasks with a fixed boundary: of the predicted value there."""
    conservation_weight: NonNegativeFloat = 0.0
    """Tasks that conserve: of the change of each field's integral. Needs the whole grid."""
    queries: PositiveInt | None = None
    """Points at which a sample is decoded in training, drawn anew in each step. None, and on a grid of no more points:
    all of them."""
    query_sampling: Literal["uniform", "stratified"] = "stratified"
    """uniform: points drawn one by one. stratified: the grid's points cut into `queries` equal runs, one of each."""
    drop_path: FractionBelowOne = 0.0
    """Probability that a sample skips the last block of the operator, growing linearly from 0 at the first."""
    flip: Fraction = 0.0
    """Tasks without time: share of samples mirrored along each axis. For equations that have this symmetry."""
    residual_from: PositiveInt | None = None
    """Optimizer step at which the third stage begins: all else keeps still, and model.residual_depth blocks learn to
    draw what the prediction misses. The learning rate's schedule ends there and begins anew. None: no such stage."""
    residual_steps: PositiveInt = 1
    """Third stage: steps from noise to what a prediction misses, a forward each; their times alone are learned. 1: the
    mean of what may be missed, which has the lowest error. More, such as 4: a likely one, for what the input does not
    tell."""

    def __post_init__(self) -> None:
        whole = {"spectral_weight": self.spectral_weight, "conservation_weight": self.conservation_weight}
        for name, weight in whole.items():
            if weight and self.queries is not None:
                raise UsageError(
                    f"objective.{name} {weight:g}: is of the whole grid, and objective.queries {self.queries} decodes "
                    "a part of it. Leave queries at None, or this weight at 0."
                )
        if self.freeze_autoencoder and not self.autoencode_steps:
            raise UsageError(
                "objective.freeze_autoencoder true with autoencode_steps 0: encoder and decoder would stay at their "
                "random initial values. Give the first stage some steps, or do not freeze them."
            )
        if self.freeze_autoencoder and self.inverse_every != 1:
            raise UsageError(
                f"objective.inverse_every {self.inverse_every} with freeze_autoencoder true: the inverse terms train "
                "encoder and decoder, so a second stage that freezes them has none. Leave one of the two out."
            )
        if self.queries is None and self.query_sampling != "stratified":
            raise UsageError(
                f"objective.query_sampling {self.query_sampling}: has no effect without objective.queries. Give their "
                "number, or leave query_sampling out."
            )
        if self.residual_from is not None and self.residual_from <= self.autoencode_steps:
            raise UsageError(
                f"objective.residual_from {self.residual_from}: must be more than autoencode_steps "
                f"{self.autoencode_steps}, or the operator would never learn. Raise it."
            )
        if self.residual_from is None and self.residual_steps != 1:
            raise UsageError(
                f"objective.residual_steps {self.residual_steps}: has no effect without objective.residual_from. Give "
                "the step at which its stage begins, or leave residual_steps out."
            )


def stage_of_step(config: ObjectiveConfig, step: int) -> Stage:
    """The stage that optimizer step ``step`` belongs to."""
    if config.residual_from is not None and step >= config.residual_from:
        return "residual"
    return "autoencode" if step < config.autoencode_steps else "operator"


def place_in_schedule(config: ObjectiveConfig, step: int, decay_steps: int) -> tuple[int, int]:
    """Where optimizer step ``step`` stands in its learning-rate schedule, and that schedule's steps.

    The first two stages share one, which has ended when their weights are kept still; the residual's has the rest of
    ``decay_steps``.
    """
    start = config.residual_from
    if start is None:
        return step, decay_steps
    return (step, min(start, decay_steps)) if step < start else (step - start, decay_steps - start)


def coefficients(config: ObjectiveConfig, step: int, conserved: bool, boundary: str) -> dict[str, float]:
    """Coefficient of every term of ``TERMS`` in this step, 0 for what it or its task does not have."""
    stage = stage_of_step(config, step)
    if stage == "residual":
        return dict.fromkeys(TERMS, 0.0) | {"residual": 1.0}
    if stage == "autoencode":
        return dict.fromkeys(TERMS, 0.0) | {"reconstruction": 1.0, "reencoding": config.inverse_weight}
    inverse = config.inverse_weight if step % config.inverse_every == 0 and not config.freeze_autoencoder else 0.0
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
    """Module prefixes that some stage freezes, for the optimizer's groups; mostly none."""
    modules = list(dict.fromkeys(name.split(".")[0] for name, _ in model.named_parameters()))
    autoencoder = [name for name in modules if name in AUTOENCODER]
    if config.residual_from is None:
        return {"autoencoder": autoencoder} if config.freeze_autoencoder else {}
    others = [name for name in modules if name not in (*AUTOENCODER, RESIDUAL)]
    return {"autoencoder": autoencoder, "operator": others, RESIDUAL: [RESIDUAL]}


def frozen_parts(config: ObjectiveConfig, step: int) -> list[str]:
    """Parts frozen in this step. The residual's keeps its first values until its stage, whatever the weight decay."""
    stage = stage_of_step(config, step)
    if stage == "residual":
        return ["autoencoder", "operator"]
    frozen = ["autoencoder"] if config.freeze_autoencoder and stage == "operator" else []
    return frozen if config.residual_from is None else [*frozen, RESIDUAL]


def used(coefficients: Mapping[str, float]) -> set[str]:
    """Terms that count in this step."""
    return {term for term, coefficient in coefficients.items() if coefficient}


@dataclass(frozen=True)
class StepObjective:
    """What one optimizer step learns. The same on every process."""

    number: int
    """Of the task, in the order of the data."""
    task: FieldTask
    coefficients: Mapping[str, float]
    """Of every term of ``TERMS``."""
    frozen: Sequence[str]
    """Parts of the model that keep still."""
    train_encoder: bool
    """Whether the losses behind the encoder train it."""

    @property
    def terms(self) -> set[str]:
        return used(self.coefficients)

    @property
    def parts(self) -> Parts | None:
        """What the model computes. None: a prediction without gradient, and what it misses."""
        return losses.parts_of(self.terms, train_encoder=self.train_encoder)


def objective_of_step(config: ObjectiveConfig, step: int, number: int, task: FieldTask) -> StepObjective:
    """What optimizer step ``step`` learns of task ``number``."""
    return StepObjective(
        number,
        task,
        coefficients(config, step, task.conserved, task.boundary),
        frozen_parts(config, step),
        train_encoder=not config.freeze_autoencoder,
    )


def queries_of(config: ObjectiveConfig, points: int) -> int | None:
    """Points at which a sample on a grid of ``points`` is decoded; None: at all of them."""
    return config.queries if config.queries is not None and config.queries < points else None


BOUNDARY_POINTS = 64
"""Points at which the boundary term looks, drawn anew for each sample and step."""


def with_queries(
    config: ObjectiveConfig,
    batch: Mapping[str, Tensor],
    coordinates: Tensor,
    draws: Callable[..., Tensor],
    terms: Collection[str],
) -> dict[str, Tensor]:
    """The batch, and where it is decoded: ``given`` and ``sought`` (B, C, Q), and ``queries`` where not the whole grid.

    ``coordinates`` (H * W, d) are those of the grid's points; ``draws(stream, *shape)`` gives uniform draws
    (B, *shape) keyed by sample. With the boundary term in ``terms``, ``BOUNDARY_POINTS`` more queries follow the Q.
    """
    made = dict(batch) | {"given": batch["input"].flatten(2), "sought": batch["target"].flatten(2)}
    if (count := queries_of(config, len(coordinates))) is not None:
        stratified = config.query_sampling == "stratified"
        places = fields.sample_points(draws("queries", count), len(coordinates), stratified)  # (B, Q)
        made["queries"] = coordinates[places]
        made["given"], made["sought"] = (fields.at_points(batch[name], places) for name in ("input", "target"))
    if "boundary" in terms:
        edge = fields.boundary_points(draws("boundary", BOUNDARY_POINTS), coordinates.shape[1])
        inner = made.get("queries", coordinates.expand(len(edge), -1, -1))
        made["queries"] = torch.cat((inner, edge), dim=1)
    return made


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out fields, with the averaged weights."""

    every: NonNegativeInt = 0
    """Optimizer steps between evaluations; there is always one at the end, and 0 makes only that."""
    samples: PositiveInt = 256
    """Held-out rows of each task, over all processes."""
    batch_size: PositiveInt = 64
    """Samples per process per forward."""
    trajectories: PositiveInt = 32
    """Held-out trajectories of each task with time that are rolled out, over all processes."""
    conditioning: ConditioningConfig = field(default_factory=ConditioningConfig)
    patience: PositiveInt | None = None
    """Evaluations without a better mean error of all tasks after which the run ends; those of the first stage do not
    count. None: it runs to its end."""

    def __post_init__(self) -> None:
        if self.patience is not None and self.every == 0:
            raise UsageError(
                f"evaluation.patience {self.patience}: counts evaluations, and evaluation.every 0 makes one only, at "
                "the end. Set evaluation.every to a number of steps."
            )

    def due(self, step: int, max_steps: int) -> bool:
        """Whether to evaluate after ``step`` steps."""
        return step == max_steps or (self.every > 0 and step % self.every == 0)


def check_residual(objective: ObjectiveConfig, evaluation: EvaluationConfig, depth: int) -> None:
    """Refuse a residual's stage without a network of ``depth`` model.residual_depth, and a network without a stage."""
    start = objective.residual_from
    if (start is None) != (depth == 0):
        raise UsageError(
            f"objective.residual_from {start} with model.residual_depth {depth}: the stage needs a network, and the "
            "network a stage. Give both (depth 1 or more), or leave both out."
        )
    if start is not None and evaluation.patience is not None:
        raise UsageError(
            f"evaluation.patience {evaluation.patience} with objective.residual_from {start}: patience looks at the "
            "plain prediction, which keeps still in that stage. Leave one of them out."
        )


class Task(Protocol):
    """What a task's equation has, as `FieldTask` says it."""

    @property
    def conserved(self) -> bool: ...
    @property
    def boundary(self) -> str: ...
    @property
    def has_time(self) -> bool: ...


def check_tasks(objective: ObjectiveConfig, evaluation: EvaluationConfig, tasks: Iterable[Task]) -> None:
    """Refuse options that are about something no task has."""
    tasks = list(tasks)
    conserved, dirichlet = any(t.conserved for t in tasks), any(t.boundary == "dirichlet" for t in tasks)
    steady, conditioning = any(not t.has_time for t in tasks), evaluation.conditioning
    faults = (
        (conserved, "objective.conservation_weight", objective.conservation_weight, 0.0, "conserves its integral"),
        (dirichlet, "objective.boundary_weight", objective.boundary_weight, 0.0, "has a fixed boundary"),
        (steady, "objective.flip", objective.flip, 0.0, "is without time"),
        (conserved, "evaluation.conditioning", conditioning, ConditioningConfig(), "conserves its integral"),
    )
    for present, name, value, default, what in faults:
        if value != default and not present:
            raise UsageError(
                f"{name} {value}: has no effect, for no task of data.tasks {what}. Leave it at {default}, or add such "
                "a task."
            )


def check_stages(objective: ObjectiveConfig, warmup_steps: int, max_steps: int, decay_steps: int) -> list[str]:
    """Refuse a residual's stage that cannot learn; lines for the log where a run ends before a stage.

    ``decay_steps`` is where the schedule ends.
    """
    start, first = objective.residual_from, objective.autoencode_steps
    ends = f"the run ends before it, at step {max_steps}"
    lines: list[str] = []
    if max_steps <= first:
        lines.append(f"objective.autoencode_steps {first}: the operator learns after it; {ends}, so it learns nothing")
    if start is None:
        return lines
    if start < warmup_steps or decay_steps - start <= warmup_steps:
        raise UsageError(
            f"objective.residual_from {start}: the learning rate begins anew there, and warms up for {warmup_steps} "
            f"steps before and after; the schedule ends at step {decay_steps}. Move it, or lower "
            "schedule.warmup_steps."
        )
    if max_steps <= start:
        lines.append(f"objective.residual_from {start}: {ends}; the residual learns nothing")
    return lines


def mirrored(values: Tensor, draws: Tensor, share: float) -> Tensor:
    """(B, C, H, W) and uniform draws (B, 2) -> samples mirrored along each axis whose draw is below ``share``."""
    for axis in (2, 3):
        chosen = (draws[:, axis - 2] < share)[:, None, None, None]
        values = torch.where(chosen, values.flip(axis), values)
    return values
