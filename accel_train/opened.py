"""A run that is open, and its model as the strategy trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from accel_train.checkpoints.run import Run
from accel_train.experiment_options import ExperimentConfig
from accel_train.metrics.recorder import RunInfo
from accel_train.training import schedules
from accel_train.training.accumulation import Batch, GradientWindow, SyncPolicy
from accel_train.training.ema import Ema
from accel_train.training.schedules import ScheduleConfig
from accel_train.training.step_guard import StepGuard


@dataclass(frozen=True)
class Opened:
    """An experiment on its machine, with its directory and its length. One per process."""

    config: ExperimentConfig
    accelerator: Accelerator
    run: Run
    schedule: ScheduleConfig
    max_steps: int
    """From the options, or from max_epochs and the size of the data."""
    decay_steps: int
    """Of the schedule, as the first start resolved it: a raised max_steps holds the floor."""
    accumulation_steps: int
    """Micro-batches per process and step."""
    finished: bool
    """There is no step left, and no evaluation was asked for."""

    @property
    def start_step(self) -> int:
        """Optimizer steps already done."""
        return self.run.start_step

    def learning_rate_factor(self, step: int, decay_steps: int | None = None) -> float:
        """Of the learning rate in step ``step`` of a schedule that ends at ``decay_steps``; None: the run's."""
        steps = self.decay_steps if decay_steps is None else decay_steps
        return schedules.learning_rate_factor(self.schedule, step, steps)


@dataclass(frozen=True)
class Prepared:
    """A model as the strategy trains it, with what belongs to it. One per process."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: AcceleratedOptimizer
    ema: Ema
    run_info: RunInfo
    sync: SyncPolicy
    guard: StepGuard | None

    def window(
        self,
        micro_batches: Sequence[tuple[Batch, Mapping[str, Tensor] | Tensor]],
        coefficients: Mapping[str, float],
        step: int,
    ) -> GradientWindow:
        """The gradient of optimizer step ``step``, from (inputs, weights) of each micro-batch: see ``GradientWindow``.
        Costs two small reductions a step; every process must have equally many micro-batches."""
        return GradientWindow(
            self.accelerator, self.model, micro_batches, coefficients, step, policy=self.sync, guard=self.guard
        )
