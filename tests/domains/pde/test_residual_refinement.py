"""Refinement by diffusion against closed forms: what a Gaussian residual becomes, step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from accel_train import rng
from accel_train.domains.pde.residual import refinement

SIZE = torch.tensor([0.1, 0.02])
"""Of two channels; what a network would have learned."""


def batch_of(size: int = 6) -> dict[str, Tensor]:
    index = torch.arange(size)
    return {"occurrence": 10 + index, "position": index, "target": torch.zeros(size, 2, 1, 5)}


def gaussian_mean(noisy: Tensor, time: Tensor, mean: float, deviation: float) -> Tensor:
    """E[residual | noisy residual] where residuals are drawn from N(mean, deviation^2), in units of their size."""
    t = time[:, None, None, None].double()
    a, variance = 1 - t, deviation**2
    gain = a * variance / (a**2 * variance + t**2)
    return (mean + gain * (noisy.double() - a * mean)).float()


def gaussian(mean: float, deviation: float) -> refinement.Correct:
    """A network that knows it: what the guess a x / (a^2 + t^2) lacks, over t / sqrt(a^2 + t^2)."""

    def correct(guess: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        t = time[:, None, None, None]
        a = 1 - t
        noisy = torch.where(a > 0, guess * (a**2 + t**2) / a.clamp(min=1e-9), 0)  # at time 1 it says nothing
        return (gaussian_mean(noisy, time, mean, deviation) - guess) * (a**2 + t**2).sqrt() / t, SIZE.log()

    return correct


def unit_of(steps: int, mean: float, deviation: float, prediction: Tensor, sample: Tensor) -> Tensor:
    made = refinement.refine(gaussian(mean, deviation), prediction, SIZE.log(), steps, seed=3, sample=sample)
    return (made - prediction) / SIZE[:, None, None]


def test_one_step_gives_the_mean_of_what_is_missed() -> None:
    found = unit_of(1, 0.7, 0.5, torch.zeros(4, 2, 1, 5), torch.arange(4))
    torch.testing.assert_close(found, torch.full_like(found, 0.7), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (0.7, 0.5), (-1.0, 0.1)])
def test_steps_follow_the_flow_of_a_gaussian(mean: float, deviation: float) -> None:
    """Noise e at time 1 flows to mean + deviation * e; Euler's method comes closer by as much as its steps are more."""
    prediction, sample = torch.randn(4, 2, 1, 5, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    noise = rng.normal(rng.sample_keys(3, "sampling/latent", 0, sample), (2, 1, 5))
    errors = [
        (unit_of(n, mean, deviation, prediction, sample) - mean - deviation * noise).abs().max() for n in (50, 200)
    ]
    assert errors[1] < 0.1 * deviation
    assert errors[1] < 0.35 * errors[0]


def test_few_steps_are_eulers() -> None:
    """By the drift, residual - noise, which follows from the clean refinement."""
    sample = torch.arange(4)
    x = rng.normal(rng.sample_keys(3, "sampling/latent", 0, sample), (2, 1, 5))
    for k in range(4):
        time = torch.full((4,), 1 - k / 4)
        drift = (gaussian_mean(x, time, 0.3, 0.8) - x) / time[:, None, None, None]
        x = x + drift / 4
    torch.testing.assert_close(unit_of(4, 0.3, 0.8, torch.zeros(4, 2, 1, 5), sample), x, rtol=1e-4, atol=1e-5)


def test_more_steps_add_what_is_not_known() -> None:
    """Of N(0, 1), of which nothing is known: the mean misses its variance once, a draw twice."""
    sample, truth = torch.arange(256), torch.randn(256, 2, 1, 5, generator=torch.Generator().manual_seed(0))
    errors = [(unit_of(n, 0.0, 1.0, torch.zeros_like(truth), sample) - truth).square().mean() for n in (1, 64)]
    assert errors[0] == pytest.approx(1, rel=0.1)
    assert errors[1] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_network_of_zeros_is_the_best_linear_guess(steps: int) -> None:
    """For residuals of unit size and mean 0: nothing in one step, so that nothing is added before it has learned."""
    prediction, sample = torch.randn(4, 2, 1, 5, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    zero = refinement.refine(lambda x, _t: (torch.zeros_like(x), SIZE.log()), prediction, SIZE.log(), steps, 3, sample)
    expected = refinement.refine(gaussian(0.0, 1.0), prediction, SIZE.log(), steps, 3, sample)
    torch.testing.assert_close(zero, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(zero, prediction) == (steps == 1)


def test_noise_alone_does_not_reach_the_network() -> None:
    seen = list[Tensor]()

    def correct(guess: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(guess)
        return torch.zeros_like(guess), SIZE.log()

    refinement.denoise(correct, torch.randn(2, 2, 1, 5), torch.tensor([1.0, 0.5]))
    assert seen[0][0].abs().max() == 0
    assert seen[0][1].abs().max() > 0


def test_a_sample_is_refined_alike_in_any_batch() -> None:
    prediction, sample = torch.randn(4, 2, 1, 5, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    correct = gaussian(0.3, 0.8)
    whole = refinement.refine(correct, prediction, SIZE.log(), 3, 0, sample)
    alone = refinement.refine(correct, prediction[2:3], SIZE.log(), 3, 0, sample[2:3])
    assert torch.equal(alone, whole[2:3])
    assert not torch.equal(refinement.refine(correct, prediction, SIZE.log(), 3, 1, sample), whole)


def test_what_is_learned_is_what_the_guess_lacks() -> None:
    missed, noise = torch.randn(2, 3, 2, 1, 5, generator=torch.Generator().manual_seed(0)).unbind()
    time, said = torch.tensor([0.1, 0.25, 1.0]), torch.tensor([0.3, -0.2])[:, None, None]
    unit, t = missed / SIZE[:, None, None], time[:, None, None, None]
    guess = (1 - t) * ((1 - t) * unit + t * noise) / ((1 - t) ** 2 + t**2)

    def correct(given: Tensor, when: Tensor) -> tuple[Tensor, Tensor]:
        torch.testing.assert_close(given, guess)
        assert torch.equal(when, time)
        return said.expand_as(given), SIZE.log()

    found = refinement.losses(correct, missed, SIZE.log(), time, noise)
    own_size = missed.double().square().mean((2, 3)).sqrt().log() - SIZE.double().log()
    lacking = unit - guess - said * t / ((1 - t) ** 2 + t**2).sqrt()
    expected = lacking.double().square().mean((1, 2, 3)) + refinement.SIZE_WEIGHT * own_size.square().mean(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_mean_has_the_least_loss() -> None:
    """Of all that a network could say, E[x0 | x_t] is what the loss asks for."""
    generator = torch.Generator().manual_seed(0)
    unit = 0.4 + 0.6 * torch.randn(512, 2, 1, 16, generator=generator)
    time, noise = torch.rand(512, generator=generator), torch.randn(unit.shape, generator=generator)
    missed = unit * SIZE[:, None, None]

    def loss(mean: float, deviation: float) -> float:
        return float(refinement.losses(gaussian(mean, deviation), missed, SIZE.log(), time, noise).mean())

    best = loss(0.4, 0.6)
    assert all(loss(*other) > best for other in ((0.3, 0.6), (0.5, 0.6), (0.4, 0.5), (0.4, 0.7)))


def test_the_size_is_learned_and_does_not_teach_the_residual() -> None:
    missed = torch.randn(8, 2, 1, 64, generator=torch.Generator().manual_seed(0)) * SIZE[:, None, None]
    log_size, weight = (torch.zeros(2, requires_grad=True) for _ in range(2))

    def correct(guess: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return weight[:, None, None] * guess, log_size

    optimizer = torch.optim.SGD([log_size], lr=10.0)
    for _ in range(60):
        optimizer.zero_grad()
        refinement.losses(correct, missed, log_size, torch.full((8,), 0.5), torch.zeros_like(missed)).mean().backward()
        optimizer.step()
    each = missed.square().mean((2, 3)).sqrt().log().mean(0)
    torch.testing.assert_close(log_size.detach(), each, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(log_size.detach().exp(), SIZE, rtol=0.1, atol=0)
    loss = refinement.losses(correct, missed, log_size, torch.full((8,), 0.5), torch.zeros_like(missed)).mean()
    (gradient,) = torch.autograd.grad(loss - refinement.SIZE_WEIGHT * (log_size - each).square().mean(), log_size)
    assert gradient.abs().max() < 1e-6


def test_nothing_missed_has_a_finite_loss() -> None:
    zeros = torch.zeros(3, 2, 1, 5)
    found = refinement.losses(gaussian(0.0, 1.0), zeros, SIZE.log(), torch.full((3,), 0.5), zeros)
    assert found.isfinite().all()


def test_draws_belong_to_the_sample() -> None:
    batch = batch_of()
    whole = refinement.draw_noise(batch, 0, 7, 6, 4)
    assert whole["noise"].shape == batch["target"].shape
    half = refinement.draw_noise({name: values[4:] for name, values in batch.items()}, 0, 7, 6, 4)
    assert all(torch.equal(half[name], whole[name][4:]) for name in whole)
    assert not torch.equal(refinement.draw_noise(batch, 0, 8, 6, 4)["noise"], whole["noise"])
    assert math.isclose(float(whole["noise"].std()), 1.0, rel_tol=0.3)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_times_of_the_steps_are_learned_and_no_others(steps: int) -> None:
    visited = list[float]()

    def correct(guess: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        visited.append(float(time[0]))
        return torch.zeros_like(guess), SIZE.log()

    refinement.refine(correct, torch.zeros(1, 2, 1, 5), SIZE.log(), steps, 0, torch.arange(1))
    for step in range(5):
        times = refinement.draw_noise(batch_of(64), 0, step, 64, steps)["time"]
        assert times.unique().tolist() == sorted(visited)
        assert all((times == time).sum() == 64 // steps for time in visited)
