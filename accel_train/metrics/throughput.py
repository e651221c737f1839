"""Throughput of training, measured on the host without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from accel_train.metrics.profiling.names import PAUSE
from accel_train.metrics.profiling.step_times import Part, StepTimes
from accel_train.speed.device_peaks import peak_of
from accel_train.training.parameters import widest

if TYPE_CHECKING:
    from accelerate import Accelerator

GIB = float(1 << 30)
SHORTEST_STALL_SECONDS = 0.001
Count = float | torch.Tensor
"""A number, or a tensor with one element on any device. Tensors are summed on their device and read at a log point."""


@dataclass(frozen=True)
class _Interval:
    """Counts between two reads."""

    seconds: float
    steps: int
    samples: float
    tokens: float
    padded_tokens: float
    data_wait_seconds: float
    flops: float
    profiled_steps: int
    parts: Mapping[Part, float]


class LocalCounts:
    """Counts of this process since the last log point. Tensors are summed on their device, without a wait."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}

    def add(self, **counts: Count) -> None:
        """Count one step of this process. Every step must have the same names."""
        for name, count in counts.items():
            # A sum on the device, if it is a tensor: reading it would wait in every step.
            self._counts[name] = self._counts.get(name, 0.0) + count

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the sums over all processes since the last call. A small collective, with a wait for the device."""
        if not self._counts:
            return {}
        device = accelerator.device
        dtype = widest(torch.zeros((), device=device)).dtype  # FLOPs exceed the integers that are exact in fp32
        counts = self._counts.values()
        values = [torch.as_tensor(count, dtype=dtype, device=device) for count in counts]
        # In the order of their first `add`, which must be the same on every process: the vector has no names.
        total: Any = accelerator.reduce(torch.stack(values), "sum")
        names = list(self._counts)
        self._counts = {}
        return dict(zip(names, total.tolist(), strict=True))


class Throughput:
    """Throughput of training alone over the last log intervals. Every process may have one. No collective.

    The window ends at reads for a reason. On CUDA a step returns to the host long before the device finishes it, so a
    clock in ``update`` would time the queue. ``read`` is called at a log point, after the host has fetched the loss
    and thus waited for all earlier work. Between two such points, time and counts belong together. The window
    therefore holds whole log intervals, as few as reach ``window_steps`` steps. The first interval includes
    compilation and other warm-up, and leaves the window as training continues.

    The monotonic clock starts with the constructor, so build the object right before the loop.
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
        times: StepTimes | None = None,
    ) -> None:
        """Take ``peak_flops_per_second`` as the dense peak of ONE device in the precision of the matrix products.

        None looks up the peak by device and ``precision``. If it is unknown, there is no ``mfu``. ``times`` has the
        parts of the steps, which the gradient window marks.
        """
        self._device = device
        self._world_size = world_size
        self._peak = peak_flops_per_second or peak_of(device, precision)
        self._window_steps = window_steps
        self._clock = clock
        self._times = times
        self._intervals: deque[_Interval] = deque()
        self._pauses = 0
        self._paused_since = 0.0
        self.paused_seconds = 0.0
        """Seconds of all pauses so far."""
        self._stalled_seconds = 0.0
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
        self._profiled_steps = 0

    def update(
        self,
        *,
        samples: Count,
        tokens: Count = 0.0,
        padded_tokens: Count = 0.0,
        data_wait_seconds: float = 0.0,
        flops: Count = 0.0,
        profiled: bool = False,
    ) -> None:
        """Count one optimizer step. All counts except ``data_wait_seconds`` are GLOBAL, over all processes.

        ``tokens`` counts valid tokens, ``padded_tokens`` all computed positions. ``flops`` are model FLOPs of forward
        and backward, without recomputation. A device tensor costs one small kernel and no wait. A ``profiled`` step is
        slower than it would be, and its interval counts only if the window has no other.
        """
        self._steps += 1
        self._samples = self._samples + samples
        self._tokens = self._tokens + tokens
        self._padded_tokens = self._padded_tokens + padded_tokens
        self._data_wait_seconds += data_wait_seconds
        self._flops = self._flops + flops
        self._profiled_steps += profiled

    def start(self) -> None:
        """Restart the clock before the first step, so that earlier setup does not count as part of it."""
        self._restart(self._clock())

    def end_of_step(self) -> None:
        """End the last part of a step, before a log point, a save or an evaluation adds to it."""
        if self._times is not None:
            self._times.end("update")

    @property
    def is_paused(self) -> bool:
        """True within ``pause``."""
        return self._pauses > 0

    @contextmanager
    def pause(self) -> Generator[None]:
        """Exclude the time of evaluation, sampling or saving. May be nested.

        Waits for a CUDA device on entry and exit, so that queued steps count as training and a queued evaluation does
        not. The paused code reads the weights and would wait anyway.
        """
        if not self._pauses:
            self._wait_for_device()
            self._paused_since = self._clock()
        self._pauses += 1
        try:
            with record_function(PAUSE):  # costs microseconds without a profiler
                yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._wait_for_device()
                paused = self._clock() - self._paused_since
                self._excluded += paused
                self.paused_seconds += paused

    @contextmanager
    def saving(self) -> Generator[None]:
        """Exclude the time of a save or of the wait for one, as ``pause`` does, and report it in the next line."""
        with self.pause():
            began = self._clock()
            try:
                yield
            finally:
                # A snapshot that is copied on the device holds up the next step there.
                self._wait_for_device()
                self._stalled_seconds += self._clock() - began

    def read(self) -> dict[str, float]:
        """Close the interval and return its metrics. Call it right after the host has waited for the loss.

        Metrics without suffix are global. Memory is of this process. Before the first step it returns memory only.
        Rates of tokens need counted tokens, ``model_tflops_per_second`` counted FLOPs, and ``mfu`` a known peak.
        """
        self._close_interval()
        if not self._intervals:
            return memory_in_use(self._device)
        counted = [interval for interval in self._intervals if not interval.profiled_steps] or self._intervals
        # At least 1 ns, whatever a clock passed by the caller does.
        seconds = max(sum(i.seconds for i in counted), 1e-9)
        steps = sum(i.steps for i in counted)
        metrics: dict[str, float] = {}
        # Only in the lines whose own interval was profiled: later ones leave it out.
        if self._intervals[-1].profiled_steps:
            metrics["profiled_steps"] = self._intervals[-1].profiled_steps
        for name in ("samples", "tokens", "padded_tokens"):
            per_second = sum(float(getattr(i, name)) for i in counted) / seconds
            # A recipe that counts no tokens has no rate, instead of one of 0.
            if name != "samples" and per_second == 0:
                continue
            metrics[f"{name}_per_second"] = per_second
            metrics[f"{name}_per_second_per_device"] = per_second / self._world_size
        metrics["step_seconds"] = seconds / steps
        # A shorter stall is the cost of a call that found nothing to wait for.
        if self._stalled_seconds >= SHORTEST_STALL_SECONDS:
            metrics["save_stall_seconds"] = self._stalled_seconds
        self._stalled_seconds = 0.0
        waited = sum(i.data_wait_seconds for i in counted)
        # The wait for the first step may have begun before the clock was started.
        metrics["data_wait_fraction"] = min(waited / seconds, 1.0)
        # An interval has no times if the device recorded more of them than could be kept.
        timed = [interval for interval in counted if interval.parts]
        timed_seconds = max(sum(i.seconds for i in timed), 1e-9)
        for part in counted[-1].parts:
            metrics[f"{part}_fraction"] = sum(i.parts.get(part, 0.0) for i in timed) / timed_seconds
        flops_per_second = sum(i.flops for i in counted) / seconds
        return metrics | self._flop_metrics(flops_per_second) | memory_in_use(self._device)

    def _flop_metrics(self, flops_per_second: float) -> dict[str, float]:
        # A recipe that counts no FLOPs has no MFU, rather than one of 0.
        if flops_per_second <= 0:
            return {}
        per_device = flops_per_second / self._world_size
        metrics = {
            "model_tflops_per_second": flops_per_second / 1e12,
            "model_tflops_per_second_per_device": per_device / 1e12,
        }
        if self._peak:
            metrics["mfu"] = per_device / self._peak
        return metrics

    def _close_interval(self) -> None:
        if not self._steps:  # a second read at the same point: the interval stays open
            return
        # float() waits for a device count, so the clock is read last.
        samples = float(self._samples)
        tokens = float(self._tokens)
        padded_tokens = float(self._padded_tokens)
        flops = float(self._flops)
        # Within a pause the interval has ended where the pause began.
        now = self._paused_since if self._pauses else self._clock()
        interval = _Interval(
            seconds=now - self._since - self._excluded,
            steps=self._steps,
            samples=samples,
            tokens=tokens,
            padded_tokens=padded_tokens,
            data_wait_seconds=self._data_wait_seconds,
            flops=flops,
            profiled_steps=self._profiled_steps,
            parts={} if self._times is None else self._times.take(),
        )
        self._intervals.append(interval)
        self._restart(now)
        steps = sum(interval.steps for interval in self._intervals)
        # Whole intervals only: between two reads there is no point where time and counts belong together.
        while steps - self._intervals[0].steps >= self._window_steps:
            steps -= self._intervals.popleft().steps

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            # Only this stream: a save may be copying on a stream of its own.
            torch.cuda.current_stream(self._device).synchronize()


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the GiB used by this process: memory of the allocator on CUDA, the resident set on CPU.

    Needs no device wait, because the CUDA allocator counts on the host. ``memory_peak_gib`` is the largest allocation
    since the process began or since ``torch.cuda.reset_peak_memory_stats``.
    """
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            # Number of times that the allocator had to free its cache first, with a wait for the device.
            "allocator_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        }
    import psutil

    return {"process_rss_gib": psutil.Process().memory_info().rss / GIB}
