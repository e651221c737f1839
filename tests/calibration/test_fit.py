"""The line through the times of collectives, and the rounds behind each time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from accel_train.calibration.links import SIZES, fit
from accel_train.calibration.timing import LEAST, MOST, WARM_UP, Clock, summarize, time_rounds

SENT = SIZES["cpu"]


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 2e9), (2e-5, 4e11), (0.0, 1e9)])
def test_a_line_is_found_again(latency: float, bandwidth: float) -> None:
    found = fit(SENT, [latency + sent / bandwidth for sent in SENT])
    assert found.link.latency_seconds == pytest.approx(latency, abs=1e-12)
    assert found.link.bytes_per_second == pytest.approx(bandwidth)
    assert found.residual == pytest.approx(0.0, abs=1e-9)


def test_the_fit_is_that_of_least_squares_of_relative_errors() -> None:
    """Against numpy's solution of the same problem, on times with errors of up to 30 %."""
    errors = np.random.default_rng(0).uniform(0.7, 1.3, len(SENT))
    times = np.array([1e-4 + sent / 1e9 for sent in SENT]) * errors
    matrix = np.stack([1 / times, np.array(SENT) / times], axis=1)
    (latency, slope), squares, *_ = np.linalg.lstsq(matrix, np.ones(len(SENT)))
    found = fit(SENT, list(times))
    assert found.link.latency_seconds == pytest.approx(latency)
    assert found.link.bytes_per_second == pytest.approx(1 / slope)
    assert found.residual == pytest.approx(math.sqrt(squares[0] / len(SENT)))


def test_a_latency_below_zero_is_none() -> None:
    """Three times as long for twice the bytes: a line would begin below zero."""
    found = fit([100, 200], [1.0, 3.0])
    assert found.link.latency_seconds == 0.0
    # Least squares of (x s / t - 1): s = sum(x / t) / sum((x / t)^2).
    ratios = [100 / 1.0, 200 / 3.0]
    assert found.link.bytes_per_second == pytest.approx(sum(r * r for r in ratios) / sum(ratios))
    assert found.residual > 0.1


def test_what_is_no_line_is_refused() -> None:
    with pytest.raises(ValueError, match="two sizes or more"):
        fit([100, 100], [1.0, 1.0])
    with pytest.raises(ValueError, match="do not grow"):
        fit([100, 200, 300], [3.0, 2.0, 1.0])


class Ticking:
    """A clock that work moves forward."""

    def __init__(self, durations: list[float]) -> None:
        self.now = 0.0
        self.calls = 0
        self._durations = itertools.cycle(durations)

    def work(self) -> None:
        self.calls += 1
        self.now += next(self._durations)

    def read(self) -> float:
        return self.now

    def clock(self) -> Clock:
        return Clock(now=self.read)


def test_rounds_are_timed_behind_the_warm_up() -> None:
    ticking = Ticking([100.0, 50.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert time_rounds(ticking.work, 0.0, ticking.clock(), ticking.read) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert ticking.calls == WARM_UP + LEAST


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, LEAST), (12.0, 10), (1e9, MOST)])
def test_rounds_fill_the_time(seconds: float, rounds: int) -> None:
    ticking = Ticking([1.0])
    assert len(time_rounds(ticking.work, seconds, ticking.clock(), ticking.read)) == rounds


def test_the_device_is_waited_for() -> None:
    """Work that only queues takes its time in the wait."""
    state = {"queued": 0.0, "now": 0.0}

    def wait() -> None:
        state["now"] += state.pop("queued")
        state["queued"] = 0.0

    def work() -> None:
        state["queued"] += 2.0

    assert time_rounds(work, 0.0, Clock(now=lambda: state["now"], wait=wait)) == [2.0] * LEAST


def test_time_of_other_programs_is_not_counted() -> None:
    """A thread that sleeps uses none of its own time, but of that for the measurement."""
    own = Ticking([1.0])
    assert time_rounds(own.work, 10.0, own.clock(), lambda: 4 * own.now) == [1.0] * LEAST


def test_the_slowest_process_counts() -> None:
    found = summarize([[1.0, 1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 4.0, 5.0, 6.0]])
    assert (found.seconds, found.rounds) == (4.0, 5)
    assert found.spread == pytest.approx((5.0 - 3.0) / 4.0)
