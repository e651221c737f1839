"""Rounds of a measurement: warm-up, the time of each round, the median and the spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP = 2
LEAST = 5
"""Rounds of each measurement, however long they take."""
MOST = 1000


@dataclass(frozen=True)
class Clock:
    """Time, read after the device has finished its work."""

    now: Callable[[], float] = time.perf_counter
    wait: Callable[[], None] = lambda: None

    def read(self) -> float:
        """Wait for the device and return the time."""
        self.wait()
        return self.now()


def wall_clock(device: torch.device) -> Clock:
    """Return the clock of a device that others may keep waiting."""
    if device.type == "cuda":
        return Clock(wait=lambda: torch.cuda.synchronize(device))
    return Clock()


def own_clock(device: torch.device) -> tuple[Clock, str]:
    """Return the clock for computation, and its name.

    On a CPU with one thread it is the thread's own, which stands still while another program has the core. Of several
    threads one waits for the others asleep, and only the wall clock sees that.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return Clock(now=time.thread_time), "thread"
    return wall_clock(device), "wall"


def time_rounds(
    work: Callable[[], object], seconds: float, clock: Clock, wall: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the time of each call of ``work``: at least ``LEAST`` calls, and more until ``seconds`` are over."""
    began = wall()
    for _ in range(WARM_UP):
        work()
    found: list[float] = []
    before = clock.read()
    while len(found) < LEAST or (wall() - began < seconds and len(found) < MOST):
        work()
        after = clock.read()
        found.append(after - before)
        before = after
    return found


@dataclass(frozen=True)
class Timed:
    """Rounds of one measurement, of the slowest process."""

    seconds: float
    """Median of a round."""
    spread: float
    """Distance of the quartiles over the median."""
    rounds: int


def summarize(by_process: Sequence[Sequence[float]]) -> Timed:
    """Return the slowest process's rounds: a step waits for it."""
    slowest = max(by_process, key=statistics.median)
    median = statistics.median(slowest)
    low, _, high = statistics.quantiles(slowest, n=4, method="inclusive")
    return Timed(median, (high - low) / median, len(slowest))
