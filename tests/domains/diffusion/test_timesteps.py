"""Times of the global batch: even, unbiased, and the same however the batch is cut."""

import ast
import math
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accel_train import rng
from accel_train.config import UsageError
from accel_train.domains.diffusion import timesteps

EPSILON = timesteps.TIME_EPSILON
TIMESTEPS = 100_000
"""Timesteps of a scheduler, to tell times apart more finely than the usual 1000."""


def batch(count, step=0):
    return {"position": torch.arange(count), "occurrence": torch.arange(count) + step * count}


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000])
@pytest.mark.parametrize("shift", [0.0, 0.3, 0.999999, 1 - 2.0**-26])  # the last is 1 in fp32
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


def test_a_uniform_time_is_that_of_the_occurrence_and_an_even_one_that_of_the_position():
    here = {"position": torch.arange(16), "occurrence": torch.arange(16) + 100}
    elsewhere = {"position": torch.arange(16).flip(0), "occurrence": here["occurrence"]}
    later = {"position": here["position"], "occurrence": here["occurrence"] + 16}
    for sampling, same, other in (("uniform", elsewhere, later), ("low_discrepancy", later, elsewhere)):
        times, of_same, of_other = (timesteps.training_times(b, 0, "t", 5, 16, sampling) for b in (here, same, other))
        assert torch.equal(of_same, times)
        assert not torch.equal(of_other, times)


def test_times_of_two_axes_are_paired_by_the_lattice():
    """Of equal shifts too: the second axis is no copy of the first."""
    one, two = (timesteps.training_times(batch(64), 0, "t", 5, 64, axis=axis) for axis in (0, 1))
    expected = timesteps.low_discrepancy(torch.arange(64), 64, rng.host_uniform(0, "t", 5), 1)
    torch.testing.assert_close(two, expected * (1 - 2 * EPSILON) + EPSILON)
    assert not torch.equal(one, two)


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


def density(name, **options):
    return timesteps.TimeConfig(density=name, **options)


def test_a_shift_comes_after_the_density():
    config = density("logit_normal", logit_mean=0.5, shift=3.0)
    given = [batch(64), 0, "t", 5, 64, "uniform"]
    draws = rng.uniform(rng.sample_keys(0, "t", 5, torch.arange(64)))
    expected = timesteps.shifted(timesteps.with_density(draws, config), 3.0)
    found = timesteps.training_times(*given, config=config)
    torch.testing.assert_close(found, expected * (1 - 2 * EPSILON) + EPSILON)


def diffusers_function(name):
    """A function of diffusers.training_utils, compiled alone: importing the module takes 9 seconds."""
    source = Path(find_spec("diffusers").origin).with_name("training_utils.py").read_text("utf-8")
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    scope = {"torch": torch, "math": math}
    exec(compile("from __future__ import annotations\n" + ast.unparse(tree), "training_utils.py", "exec"), scope)
    return scope[name]


def diffusers_draw(scheme, count, **options):
    """Times of diffusers' training scripts, and the generator's draws behind them."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    draw = diffusers_function("compute_density_for_timestep_sampling")

    def seeded():
        return torch.Generator().manual_seed(7)

    places = draw(scheme, count, generator=seeded(), **options)
    # The scripts take them as places in a list from noisy to clean.
    listed = FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIMESTEPS).timesteps
    times = listed[(places * TIMESTEPS).long()] / TIMESTEPS
    if scheme == "logit_normal":
        normal = torch.normal(0.0, 1.0, (count,), generator=seeded())
        return times, torch.special.ndtr(normal.double())
    return times, torch.rand(count, generator=seeded()).double()


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.6), (-1.0, 2.0)])
def test_logit_normal_is_that_of_diffusers_with_the_other_sign(mean, std):
    expected, draws = diffusers_draw("logit_normal", 512, logit_mean=mean, logit_std=std)
    times = timesteps.with_density(1 - draws, density("logit_normal", logit_mean=-mean, logit_std=std))
    torch.testing.assert_close(times.float(), expected, rtol=0, atol=2 / TIMESTEPS)


@pytest.mark.parametrize("scale", [1.29, 1.75, 0.5, -1.0])
def test_mode_is_that_of_diffusers(scale):
    expected, draws = diffusers_draw("mode", 512, mode_scale=scale)
    times = timesteps.with_density(draws, density("mode", mode_scale=scale))
    torch.testing.assert_close(times.float(), expected, rtol=0, atol=2 / TIMESTEPS)


def test_uniform_is_that_of_diffusers():
    expected, draws = diffusers_draw("none", 512)
    times = timesteps.with_density(1 - draws, density("uniform"))
    torch.testing.assert_close(times.float(), expected, rtol=0, atol=2 / TIMESTEPS)


def test_cosmap_draws_by_diffusers_weight():
    """The density of drawn times is 1 / (d time / d draw): diffusers' weight of cosmap, whose mean over times is 1."""
    weight = diffusers_function("compute_loss_weighting_for_sd3")
    draws = torch.linspace(0.001, 0.999, 201, dtype=torch.float64, requires_grad=True)
    times = timesteps.with_density(draws, density("cosmap"))
    (slope,) = torch.autograd.grad(times.sum(), draws)
    torch.testing.assert_close(1 / slope, weight("cosmap", times.detach()))


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_loss_weights_are_those_of_diffusers(weighting):
    times = torch.linspace(0.001, 0.999, 101)
    expected = diffusers_function("compute_loss_weighting_for_sd3")(weighting, times)
    torch.testing.assert_close(timesteps.loss_weight(times, weighting), expected)


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
def test_shift_is_that_of_diffusers(shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    plain = FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas
    expected = FlowMatchEulerDiscreteScheduler(shift=shift).sigmas
    torch.testing.assert_close(timesteps.shifted(plain, shift), expected)


@pytest.mark.parametrize("name", ["logit_normal", "mode", "cosmap"])
def test_a_density_keeps_the_even_spread_and_the_cut(name):
    config = timesteps.TimeConfig(density=name, shift=2.0)
    uniform = timesteps.training_times(batch(256), 3, "t", 7, 256)
    times = timesteps.training_times(batch(256), 3, "t", 7, 256, config=config)
    assert torch.equal(times.argsort(), uniform.argsort())
    assert times.min() >= EPSILON
    assert times.max() <= 1 - EPSILON
    assert (times - uniform).abs().max() > 0.02
    cut = {key: value[100:130] for key, value in batch(256).items()}
    assert torch.equal(timesteps.training_times(cut, 3, "t", 7, 256, config=config), times[100:130])


def test_default_config_changes_no_bit():
    uniform = timesteps.training_times(batch(64), 3, "t", 7, 64)
    assert torch.equal(timesteps.training_times(batch(64), 3, "t", 7, 64, config=timesteps.TimeConfig()), uniform)


def test_an_option_of_another_density_is_refused():
    with pytest.raises(UsageError, match=r"times\.mode_scale: 0\.5: has no effect with times\.density: uniform"):
        timesteps.TimeConfig(mode_scale=0.5)
