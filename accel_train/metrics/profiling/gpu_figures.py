"""Utilization, power and temperature of the main process's GPU, from NVIDIA's NVML. No device wait, no collective.

A thread queries the driver once a second, independently of the steps, and a log point takes the samples so far.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import torch

from accel_train.metrics.logs import details

logger = logging.getLogger(__name__)
SECONDS = 1.0
"""Time between two samples. The driver itself averages the utilization over up to a second."""
PATIENCE_SECONDS = 5.0
GIB = float(1 << 30)
THROTTLED = {
    "SwPowerCap": "power_cap",
    "HwSlowdown": "hardware",
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "hardware_thermal",
    "HwPowerBrakeSlowdown": "power_brake",
}
"""Reasons for lowered clocks, by NVML's names. Idle clocks and clocks set by a user do not count."""

S = TypeVar("S")


class Query(NamedTuple):
    """One metric of a device."""

    name: str
    """Field of a training line."""
    ask: Callable[[Any, Any], float]
    """Takes the library and the handle."""
    combine: Callable[[list[float]], float]
    """Combines the samples into one value."""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _last(values: list[float]) -> float:
    return values[-1]


QUERIES = (
    Query("gpu_utilization", lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100, _mean),
    Query("gpu_power_watts", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, _mean),
    Query(
        "gpu_temperature_celsius",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        max,
    ),
    Query("gpu_memory_used_gib", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB, _last),
)


def _without(reason: str) -> Callable[[], None]:
    details(logger, f"training lines have no utilization, power and temperature of the GPU: {reason}")
    return lambda: None


class GpuFigures:
    """Metrics of one GPU since the last log point, sampled while the steps run.

    Needs the package nvidia-ml-py (extra ``gpu``) and a driver. Without one of them, or for a metric that the device
    does not have, fields are absent, and the log file says so once.
    """

    def __init__(self, device: torch.device, seconds: float = SECONDS) -> None:
        self._device = device
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._queries = list(QUERIES)
        self._throttled: Mapping[int, str] = {}
        """Words for the bits of NVML. Empty if the device does not report them."""
        self._samples: dict[str, list[float]] = {}
        self._reasons = 0

    def watched(self, steps: Generator[S]) -> Generator[S]:
        """Yield the steps, and sample until the last one has ended."""
        # Started with the first step, because the loader's workers are forked before the first batch.
        stop: Callable[[], None] | None = None
        try:
            with closing(steps):
                for batches in steps:
                    if stop is None:
                        stop = self._start()
                    yield batches
        finally:
            if stop is not None:
                stop()

    def take(self) -> dict[str, float | str]:
        """Return the fields of a training line, from the samples since the last call or else the last sample."""
        with self._lock:
            fields: dict[str, float | str] = {}
            for query in self._queries:
                values = self._samples.get(query.name)
                if values:
                    fields[query.name] = query.combine(values)
                    # For a log point that comes before the next sample.
                    del values[:-1]
            reasons, self._reasons = self._reasons, 0
            named = [name for bit, name in self._throttled.items() if reasons & bit]
        if named:
            fields["gpu_throttled"] = ", ".join(named)
        return fields

    def _start(self) -> Callable[[], None]:
        """Start sampling, and return a function that stops it."""
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return _without("nvidia-ml-py is not installed (pip install 'accel-train[gpu]')")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return _without(f"NVML does not start: {error}")
        try:
            # By UUID: NVML numbers all GPUs of the machine, torch only those of CUDA_VISIBLE_DEVICES.
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self._device).uuid}")
        except nvml.NVMLError as error:
            nvml.nvmlShutdown()
            return _without(f"NVML does not know the device: {error}")
        self._throttled = {getattr(nvml, f"nvmlClocksThrottleReason{name}"): word for name, word in THROTTLED.items()}
        thread = threading.Thread(target=self._sample_until_the_end, args=(nvml, gpu), name="GPU figures", daemon=True)
        thread.start()

        def stop() -> None:
            self._ended.set()
            thread.join(PATIENCE_SECONDS)
            # A driver that does not answer is left alone: the run has ended.
            if not thread.is_alive():
                nvml.nvmlShutdown()

        return stop

    def _sample_until_the_end(self, nvml: Any, gpu: Any) -> None:
        while True:
            self._sample(nvml, gpu)
            if self._ended.wait(self._seconds):
                return

    def _sample(self, nvml: Any, gpu: Any) -> None:
        for query in list(self._queries):
            try:
                value = query.ask(nvml, gpu)
            except nvml.NVMLError as error:
                # Such as the utilization of a GPU partition (MIG).
                with self._lock:
                    self._queries.remove(query)
                details(logger, f"training lines have no {query.name}: {error}")
                continue
            with self._lock:
                self._samples.setdefault(query.name, []).append(value)
        if not self._throttled:
            return
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        except nvml.NVMLError:
            self._throttled = {}
            return
        with self._lock:
            self._reasons |= reasons
