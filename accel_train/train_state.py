"""The open experiment, and its model prepared for training: the inputs of a recipe's loop."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from accel_train.checkpoints.run import Run
from accel_train.config import UsageError, expand_path
from accel_train.data import leaving_out
from accel_train.data.tables.ledger import DataHistory
from accel_train.experiment_options import ExperimentConfig
from accel_train.metrics.profiling.step_times import StepTimes
from accel_train.options.tree import to_tree
from accel_train.runtime.exiting import StartAgain
from accel_train.runtime.main_alone import on_main
from accel_train.speed import out_of_memory
from accel_train.training import schedules
from accel_train.training.accumulation import Batch, GradientWindow
from accel_train.training.ema import Ema
from accel_train.training.gradients.sync import SyncPolicy
from accel_train.training.health import rollback
from accel_train.training.schedules import ScheduleConfig
from accel_train.training.step_guard import NonFiniteError, StepGuard

if TYPE_CHECKING:
    from accel_train.data.options import BatchScheduleConfig
    from accel_train.data.sampler import Sampler
    from accel_train.metrics.early_stopping import EarlyStopping
    from accel_train.metrics.recorder import Recorder, RunInfo
    from accel_train.store.planning import Plan
    from accel_train.training.feedback.noise_scale import NoiseScale
    from accel_train.training.feedback.plateau import Plateau
    from accel_train.training.step_calls import StepCalls

logger = logging.getLogger(__name__)


def smaller_micro_batch(config: ExperimentConfig) -> out_of_memory.SmallerMicroBatch | None:
    """Return the micro-batch that an earlier start of the run fell back to, None if ``micro_batch_size`` applies."""
    if config.out_of_memory == "stop" or config.run_options().overwrite:
        return None
    return out_of_memory.recorded(expand_path(config.output_dir), config.micro_batch_size)


def in_use(config: ExperimentConfig, micro_batch_size: int, schedule: ScheduleConfig) -> ExperimentConfig:
    """Return a copy of the config with the micro-batch and schedule in use."""
    # Not `replace`: its checks are meant for requested values, and would refuse those that the run fell back to.
    used = copy.copy(config)
    object.__setattr__(used, "micro_batch_size", micro_batch_size)
    object.__setattr__(used, "schedule", schedule)
    return used


@dataclass(frozen=True)
class Experiment:
    """An experiment on its machine, with its directory and its length. One per process."""

    config: ExperimentConfig
    accelerator: Accelerator
    run: Run
    schedule: ScheduleConfig
    max_steps: int
    """``max_steps`` of the config, or as many as ``max_epochs`` takes."""
    decay_steps: int
    """Length of the schedule, resolved by the first start. Steps beyond it, after ``max_steps`` was raised, train with
    the final learning rate."""
    micro_batch_size: int
    """Samples per process and forward: that of the config, or a smaller one after running out of memory."""
    accumulation_steps: int
    """Micro-batches per process and step."""
    history: DataHistory
    """The data of this start and of those before."""
    metrics: tuple[str, ...] | None = None
    """Names of all that an evaluation reports, None if the recipe does not declare them."""
    patience_after: int = 0
    """Steps whose evaluations do not count for early stopping."""

    @property
    def start_step(self) -> int:
        """Optimizer steps already done."""
        return self.run.start_step

    @cached_property
    def early_stopping(self) -> EarlyStopping | None:
        """Counter of evaluations without improvement, None if they never end the run. Collective."""
        policy = self.config.checkpoints
        if policy.patience is None or policy.best_metric is None:
            return None
        # Imported here, because most runs do not need it.
        from accel_train.metrics.early_stopping import EarlyStopping

        early_stopping = EarlyStopping(
            self.accelerator, policy.patience, policy.best_metric, policy.best_mode, self.patience_after
        )
        early_stopping.resume(self.run.directory, self.start_step)
        return early_stopping

    @cached_property
    def finished(self) -> bool:
        """True if no step is left, and no evaluation. Collective."""
        # Such a start has an evaluation left, whatever the number of steps.
        if self.config.evaluate_only or self.run.owes_evaluation:
            return False
        if self.start_step >= self.max_steps:
            return True
        return self.early_stopping is not None and self.early_stopping.exhausted

    def finished_notices(self, option: str, kept_flags: str) -> list[str]:
        """Return lines for the log of a start with nothing left to do, and how to train on.

        ``option`` is the one with the length of the run, ``kept_flags`` those of a shortened schedule.
        """
        early_stopping = self.early_stopping
        if self.start_step < self.max_steps and early_stopping is not None:
            return [early_stopping.notice(self.start_step)]
        remedy = schedules.remedy_when_finished(self.schedule, self.decay_steps, self.max_steps, kept_flags)
        return self.run.finished_notices(self.max_steps, option, remedy)

    @property
    def only_evaluates(self) -> bool:
        """True for a start that trains no step: as asked, or to make up for an evaluation that a stop interrupted."""
        is_owed = self.run.owes_evaluation and self.start_step >= self.max_steps
        return self.config.evaluate_only or is_owed

    @cached_property
    def report_directory(self) -> Path:
        """Directory of the report. ``evaluate_only`` on data other than the checkpoint's has its own folder there."""
        if self.config.evaluate_only:
            return self.run.report_directory(self.history.contents)
        return self.run.report_directory()

    @cached_property
    def plateau(self) -> Plateau | None:
        """Learning-rate factor that follows the training loss, None if the schedule alone decides."""
        if not self.config.plateau.is_on:
            return None
        # Imported here, because most runs do not need it.
        from accel_train.training.feedback.plateau import Plateau

        return Plateau(self.config.plateau)

    @cached_property
    def noise_scale(self) -> NoiseScale | None:
        """Gradient noise scale, by which the batch grows. None if it is not measured."""
        schedule = self.config.batch_schedule
        if not schedule.measures:
            return None
        # Imported here, because most runs do not need it.
        from accel_train.training.feedback.noise_scale import NoiseScale

        beta = self.config.optimizer.betas[0]
        return NoiseScale(beta, schedule.noise_steps, schedule.noise_every, self.run.grown)

    @property
    def batch_schedule(self) -> BatchScheduleConfig:
        """``batch_schedule`` of the config, with the changes that measured noise has brought so far."""
        return self.config.batch_schedule.grown(self.run.grown)

    def batch_size(self, step: int) -> int:
        """Return the number of samples in optimizer step ``step``, counted from 0, over all processes."""
        return self.batch_schedule.size(self.config.global_batch_size, step)

    @property
    def most_accumulated(self) -> int:
        """Micro-batches of a process in the largest step of the batch schedule."""
        # Imported here, because only the speed options ask.
        from accel_train.data.sampler import accumulation_steps

        largest = self.config.batch_schedule.largest(self.config.global_batch_size)
        return accumulation_steps(largest, self.accelerator.num_processes, self.micro_batch_size)

    def share_of(self, batch_size: int) -> int:
        """Return the largest number of samples that a process gets of ``batch_size``: no micro-batch is larger."""
        return math.ceil(batch_size / self.accelerator.num_processes)

    def config_in_use(self) -> dict[str, Any]:
        """Return the config as nested values, with the micro-batch and schedule in use where they differ from it."""
        return to_tree(in_use(self.config, self.micro_batch_size, self.schedule))

    def with_ledger(self, write_extras: Callable[[Path], None] | None) -> Callable[[Path], None]:
        """Return a function that writes the extra files of a checkpoint, and the ledger of its data."""

        def write(directory: Path) -> None:
            if write_extras is not None:
                write_extras(directory)
            self.history.save(directory / "assets", self.start_step)

        return write

    def refuse_unreported(self, step: int, metrics: Mapping[str, float], *before: Callable[[], None]) -> None:
        """Raise ``UsageError`` if an evaluation lacks ``checkpoints.best_metric``, after calling each of ``before``.

        Metrics that a recipe declares are checked at the start. Here they are checked only if the evaluation after
        ``step`` steps counts for ``checkpoints.patience``. Collective. The main process decides, since a recipe may
        return metrics there alone.
        """
        best_metric = self.config.checkpoints.best_metric
        counts = self.config.checkpoints.patience is not None and step > self.patience_after
        if best_metric is None or not (self.metrics is None or counts):
            return
        # Imported here, because most runs have no use for it.
        from accel_train.checkpoints.policy import refuse_unknown_metric

        try:
            on_main(self.accelerator, lambda: refuse_unknown_metric(best_metric, list(metrics)), training=True)
        except UsageError:
            for act in before:
                act()
            raise

    def plan_of_save(self, ema: Ema) -> Plan:
        """Return the files of a save and their places in the host memory of all processes, without allocating any."""
        # Imported here, because only a simulation asks: a save plans by itself.
        from accel_train.checkpoints.contents import plan_after_a_step

        return plan_after_a_step(ema, self.config.checkpoints, self.run, self.accelerator.num_processes)

    def learning_rate_factor(self, step: int, decay_steps: int | None = None) -> float:
        """Return the factor of the learning rate in step ``step``, with those of ``batch_schedule`` and of plateaus.

        The schedule ends at ``decay_steps``, by default the run's.
        """
        if decay_steps is None:
            decay_steps = self.decay_steps
        growth = self.batch_schedule.factor(self.config.global_batch_size, step)
        factor = growth * schedules.learning_rate_factor(self.schedule, step, decay_steps)
        if self.plateau is not None:
            # A factor of its own, which the schedule of the next step cannot overwrite.
            factor *= self.plateau.factor
        return factor


