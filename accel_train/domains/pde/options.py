"""Options of the objective and of the evaluation of a latent operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from accel_train.config import (
    Fraction,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UsageError,
    refuse_without_effect,
)

# The plain step and the nine `trajectories.NOISES`: all proposals that exist for a task that is not periodic.
MOST_CANDIDATES = 10


@dataclass(frozen=True)
class ObjectiveConfig:
    """Loss terms and stages. All errors are computed on normalised fields."""

    autoencode_steps: NonNegativeInt = 0
    """Steps of the first stage: encoder and decoder alone learn to invert each other. The operator learns in the
    second stage, the remaining steps. The run switches stages automatically, also after a resume."""
    freeze_autoencoder: bool = False
    """Second stage: freeze encoder and decoder after the first stage. False: the prediction trains everything."""
    latent_weight: NonNegativeFloat = 0.0
    """Second stage: weight of the squared distance from the predicted latent to the target's, behind a
    stop-gradient."""
    inverse_weight: NonNegativeFloat = 0.05
    """Weight of decoding an encoded field and of re-encoding a decoded one. The first stage gives decoding weight 1
    and re-encoding this one."""
    inverse_every: PositiveInt = 1
    """Second stage: steps from one use of the inverse terms to the next. They cost one more decoding and encoding."""
    spectral_weight: NonNegativeFloat = 0.0
    """Weight of the error of the Fourier amplitudes, relative to the target's energy. Needs the whole grid."""
    boundary_weight: NonNegativeFloat = 0.0
    """Tasks whose fields are 0 at the edge (boundary dirichlet): weight of the error there."""
    conservation_weight: NonNegativeFloat = 0.0
    """Conservative tasks: weight of the change of each field's integral. Needs the whole grid."""
    queries: PositiveInt | None = None
    """Points at which a training sample is decoded, drawn again in each step. None: all points of the grid. A smaller
    grid also uses all its points."""
    query_sampling: Literal["uniform", "stratified"] = "stratified"
    """uniform: independent points. stratified: one point from each of `queries` equal runs of the grid's points."""
    drop_path: FractionBelowOne = 0.0
    """Probability that a sample skips the last block of the operator. It grows linearly from 0 at the first block."""
    flip: Fraction = 0.0
    """Tasks without time: share of samples mirrored along each axis. For equations with this symmetry."""
    residual_from: PositiveInt | None = None
    """Optimizer step at which the third stage begins: model.residual_depth blocks learn the residual of the
    prediction, everything else is frozen. The learning-rate schedule ends there and starts again. None: no such
    stage."""
    residual_steps: PositiveInt = 1
    """Third stage: denoising steps of the residual, one forward each. Training uses only the times of these steps. 1:
    the mean residual, with the lowest error. More, such as 4: a sample of the possible residuals, for details that the
    input does not determine."""

    @property
    def last_stage(self) -> int:
        """First step of the last stage."""
        return self.residual_from or self.autoencode_steps

    def __post_init__(self) -> None:
        whole = {"spectral_weight": self.spectral_weight, "conservation_weight": self.conservation_weight}
        for name, weight in whole.items():
            if weight and self.queries is not None:
                raise UsageError(
                    f"objective.{name} {weight:g}: needs the whole grid, but objective.queries {self.queries} decodes "
                    "only part of it. Leave queries at None, or this weight at 0."
                )
        if self.freeze_autoencoder and not self.autoencode_steps:
            raise UsageError(
                "objective.freeze_autoencoder true with autoencode_steps 0: encoder and decoder would stay at their "
                "random initial values. Give the first stage some steps, or do not freeze them."
            )
        if self.freeze_autoencoder:
            because = "with objective.freeze_autoencoder: true, because the inverse terms train encoder and decoder"
            refuse_without_effect(self, "objective", ["inverse_every"], because)
        if self.inverse_weight == 0:
            because = "with objective.inverse_weight: 0, which leaves the inverse terms out"
            refuse_without_effect(self, "objective", ["inverse_every"], because, "give a weight")
        if self.queries is None:
            because = "without objective.queries"
            refuse_without_effect(self, "objective", ["query_sampling"], because, "give their number")
        if self.residual_from is not None and self.residual_from <= self.autoencode_steps:
            raise UsageError(
                f"objective.residual_from {self.residual_from}: must be more than autoencode_steps "
                f"{self.autoencode_steps}, or the operator would never learn. Raise it."
            )
        if self.residual_from is None:
            because = "without objective.residual_from"
            instead = "give the step at which its stage begins"
            refuse_without_effect(self, "objective", ["residual_steps"], because, instead)


@dataclass(frozen=True)
class ConditioningConfig:
    """Test-time conditioning: try several next steps and follow those that conserve the integral best."""

    candidates: PositiveInt = 6
    """Next steps tried from each state: the plain one and variations of it. At most 10."""
    beam: PositiveInt = 2
    """States of each sample followed at once."""
    horizon: PositiveInt = 2
    """Steps over which a candidate is scored: its own, then plain ones. A step costs up to beam * candidates * horizon
    forwards. A plain step costs one."""

    def __post_init__(self) -> None:
        if self.candidates > MOST_CANDIDATES:
            raise UsageError(
                f"evaluation.conditioning.candidates {self.candidates}: at most {MOST_CANDIDATES} next steps can be "
                "tried from a state; lower it, or raise evaluation.conditioning.beam"
            )
        if self.candidates == 1:
            # A beam or horizon below its default takes the plain step as well.
            more = [name for name in ("beam", "horizon") if getattr(self, name) > getattr(ConditioningConfig, name)]
            because = "with evaluation.conditioning.candidates: 1, the plain step alone"
            refuse_without_effect(self, "evaluation.conditioning", more, because, "raise candidates")


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out fields with the EMA weights."""

    every: NonNegativeInt = 0
    """Optimizer steps between evaluations. 0: one evaluation, at the end. Every run has that one."""
    samples: PositiveInt = 256
    """Held-out rows of each task, over all processes."""
    batch_size: PositiveInt | None = None
    """Samples per process and forward. None: as many as in a micro-batch, and so no more memory than training takes."""
    trajectories: PositiveInt = 32
    """Held-out trajectories to roll out of each task with time, over all processes."""
    conditioning: ConditioningConfig = field(default_factory=ConditioningConfig)

    def due(self, step: int, max_steps: int) -> bool:
        """Return True if an evaluation follows ``step`` completed steps."""
        return step == max_steps or (self.every > 0 and step % self.every == 0)
