"""Times of the parts of a step in every run: forward, backward, update. No profiler, and no device wait per step.

On CUDA a call returns to the host before the device has started the work, so events in the stream take the times. They
are read at a log point, where the host has waited for the loss anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal, Protocol

import torch

Part = Literal["forward", "backward", "update"]
MOST_EVENTS = 1 << 14
"""Maximum number of events between two reads. A log point every 100 steps of 50 micro-batches needs 15,000."""


class Clock(Protocol):
    """Clock for the parts of a step, on one device."""

    def mark(self, part: Part | None) -> None:
        """End the part that began at the last mark. None: the time since then belongs to no part."""
        ...

    def take(self) -> dict[Part, float]:
        """Return the seconds of each part since the last call."""
        ...


class StepTimes:
    """Seconds of the parts of the steps between two log points, of this process. No collective.

    ``backward`` includes overlapping reductions, and under ZeRO the engine's update. ``update`` follows the last
    backward: the rest of the reduction, clipping, optimizer and EMA. The rest of a step is the wait for data and the
    preparation of the batch. Devices other than CPU and CUDA have no parts.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._taken: dict[Part, float] = {}
        """Seconds that ``total`` has read from the clock, and that no log point has taken yet."""
        self._totals: dict[Part, float] = {}
        self._clock: Clock | None = None
        if device.type == "cpu":
            self._clock = _HostClock(clock)
        elif device.type == "cuda" and torch.cuda.is_available():
            self._clock = _EventClock()

    def begin(self) -> None:
        """Begin a forward."""
        if self._clock is not None:
            self._clock.mark(None)

    def end(self, part: Part) -> None:
        """End a part and begin the next."""
        if self._clock is not None:
            self._clock.mark(part)

    def take(self) -> dict[Part, float]:
        """Return the seconds of each part since the last call, for a log point. Empty if they are not measured."""
        self._read()
        taken, self._taken = self._taken, {}
        return taken

    def total(self, part: Part) -> float:
        """Return the seconds of a part since the start, NaN if parts are not measured. Waits for a CUDA device."""
        self._read()
        if self._clock is None:
            return math.nan
        return self._totals.get(part, 0.0)

    def _read(self) -> None:
        if self._clock is None:
            return
        for part, seconds in self._clock.take().items():
            self._taken[part] = self._taken.get(part, 0.0) + seconds
            self._totals[part] = self._totals.get(part, 0.0) + seconds


class _HostClock:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: dict[Part, float] = {}

    def mark(self, part: Part | None) -> None:
        now = self._clock()
        if part is not None:
            self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[Part, float]:
        taken, self._seconds = self._seconds, {}
        return taken


class _EventClock:
    """Events in the compute stream. The event objects are reused after each log point."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._parts: list[Part | None] = []
        self._is_incomplete = False

    def mark(self, part: Part | None) -> None:
        if len(self._parts) == MOST_EVENTS:
            # A loop without log points, or many micro-batches between two of them.
            self._parts = []
            self._is_incomplete = True
        if len(self._parts) == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[len(self._parts)].record()
        self._parts.append(part)

    def take(self) -> dict[Part, float]:
        seconds: dict[Part, float] = {}
        if self._parts:
            # The host has waited for the loss, and the update that follows it may still be running.
            self._events[len(self._parts) - 1].synchronize()
        for place, part in enumerate(self._parts):
            if part is not None and place > 0:
                milliseconds = self._events[place - 1].elapsed_time(self._events[place])
                seconds[part] = seconds.get(part, 0.0) + milliseconds / 1e3
        self._parts = []
        if self._is_incomplete:
            # Times of a part of the interval would pass for those of the whole.
            self._is_incomplete = False
            return {}
        return seconds
