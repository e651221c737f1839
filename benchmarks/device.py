"""The device of the GPU suite, or a CPU for its dry run: timing, memory, synchronisations, remaining time."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from benchmarks.reads import HostReads
from benchmarks.sd3 import Shape

GIB = float(1 << 30)


@dataclass(frozen=True)
class Machine:
    """A device, with the model shapes to measure on it and a time limit."""

    device: torch.device
    tiny: bool
    """A dry run, at sizes for which the measurements are meaningless."""
    limit_seconds: float = 590.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def backend(self) -> str:
        """Backend of torch.compile. The dry run uses aot_eager, which only traces: seconds instead of minutes."""
        return "aot_eager" if self.tiny else "inductor"

    @property
    def left(self) -> float:
        """Seconds left until the suite must end. Negative after that."""
        return self.limit_seconds - (time.perf_counter() - self.began)

    @property
    def memory(self) -> int:
        """Total memory of the device in bytes. On a CPU, a stand-in of 8 GiB."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 1 << 33

    def free_bytes(self) -> int:
        """Return the free memory of the device in bytes. On a CPU, a stand-in of 8 GiB."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 33

    def wait(self) -> None:
        """Wait for all work on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Free unreferenced memory and all compiled code, and reset the count of peak memory."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def held_bytes(self) -> int:
        """Return the bytes allocated on the device; 0 on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def peak_bytes(self) -> int:
        """Return the peak of bytes allocated since the last ``release``; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def seconds(self, work: Callable[[], object], repeats: int, warm_up: int = 3) -> list[float]:
        """Return the seconds of each of ``repeats`` calls after a warm-up, by CUDA events, or by wall time on a CPU."""
        for _ in range(warm_up):
            work()
        self.wait()
        if self.device.type != "cuda":
            return [_wall(work) for _ in range(repeats)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self.wait()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    def waits(self, work: Callable[[], object]) -> list[str]:
        """Return ``file:line`` of every synchronisation in a call; on a CPU, the name of each read that would wait."""
        if self.device.type != "cuda":
            with HostReads() as reads:
                work()
            return sorted(reads.counts.elements())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]

    def large(self) -> Shape:
        """Return SD3-medium with 1024 + 154 tokens: 32 rows on a device with more than 120 GB, else 12."""
        return TINY if self.tiny else Shape(batch=32 if self.memory > 120e9 else 12)

    def long(self) -> Shape:
        """Return SD3-medium with 4096 + 154 tokens: 8 rows on a device with more than 120 GB, else 3."""
        return TINY if self.tiny else Shape(side=128, batch=8 if self.memory > 120e9 else 3)

    def wide_heads(self) -> Shape:
        """Return the shape of ``large`` with attention heads of width 128."""
        return TINY if self.tiny else Shape(head_width=128, batch=self.large().batch)

    def small(self) -> Shape:
        """Return a launch-bound shape: 12 blocks of width 768, 256 + 77 tokens, 16 rows."""
        return TINY if self.tiny else Shape(768, 12, side=32, text_tokens=77, batch=16)


TINY = Shape(64, 2, head_width=16, side=8, text_tokens=5, batch=2, text_width=24, pooled_width=12, channels=4)


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
