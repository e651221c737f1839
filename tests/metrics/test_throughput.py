"""Rates against closed forms on a clock that the test turns."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.metrics.throughput import LocalCounts, Throughput

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def train(meter: Throughput, clock: Clock, steps: int, seconds: float, **counts: float) -> None:
    for _ in range(steps):
        clock.now += seconds
        meter.update(**({"samples": 8} | counts))  # type: ignore[arg-type]


def test_rates_are_counts_over_time() -> None:
    clock = Clock()
    meter = Throughput(CPU, world_size=4, peak_flops_per_second=5e12, clock=clock)
    train(meter, clock, 10, 0.5, tokens=100, padded_tokens=160, data_wait_seconds=0.05, flops=2e12)
    rates = meter.read()
    expected = {
        "samples_per_second": 16.0,
        "samples_per_second_per_device": 4.0,
        "tokens_per_second": 200.0,
        "tokens_per_second_per_device": 50.0,
        "padded_tokens_per_second": 320.0,
        "padded_tokens_per_second_per_device": 80.0,
        "step_seconds": 0.5,
        "data_wait_fraction": 0.1,
        "model_tflops_per_second": 4.0,
        "model_tflops_per_second_per_device": 1.0,
        "mfu": 0.2,
    }
    memory = rates.pop("process_rss_gib")
    assert rates == pytest.approx(expected)
    assert memory == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.2)


def test_parts_are_of_the_intervals_that_have_times() -> None:
    clock = Clock()
    taken = iter([{}, {"forward": 2.0, "backward": 1.0}])
    meter = Throughput(CPU, clock=clock, times=SimpleNamespace(take=lambda: next(taken)))  # type: ignore[arg-type]
    train(meter, clock, 4, 1.0)
    assert "forward_fraction" not in meter.read()
    train(meter, clock, 4, 1.0)
    rates = meter.read()
    assert (rates["forward_fraction"], rates["backward_fraction"]) == (0.5, 0.25)


def test_what_is_not_known_is_absent() -> None:
    clock = Clock()
    meter = Throughput(CPU, clock=clock)
    assert set(meter.read()) == {"process_rss_gib"}
    train(meter, clock, 1, 1.0)
    assert "mfu" not in meter.read()
    train(meter, clock, 1, 1.0, flops=1e12)
    rates = meter.read()
    assert "mfu" not in rates  # FLOPs known, peak not
    assert rates["model_tflops_per_second"] == pytest.approx(0.5)  # over both steps of the window


def test_window_is_the_fewest_intervals_that_hold_enough_steps() -> None:
    clock = Clock()
    meter = Throughput(CPU, window_steps=20, clock=clock)
    seconds = []
    for step_time in (9.0, 1.0, 1.0, 2.0):
        train(meter, clock, 10, step_time)
        seconds.append(meter.read()["step_seconds"])
    assert seconds == pytest.approx([9.0, 5.0, 1.0, 1.5])


def test_reading_twice_changes_nothing_and_loses_no_time() -> None:
    clock = Clock()
    meter = Throughput(CPU, window_steps=1, clock=clock)
    train(meter, clock, 5, 1.0)
    first = meter.read()
    clock.now += 3.0  # between two steps, after the log point
    assert meter.read()["step_seconds"] == first["step_seconds"]
    train(meter, clock, 1, 1.0)
    assert meter.read()["step_seconds"] == pytest.approx(4.0)


def test_paused_time_is_not_training() -> None:
    clock = Clock()
    meter = Throughput(CPU, window_steps=1, clock=clock)
    train(meter, clock, 5, 1.0)
    with meter.pause():
        clock.now += 50.0
        with meter.pause():  # saving inside an evaluation
            clock.now += 50.0
        clock.now += 50.0
    train(meter, clock, 5, 1.0)
    assert meter.read()["samples_per_second"] == pytest.approx(8.0)
    train(meter, clock, 5, 2.0)
    with meter.pause():
        clock.now += 50.0
        assert meter.read()["step_seconds"] == pytest.approx(2.0)  # read inside the pause
        clock.now += 50.0
    train(meter, clock, 5, 3.0)
    assert meter.read()["step_seconds"] == pytest.approx(3.0)


def test_the_time_of_saving_is_in_the_next_line_alone_and_in_no_rate() -> None:
    clock = Clock()
    meter = Throughput(CPU, clock=clock)
    train(meter, clock, 2, 1.0)
    assert "save_stall_seconds" not in meter.read()
    with meter.saving():
        clock.now += 3.0
    train(meter, clock, 2, 1.0)
    with meter.pause():
        clock.now += 50.0  # an evaluation, which first waits for the save before
        with meter.saving():
            clock.now += 0.25
    after = meter.read()
    assert after["save_stall_seconds"] == pytest.approx(3.25)
    assert after["step_seconds"] == pytest.approx(1.0)
    with meter.saving():
        clock.now += 0.0005  # nothing to save
    train(meter, clock, 2, 1.0)
    assert "save_stall_seconds" not in meter.read()
    with pytest.raises(OSError, match="full"), meter.saving():
        clock.now += 2.0
        raise OSError("full")
    train(meter, clock, 1, 1.0)
    assert meter.read()["save_stall_seconds"] == pytest.approx(2.0)


def test_pause_ends_where_the_evaluation_fails() -> None:
    clock = Clock()
    meter = Throughput(CPU, clock=clock)

    def evaluate() -> None:
        with meter.pause():
            clock.now += 50.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        evaluate()
    train(meter, clock, 5, 1.0)
    assert meter.read()["step_seconds"] == pytest.approx(1.0)


def test_jumps_of_the_wall_clock_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10**6, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))  # runs backwards
    meter = Throughput(CPU)
    began = time.perf_counter()
    for _ in range(5):
        time.sleep(0.01)
        meter.update(samples=8, data_wait_seconds=0.002)
    rates = meter.read()
    measured = (time.perf_counter() - began) / 5
    assert 0.01 <= rates["step_seconds"] <= measured
    assert 0 < rates["data_wait_fraction"] < 1


def test_a_clock_that_stands_still_or_goes_back_gives_no_negative_rate() -> None:
    clock = Clock()
    meter = Throughput(CPU, window_steps=1, clock=clock)
    train(meter, clock, 2, 0.0)
    assert all(rate >= 0 for rate in meter.read().values())
    train(meter, clock, 2, -5.0)
    assert all(rate >= 0 for rate in meter.read().values())


class CountReads(TorchDispatchMode):
    """Counts what would wait for a device: a tensor turned into a number."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_tensor_counts_are_read_at_the_log_point_only() -> None:
    clock = Clock()
    meter = Throughput(CPU, clock=clock)
    count = torch.tensor(0)
    with CountReads() as counter:
        for step in range(4):
            clock.now += 1.0
            count.fill_(10 * step)  # the caller may use its buffer again
            meter.update(samples=8, tokens=count)
        assert counter.reads == 0
        rates = meter.read()
        assert counter.reads == 1
    assert rates["tokens_per_second"] == pytest.approx((0 + 10 + 20 + 30) / 4)


