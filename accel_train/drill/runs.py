"""Starts of a recipe in processes of their own, with their output and recorded events."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_train.compare.runs import Child, kill_family, start_child, stop_signals_held
from accel_train.drill.inside.request import Event, read_events

LOOK_SECONDS = 0.05
"""Time between two looks at a run."""
LINES_SHOWN = 8


@dataclass(frozen=True)
class Ended:
    """A start that has ended."""

    code: int
    """Exit code. Negative: the signal that ended it."""
    began: float
    """Time of the start by the system-wide monotonic clock."""
    seconds: float
    output: str
    events: Sequence[Event]
    timed_out: bool
    """True if it did not end by itself within the limit."""

    def steps(self, name: str) -> list[int]:
        """Return the steps of the main process's events ``name``."""
        return [event.step for event in self.events if event.name == name and event.rank == 0]

    @property
    def first_step(self) -> float | None:
        """Seconds from the start of the command until its first step began. None if it made none."""
        begun = [event.at for event in self.events if event.name == "begin" and event.rank == 0]
        return begun[0] - self.began if begun else None

    @property
    def was_struck(self) -> bool:
        """True if a process recorded that the fault happened."""
        return any(event.name == "fault" for event in self.events)

    @property
    def last_lines(self) -> str:
        """The end of the output."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return "\n".join(lines[-LINES_SHOWN:])

    @property
    def ending(self) -> str:
        """The exit code, or the name of the signal."""
        if self.timed_out:
            return "none"
        return signal.Signals(-self.code).name if self.code < 0 else str(self.code)


class Runner:
    """Starts commands one after another. Signals its own processes only."""

    def run(
        self,
        words: Sequence[str],
        home: Path,
        name: str,
        environment: Mapping[str, str],
        limit_seconds: float,
        when_ready: Callable[[Child], None] | None = None,
    ) -> Ended:
        """Run a command to its end, its output in ``home/name.txt`` and its events in ``home/name.jsonl``.

        ``when_ready`` is called once a process has recorded that it is ready for the parent's part of the fault.
        """
        log = home / f"{name}.txt"
        # Beside the run directory, whose content is the recipe's own.
        events = home / f"{name}.jsonl"
        began = time.monotonic()
        child: Child | None = None
        timed_out = False
        try:
            with stop_signals_held():
                child = self.start(words, log, environment)
            while child.poll() is None:
                if when_ready is not None and any(event.name == "ready" for event in read_events(events)):
                    when_ready(child)
                    # Once: the events stay in the file.
                    when_ready = None
                timed_out = time.monotonic() - began > limit_seconds
                if timed_out:
                    break
                with suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK_SECONDS)
        finally:
            # Also after an exception, such as a Ctrl-C of the drill itself.
            if child is not None:
                kill_family(child)
        assert child is not None, "a start that fails has raised"
        seconds = time.monotonic() - began
        output = log.read_text(errors="replace")
        return Ended(child.wait(), began, seconds, output, read_events(events), timed_out)

    def start(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        """Start a command in a group of its own."""
        with log.open("wb") as output:
            return start_child(words, output, environment)
