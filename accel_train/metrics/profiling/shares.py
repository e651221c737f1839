"""Shares of the time of the profiled steps by kind of work. Each moment counts once, so they sum to 1."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_train.metrics.profiling.intervals import Interval, intersect, length, merge, subtract
from accel_train.metrics.profiling.names import DATA_WAIT, PAUSE, STEP

COMPUTE = "compute"
MEMORY = "memory-bound operators"
COMMUNICATION = "communication"
WAIT = "data wait"
IDLE = "idle"
OTHER = "other operators"
PYTHON = "outside operators"

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Inductor's pointwise and reduction kernels (triton_, not triton_tem_) are no compute, whatever their names contain.
# conv(?!ert): a convolution, not the conversion of a dtype.
COMPUTE_KERNEL = re.compile(
    r"(?!triton_(?!tem_)).*(gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|triton_tem|"
    r"conv(?!ert)|flash|fmha|attention|attn)",
    re.IGNORECASE,
)
COMPUTE_OPERATOR = re.compile(
    r"aten::(mm|bmm|addmm|addbmm|baddbmm|addmv|mv|dot|_scaled_mm|_int_mm|.*convolution.*|mkldnn_.*|"
    r"_?scaled_dot_product_.*|_flash_attention.*)|mkl::.*|mkldnn::.*"
)
COMMUNICATION_NAME = re.compile(r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)


@dataclass(frozen=True)
class Event:
    """A span of a trace."""

    name: str
    category: str
    """Category in the Chrome trace, such as kernel, cpu_op or user_annotation."""
    start: float
    """In microseconds."""
    seconds: float

    @property
    def interval(self) -> Interval:
        """Start and end, in microseconds."""
        return self.start, self.start + self.seconds * 1e6


@dataclass(frozen=True)
class Shares:
    """Shares of the time of the profiled steps, without evaluations and saves."""

    seconds: float
    """Duration of all profiled steps together."""
    steps: int
    on_device: bool
    """True if the trace has work on a GPU."""
    parts: Mapping[str, float]
    """Shares by name, in the order in which they claim the time. They sum to 1."""

    def of(self, part: str) -> float:
        """Return the share of a part, 0 for a part that this kind of device lacks."""
        return self.parts.get(part, 0.0)


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """Return the spans of a Chrome trace by torch's profiler."""
    events: list[Event] = []
    for entry in trace["traceEvents"]:
        if entry.get("ph") == "X" and "dur" in entry:
            seconds = float(entry["dur"]) / 1e6
            events.append(Event(entry["name"], entry.get("cat", ""), float(entry["ts"]), seconds))
    return events


def measure(events: Sequence[Event]) -> Shares:
    """Return the shares of the time within the spans named ``STEP``, of which there must be at least one.

    A moment with several events belongs to the first part that claims it. On a GPU the order is compute, memory-bound
    operators, communication, data wait, idle: communication and data wait count only where the GPU does nothing else.
    On a CPU the host itself reads the data, so the wait comes first.
    """
    steps = [event.interval for event in events if event.category == "user_annotation" and event.name == STEP]
    assert steps, "the trace has no step"
    paused = merge(_annotations(events, PAUSE))
    window = subtract(merge(steps), paused)
    on_device = any(event.category in ON_DEVICE for event in events)
    claims = _device_claims(events) if on_device else _host_claims(events)
    parts: dict[str, float] = {}
    total = length(window)
    left = window
    for name, intervals in claims.items():
        claimed = merge(intervals)
        parts[name] = length(intersect(left, claimed)) / total
        left = subtract(left, claimed)
    parts[IDLE if on_device else PYTHON] = length(left) / total
    return Shares(total / 1e6, len(steps), on_device, parts)


def _device_claims(events: Iterable[Event]) -> dict[str, list[Interval]]:
    claims: dict[str, list[Interval]] = {
        COMPUTE: [],
        MEMORY: [],
        COMMUNICATION: [],
        WAIT: _annotations(events, DATA_WAIT),
    }
    for event in events:
        if event.category not in ON_DEVICE:
            continue
        # First, because the name of a collective may contain words of the other patterns.
        if COMMUNICATION_NAME.search(event.name):
            claims[COMMUNICATION].append(event.interval)
        elif event.category == "kernel" and COMPUTE_KERNEL.match(event.name):
            claims[COMPUTE].append(event.interval)
        else:
            claims[MEMORY].append(event.interval)
    return claims


def _host_claims(events: Iterable[Event]) -> dict[str, list[Interval]]:
    claims: dict[str, list[Interval]] = {
        WAIT: _annotations(events, DATA_WAIT),
        COMPUTE: [],
        COMMUNICATION: [],
        OTHER: [],
    }
    for event in events:
        communicates = COMMUNICATION_NAME.search(event.name) is not None
        if communicates and event.category in ("cpu_op", "user_annotation"):
            claims[COMMUNICATION].append(event.interval)
        elif event.category == "cpu_op":
            # Compute claims first, so an outer aten::linear keeps only the time outside its aten::addmm.
            part = COMPUTE if COMPUTE_OPERATOR.fullmatch(event.name) else OTHER
            claims[part].append(event.interval)
    return claims


def _annotations(events: Iterable[Event], name: str) -> list[Interval]:
    return [event.interval for event in events if event.category == "user_annotation" and event.name == name]
