"""Intervals of paired differences: coverage under autocorrelation, and what pairing is worth."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from accel_train.rerun.paired import FEWEST, paired_difference


def autoregression(correlation: float, count: int, generator: np.random.Generator) -> list[float]:
    """A stationary series with mean 0."""
    values = [float(generator.normal() / math.sqrt(1 - correlation**2))]
    while len(values) < count:
        values.append(correlation * values[-1] + float(generator.normal()))
    return values


@pytest.mark.parametrize(("correlation", "count", "least"), [(0.0, 20, 0.91), (0.5, 100, 0.91), (0.8, 100, 0.88)])
def test_intervals_cover_the_mean_of_autocorrelated_differences(correlation: float, count: int, least: float) -> None:
    generator = np.random.default_rng(0)
    covered: list[bool] = []
    covered_by_steps: list[bool] = []
    for _ in range(400):
        values = autoregression(correlation, count, generator)
        found = paired_difference([0.0] * count, values)
        assert found.half_width is not None
        assert found.difference == pytest.approx(fmean(values))
        covered.append(abs(found.difference) <= found.half_width)
        covered_by_steps.append(abs(found.difference) <= 1.96 * np.std(values, ddof=1) / math.sqrt(count))
    assert least <= fmean(covered) <= 0.98
    # What makes the batches necessary.
    if correlation > 0:
        assert fmean(covered_by_steps) < 0.8


def test_what_two_curves_have_in_common_does_not_widen_the_paired_interval() -> None:
    generator = np.random.default_rng(1)
    common = 3 * generator.normal(size=200)
    a = common + 0.1 * generator.normal(size=200)
    b = common + 0.1 * generator.normal(size=200) - 0.2
    found = paired_difference(list(a), list(b))
    assert found.half_width is not None
    assert found.unpaired_half_width is not None
    assert found.half_width < 0.1 < 0.3 < found.unpaired_half_width
    assert found.reading == "lower"
    assert paired_difference(list(b), list(a)).reading == "higher"


def test_intervals_are_those_of_the_means_of_five_stretches() -> None:
    """Means 0 to 4 have the variance 2.5, and their mean a fifth of it."""
    steps = [float(mean) for mean in range(5) for _ in range(FEWEST // 5)]
    found = paired_difference([1.0] * len(steps), steps)
    assert found.half_width == pytest.approx(float(stats.t.ppf(0.975, 4)) * math.sqrt(0.5))
    # Two variances, of which one is 0 here, have twice the degrees of freedom.
    assert found.unpaired_half_width == pytest.approx(float(stats.t.ppf(0.975, 8)) * math.sqrt(0.5))


def test_readings() -> None:
    rising = [float(step) for step in range(24)]
    assert paired_difference(rising, rising).reading == "equal"
    few = paired_difference(rising[: FEWEST - 1], [2 * value for value in rising[: FEWEST - 1]])
    assert (few.half_width, few.reading) == (None, "no interval: 19 value(s)")
    noise = [(-1.0) ** step for step in range(21)]
    assert paired_difference([0.0] * 21, noise).reading == "no effect shown"
    broken = paired_difference(rising, [*rising[:-1], math.nan])
    assert (broken.half_width, broken.reading) == (None, "not finite")
