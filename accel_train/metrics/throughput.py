"""How fast training goes, counted on the host, without ever making the host wait for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_train.speed.device_peaks import peak_of
from accel_train.training.accumulation import widest

if TYPE_CHECKING:
    from accelerate import Accelerator

GIB = float(1 << 30)
Count = float | torch.Tensor
"""A number, or a tensor of one element on any device: it is summed where it is and read at the log point."""


@dataclass(frozen=True)
class _Interval:
    """What happened between two reads."""

    seconds: float
    steps: int
    samples: float
    tokens: float
    padded_tokens: float
    data_wait_seconds: float
    flops: float


class LocalCounts:
    """What this process has computed since the last log point. Summed where the counts are, without waiting."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}

    def add(self, **counts: Count) -> None:
        """Count one step of this process; the same names in every step."""
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + count

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Sums over all processes since the last call. A small collective; waits for the device."""
        if not self._counts:
            return {}
        dtype = widest(torch.zeros((), device=accelerator.device)).dtype  # FLOPs exceed what fp32 counts
        values = [torch.as_tensor(c, dtype=dtype, device=accelerator.device) for c in self._counts.values()]
        total: Any = accelerator.reduce(torch.stack(values), "sum")
        names, self._counts = list(self._counts), {}
        return dict(zip(names, total.tolist(), strict=True))


class Throughput:
    """Rates of training alone over the last log intervals. Every process may keep one; no collective.

    Why the window is bounded by reads: on CUDA a step returns to the host long before the device has done it,
    so a clock read in ``update`` times the queue, not the work. ``read`` is called at the log point, after
    the host has fetched the loss and so has waited for all the work before it. The time from one such point
    to the next is the device's, and what was counted between them was done between them. The window is
    therefore the fewest whole log intervals that hold at least ``window_steps`` steps; the first one includes
    compilation and other warm-up, and leaves the window as training goes on.

    The clock starts when the object is made: make it right before the loop. It is monotonic; a jump of the
    wall clock changes nothing.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        world_size: int = 1,
        precision: str = "fp32",
        peak_flops_per_second: float | None = None,
        window_steps: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``peak_flops_per_second`` is the dense peak of ONE device in the precision of the matrix products;
        None looks the device and ``precision`` up, and where they are not known there is no ``mfu``."""
        self._device = device
        self._world_size = world_size
        self._peak = peak_flops_per_second or peak_of(device, precision)
        self._window_steps = window_steps
        self._clock = clock
        self._intervals: deque[_Interval] = deque()
        self._pauses = 0
        self._paused_since = 0.0
        self._restart(clock())

    def _restart(self, now: float) -> None:
        self._since = now
        self._excluded = 0.0
        self._steps = 0
        self._samples: Count = 0.0
        self._tokens: Count = 0.0
        self._padded_tokens: Count = 0.0
        self._data_wait_seconds = 0.0
        self._flops: Count = 0.0

    def update(
        self,
        *,
        samples: Count,
        tokens: Count = 0.0,
        padded_tokens: Count = 0.0,
        data_wait_seconds: float = 0.0,
        flops: Count = 0.0,
    ) -> None:
        """Count one optimizer step. All counts are GLOBAL (over all processes) but ``data_wait_seconds``.

        ``tokens`` are valid ones, ``padded_tokens`` all positions that were computed. ``flops`` are model
        FLOPs of forward and backward, without recomputation. A device tensor costs one small kernel, no wait.
        """
        self._steps += 1
        self._samples = self._samples + samples
        self._tokens = self._tokens + tokens
        self._padded_tokens = self._padded_tokens + padded_tokens
        self._data_wait_seconds += data_wait_seconds
        self._flops = self._flops + flops

    @contextmanager
    def pause(self) -> Generator[None]:
        """Time that is not training: evaluation, sampling, saving. May be nested.

        The one place that waits for a CUDA device, on entry and on exit, so that queued steps count as
        training and queued evaluation does not. What is paused for reads the weights and waits anyway.
        """
        if not self._pauses:
            self._wait_for_device()
            self._paused_since = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._wait_for_device()
                self._excluded += self._clock() - self._paused_since

    def read(self) -> dict[str, float]:
        """Close the interval and return the rates; call it where the host has just waited for the loss.

        Rates without suffix are global. Absent: everything but memory before the first step;
        ``model_tflops_per_second`` where no FLOPs were counted; ``mfu`` where the peak is not known.
        Memory is this process's.
        """
        self._close_interval()
        if not self._intervals:
            return memory_in_use(self._device)
        seconds = max(sum(i.seconds for i in self._intervals), 1e-9)  # never negative, whatever the clock
        steps = sum(i.steps for i in self._intervals)
        rates: dict[str, float] = {}
        for name in ("samples", "tokens", "padded_tokens"):
            rate = sum(float(getattr(i, name)) for i in self._intervals) / seconds
            rates[f"{name}_per_second"] = rate
            rates[f"{name}_per_second_per_device"] = rate / self._world_size
        rates["step_seconds"] = seconds / steps
        waited = sum(i.data_wait_seconds for i in self._intervals)
        rates["data_wait_fraction"] = min(waited / seconds, 1.0)
        flops = sum(i.flops for i in self._intervals) / seconds
        return rates | self._flop_rates(flops) | memory_in_use(self._device)

    def _flop_rates(self, flops_per_second: float) -> dict[str, float]:
        if flops_per_second <= 0:
            return {}
        per_device = flops_per_second / self._world_size
        rates = {
            "model_tflops_per_second": flops_per_second / 1e12,
            "model_tflops_per_second_per_device": per_device / 1e12,
        }
        return rates | ({"mfu": per_device / self._peak} if self._peak else {})

    def _close_interval(self) -> None:
        if not self._steps:  # a second read at the same point: nothing new, the interval stays open
            return
        # Reading a device count waits for it, so the clock comes after.
        samples, tokens = float(self._samples), float(self._tokens)
        padded_tokens, flops = float(self._padded_tokens), float(self._flops)
        now = self._paused_since if self._pauses else self._clock()
        seconds = now - self._since - self._excluded
        self._intervals.append(
            _Interval(seconds, self._steps, samples, tokens, padded_tokens, self._data_wait_seconds, flops)
        )
        self._restart(now)
        while sum(i.steps for i in self._intervals) - self._intervals[0].steps >= self._window_steps:
            self._intervals.popleft()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # not for the copies of a save beside it


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB used by this process: the allocator's figures on CUDA, the resident set of the process on CPU.

    Host only: the CUDA allocator keeps its books on the host. ``memory_peak_gib`` is the largest allocation
    since the process began, or since ``torch.cuda.reset_peak_memory_stats``.
    """
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
    import psutil

    return {"process_rss_gib": psutil.Process().memory_info().rss / GIB}
