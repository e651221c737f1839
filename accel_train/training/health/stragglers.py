"""Detection of processes that are slower than the others, from the work that each does alone.

Collectives equalise the step times of all processes: the slow one is the one that does not wait. So the processes
compare times without a collective in them: the wait for data, the forward under DDP, and a small probe that all of them
run after the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median_low
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Measure = Literal["data", "forward", "device", "host"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
WORDS: dict[Measure, str] = {
    "data": "waits {} per step for data",
    "forward": "takes {} per step for the forward",
    "device": "takes {} for a matrix product of fixed size",
    "host": "takes {} for a Python loop of fixed length",
}
REMEDIES: dict[Measure, str] = {
    "data": "check the disk or network of that host, and what else reads from it",
    "forward": "check the clocks, the temperature and other jobs of that device and host",
    "device": "check the clocks, the temperature and other jobs of that device (nvidia-smi -q -d PERFORMANCE)",
    "host": "check the other jobs of that host, and the cores that the process may use",
}
CHECKS = 2
"""Checks in a row above the limit that make a process slow: one alone may be chance."""
REPEATS = 3
"""Repetitions of a probe. The shortest counts."""
PRODUCTS = 8
"""Matrix products per repetition."""
PRODUCT_SIZE = {"cuda": 2048}
"""Rows of the matrices by type of device. 8 products take 0.25 ms on a GPU with 550 TFLOP/s."""
PRODUCT_SIZE_ELSEWHERE = 64
"""Rows of the matrices elsewhere, few enough for one thread: threads of a CPU with busy cores wait for each other."""
PYTHON_ROUNDS = 4000


class Times(NamedTuple):
    """Seconds of one process since the check before, or of the probe. NaN: not measured."""

    step: float
    """Mean time of a step, without pauses."""
    data: float
    forward: float
    device: float
    host: float


class Slow(NamedTuple):
    """A process that is slower than the others."""

    process: int
    measure: Measure
    seconds: float
    median_seconds: float
    factor: float
    """For ``data``, the time of a step over its time with the median's wait. Else ``seconds / median_seconds``."""

    def describe(self, host: str, processes: int) -> str:
        """Return the finding and the remedy, for a message."""
        words = WORDS[self.measure].format(_milliseconds(self.seconds))
        effect = f"{self.factor:.1f} times as long"
        if self.measure == "data":
            effect = f"which makes a step {effect}"
        return (
            f"process {self.process} ({host}) is slower than the others, which wait for it: it {words}, the median of "
            f"the {processes} processes {_milliseconds(self.median_seconds)}, {effect}; {REMEDIES[self.measure]}"
        )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def factor_of(measure: Measure, own: float, median: float, step: float) -> float:
    """Return how many times slower than the median a process is. 0 where it was not measured."""
    if measure == "data":
        # Any wait is many times a median of nearly 0. What counts is its share of the step.
        own, median = step, step - (own - median)
    if not (math.isfinite(own) and math.isfinite(median)):
        return 0.0
    return own / max(median, 1e-9)


class Stragglers:
    """Judges the times of all processes, check by check. The same on every process."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._above: dict[tuple[int, Measure], int] = {}
        """Checks in a row above the limit."""

    def judge(self, rows: Sequence[Times]) -> tuple[list[Slow], list[tuple[int, Measure]]]:
        """Return the processes that have become slow with this check, and those that have recovered."""
        slow: list[Slow] = []
        recovered: list[tuple[int, Measure]] = []
        for measure in MEASURES:
            values: list[float] = [getattr(row, measure) for row in rows]
            # The lower of two middle values: with two processes, that of the faster one.
            middle = median_low(values)
            for process, own in enumerate(values):
                key = (process, measure)
                before = self._above.get(key, 0)
                factor = factor_of(measure, own, middle, rows[process].step)
                if factor <= self._factor:
                    self._above.pop(key, None)
                    if before >= CHECKS:
                        recovered.append(key)
                    continue
                self._above[key] = before + 1
                if before + 1 == CHECKS:
                    slow.append(Slow(process, measure, own, middle, factor))
        return slow, recovered


class Probe:
    """A fixed piece of work for the device and one for the host. Waits for the device. Not a collective."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        size = PRODUCT_SIZE.get(device.type, PRODUCT_SIZE_ELSEWHERE)
        # Kept allocated, because memory may be short at a check.
        self._factor: Tensor = torch.full((size, size), 1 / size, device=device, dtype=dtype)
        self._product = torch.empty_like(self._factor)
        self._device = device

    def measure(self) -> tuple[float, float]:
        """Return the seconds of the device and of the host, each the shortest of a few."""
        device = min(self._on_device() for _ in range(REPEATS))
        return device, min(_on_host() for _ in range(REPEATS))

    @torch.no_grad()
    def _on_device(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(self._factor, self._factor, out=self._product)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - began


def _on_host() -> float:
    began = time.perf_counter()
    total = 0
    for number in range(PYTHON_ROUNDS):
        total += number % 7
    return time.perf_counter() - began
