"""When training state is saved, and which saves are kept: the options, and decisions that touch no file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from accel_train.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, UsageError
from accel_train.precision import Precision
from accel_train.store import retention
from accel_train.store.commit import Checkpoint
from accel_train.wording import did_you_mean, nearest

logger = logging.getLogger(__name__)

DEFAULT_MINUTES = 10.0


@dataclass(frozen=True)
class CheckpointConfig:
    """When training state is saved, in which form, and which saves are kept."""

    save_every: NonNegativeInt = 0
    """Optimizer steps between saves; 0 leaves it to the two options below. There is always a save at the end."""
    save_every_minutes: NonNegativeFloat | None = None
    """Minutes between saves, by the main process's clock; 0 is off. null: 10, but off where save_every or
    save_every_epochs is set."""
    save_every_epochs: NonNegativeFloat = 0.0
    """Passes over the data between saves; 0 is off."""
    save_state: bool = True
    """Save optimizer state. false: weights and average only, from which a run cannot resume."""
    save_precision: Precision = "fp32"
    """Of model.safetensors and ema.safetensors. Exact fp32 weights and average stay with the optimizer state."""
    asynchronous: bool = True
    """Write behind the loop. false: the loop waits until the checkpoint is committed."""
    keep_last: NonNegativeInt = 3
    """Newest checkpoints kept; older ones go after a newer one is committed. 0 keeps all."""
    keep_best: NonNegativeInt = 0
    """Beside those, the best of all by best_metric. 0 is off."""
    best_metric: str | None = None
    """Name of an evaluation figure, as in evaluation.json."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger best_metric is better."""
    keep_every: NonNegativeInt = 0
    """Beside those, every checkpoint whose step is a multiple of this, for ever. 0 is off."""
    keep_window_steps: NonNegativeInt = 0
    """Beside those, all of the last this many steps. 0 is off."""
    keep_window_epochs: NonNegativeFloat = 0.0
    """Beside those, all of the last this many passes over the data. 0 is off."""
    pinned: tuple[str, ...] = ()
    """Names of checkpoints (checkpoint_00001200) that are never deleted."""
    keep_state_last: NonNegativeInt = 0
    """Only this many of the newest keep their optimizer state, which is half of their size or more. 0: all do."""
    on_error: Literal["stop", "continue"] = "stop"
    """After a failed save: stop the run, or warn and train on (the last save always stops)."""
    grace_seconds: PositiveFloat = 30.0
    """What the scheduler grants between SIGTERM and SIGKILL; a warning says when the last save took longer."""

    @property
    def minutes(self) -> float:
        """Minutes between saves by the clock; 0: off. A run of hours never has its end as the only save by default."""
        if self.save_every_minutes is not None:
            return self.save_every_minutes
        return 0.0 if self.save_every or self.save_every_epochs else DEFAULT_MINUTES

    def __post_init__(self) -> None:
        if self.keep_best > 0 and not self.best_metric:
            raise UsageError(
                f"checkpoints.keep_best: {self.keep_best} requires checkpoints.best_metric, the name of an evaluation "
                "figure (the keys of evaluation.json); add it"
            )
        if wrong := retention.invalid_pins(self.pinned):
            raise UsageError(f"checkpoints.pinned: {wrong[0]!r} is no checkpoint's name; give e.g. checkpoint_00001200")


def refuse_unknown_metric(best_metric: str | None, metrics: Sequence[str]) -> None:
    """Refuse a ``best_metric`` that no evaluation of this run reports: there would never be a best."""
    if best_metric is None or best_metric in metrics:
        return
    raise UsageError(
        f"checkpoints.best_metric: {best_metric!r} is not reported by this run's evaluation"
        f"{did_you_mean(nearest(best_metric, metrics))}; it reports {', '.join(metrics) or 'nothing'}; give one of "
        "these, or leave checkpoints.best_metric out"
    )


def due(config: CheckpointConfig, step: int, epoch: Callable[[int], float]) -> bool:
    """Whether steps or passes over the data ask for a save after ``step`` steps: the same on every rank."""
    every = config.save_every_epochs
    by_epoch = every > 0 and int(epoch(step) / every) > int(epoch(step - 1) / every)
    return by_epoch or (config.save_every > 0 and step % config.save_every == 0)


def warn_about_grace(checkpoint: Checkpoint | None, config: CheckpointConfig, main: bool) -> None:
    """Say at the start that a scheduler may kill before a save is done, by what the last one took."""
    taken = float(checkpoint.manifest.get("seconds", 0.0)) if checkpoint is not None else 0.0
    if main and taken > config.grace_seconds:
        logger.warning(
            "the last save took %.1f s and checkpoints.grace_seconds is %g: after SIGTERM the scheduler may kill this "
            "run before it has saved; raise the scheduler's grace period and this option, or save more often",
            taken,
            config.grace_seconds,
        )


def refuse_uncovered(names: Sequence[str]) -> None:
    """Refuse a model with state that a checkpoint would not hold: it would be lost in silence."""
    if names:
        raise UsageError(
            f"the model has {len(names)} tensor(s) that are not trained ({', '.join(names[:3])}), and a checkpoint "
            "holds trainable parameters only; make buffers non-persistent if they can be computed, keep frozen weights "
            "outside the trained module, or use norms without running statistics"
        )
