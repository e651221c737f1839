"""Reports of a training: counted in every step, and written at the log points."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from accel_train.metrics.details.by_part import PartNorms
from accel_train.metrics.details.by_sample import SampleLosses
from accel_train.metrics.logs import info
from accel_train.metrics.profiling.gpu_figures import GpuFigures
from accel_train.metrics.recorder import Recorder, RunInfo
from accel_train.metrics.throughput import Count, LocalCounts, Throughput
from accel_train.reporting.comparisons import build_comparisons
from accel_train.reporting.memory import MemoryReport
from accel_train.reporting.watched_steps import watched_steps
from accel_train.runtime.main_alone import on_main
from accel_train.training.gradients.loss_checks import count_unweighted, refuse_unweighted
from accel_train.training.health.comparing import Comparisons
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard, StepResult

if TYPE_CHECKING:
    from accel_train.data.loader import StepBatches
    from accel_train.train_state import Experiment, TrainState
    from accel_train.training.step_calls import StepCalls

logger = logging.getLogger(__name__)


@dataclass
class Reports:
    """Log, throughput, losses, memory and comparisons of a training. One per process, and the main process writes."""

    opened: Experiment
    run_info: RunInfo
    guard: StepGuard
    weights: Shards
    log: Recorder
    throughput: Throughput
    losses: SampleLosses
    norms: PartNorms
    memory: MemoryReport
    comparisons: Comparisons
    calls: StepCalls
    gpu: GpuFigures | None
    """GPU metrics, on the main process under CUDA. None elsewhere."""
    _counts: LocalCounts = field(default_factory=LocalCounts)

    def watched(self, steps: Generator[StepBatches]) -> Generator[StepBatches]:
        """Wrap the steps of the loop with a watch for hanging ones and, if asked for, a profiler. No collective."""
        if self.gpu is not None:
            steps = self.gpu.watched(steps)
        return watched_steps(self.opened, steps, self.throughput)

    def begin_step(self, done: int) -> None:
        """Prepare update ratios and the check of rates for a step that is logged. ``done`` counts this step as well."""
        if self.log.due(done):
            self.norms.before()
            self.calls.compare_rates()

    def step(
        self,
        batches: StepBatches,
        result: StepResult,
        epoch: float,
        counts: Mapping[str, Count],
        fields: Mapping[str, object],
    ) -> None:
        """Count a step. At a log point, wait for the device and write a training line.

        Collective at log points, when processes are compared and when the gradient noise is measured. Raises
        ``ReplicasDifferError``, ``RuntimeError`` for a learning rate that ``set_learning_rate`` has not set, and
        ``UsageError`` for a loss, or a weight of a loss term, that is not multiplied by the sample's weight, and for
        one of ``fields`` with the name of another.
        """
        self.throughput.end_of_step()
        self.losses.add(result)
        self._counts.add(**counts)
        config = self.opened.config
        logs = self.log.due(batches.done)
        totals: dict[str, float] = {}
        # Summing over processes waits for the device, so between log points the counts stay on it.
        if logs:
            self.calls.refuse_other_rates(batches.done)
            self._counts.add(**count_unweighted(result))
            totals = self._counts.take(self.opened.accelerator)
            refuse_unweighted(totals)
        self.throughput.update(
            samples=self.opened.batch_size(batches.step),
            data_wait_seconds=batches.data_wait_seconds,
            profiled=config.profile.holds(batches.done),
            **totals,
        )
        self.log.advance(batches.done)
        if logs:
            # `result.fields` waits for the device, and `throughput.read` times the interval up to that wait.
            line = result.fields() | result.metrics.means() | self.throughput.read() | self.losses.take()
            line |= self.norms.take(result, line["grad_norm"])
            if self.gpu is not None:
                line |= self.gpu.take()
            line |= self.run_info.fields(epoch, self.opened.batch_size(batches.step))
            self.log.train(batches.done, line, fields)
        self.memory.first_step(self.log, batches.done)
        self._follow_plateau(result, batches.done)
        self._follow_noise(result, batches.done)
        self.bad_steps()
        self.comparisons.after(batches.done, batches.data_wait_seconds)

    def before_save(self, done: int) -> None:
        """Write what a resume from the save of step ``done`` would not write again, and compare the replicas.

        Collective. Raises ``ReplicasDifferError`` instead of letting wrong weights be saved.
        """
        self.bad_steps()
        self.losses.write()
        self.comparisons.check_replicas(done)

    def memory_after_running_out(self) -> dict[str, Any]:
        """Log the memory of this process, and return it as fields of the event. Not collective."""
        opened = self.opened
        return self.memory.after_running_out(opened.run.directory / "logs", opened.accelerator.process_index)

    def _follow_plateau(self, result: StepResult, done: int) -> None:
        """Pass the loss to the plateau schedule, and record a change. Waits for the device at the end of a window."""
        plateau = self.opened.plateau
        if plateau is None:
            return
        change = plateau.follow(result, done)
        if change is not None:
            self.log.record("plateau", asdict(change), step=done)
            info(logger, f"step {done}: {plateau.describe(change)}")

    def _follow_noise(self, result: StepResult, done: int) -> None:
        """Measure this step's gradient noise, and at the end of a window let the batch grow. Collective."""
        opened = self.opened
        noise = opened.noise_scale
        size = opened.batch_size(done - 1)
        if noise is None or not noise.follow(result, done, size, self.weights, opened.accelerator):
            return
        here = noise.end_window()
        # The main process's window, so that all processes decide alike.
        window = on_main(opened.accelerator, lambda: here, training=True)
        if window is None:
            return
        schedule = opened.config.batch_schedule
        grown = schedule.next_size(size) if window.exceeds(schedule.noise_factor * size) else size
        if grown > size:
            noise.stages.append((done, grown))
        sizes = {"global_batch_size": size, "next_global_batch_size": grown}
        self.log.record("noise_scale", {**asdict(window), **sizes}, step=done)
        info(logger, f"step {done}: {window.describe(size, grown)}")

    def bad_steps(self) -> None:
        """Write an event and a warning for each new bad step that the host knows of by now."""
        for bad, skipped in self.guard.history.take_unreported():
            self.log.record("bad_step", bad.fields() | {"skipped": skipped}, step=bad.step + 1)
            if self.opened.accelerator.is_main_process:
                action = "trained all the same"
                if skipped:
                    action = "skipped: nothing has moved"
                elif self.guard.config.clips_spikes:
                    action = "trained with its gradient scaled down"
                logger.warning("%s; %s. Samples concerned: %s", bad.finding, action, bad.suspects)


