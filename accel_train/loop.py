"""The reporting half of a training loop: batches, records, checkpoints, evaluations, and when to end.

It owns neither model nor optimizer nor loss: these and the order of a step are the recipe's own lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType

from accelerate import Accelerator

from accel_train.checkpoints.saver import Saver
from accel_train.config import to_tree
from accel_train.data import sampler
from accel_train.data.loader import StepBatches, iterate_steps
from accel_train.data.reading import MapDataset
from accel_train.data.sampler import Sampler
from accel_train.experiment import ExperimentConfig, Opened, Prepared
from accel_train.hub.repository import RUN_FILES
from accel_train.metrics.evaluation import EvaluationStopped, stoppable
from accel_train.metrics.logs import info
from accel_train.metrics.recorder import Recorder
from accel_train.metrics.throughput import Count, Throughput
from accel_train.runtime import step_overhead
from accel_train.runtime.exiting import EXIT_PREEMPTED
from accel_train.store.commit import checkpoint_name
from accel_train.training.accumulation import StepResult

logger = logging.getLogger(__name__)
CALLS = ("report", "save_if_due")


class Training:
    """One run from the step that it stands at. Made, iterated and called on every process; a context manager.

    ::

        with loop.Training(config, accelerator, opened, prepared, data, order, write_extras) as training:
            for batches in training:                # ends at max_steps, at a stop, at an early end
                ...                                 # forward, backward, optimizer, EMA
                training.report(batches, result)
                training.save_if_due(result)        # before the evaluation: one that fails loses nothing
                if config.evaluation.due(batches.done, opened.max_steps):
                    training.evaluate(evaluation)
        return loop.finish(training)

    Leaving it finishes the last save and ends readers and trackers, whatever the reason. ``write_extras(directory)``
    puts beside the weights of a checkpoint what their use needs; the main process calls it.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        accelerator: Accelerator,
        opened: Opened,
        prepared: Prepared,
        dataset: MapDataset,
        order: Sampler,
        write_extras: Callable[[Path], None],
    ) -> None:
        run, first, device, world_size = opened.run, opened.start_step, accelerator.device, accelerator.num_processes
        self.opened, self.accelerator = opened, accelerator
        self.done = first
        """Optimizer steps done, with those of earlier starts."""
        self.stopped = False
        """The run was asked to stop, and what it has done is saved."""
        self._ended = False
        self._order, self._notes, self._batch = order, prepared.notes, config.global_batch_size
        self._result: StepResult | None = None
        self._metrics: Mapping[str, float] = {}
        """Of an evaluation after the present step."""
        self._called: list[str] = []
        self._log = Recorder(
            accelerator,
            run.directory,
            config.log,
            max_steps=opened.max_steps,
            start_step=first,
            config=to_tree(config),
            facts=prepared.notes.facts,
        )
        self._saver = Saver(
            accelerator,
            run,
            prepared.average,
            config.checkpoints,
            config.hub,
            write_extras,
            epoch=order.epoch,
            on_commit=self._log.saved,
        )
        cut = sampler.Cut(accelerator.process_index, world_size, config.micro_batch_size)
        self._steps = iterate_steps(
            dataset, order, cut, start_step=first, max_steps=opened.max_steps, device=device, config=config.loader
        )
        self._rates = Throughput(device, world_size=world_size, precision=config.precision)
        self._contexts = ExitStack()

    def __enter__(self) -> Training:
        for context in (step_overhead.garbage_frozen(), self._log, closing(self._steps), self._saver):
            self._contexts.enter_context(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, trace)
        self.stopped = self.stopped or self._saver.stopping

    def __iter__(self) -> Iterator[StepBatches]:
        """The micro-batches of each step. Raises ``RuntimeError`` where the step before was not reported or saved."""
        for batches in self._steps:
            self._called, self._metrics, self.done = [], {}, batches.done
            yield batches
            if missing := [name for name in CALLS if name not in self._called]:
                raise RuntimeError(f"step {batches.step}: the loop did not call training.{missing[0]}; add the call")
            if self._ended and not self.stopped:
                self._save()
            if self.stopped or self._ended:
                return

    def report(
        self,
        batches: StepBatches,
        result: StepResult,
        *,
        samples: Count | None = None,
        tokens: Count = 0.0,
        padded_tokens: Count = 0.0,
        flops: Count = 0.0,
        **fields: object,
    ) -> None:
        """Count the step for the throughput and, at a log point, write a training line; that waits for the device.

        ``samples`` (None: the global batch), ``tokens``, ``padded_tokens`` and ``flops`` are of this step over all
        processes, as in ``Throughput.update``; ``fields`` join the line as they are.
        """
        self._called.append("report")
        self._saver.begin()
        samples = self._batch if samples is None else samples
        counts = {"samples": samples, "tokens": tokens, "padded_tokens": padded_tokens, "flops": flops}
        self._rates.update(data_wait_seconds=batches.data_wait_seconds, **counts)
        self._log.advance(self.done)
        if self._log.due(self.done):
            notes = self._notes.fields(self._order.epoch(self.done))
            self._log.train(self.done, result.fields() | self._rates.read() | notes | fields)

    def save_if_due(self, result: StepResult) -> None:
        """Save if a save is due or somebody asked to stop: all processes learn of it at one step."""
        self._called.append("save_if_due")
        self._result = result
        self.stopped = self._saver.boundary(self.done)
        if self.stopped or self._saver.due(self.done, self.opened.max_steps):
            self._save()

    def evaluate(self, evaluation: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Run ``evaluation``, record its metrics, and add them to the checkpoint of this step, if there is one.

        What was saved is committed first, so that an evaluation that raises, hangs or is killed loses nothing. A stop
        ends it at its next ``stopping_point``, on all processes, and saves. Returns the metrics; empty after a stop.
        """
        if self.stopped:
            return {}
        with self._rates.pause():
            self._saver.finish()
            try:
                with stoppable(self._saver.asked_to_stop):
                    metrics = evaluation()
            except EvaluationStopped:
                info(logger, f"asked to stop: the evaluation after step {self.done} is broken off")
                self.stopped = True
                self._save()
                return {}
            self._log.evaluation(self.done, metrics)
            self._saver.add_metrics(self.done, metrics)
        self._metrics = metrics
        return metrics

    def end(self) -> None:
        """Let this step be the last: save it and leave the loop. The same on every process."""
        self._ended = True

    def _save(self) -> None:
        assert self._result is not None, "save_if_due comes first"
        self._result.check()
        with self._rates.pause():
            self.stopped = self._saver.save(self.done, self._metrics) or self.stopped


def finish(training: Training) -> int:
    """End the trackers, say where things are, and give the exit code: 75 where a run was asked to stop."""
    opened, step = training.opened, training.done
    training.accelerator.end_training()
    if training.stopped:
        info(logger, f"stopped at step {step} of {opened.max_steps} and saved; start again to go on (exit code 75)")
        return EXIT_PREEMPTED
    place = opened.run.directory
    there = [f"checkpoints/{checkpoint_name(step)}", *(name for name in RUN_FILES if (place / name).exists())]
    info(logger, f"finished: {place} holds {', '.join(there)}")
    return 0