@dataclass(frozen=True)
class TrainState:
    """The model wrapped by the strategy, with its optimizer and EMA. One per process."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: AcceleratedOptimizer
    ema: Ema
    run_info: RunInfo
    sync: SyncPolicy
    guard: StepGuard
    report_directory: Path
    """Directory for what an evaluation draws and writes for people. May not exist yet."""
    base_files: Mapping[str, Any] | None = None
    """Reference to the files of the base as they were when its weights were read. None: no base."""

    @cached_property
    def times(self) -> StepTimes:
        """Timer of the parts of a step. Gradient windows mark them, and log points read it."""
        return StepTimes(self.accelerator.device)

    @cached_property
    def calls(self) -> StepCalls:
        """Record of the loop's calls in the current step, created on first use."""
        # Imported here, because a simulation checks no loop.
        from accel_train.training.step_calls import StepCalls

        return StepCalls(self.optimizer)

    def window(
        self,
        micro_batches: Sequence[tuple[Batch, Mapping[str, Tensor] | Tensor]],
        coefficients: Mapping[str, float],
        step: int,
    ) -> GradientWindow:
        """Return the window of optimizer step ``step`` over its micro-batches, each given as (inputs, weights).

        Collective: every process passes the same number of micro-batches. Costs two small reductions per step.
        ``GradientWindow`` describes weights and coefficients.
        """
        self.ema.announce(step)
        return GradientWindow(
            self.accelerator,
            self.model,
            micro_batches,
            coefficients,
            step,
            policy=self.sync,
            guard=self.guard,
            times=self.times,
        )


