"""Learning rate on a plateau: torch's scheduler as the reference, kinds of steps, and what a checkpoint keeps."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch

from accel_train.config import UsageError
from accel_train.training.feedback.options import PlateauConfig
from accel_train.training.feedback.plateau import Change, Plateau
from accel_train.training.health.options import HealthConfig
from accel_train.training.optimizers import OptimizerConfig
from benchmarks.reads import HostReads
from tests.training.test_health import Training

ONE = {"main": 1.0}


def noisy_means(seed: int, windows: int) -> list[float]:
    """Falls, then stays with noise around a level, and falls again."""
    draws = random.Random(seed)
    levels = [3.0 / (1 + min(n, 10)) + (0.0 if n < windows // 2 else -0.1) for n in range(windows)]
    return [level * (1 + draws.uniform(-0.03, 0.03)) for level in levels]


def window(plateau: Plateau, mean: float, coefficients: dict[str, float] | None = None) -> Change | None:
    """A window of two steps with the mean."""
    for loss in (0.75 * mean, 1.25 * mean):
        plateau.add(coefficients or ONE, torch.tensor(loss, dtype=torch.float64), None)
    return plateau.end_window()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"factor": 0.5, "patience": 1},
        {"factor": 0.5, "patience": 3, "min_improvement": 0.02},
        {"factor": 0.1, "patience": 2, "cooldown": 4, "min_factor": 0.0},
        {"factor": 0.3, "patience": 1, "min_factor": 0.05, "min_improvement": 0.0},
    ],
)
def test_decisions_are_those_of_torch(options: dict[str, Any], seed: int) -> None:
    """``ReduceLROnPlateau`` acts on one bad window more than its patience."""
    config = PlateauConfig(**options)
    plateau = Plateau(config)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        factor=config.factor,
        patience=config.patience - 1,
        threshold=config.min_improvement,
        cooldown=config.cooldown,
        min_lr=config.min_factor,
        eps=0.0,
    )
    factors: list[float] = []
    for mean in noisy_means(seed, 60):
        change = window(plateau, mean)
        before = optimizer.param_groups[0]["lr"]
        reference.step(mean)
        after = optimizer.param_groups[0]["lr"]
        assert plateau.factor == pytest.approx(after, rel=1e-12)
        assert (change is not None) == (after < before)
        factors.append(plateau.factor)
    assert len(set(factors)) > 2


def test_windows_are_counted_from_the_start_of_the_run() -> None:
    plateau = Plateau(PlateauConfig(factor=0.5, steps=7))
    assert [done for done in range(1, 30) if plateau.ends_window(done)] == [7, 14, 21, 28]


def test_steps_left_out_do_not_count() -> None:
    """The mean is that of the trained steps, and a window without any changes nothing."""
    plateau, trained = Plateau(PlateauConfig(factor=0.5, patience=1)), torch.ones(())
    for loss, moved in ((4.0, 1), (math.nan, 0), (2.0, 1), (math.inf, 0)):
        plateau.add(ONE, torch.tensor(loss), moved * trained)
    plateau.end_window()
    assert plateau.state()["best"] == [[["main"], 3.0]]
    before = plateau.state()
    plateau.add(ONE, torch.tensor(math.nan), 0 * trained)
    assert plateau.end_window() is None
    assert plateau.end_window() is None
    plateau.add({"main": 0.0}, torch.tensor(0.0), None)  # trains nothing
    assert plateau.end_window() is None
    assert plateau.state() == before


def test_another_mixture_of_modes_is_no_improvement() -> None:
    """Losses of 7 and 1 that stay as they are: the mean of all steps follows the draws of the modes."""
    plateau = Plateau(PlateauConfig(factor=0.5, patience=2))
    text, latent = {"text": 1.0, "latent": 0.0}, {"text": 0.0, "latent": 8.0}
    changes: list[Change | None] = []
    for texts in (8, 5, 2):  # a mean of 5.8, 4, 2.2
        for number in range(10):
            coefficients, loss = (text, 7.0) if number < texts else (latent, 1.0)
            plateau.add(coefficients, torch.tensor(loss), None)
        changes.append(plateau.end_window())
    assert changes == [None, None, Change(0.5, 2, 0.0)]


def test_each_kind_is_compared_with_its_own_best_by_its_share_of_the_steps() -> None:
    plateau = Plateau(PlateauConfig(factor=0.5, patience=1, min_improvement=0.1))
    for a, b in ((10.0, 1.0), (10.5, 0.8)):
        for _ in range(3):
            plateau.add({"a": 1.0, "b": 0.0}, torch.tensor(a), None)
        plateau.add({"a": 0.0, "b": 2.0}, torch.tensor(b), None)
        change = plateau.end_window()
    assert change is not None
    assert change.improvement == pytest.approx((3 * -0.05 + 0.2) / 4, rel=1e-6)
    # A stage that begins with a term of its own has nothing to be compared with.
    assert window(plateau, 100.0, {"new": 1.0}) is None
    assert window(plateau, 100.0, {"new": 1.0}) is not None


def test_a_resume_at_any_step_decides_as_the_run_that_goes_on() -> None:
    config = PlateauConfig(factor=0.5, steps=3, patience=2, cooldown=1, min_improvement=0.05)
    whole, losses = Plateau(config), noisy_means(0, 90)
    resumed, factors = Plateau(config), []
    for done, loss in enumerate(losses, start=1):
        again = Plateau(config)
        again.load(json.loads(json.dumps(resumed.state())))
        resumed = again
        coefficients = {"a": 1.0, "b": float(done % 4 == 0)}
        for plateau in (whole, resumed):
            plateau.add(coefficients, torch.tensor(loss), None)
        if whole.ends_window(done):
            assert whole.end_window() == resumed.end_window()
        assert whole.state() == resumed.state()
        factors.append(whole.factor)
    assert len(set(factors)) > 2


def test_the_device_is_waited_for_at_the_end_of_a_window_only(fresh: None) -> None:
    health = HealthConfig(non_finite="skip")
    training = Training(OptimizerConfig(lr=1e-2, fused=True), health, on_device=True)
    plateau = Plateau(PlateauConfig(factor=0.5, steps=4))
    plateau.follow(training.step(0), 1)
    with HostReads() as reads:
        plateau.follow(training.step(1), 2)
        plateau.follow(training.step(2, "loss"), 3)
    assert not reads.counts, reads.places
    with HostReads() as reads:
        plateau.follow(training.step(3), 4)
    assert reads.counts
    ((_, best),) = plateau.state()["best"]
    twin = Training(OptimizerConfig(lr=1e-2, fused=True), health, on_device=True)
    losses = [float(twin.step(step).loss) for step in (0, 1, 3)]
    assert best == pytest.approx(sum(losses) / 3, rel=1e-6)  # without the step that was skipped
    assert training.guard.history.skipped == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"factor": 1.5}, "plateau.factor: 1.5: more than 0 and at most 1 is required"),
        ({"factor": 0.0}, "plateau.factor: 0.0: more than 0"),
        ({"factor": 0.5, "min_factor": 1.0}, "plateau.min_factor: 1.0: less than 1 is required"),
        ({"patience": 5}, "plateau.patience: 5: has no effect with plateau.factor: 1; .*the default is 3"),
        ({"steps": 5}, "plateau.steps: 5: has no effect"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PlateauConfig(**options)


def test_a_run_that_is_too_short_is_told() -> None:
    config = PlateauConfig(factor=0.5, steps=10, patience=2)
    assert config.notices(31) == []
    (notice,) = config.notices(30)
    assert "no effect in this run of 30 steps" in notice
    assert "falls after step 30 at the earliest" in notice
    plateau = Plateau(config)
    changes = [window(plateau, 1.0) for _ in range(3)]
    assert [change is not None for change in changes] == [False, False, True]  # after 3 windows of 10
    assert PlateauConfig().notices(1) == []
