"""Figures of a GPU, from a stand-in for NVML that refuses what NVML refuses."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train.metrics.profiling.gpu_figures import GpuFigures
from accel_train.metrics.throughput import memory_in_use

UUID = "5a2f-77"
DEVICE = torch.device("cuda", 1)


class Refused(Exception):
    """NVMLError."""


class Nvml:
    """Answers calls between init and shutdown, about a device found by its UUID."""

    NVMLError = Refused
    NVML_TEMPERATURE_GPU = 0
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        self.up = 0
        self.samples = 0
        self.calls: list[str] = []
        self.without: set[str] = set()
        self.reasons = [0x4 | 0x1, 0x40, 0x0]

    def nvmlInit(self) -> None:
        self._answer("init", running=False)
        self.up += 1

    def nvmlShutdown(self) -> None:
        self._answer("shutdown")
        self.up -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._answer("handle")
        if uuid != f"GPU-{UUID}":
            raise Refused(f"not found: {uuid}")
        return "handle of 1"

    def _answer(self, name: str, handle: Any = "handle of 1", *, running: bool = True) -> None:
        self.calls.append(name)
        if name in self.without or handle != "handle of 1":
            raise Refused(f"{name}: not supported")
        if running:
            assert self.up == 1, f"{name} outside of init and shutdown"

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        self._answer("utilization", handle)
        self.samples += 1
        return SimpleNamespace(gpu=50 + 10 * self.samples, memory=1)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        self._answer("power", handle)
        return 400_000 + 100_000 * self.samples  # milliwatts

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        self._answer("temperature", handle)
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 80 - self.samples

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        self._answer("memory", handle)
        return SimpleNamespace(used=self.samples << 30, total=80 << 30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        self._answer("reasons", handle)
        return self.reasons[min(self.samples, len(self.reasons)) - 1]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)

    def properties(device: torch.device) -> Any:
        assert device == DEVICE
        return SimpleNamespace(uuid=UUID)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return library


def steps(count: int) -> Generator[int]:
    yield from range(count)


def wait_for(condition: Any) -> None:
    while not condition():
        time.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_log_point_takes_means_the_highest_temperature_and_the_last_memory(nvml: Nvml) -> None:
    figures = GpuFigures(DEVICE, seconds=0.0)
    lines: list[dict[str, Any]] = []
    sample = figures._sample

    def thrice(*arguments: Any) -> None:
        # The thread stands still after its third.
        if nvml.samples < 3:
            sample(*arguments)

    figures._sample = thrice
    for _ in figures.watched(steps(2)):
        wait_for(lambda: nvml.samples == 3 and nvml.calls[-1] == "reasons")
        lines.append(figures.take())
    assert lines[0] == {
        "gpu_utilization": pytest.approx(0.7),
        "gpu_power_watts": pytest.approx(600),
        "gpu_temperature_celsius": 79,
        "gpu_memory_used_gib": 3.0,
        "gpu_throttled": "power_cap, hardware_thermal",
    }
    # Without a new sample the last one stands.
    assert lines[1] == {
        "gpu_utilization": 0.8,
        "gpu_power_watts": 700,
        "gpu_temperature_celsius": 77,
        "gpu_memory_used_gib": 3.0,
    }
    assert nvml.calls[:2] == ["init", "handle"]
    assert nvml.calls[-1] == "shutdown"
    assert nvml.up == 0
    assert "GPU figures" not in threads()


def test_a_loop_that_is_left_ends_the_thread_and_the_library(nvml: Nvml) -> None:
    given = GpuFigures(DEVICE).watched(steps(5))
    next(given)
    assert "GPU figures" in threads()
    given.close()
    assert "GPU figures" not in threads()
    assert nvml.up == 0


def test_what_the_device_does_not_tell_is_absent_and_said_once(nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    nvml.without = {"utilization", "reasons"}
    figures = GpuFigures(DEVICE, seconds=0.0)
    for _ in figures.watched(steps(1)):
        wait_for(lambda: nvml.calls.count("memory") > 3)
    assert sorted(figures.take()) == ["gpu_memory_used_gib", "gpu_power_watts", "gpu_temperature_celsius"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "training lines have no gpu_utilization: utilization: not supported"
    assert nvml.calls.count("reasons") == 1


@pytest.mark.parametrize(
    ("without", "uuid", "reason"),
    [("init", UUID, "NVML does not start: init"), ("", "other", "NVML does not know the device: not found: GPU-other")],
)
def test_without_a_driver_or_the_device_steps_go_on(
    nvml: Nvml,
    without: str,
    uuid: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    nvml.without = {without}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    figures = GpuFigures(DEVICE)
    assert list(figures.watched(steps(3))) == [0, 1, 2]
    assert figures.take() == {}
    (said,) = [record.getMessage() for record in caplog.records]
    assert reason in said
    assert nvml.calls.count("init") == 1
    assert nvml.up == 0


def test_without_the_package_the_log_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert list(GpuFigures(DEVICE).watched(steps(3))) == [0, 1, 2]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "pip install 'accel-train[gpu]'" in said


def test_retries_of_the_allocator_are_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 3})
    assert memory_in_use(DEVICE)["allocator_retries"] == 3
