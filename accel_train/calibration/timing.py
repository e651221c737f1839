"""Timing of repeated work: warm-up, the time of each round, their median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP = 2
LEAST = 5
"""Least number of rounds of a measurement, however long they take."""
MOST = 1000


@dataclass(frozen=True)
class Clock:
    """A clock that is read once the device has finished its queued work."""

    now: Callable[[], float] = time.perf_counter
    wait: Callable[[], None] = lambda: None

    def read(self) -> float:
        """Wait for the device and return the time."""
        self.wait()
        return self.now()


def wall_clock(device: torch.device) -> Clock:
    """Return a wall clock, which also counts the time spent waiting for other processes and threads."""
    if device.type == "cuda":
        return Clock(wait=lambda: torch.cuda.synchronize(device))
    return Clock()


def own_clock(device: torch.device) -> tuple[Clock, str]:
    """Return the clock for computation, and its name.

    On a CPU with one thread it is the thread's own clock, which stops while another program has the core. With several
    threads, the calling one sleeps while it waits for the others, and only the wall clock counts that.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return Clock(now=time.thread_time), "thread"
    return wall_clock(device), "wall"


def time_rounds(
    work: Callable[[], object], seconds: float, clock: Clock, wall: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Time each call of ``work`` after a warm-up, until ``seconds`` are over: ``LEAST`` to ``MOST`` calls."""
    began = wall()
    for _ in range(WARM_UP):
        work()
    times: list[float] = []
    before = clock.read()
    while len(times) < LEAST or (wall() - began < seconds and len(times) < MOST):
        work()
        after = clock.read()
        times.append(after - before)
        before = after
    return times


@dataclass(frozen=True)
class Timed:
    """Summary of the slowest process's rounds of one measurement."""

    seconds: float
    """Median time of a round."""
    spread: float
    """Interquartile range over the median."""
    rounds: int


def summarize(by_process: Sequence[Sequence[float]]) -> Timed:
    """Summarize the rounds of the slowest process, the one that a step waits for."""
    slowest = max(by_process, key=statistics.median)
    median = statistics.median(slowest)
    low, _, high = statistics.quantiles(slowest, n=4, method="inclusive")
    return Timed(median, (high - low) / median, len(slowest))
