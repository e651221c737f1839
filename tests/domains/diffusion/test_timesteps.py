"""Times of the global batch: even, unbiased, and the same however the batch is cut."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accel_train import rng
from accel_train.domains.diffusion import timesteps

EPSILON = timesteps.TIME_EPSILON


def batch(count, step=0):
    return {"position": torch.arange(count), "occurrence": torch.arange(count) + step * count}


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000])
@pytest.mark.parametrize("shift", [0.0, 0.3, 0.999999])
def test_low_discrepancy_closed_form(count, shift):
    expected = [float((Fraction(i, count) + Fraction(shift)) % 1) for i in range(count)]
    drawn = timesteps.low_discrepancy(torch.arange(count), count, shift)
    distance = np.abs(drawn.double().numpy() - expected)
    assert np.minimum(distance, 1 - distance).max() < 6.1e-8  # 0 and 1 are one place
    assert drawn.max() < 1


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000), st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1]))
def test_each_stratum_holds_one_time(count, shift, axis):
    ordered = timesteps.low_discrepancy(torch.arange(count), count, shift, axis).double().sort().values
    gaps = torch.cat([ordered[1:] - ordered[:-1], ordered[:1] + 1 - ordered[-1:]])
    assert (gaps - 1 / count).abs().max() < 2e-7


@pytest.mark.parametrize("count", [8, 16, 64, 96, 100, 210, 256, 1000])
def test_two_axes_fill_the_square(count):
    """Pairs keep a distance of at least 0.75 / sqrt(count), round the edges too; at best it is 1.07.

    Independent times come as near as 1 / count, and one axis with two shifts puts all pairs on a line.
    """
    x, y = (timesteps.low_discrepancy(torch.arange(count), count, s, axis) for axis, s in ((0, 0.123), (1, 0.7)))
    squared = sum(((v[:, None] - v[None]).abs() - ((v[:, None] - v[None]).abs() > 0.5).float()) ** 2 for v in (x, y))
    nearest = (squared + torch.eye(count)).min().sqrt()
    assert nearest > 0.75 / math.sqrt(count)


@pytest.mark.parametrize("sampling", ["low_discrepancy", "uniform"])
def test_the_cut_of_the_batch_does_not_enter(sampling):
    whole = timesteps.training_times(batch(48), 3, "text/time", 7, 48, sampling)
    order = torch.randperm(48)
    cut = {name: value[order] for name, value in batch(48).items()}
    parts = [
        timesteps.training_times({k: v[i : i + 5] for k, v in cut.items()}, 3, "text/time", 7, 48, sampling)
        for i in range(0, 48, 5)
    ]
    assert torch.equal(torch.cat(parts), whole[order])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("sampling", ["low_discrepancy", "uniform"])
def test_unbiased(sampling, axis):
    """Every position sees the uniform distribution over steps, and the mean of a function is its integral."""
    times = torch.stack([timesteps.training_times(batch(16, s), 0, "t", s, 16, sampling, axis) for s in range(1500)])
    assert times.min() >= EPSILON
    assert times.max() <= 1 - EPSILON
    assert times.min() < 0.002
    assert times.max() > 0.998
    for position in (0, 7, 15):
        assert stats.kstest(times[:, position].numpy(), "uniform").pvalue > 1e-3
    # Of the mean of t^2 over a batch of 16: (u - 1/2) / 16 in the first case, sd(t^2) / 4 in the second.
    spread = {"low_discrepancy": 1 / 16 / math.sqrt(12), "uniform": math.sqrt(1 / 5 - 1 / 9) / 4}[sampling]
    means = times.double().square().mean(1)
    assert means.std() == pytest.approx(spread, rel=0.1)
    assert abs(means.mean() - 1 / 3) < 4 * spread / math.sqrt(1500) + 2 * EPSILON


def test_low_discrepancy_is_calmer():
    one, other = (
        torch.stack([timesteps.training_times(batch(64, s), 0, "t", s, 64, kind) for s in range(200)])
        for kind in ("low_discrepancy", "uniform")
    )
    assert one.exp().mean(1).std() < other.exp().mean(1).std() / 5


def test_stratified():
    keys = rng.sample_keys(0, "evaluation", 0, torch.arange(5000))
    for stratum in range(16):
        times = (timesteps.stratified(keys, stratum, 16) - EPSILON) / (1 - 2 * EPSILON)
        assert stratum / 16 - 1e-6 <= times.min() < stratum / 16 + 1e-3
        assert (stratum + 1) / 16 - 1e-3 < times.max() <= (stratum + 1) / 16 + 1e-6
        assert stats.kstest((times * 16 - stratum).numpy(), "uniform").pvalue > 1e-3
