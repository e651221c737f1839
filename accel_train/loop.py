"""The reporting half of a training loop: batches, records, checkpoints, evaluations, and when to end.

It owns neither model nor optimizer nor loss: these and the order of a step are the recipe's own lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train import simulated, train_state
from accel_train.checkpoints.saver import Saver
from accel_train.data import leaving_out, sampler
from accel_train.data.datasets import MapDataset
from accel_train.data.loader import StepBatches, iterate_steps
from accel_train.data.sampler import Sampler
from accel_train.metrics.evaluation import EvaluationStopped, stoppable
from accel_train.metrics.logs import info
from accel_train.reporting.arguments import check_arguments
from accel_train.reporting.evaluations import evaluate_only as evaluate_only
from accel_train.reporting.evaluations import heldout_means as heldout_means
from accel_train.reporting.evaluations import numbers, returned_by, warn_undeclared
from accel_train.reporting.reports import Reports, build_reports
from accel_train.runtime import step_overhead
from accel_train.runtime.exiting import EXIT_PREEMPTED, unfinished
from accel_train.speed.out_of_memory import Part, ran_out
from accel_train.train_state import Experiment, TrainState
from accel_train.training.step_guard import NonFiniteError, StepResult

if TYPE_CHECKING:
    from accel_train.metrics.throughput import Count

logger = logging.getLogger(__name__)


@contextmanager
def training(
    opened: Experiment,
    prepared: TrainState,
    dataset: MapDataset,
    order: Sampler,
    write_extras: Callable[[Path], None] | None = None,
) -> Generator[Training]:
    """Run the training loop from the step reached so far. Every process enters, iterates and calls it.

    ::

        with loop.training(opened, prepared, data, order, write_extras) as training:
            for batches in training:                # ends at max_steps, at a stop or at an early end
                ...                                 # forward, backward, optimizer, EMA
                training.report(batches, result)
                training.save_if_due(result)        # before the evaluation, so that a failing one loses nothing
                if config.evaluation.due(batches.done, opened.max_steps):
                    training.evaluate(evaluation)
        return loop.finish(training)

    Leaving it ends readers and trackers, and without an error commits the save in progress. After an error a single
    process still commits it; several abandon it, because the others may be waiting in another collective. The main
    process calls ``write_extras(directory)`` to add files to a checkpoint, such as the model's config.
    """
    first = sampler.scheduled(order, opened.config.batch_schedule)
    if (simulation := simulated.active()) is not None:
        with simulation.training(opened, prepared, dataset, first) as steps:
            yield steps
        return
    check_arguments(opened, prepared, dataset, order)
    config = opened.config
    accelerator = opened.accelerator
    reports = build_reports(opened, prepared)
    saver = Saver(
        accelerator,
        opened.run,
        prepared.ema,
        config.checkpoints,
        config.hub,
        opened.with_ledger(write_extras),
        epoch=lambda step: current.order.epoch(step),
        on_commit=reports.log.saved,
    )

    def read(current: Training) -> Generator[StepBatches]:
        current.order = train_state.without_left_out(opened, prepared, sampler.scheduled(order, opened.batch_schedule))
        return _read(current, dataset)

    current = Training(opened, first, reports, saver, iter(()), prepared)
    current.steps = steps = reports.watched(_reread_after_growth(current, read(current), read))
    observation = nullcontext() if _observe is None else _observe(current, prepared, dataset)
    # Exited from right to left: the saver's last commit is still recorded in the log.
    alone = prepared.calls.alone(prepared.model)
    with step_overhead.garbage_frozen(), alone, reports.log, closing(steps), saver, observation, _recorded(current):
        yield current
        current.close()
    # A request may have ended the saver's wait for the Hub, after the last step.
    current.stopped = current.stopped or saver.stopping
    # A recipe that ends without `finish` would report a stop as the end.
    unfinished.append(str(opened.run.directory))


def _read(training: Training, dataset: MapDataset) -> Generator[StepBatches]:
    """Return the steps from the current one on, in the order of ``training``."""
    opened = training.opened
    accelerator = opened.accelerator
    return iterate_steps(
        dataset,
        training.order,
        sampler.BatchShard(accelerator.process_index, accelerator.num_processes, opened.micro_batch_size),
        start_step=training.done,
        max_steps=opened.max_steps,
        device=accelerator.device,
        config=opened.config.loader,
    )


def _reread_after_growth(
    training: Training, steps: Generator[StepBatches], read: Callable[[Training], Generator[StepBatches]]
) -> Generator[StepBatches]:
    """Yield the steps. After one that changes the batch size, read again: prefetched batches have the old size."""
    opened = training.opened
    while True:
        changes = len(opened.run.grown)
        with closing(steps):
            for batches in steps:
                yield batches
                if len(opened.run.grown) > changes:
                    break
            else:
                return
        steps = read(training)


@contextmanager
def _recorded(training: Training) -> Generator[None]:
    """Record the error that ends training, if any, and the bad steps not yet recorded."""
    try:
        yield
    except NonFiniteError as error:
        train_state.roll_back(training.opened, training.reports.log, error)
        raise
    except Exception as error:
        if ran_out(error, training.part):
            memory = training.reports.memory_after_running_out()
            log = training.reports.log
            train_state.handle_out_of_memory(training.opened, log, error, training.done, training.part, memory)
        raise
    finally:
        # Also after an error: the step that ended the run may be one of them.
        training.reports.bad_steps()


@dataclass
class Training:
    """A running training: iterate it for the batches of each step, and report their result to it."""

    opened: Experiment
    order: Sampler
    reports: Reports
    saver: Saver
    steps: Iterator[StepBatches]
    prepared: TrainState
    done: int = field(init=False)
    """Optimizer steps done, including those of earlier starts."""
    stopped: bool = False
    """The run was asked to stop, and its work is saved."""
    measure: Callable[[StepResult], None] | None = None
    """If set, takes the result of each step, which then changes nothing: no update, record, save or evaluation."""
    _ended: bool = False
    _in_step: bool = False
    """The loop has not asked for the step after the current one."""
    part: Part = "step"
    """Current part of the loop. After an error, the part that failed."""
    rerun_hint: str | None = None
    """Way to rerun the final evaluation that a stop interrupted, worded to follow "start". None: none is owed."""
    _result: StepResult | None = None
    _metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of an evaluation after the current step."""
    _has_compared_metrics: bool = False
    """The names of an evaluation's metrics were compared with those that the recipe declares."""
    _saved: int | None = None
    """The step of the last save."""

    def __post_init__(self) -> None:
        self.done = self.opened.start_step

    def __iter__(self) -> Iterator[StepBatches]:
        """Yield the micro-batches of each step.

        Raises ``RuntimeError`` if a call was missing in the previous step (``StepCalls``).
        """
        self.reports.throughput.start()
        for batches in self.steps:
            self.prepared.calls.begin()
            self._metrics = {}
            self.done = batches.done
            if self.measure is None:
                self.reports.begin_step(batches.done)
            # Without any weight the gradient is 0, but momentum and weight decay would still move the weights.
            has_no_weight = leaving_out.has_no_weight(self.order, batches.step)
            guard = self.prepared.guard
            guard.leaves_out = self.measure is not None or has_no_weight
            # What is measured is not part of the run, and counts nowhere.
            if self.measure is None and has_no_weight:
                guard.history.leave_out()
            self._in_step = True
            yield batches
            # Checked when the loop asks for the next step, after everything that it does with this one.
            self._end_step()
            if self.stopped or self._ended:
                return
            if self._saved == self.done:
                train_state.double_micro_batch(self.opened, self.done, self.saver.committed)

    def _end_step(self) -> None:
        """Check that no call is missing in the step, and save it if the loop has made it the last."""
        self._in_step = False
        updates = self.measure is None and not self.prepared.guard.skips_this_step
        self.prepared.calls.require(self.done, updates=updates)
        if self._ended and not self.stopped:
            self._save()

    def close(self) -> None:
        """End the step after which a ``break`` left the loop. Raises ``RuntimeError`` unless it is the last one."""
        if not self._in_step or self.stopped:
            return
        if self.done < self.opened.max_steps and not self._ended:
            raise RuntimeError(
                f"step {self.done}: the loop over training was left before its last step, {self.opened.max_steps}, so "
                "nothing saves this one; call training.end() instead of the break or return, on every process at the "
                "same step: it saves the step and ends the loop"
            )
        self._end_step()

    def report(
        self,
        batches: StepBatches,
        result: StepResult,
        *,
        tokens: Count = 0.0,
        padded_tokens: Count = 0.0,
        flops: Count = 0.0,
        **fields: object,
    ) -> None:
        """Count the step for the throughput. At a log point, wait for the device and write a training line.

        ``tokens``, ``padded_tokens`` and ``flops`` count the work of this process in this step, as numbers or tensors.
        They are summed over the processes at the log point. ``Throughput.update`` defines each. ``fields`` are added to
        the line unchanged.
        """
        self.prepared.calls.report(batches, result)
        if self.measure is not None:
            self.measure(result)
            return
        self.saver.begin()  # from here on a stop has a step to save, and must not end the process at once
        counts = {"tokens": tokens, "padded_tokens": padded_tokens, "flops": flops}
        self.reports.step(batches, result, self.order.epoch(self.done), counts, fields)

    def save_if_due(self, result: StepResult) -> None:
        """Save if a save is due or a stop was requested. All processes learn of it at the same step."""
        self.prepared.calls.save(result)
        self._result = result
        if self.measure is not None:
            return
        self.stopped = self.saver.boundary(self.done)
        if self.stopped or self.saver.due(self.done, self.opened.max_steps):
            self._save()

    def evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Call ``evaluate``, record its metrics, and add them to the checkpoint of this step, if there is one.

        A pending save is committed first, so that an evaluation that raises, hangs or is killed loses nothing. A stop
        ends it at its next ``stopping_point``, on all processes, and saves. Returns the metrics, empty after a stop.
        Saves, then raises ``UsageError``, if they are not a dict of numbers, or lack ``checkpoints.best_metric``, which
        decides what retention keeps.
        """
        if self.measure is not None:
            return {}
        if self.stopped:
            self._owe_evaluation()
            return {}
        with self.reports.throughput.pause():
            with self._doing("save"), self.reports.throughput.saving():
                self.saver.finish()
            try:
                # All processes must leave it at the same forward, so they ask each other there.
                with self._doing("evaluation"), stoppable(self.saver.asked_to_stop):
                    returned = returned_by(evaluate)
            except EvaluationStopped:
                info(logger, f"asked to stop: the evaluation after step {self.done} is interrupted")
                self.stopped = True
                self._save()  # does nothing if a due save has written this step
                self._owe_evaluation()
                return {}
            metrics = self._record(returned)
        self.opened.refuse_unreported(self.done, metrics, self._save, self.saver.finish)
        if self.opened.early_stopping is not None and self.opened.early_stopping.ended(self.done, metrics):
            self.end()
        return metrics

    def end(self) -> None:
        """Make this step the last: save it and leave the loop. The same on every process."""
        self._ended = True
        self.reports.log.end()

    def _record(self, returned: object) -> Mapping[str, float]:
        """Record what an evaluation returned, and add it to the checkpoint of this step."""
        metrics = numbers(self.opened.accelerator, returned, self._save, self.saver.finish)
        if metrics and not self._has_compared_metrics:
            self._has_compared_metrics = True
            warn_undeclared(self.opened.metrics, metrics)
        with self._doing("evaluation"):
            self.reports.log.evaluation(self.done, metrics)
        with self._doing("save"):
            self.saver.add_metrics(self.done, metrics)
        self._metrics = metrics
        return metrics

    def _owe_evaluation(self) -> None:
        """Leave the evaluation after the last step to the next start. Those between steps are not made up for."""
        if self.done < self.opened.max_steps:
            return
        if not self.opened.config.checkpoints.save_state:
            # No start can resume from weights alone.
            self.rerun_hint = "again with --evaluate_only"
            return
        self.rerun_hint = "the same command again"
        # Before the saver's last exchange with the others, which may end the launcher once they have left.
        if self.opened.accelerator.is_main_process:
            self.opened.run.owe_evaluation(self.done)

    def _save(self) -> None:
        if self._result is None:
            return  # an evaluation before the first step of this start: nothing is new
        self._result.check()  # raises after a step that ends the run, which no checkpoint may follow
        with self._doing("save"):
            with self.reports.throughput.pause():
                self.reports.before_save(self.done)
            with self.reports.throughput.saving():
                self.stopped = self.saver.save(self.done, self._metrics) or self.stopped
        self._saved = self.done

    @contextmanager
    def _doing(self, part: Part) -> Generator[None]:
        """Set ``part`` during the body. After an error it stays set, so that the handler knows what failed."""
        self.part = part
        yield
        self.part = "step"


Observer = Callable[[Training, TrainState, MapDataset], AbstractContextManager[None]]
_observe: Observer | None = None


@contextmanager
def observed(by: Observer) -> Generator[None]:
    """Enter ``by(training, prepared, dataset)`` around every training loop of the body, after ``prepare``.

    The seam of ``accel-train verify``. An observer may put hooks on the optimizer and replace ``training.steps``.
    """
    global _observe
    before = _observe
    _observe = by
    try:
        yield
    finally:
        _observe = before


def finish(training: Training) -> int:
    """End the trackers, log where the results are, and return the exit code: 0, or 75 after a stop. All processes."""
    opened = training.opened
    step = training.done
    opened.accelerator.end_training()
    if training.stopped and step >= opened.max_steps:
        info(logger, f"stopped after the last step, {step}, which is saved (exit code 75)")
        # Only the wait for the Hub may have been interrupted, after the evaluation.
        if training.rerun_hint is not None:
            info(logger, f"start {training.rerun_hint} to evaluate it")
        return EXIT_PREEMPTED
    if opened.run.owes_evaluation and opened.accelerator.is_main_process:
        # A recipe that asks for `config.evaluate_only` alone has come here without a step.
        opened.run.owe_evaluation(None)
    if training.stopped:
        remedy = "start the same command again to resume (exit code 75)"
        info(logger, f"stopped at step {step} of {opened.max_steps} and saved; {remedy}")
        return EXIT_PREEMPTED
    unfinished.clear()
    info(logger, f"finished: {opened.run.directory} holds {', '.join(opened.run.results(step)) or 'nothing'}")
    return 0