def test_the_clock_is_read_after_the_device_was_waited_for() -> None:
    clock = Clock()

    class Busy(torch.Tensor):
        """Two more seconds of work until its value is there."""

        def __float__(self) -> float:
            clock.now += 2.0
            return super().__float__()

    meter = Throughput(CPU, clock=clock)
    clock.now += 1.0
    meter.update(samples=8, tokens=torch.tensor(30.0).as_subclass(Busy))
    rates = meter.read()
    assert rates["step_seconds"] == pytest.approx(3.0)
    assert rates["tokens_per_second"] == pytest.approx(10.0)


def test_only_pause_waits_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    meter = Throughput(torch.device("cuda", 0))
    meter.update(samples=8, tokens=100)
    assert not waits
    with meter.pause(), meter.pause():
        assert len(waits) == 1
    assert len(waits) == 2


def test_counts_of_this_process_are_taken_once(accelerator: Accelerator) -> None:
    """Numbers and tensors of several steps add up; what was taken begins at zero."""
    counts = LocalCounts()
    assert counts.take(accelerator) == {}
    for step in range(3):
        counts.add(tokens=torch.tensor(2.0**24 + step, dtype=torch.float64), flops=10**15)
    assert counts.take(accelerator) == {"tokens": 3 * 2.0**24 + 3, "flops": 3e15}
    assert counts.take(accelerator) == {}


def test_a_recipe_that_counts_no_tokens_has_no_rate_of_them() -> None:
    meter = Throughput(torch.device("cpu"))
    meter.update(samples=4)
    assert not any("tokens" in name for name in meter.read())
    meter.update(samples=4, tokens=8.0)
    assert meter.read().keys() >= {"tokens_per_second", "tokens_per_second_per_device"}
