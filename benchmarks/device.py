"""The device that the GPU suite runs on, or a CPU for its dry run: timing, memory, waits, the time that is left."""

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
    """One device and the sizes for it."""

    device: torch.device
    tiny: bool
    """A dry run: sizes at which figures mean nothing."""
    limit_seconds: float = 590.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def backend(self) -> str:
        """Of torch.compile. The dry run takes the one that traces and makes no code: seconds instead of minutes."""
        return "aot_eager" if self.tiny else "inductor"

    @property
    def left(self) -> float:
        """Seconds until the suite must end."""
        return self.limit_seconds - (time.perf_counter() - self.began)

    @property
    def memory(self) -> int:
        """Bytes of the device."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 1 << 33

    def free_bytes(self) -> int:
        """Of the device, now."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 33

    def wait(self) -> None:
        """For all work on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """What nothing refers to any more, compiled code included; and count the peak anew."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def held_bytes(self) -> int:
        """Allocated now; 0 on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def peak_bytes(self) -> int:
        """Most that was allocated since ``release``; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def seconds(self, work: Callable[[], object], repeats: int, warm_up: int = 3) -> list[float]:
        """Of each call, by the device's own clock."""
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
        """Every wait of one call for the device, by the line of Python; on a CPU, reads of a number from a tensor."""
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
        """SD3-medium with 1024 + 154 tokens; 32 rows where 2 B parameters leave room for them."""
        return TINY if self.tiny else Shape(batch=32 if self.memory > 120e9 else 12)

    def long(self) -> Shape:
        """The same with 4096 + 154 tokens."""
        return TINY if self.tiny else Shape(side=128, batch=8 if self.memory > 120e9 else 3)

    def wide_heads(self) -> Shape:
        """The large one with heads of 128."""
        return TINY if self.tiny else Shape(head_width=128, batch=self.large().batch)

    def small(self) -> Shape:
        """12 blocks of 768, 256 + 77 tokens, 16 rows: bound by launches."""
        return TINY if self.tiny else Shape(768, 12, side=32, text_tokens=77, batch=16)


TINY = Shape(64, 2, head_width=16, side=8, text_tokens=5, batch=2, text_width=24, pooled_width=12, channels=4)


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
