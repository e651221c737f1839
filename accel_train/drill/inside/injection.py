"""Inject a fault into a run, inside its processes, and record the progress of training.

Entered through ``loop.observed``, once the model is prepared. The recipe's own lines run unchanged. Every fault is
triggered by an event: a step reached, an evaluation begun, a save passed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.data.loader import StepBatches
from accel_train.drill.inside.request import Request
from accel_train.store import failpoints

if TYPE_CHECKING:
    from accel_train.data.datasets import MapDataset
    from accel_train.loop import Training
    from accel_train.train_state import TrainState

Evaluation = Callable[[], Mapping[str, float]]
RAISED = "accel-train drill: an evaluation that raises"


@contextmanager
def injecting(request: Request, training: Training, prepared: TrainState, _: MapDataset) -> Generator[None]:
    """Inject the fault of ``request``. Every process enters it."""
    injector = _Injector(request, training, prepared)
    training.steps = injector.watched(training.steps)
    # After the model is prepared, so that everything built before is as in an undisturbed run.
    injector.watch_evaluations()
    injector.watch_saves()
    yield


class _Injector:
    def __init__(self, request: Request, training: Training, prepared: TrainState) -> None:
        self._request = request
        self._training = training
        self._model = prepared.model
        accelerator = training.opened.accelerator
        self._rank = accelerator.process_index
        # Not the main process if there are others: it writes the checkpoints and the log.
        self._is_victim = self._rank == accelerator.num_processes - 1
        self._saves = 0

    def _record(self, name: str, step: int, seconds: float = 0.0) -> None:
        line = {"name": name, "rank": self._rank, "at": time.monotonic(), "step": step, "seconds": seconds}
        # One write, which the kernel appends as a whole, and which outlives the process.
        descriptor = os.open(self._request.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, f"{json.dumps(line)}\n".encode())
        os.close(descriptor)

    def watched(self, steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
        """Yield the steps, record their beginning and end, and inject faults of a step."""
        request = self._request
        for batches in steps:
            self._record("begin", batches.step)
            if request.action == "hub_down" and batches.step == self._training.opened.start_step:
                self._wait_for_the_end_of_the_hub(batches.step)
            is_struck = request.action in ("kill", "hang", "stop") and batches.step == request.step
            if is_struck:
                # Committed first, so that the step to resume from does not depend on the speed of the disk.
                self._training.saver.finish()
            if is_struck and request.action == "stop":
                self._wait_for_the_signal(batches.step)
            elif is_struck and self._is_victim:
                self._model.register_forward_pre_hook(lambda *_: self._strike())
            yield batches
            if is_struck and request.action != "stop" and self._is_victim:
                # A recipe may use its model without calling it.
                self._strike()
            # Here the recipe has run the lines of this step and asks for the next one.
            self._record("done", batches.done)

    def _strike(self) -> None:
        self._record("fault", self._request.step)
        # Recorded first: afterwards this process records nothing more.
        if self._request.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        # A stop request only sets a flag, so that this process stays until it is killed.
        threading.Event().wait()

    def _wait_for_the_signal(self, step: int) -> None:
        """Hold every process until one has the parent's SIGTERM. Raises ``RuntimeError`` if none gets it."""
        self._record("ready", step)
        sent = Path(self._request.sent)
        since: float | None = None
        # A collective, so all processes leave it in the same round.
        while not self._training.saver.asked_to_stop():
            if since is None and sent.exists():
                since = time.monotonic()
            if since is not None and time.monotonic() - since > self._request.patience_seconds:
                raise RuntimeError(
                    f"accel-train drill: SIGTERM was sent {self._request.patience_seconds:g} s ago and has not become "
                    "a request to stop; the recipe, or a package that it imports, handles the signal itself"
                )
            time.sleep(0.01)
        self._record("fault", step)

    def _wait_for_the_end_of_the_hub(self, step: int) -> None:
        # Only the main process pushes. The others wait for it in their first reduction.
        if self._rank == 0:
            self._record("ready", step)
            while not Path(self._request.sent).exists():
                time.sleep(0.01)
            self._record("fault", step)

    def watch_evaluations(self) -> None:
        """Record evaluations, and inject faults of an evaluation."""
        evaluate = self._training.evaluate

        def watched(evaluation: Evaluation) -> Mapping[str, float]:
            done = self._training.done
            self._record("evaluation", done)
            if self._request.action.endswith("_in_evaluation") and done == self._request.step:
                return evaluate(lambda: self._disturbed(evaluation))
            return evaluate(evaluation)

        # The recipe calls the method of this one object.
        setattr(self._training, "evaluate", watched)  # noqa: B010

    def _disturbed(self, evaluation: Evaluation) -> Mapping[str, float]:
        if self._request.action == "stop_in_evaluation":
            self._wait_for_the_signal(self._request.step)
            return evaluation()
        # The other processes do not learn of it, as with an error in the data of one process.
        if not self._is_victim:
            return evaluation()
        self._record("fault", self._request.step)
        raise RuntimeError(RAISED)

    def watch_saves(self) -> None:
        """Record how long a save stops training, and set the failpoint of the second one."""
        saver = self._training.saver
        save = saver.save
        is_wanted = self._request.action == "failpoint"
        place, _, action = self._request.failpoint.partition("=")
        # Asynchronous saves share one writer process, which reads the variable when it starts. Otherwise each save has
        # a writer of its own.
        has_one_writer = self._training.opened.config.checkpoints.asynchronous
        if is_wanted and has_one_writer:
            os.environ[failpoints.VARIABLE] = f"{place}@0#2={action}"

        def watched(step: int, metrics: Mapping[str, float] | None = None) -> bool:
            self._saves += 1
            if is_wanted and not has_one_writer and self._saves == 2:
                os.environ[failpoints.VARIABLE] = f"{place}@0={action}"
            # Before the save, which this process may not survive.
            self._record("saving", step)
            began = time.monotonic()
            stopping = save(step, metrics)
            self._record("save", step, time.monotonic() - began)
            if is_wanted and self._saves == 2:
                # Training would continue meanwhile, for as many steps as the speed of the disk allows.
                saver.finish()
            return stopping

        method: Any = watched
        setattr(saver, "save", method)  # noqa: B010
