"""Gradient noise scale: gradients with a known mean and covariance as the reference, through the real AdamW."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.options import BatchScheduleConfig
from accel_train.training.feedback.noise_scale import NoiseScale, Window
from accel_train.training.health.options import HealthConfig
from accel_train.training.optimizers import OptimizerConfig
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepResult
from benchmarks.reads import HostReads
from tests.training.test_health import Training

BETA = 0.9
SQUARE = 3.0
"""``|G|^2``."""
TRACE = 40.0
"""``tr(Sigma)``."""


class Problem:
    """A linear model in fp64 under AdamW whose gradient is G plus noise, and the noise scale that follows it."""

    def __init__(self, beta: float = BETA, size: int = 64) -> None:
        self.model = nn.ParameterDict({name: torch.zeros(size // 2, dtype=torch.float64) for name in "ab"})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(beta, 0.95))
        self.shards = Shards(self.model, self.optimizer)
        self.scale = NoiseScale(beta, steps=10, every=1, stages=[])
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.mean[0] = math.sqrt(SQUARE)

    def step(self, noise: Tensor, size: int, *, observes: bool = True, trained: Tensor | None = None) -> None:
        """Train on a batch of ``size`` whose mean of the noise is given. It is trained unless ``trained`` is 0."""
        gradient = self.mean + noise
        weights = torch.cat(list(self.model.parameters()))
        if trained is None or trained > 0:
            (weights @ gradient).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scale.add(gradient.norm(), size, trained)
        if observes:
            self.observe()

    def observe(self) -> None:
        means = torch.cat([self.shards.state(name, "exp_avg") for name in "ab" if self.shards.state_names()])
        self.scale.observe(means.square().sum())


def orthogonal(problem: Problem, sizes: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """Yield noise that is orthogonal to G and to all noise before: every square is its expectation, exactly."""
    for place, size in enumerate(sizes, start=1):
        noise = torch.zeros_like(problem.mean)
        noise[place] = math.sqrt(TRACE / size)
        yield noise, size


def exact(window: Window | None) -> None:
    assert window is not None
    assert window.gradient_square == pytest.approx(SQUARE, rel=1e-9)
    assert window.noise_trace == pytest.approx(TRACE, rel=1e-9)
    assert window.noise_scale == pytest.approx(TRACE / SQUARE, rel=1e-9)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(
    "sizes", [[8] * 2, [8] * 30, [4, 4, 4, 8, 8, 16, 16, 16, 5, 64]], ids=["two", "many", "varied"]
)
def test_every_observation_has_its_expectation(beta: float, sizes: list[int]) -> None:
    """From the second step on, and over any change of the batch."""
    problem = Problem(beta)
    for number, (noise, size) in enumerate(orthogonal(problem, sizes), start=1):
        problem.step(noise, size)
        window = problem.scale.end_window()
        if number == 1:
            assert window is None  # the mean of one gradient is that gradient
        else:
            exact(window)
            assert window is not None
            assert window.observations == 1


@pytest.mark.parametrize(("size", "tolerance"), [(4, 0.05), pytest.param(64, 0.15, marks=pytest.mark.slow)])
def test_noise_of_any_covariance_is_measured(size: int, tolerance: float) -> None:
    """Independent normal noise with a spectrum over two decades. The gradient moves the weights, not the model."""
    generator = torch.Generator().manual_seed(0)
    problem = Problem(size=64)
    spectrum = torch.logspace(0, -2, 64, dtype=torch.float64)
    spectrum *= TRACE / spectrum.sum()
    for number in range(1, 12_001):
        noise = torch.randn(64, dtype=torch.float64, generator=generator) * (spectrum / size).sqrt()
        problem.step(noise, size, observes=number % 10 == 0)
    window = problem.scale.end_window()
    assert window is not None
    assert window.observations == 1200
    assert window.noise_scale == pytest.approx(TRACE / SQUARE, rel=tolerance)


def test_gradients_that_undo_each_other_give_no_measurement() -> None:
    problem = Problem()
    problem.mean.zero_()
    for number in range(60):
        noise = torch.zeros_like(problem.mean)
        noise[0] = (-1.0) ** number
        problem.step(noise, 8)
    window = problem.scale.end_window()
    assert window is not None
    assert window.noise_scale is None
    assert window.gradient_square < 0
    assert not window.exceeds(1e-9)
    assert window.describe(8, 8).startswith("gradient noise scale not measurable")


def test_a_gradient_without_noise_has_none() -> None:
    problem = Problem()
    for _ in range(20):
        problem.step(torch.zeros_like(problem.mean), 8)
    window = problem.scale.end_window()
    assert window is not None
    assert window.noise_scale == pytest.approx(0.0, abs=1e-9)
    assert not window.exceeds(1e-6)
    assert window.describe(8, 8).endswith("batch 8: stays")


def test_steps_left_out_do_not_count() -> None:
    problem = Problem()
    for number, (noise, size) in enumerate(orthogonal(problem, [8] * 20)):
        if number % 3 == 1:
            nothing = torch.full_like(noise, math.nan)
            problem.step(nothing, 1000, observes=False, trained=torch.zeros(()))
        problem.step(noise, size, trained=torch.ones(()))
    exact(problem.scale.end_window())


def test_a_resume_at_any_step_measures_as_the_run_that_goes_on() -> None:
    whole, resumed = Problem(), Problem()
    for noise, size in orthogonal(whole, [4] * 5 + [8] * 25):
        again = NoiseScale(BETA, steps=10, every=1, stages=[])
        again.load(json.loads(json.dumps(resumed.scale.state())))
        resumed.scale = again
        for problem in (whole, resumed):
            problem.step(noise, size)
        assert whole.scale.state() == resumed.scale.state()
    assert whole.scale.end_window() == resumed.scale.end_window()


def test_a_mean_of_unknown_gradients_is_waited_for() -> None:
    """A run that begins to measure at a checkpoint finds gradients of unknown batches in its ``exp_avg``."""
    problem = Problem(beta=0.5, size=256)
    found: list[Window] = []
    for number, (noise, size) in enumerate(orthogonal(problem, [8] * 100)):
        if number == 50:
            problem.scale = NoiseScale(0.5, steps=10, every=1, stages=[])
            problem.scale.load({})
        problem.step(noise, size)
        window = problem.scale.end_window()
        if number > 50 and window is not None:
            found.append(window)
    assert 20 < len(found) < 40
    for window in found:
        assert window.noise_scale == pytest.approx(TRACE / SQUARE, rel=1e-4)


def follow(scale: NoiseScale, training: Training, step: int, spoil: str = "") -> tuple[bool, StepResult]:
    result = training.step(step, spoil)
    return scale.follow(result, step + 1, 12, training.shards, training.accelerator), result


@pytest.mark.parametrize("on_device", [True, False])
def test_the_moments_are_those_of_the_clipped_gradients_of_trained_steps(on_device: bool, fresh: None) -> None:
    training = Training(OptimizerConfig(lr=1e-2, fused=True), HealthConfig(non_finite="skip"), on_device=on_device)
    training.max_grad_norm = 0.2
    scale = NoiseScale(0.9, steps=6, every=2, stages=[])
    norms: list[float] = []
    clipped = 0
    for step in range(6):
        spoil = "gradient" if step == 3 else ""
        ends, result = follow(scale, training, step, spoil)
        assert ends == (step == 5)
        if not spoil:
            norm = float(result.grad_norm)
            clipped += norm > 0.2
            norms.append(min(norm, 0.2))
    square, *_, steps = scale.state()["moments"]
    expected = 0.0
    for norm in norms:
        expected = 0.9 * expected + 0.1 * norm**2
    assert steps == 5
    assert clipped > 2
    assert square == pytest.approx(expected, rel=1e-5)
    means = [training.shards.state(name, "exp_avg").double() for name in training.shards.parameters]
    one = 1 - 0.9**5
    scale.end_window()
    scale.observe(sum(mean.square().sum() for mean in means))  # type: ignore[arg-type]
    last = scale.end_window()
    assert last is not None
    assert last.gradient_square + last.noise_trace / 12 == pytest.approx(expected / one, rel=1e-5)


@pytest.mark.parametrize("on_device", [True, False])
def test_without_clipping_a_gradient_counts_with_its_own_norm(on_device: bool, fresh: None) -> None:
    training = Training(OptimizerConfig(lr=1e-2, fused=True), HealthConfig(), on_device=on_device)
    training.max_grad_norm = 0.0
    norm = training.step(0).grad_norm
    assert float(training.guard.clipped_norm(norm)) == float(norm) > 0


def test_the_device_is_waited_for_at_the_end_of_a_window_only(fresh: None) -> None:
    training = Training(OptimizerConfig(lr=1e-2, fused=True), HealthConfig(non_finite="skip"), on_device=True)
    scale = NoiseScale(0.9, steps=6, every=2, stages=[])
    follow(scale, training, 0)
    with HostReads() as reads:
        for step in range(1, 5):
            assert not follow(scale, training, step)[0]
    assert not reads.counts, reads.places
    with HostReads() as reads:
        assert follow(scale, training, 5)[0]
        window = scale.end_window()
    assert reads.counts
    assert window is not None
    assert window.observations == 3


NOISE = {"noise_factor": 1.0, "max_size": 64}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"noise_factor": 1.0}, "noise_factor: 1.0: a largest number of samples per step is required"),
        ({**NOISE, "steps": (3,), "sizes": (8,)}, r"noise_factor: 1.0, batch_schedule.steps \[3\]: either"),
        ({"noise_every": 5}, "noise_every: 5: has no effect without batch_schedule.noise_factor"),
        ({"max_size": 5}, "max_size: 5: has no effect"),
        ({**NOISE, "noise_steps": 25}, "noise_steps: 25: a multiple of .*noise_every 10 is required.* give 30"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        BatchScheduleConfig(**options)


def test_what_cannot_be_measured_is_refused() -> None:
    schedule = BatchScheduleConfig(**NOISE)
    schedule.refuse_unmeasurable(8, "adamw", 0.9, None)
    BatchScheduleConfig().refuse_unmeasurable(8, "muon", 0.0, 1.0)
    for name in ("muon", "adamw8bit", "prodigyopt:Prodigy"):
        with pytest.raises(
            UsageError, match=rf"optimizer.name {name} keeps no fp32 mean .*adamw or adamw_offload is required"
        ):
            schedule.refuse_unmeasurable(8, name, 0.9, None)
    with pytest.raises(UsageError, match=r"optimizer.betas 0.0: .*give --optimizer.betas 0.9 0.95"):
        schedule.refuse_unmeasurable(8, "adamw", 0.0, None)
    with pytest.raises(UsageError, match=r"max_epochs: 2\.0: .*give max_steps"):
        schedule.refuse_unmeasurable(8, "adamw", 0.9, 2.0)
    with pytest.raises(UsageError, match=r"max_size: 64: at least global_batch_size 65 is required.*give 520"):
        schedule.refuse_unmeasurable(65, "adamw", 0.9, None)


def test_sizes_double_up_to_the_largest() -> None:
    schedule = BatchScheduleConfig(noise_factor=1.0, max_size=40, learning_rate="sqrt")
    assert [schedule.next_size(size) for size in (8, 16, 32, 40)] == [16, 32, 40, 40]
    assert schedule.next_size(64) == 64  # reached under a larger maximum
    grown = schedule.grown([(10, 16), (30, 32)])
    assert [grown.size(8, step) for step in (9, 10, 29, 30)] == [8, 16, 16, 32]
    assert grown.factor(8, 30) == 2.0
    assert schedule.grown([]) is schedule
    assert schedule.largest(8) == 40
    (notice,) = schedule.notices(500)
    assert "no effect in this run of 500 steps" in notice
    assert schedule.notices(501) == []