def build_log(opened: Experiment, facts: Mapping[str, object]) -> Recorder:
    """Build the recorder of this start, which writes its first lines. Every process calls it. Raises ``UsageError``."""
    config = opened.config
    return Recorder(
        opened.accelerator,
        opened.run.directory,
        config.log,
        max_steps=opened.max_steps,
        start_step=opened.start_step,
        config=opened.config_in_use(),
        facts=facts,
        labels=config.recipe.labels,
    )


def build_reports(opened: Experiment, prepared: TrainState) -> Reports:
    """Build the reports of a training, and start their clock. Every process calls it. Raises ``UsageError``."""
    config = opened.config
    accelerator = opened.accelerator
    log = build_log(opened, prepared.run_info.facts)
    throughput = Throughput(
        accelerator.device, world_size=accelerator.num_processes, precision=config.precision, times=prepared.times
    )
    by_sample = opened.run.directory if config.log.per_sample else None
    losses = SampleLosses(accelerator, config.recipe.timesteps, by_sample, opened.start_step)
    norms = PartNorms(accelerator, prepared.ema.shards, config.log.grad_norms, ratios=config.log.update_ratios)
    info(logger, *norms.notices)
    gpu = None
    if accelerator.is_main_process and accelerator.device.type == "cuda":
        gpu = GpuFigures(accelerator.device)
    memory = MemoryReport(prepared.ema, accelerator.device)
    comparisons = build_comparisons(opened, prepared, throughput, log)
    return Reports(
        opened=opened,
        run_info=prepared.run_info,
        guard=prepared.guard,
        weights=prepared.ema.shards,
        log=log,
        throughput=throughput,
        losses=losses,
        norms=norms,
        memory=memory,
        comparisons=comparisons,
        calls=prepared.calls,
        gpu=gpu,
    )
