"""Watch for steps that hang: each process logs its Python stacks, and the main process names those the others wait for.

A collective waits for all processes, and ends with an error after ``collective_timeout_seconds`` that names none of
them. Until then a stuck process can still report where it is, from a watch thread, because its main thread answers
nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

from accel_train.store import atomic_files, strict_json
from accel_train.training.health import flight_recorder
from accel_train.wording import FILE_ONLY

logger = logging.getLogger(__name__)
LOOKS = 20
"""Checks of the thread within one limit, if the limit is short."""
LOOK_SECONDS = 1.0
"""Longest time between two checks. The processes find a hang within about this time of each other."""
ANSWER_SECONDS = 10.0
"""How long the main process waits for the other processes to report where they are."""
MAX_BYTES = 1 << 16
COLLECTIVES = "torch.distributed"
DECORATOR = "wrapper"
FRAMEWORKS = ("torch", "accelerate", "deepspeed", "contextlib")
"""Packages whose lines say what a process does, and not where in the recipe."""


class Step(Protocol):
    """One step of the loop."""

    @property
    def done(self) -> int:
        """Number of steps done once this one has ended."""
        ...


S = TypeVar("S", bound=Step)
T = TypeVar("T")


class Place(NamedTuple):
    """Where a process is."""

    process: int
    step: int
    """Step as in log lines, counted from 1."""
    line: str
    """Innermost line outside of torch and Accelerate."""
    collective: str
    """Name of the function of torch.distributed that it waits in, empty if it computes."""

    def __str__(self) -> str:
        waits = f" waits in {self.collective}," if self.collective else " is"
        return f"process {self.process}{waits} at {self.line} (step {self.step})"


def place_of(frame: FrameType, process: int, step: int) -> Place:
    """Return the place of a thread with this innermost frame."""
    collective = ""
    line = "an unknown line"
    for inner, number in traceback.walk_stack(frame):
        module = str(inner.f_globals.get("__name__", ""))
        # The outermost such frame, which the recipe or Accelerate has called, but not torch's decorator around it.
        if module.startswith(COLLECTIVES) and inner.f_code.co_name != DECORATOR:
            collective = inner.f_code.co_name
        if module.partition(".")[0] not in FRAMEWORKS:
            line = f"{inner.f_code.co_filename}:{number} in {inner.f_code.co_name}"
            break
    return Place(process, step, line, collective)


def describe(places: Sequence[Place], processes: int, seconds: float) -> list[str]:
    """Return lines about a step that has not ended for ``seconds``. The processes that others wait for come first."""
    lines = [f"no step has ended for {seconds:g} s"]
    silent = sorted({*range(processes)} - {place.process for place in places})
    if silent:
        named = ", ".join(map(str, silent))
        lines.append(f"  no answer from process {named}: ended, stopped, or busy outside of Python")
    # A process that has fallen behind is in an earlier step, or computes while the others wait.
    ordered = sorted(places, key=lambda place: (place.step, bool(place.collective), place.process))
    return [*lines, *(f"  {place}" for place in ordered)]


class HangWatch:
    """Watches from a thread whether steps still end. One per process."""

    def __init__(
        self, logs: Path, process: int, processes: int, seconds: float, is_paused: Callable[[], bool] = lambda: False
    ) -> None:
        self._logs = logs
        self._process = process
        self._processes = processes
        self._seconds = seconds
        self._is_paused = is_paused
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._step = 0
        self._since = time.monotonic()
        self._told = False

    def steps(self, steps: Generator[S]) -> Generator[S]:
        """Yield the steps, and watch them until the last has ended."""
        thread: threading.Thread | None = None
        try:
            with closing(steps):
                for batches in steps:
                    self._step = batches.done
                    self._since = time.monotonic()
                    self._told = False
                    # Only now, because the reader's workers are forked before the first batch.
                    if thread is None:
                        thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
                        thread.start()
                    yield batches
        finally:
            self._ended.set()
            if thread is not None:
                thread.join(ANSWER_SECONDS)

    def _watch(self) -> None:
        while not self._ended.wait(min(LOOK_SECONDS, self._seconds / LOOKS)):
            if self._is_paused():
                # A pause, such as an evaluation, may take any time. Afterwards the step has its full limit again.
                self._since = time.monotonic()
            elif not self._told and time.monotonic() - self._since > self._seconds:
                self._told = True
                # A report that fails must not end the watch, and never the run.
                with suppress(Exception):
                    self._tell()

    def _tell(self) -> None:
        """Log the stacks of this process. The main process also logs where each process is."""
        # Taken before anything is written, so that no answer about this hang seems too old, however busy the host is.
        oldest = time.time() - self._seconds
        # Documented, in spite of its name.
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks: list[str] = []
        for ident, frame in sorted(frames.items(), key=lambda item: item[0] != self._main):
            if ident != threading.get_ident():
                stacks.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
        logger.warning("no step has ended for %g s:\n%s", self._seconds, "".join(stacks), extra={FILE_ONLY: True})
        place = place_of(frames[self._main], self._process, self._step)
        self._write(place)
        if self._process == 0:
            answers = self._answers(partial(_read, oldest=oldest))
            for line in [*describe(answers, self._processes, self._seconds), self._remedy()]:
                logger.warning("%s", line)
        # Afterwards, because the recorder may wait for a device that is stuck.
        collectives = flight_recorder.dump(self._logs, self._process)
        if collectives is not None:
            self._write(place, collectives)
            self._tell_collectives()

    def _write(self, place: Place, collectives: Sequence[str] = ()) -> None:
        content = place._asdict() | {"time": time.time(), "collectives": list(collectives)}
        atomic_files.replace_json(self._file(self._process), content)

    def _tell_collectives(self) -> None:
        if self._process != 0:
            return
        oldest = time.time() - self._seconds - ANSWER_SECONDS
        for process, lines in sorted(self._answers(partial(_read_collectives, oldest=oldest))):
            logger.warning("  process %d: %s", process, "; ".join(lines))
        logger.warning("  %s", flight_recorder.how_to_read(self._logs))

    def _answers(self, read: Callable[[Path], T | None]) -> list[T]:
        """Return the answers of the processes that found the same hang, by process number."""
        deadline = time.monotonic() + ANSWER_SECONDS
        answers: dict[int, T] = {}
        while True:
            for process in {*range(self._processes)} - answers.keys():
                answer = read(self._file(process))
                if answer is not None:
                    answers[process] = answer
            if len(answers) == self._processes or time.monotonic() > deadline or self._ended.wait(0.1):
                return [answers[process] for process in sorted(answers)]

    def _file(self, process: int) -> Path:
        return self._logs / f"hang_{process}.json"

    def _remedy(self) -> str:
        return f"  stacks of all threads: {self._logs}/rank_N.log; --health.hang_seconds sets this limit"


def _content_of(file: Path, oldest: float) -> Mapping[str, Any]:
    """Read the hang file of a process. Returns an empty mapping if it is unreadable or from an earlier hang."""
    try:
        content: Mapping[str, Any] = strict_json.read_object(file, MAX_BYTES)
        return content if float(content["time"]) >= oldest else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read(file: Path, oldest: float) -> Place | None:
    content = _content_of(file, oldest)
    if not content.keys() >= set(Place._fields):
        return None
    return Place(*(content[name] for name in Place._fields))


def _read_collectives(file: Path, oldest: float) -> tuple[int, list[str]] | None:
    content = _content_of(file, oldest)
    if not content.get("collectives"):
        return None
    return content["process"], content["collectives"]