def handle_out_of_memory(
    opened: Experiment,
    log: Recorder,
    error: Exception,
    step: int,
    part: out_of_memory.Part,
    memory: Mapping[str, object],
) -> None:
    """Raise ``StartAgain`` with half of the micro-batch, or add advice to ``error``. ``step`` is counted from 1.

    An evaluation or a save does not become smaller with the micro-batch, so it ends the run. ``memory`` has further
    fields of the event.

    Not collective: the other processes fail in their next reduction, or are ended by the launcher.
    """
    config = opened.config
    batch_size = opened.batch_size(max(0, step - 1))
    # The samples that a forward really held: half of a larger number might be no fewer.
    used = min(opened.micro_batch_size, opened.share_of(batch_size))
    fields = {"during": part, "micro_batch_size": used, **memory}
    if part != "step" or config.out_of_memory == "stop" or used == 1:
        log.out_of_memory(step, fields)
        if part == "save":
            error.add_note(out_of_memory.explain_save(error, step))
        elif part == "evaluation":
            error.add_note(out_of_memory.explain_evaluation(step))
        else:
            error.add_note(out_of_memory.explain(used, step, global_batch_size=batch_size))
        return
    smaller = out_of_memory.record_half(opened.run.directory, config.micro_batch_size, used, step)
    log.out_of_memory(step, {**fields, "next_micro_batch_size": smaller.used})
    # Without the error as its cause, whose frames hold the tensors of the step.
    raise StartAgain(
        f"step {step} ran out of memory with micro_batch_size {used}; the next start continues from the "
        f"newest checkpoint with {smaller.used} and the same global batch of {batch_size}"
    ) from None


