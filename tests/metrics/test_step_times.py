"""Parts of a step, on a clock that the test turns and with events of a device. test_profiling.py has those of a run."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_train.metrics.profiling import step_times
from accel_train.metrics.profiling.step_times import StepTimes
from accel_train.metrics.throughput import Throughput
from accel_train.training.accumulation import GradientWindow
from tests.metrics.test_throughput import CPU, Clock


class Slow(nn.Linear):
    """Takes 3 s to go forward and 5 s to come back."""

    clock: Clock

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.clock.now += 3
        found = super().forward(input)
        found.register_hook(self.back)
        return found

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        self.clock.now += 5
        return gradient


def test_parts_of_steps_on_a_clock() -> None:
    clock = Clock()
    times = StepTimes(CPU, clock)
    meter = Throughput(CPU, clock=clock, times=times)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Slow(2, 1))
    model.clock = clock
    for _ in range(3):
        clock.now += 1  # data
        one = ({"x": torch.ones(1, 2)}, torch.tensor(1.0))
        window = GradientWindow(accelerator, model, [one, one], {"main": 1.0}, 0, times=times)
        for inputs in window:
            window.backward(model(inputs["x"]).sum())
            clock.now += 7  # of the loop's own, in no part
        model.zero_grad()
        clock.now += 2
        meter.end_of_step()
        with meter.pause():
            clock.now += 100
        meter.update(samples=1, data_wait_seconds=1)
    found = meter.read()
    # 1 + 2 * (3 + 5 + 7) + 2 seconds; what follows the last backward is the update.
    assert found["step_seconds"] == 33
    assert found["data_wait_fraction"] == pytest.approx(1 / 33)
    assert found["forward_fraction"] == pytest.approx(6 / 33)
    assert found["backward_fraction"] == pytest.approx(10 / 33)
    assert found["update_fraction"] == pytest.approx(9 / 33)
    # Totals go on, whatever a log point has taken.
    assert (times.total("forward"), times.total("backward"), meter.paused_seconds) == (18, 30, 300)
    # And nothing of it in the next interval.
    times.begin()
    clock.now += 4
    times.end("forward")
    meter.end_of_step()
    meter.update(samples=1)
    assert times.take() == {"forward": 4, "update": 0}


class Event:
    """What torch.cuda.Event has: a time on the device, which is behind the host until somebody waits."""

    made = 0
    now = 0.0
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, end: Event) -> float:
        assert Event.waits, "asked before the device was there"
        return 1e3 * (end.at - self.at)


def test_events_are_read_at_log_points_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    times = StepTimes(torch.device("cuda"))
    for _ in range(2):
        Event.waits = 0
        for _ in range(3):
            times.begin()
            Event.now += 3
            times.end("forward")
            Event.now += 5
            times.end("backward")
            Event.now += 2
            times.end("update")
            Event.now += 100
        assert Event.waits == 0
        assert times.take() == {"forward": 9, "backward": 15, "update": 6}
        assert Event.waits == 1
    assert times.take() == {}
    assert Event.made == 12
    monkeypatch.setattr(step_times, "MOST_EVENTS", 4)
    for _ in range(100):
        times.end("update")
    assert Event.made == 12
    # What is left of a longer interval would pass for the whole of it.
    assert times.take() == {}
    times.begin()
    times.end("update")
    assert times.take() == {"update": 0}


def test_other_devices_have_no_parts() -> None:
    times = StepTimes(torch.device("mps"))
    times.begin()
    times.end("forward")
    assert times.take() == {}


def test_a_total_takes_nothing_from_a_log_point() -> None:
    clock = Clock()
    times = StepTimes(CPU, clock)
    for step in (1, 2):
        times.begin()
        clock.now += 3
        times.end("forward")
        assert times.total("forward") == 3 * step
    assert times.take() == {"forward": 6}
    assert times.total("forward") == 6
    assert math.isnan(StepTimes(torch.device("mps")).total("forward"))