def double_micro_batch(opened: Experiment, done: int, committed: Callable[[int], bool]) -> None:
    """Raise ``StartAgain`` with twice the micro-batch, if that is due after a save of step ``done``. Collective.

    ``committed`` waits for that save, and returns False if it failed: the next start would resume from an older one.
    """
    config = opened.config
    if not config.regrow_after or done >= opened.max_steps:
        return
    # Read by one process, so that none sees it changed.
    smaller = on_main(opened.accelerator, lambda: smaller_micro_batch(config), training=True)
    # A step that fits into one micro-batch does not need a larger one.
    if smaller is None or smaller.used >= opened.share_of(opened.batch_size(done)):
        return
    if not out_of_memory.is_time_to_double(smaller, config.regrow_after, done) or not committed(done):
        return
    try:
        directory = opened.run.directory
        on_main(opened.accelerator, lambda: out_of_memory.record_double(directory, smaller, done), training=True)
    except OSError as error:
        logger.warning("regrow_after: the larger micro-batch could not be recorded, and waits for a save: %s", error)
        return
    raise StartAgain(
        f"{done - smaller.since} steps have had room with micro_batch_size {smaller.used}; the next start continues "
        f"from step {done} with twice as many"
    )


def roll_back(opened: Experiment, log: Recorder, error: NonFiniteError) -> None:
    """Raise ``StartAgain`` without the samples of a bad step, or add to ``error`` why not. Collective."""
    health = opened.config.health
    if health.non_finite != "rollback" or error.bad is None:
        return
    run = opened.run
    going_back = rollback.next_rollback(run.rollbacks, error.bad, health.max_rollbacks, opened.history.contents)
    if isinstance(going_back, str):
        error.add_note(going_back)
        return
    if opened.accelerator.is_main_process:
        rollback.record(run.directory, [*run.rollbacks, going_back])
        log.record("rollback", error.bad.fields() | {"left_out": going_back.samples}, step=going_back.step)
    # A process that ends takes the others with it, and the record must be complete by then.
    opened.accelerator.wait_for_everyone()
    raise StartAgain(
        f"{error.bad.finding}; the next start continues from the newest checkpoint without the samples "
        f"{going_back.samples}"
    ) from None


def without_left_out(opened: Experiment, prepared: TrainState, order: Sampler) -> Sampler:
    """Return ``order`` without the samples of ``without_samples`` and of rollbacks. Checkpoints list the latter.

    Rollbacks on other data do not count: their indices mean other samples here.
    """
    history = prepared.guard.history
    data = opened.history.contents
    earlier = history.left_out if history.left_out_data == data else []
    history.left_out = sorted({*earlier, *rollback.left_out(opened.run.rollbacks, data)})
    history.left_out_data = data
    return leaving_out.without_samples(order, [*opened.config.without_samples, *history.left_out])
