"""The recommended save interval, against closed forms and against the curve that it minimises."""

from __future__ import annotations

import math

import pytest

from accel_train.drill.interval import Costs, Present, Recommendation

DAY = 86_400.0


def costs(step: float = 1.0, save: float = 2.0, commit: float = 0.0, restart: float = 0.0, mtbf: float = DAY) -> Costs:
    return Costs(step, save, commit, restart, mtbf)


@pytest.mark.parametrize(
    ("step", "save", "mtbf", "steps"),
    [
        (1.0, 2.0, 2500.0, 100),  # sqrt(2 * 2 * 2500) = 100 s
        (0.5, 2.0, 2500.0, 200),
        (10.0, 2.0, 2500.0, 10),
        (1.0, 0.5, 10_000.0, 100),
        (1000.0, 2.0, 2500.0, 1),  # never less than a step
    ],
)
def test_the_interval_is_that_of_young(step: float, save: float, mtbf: float, steps: int) -> None:
    assert costs(step, save, mtbf=mtbf).best_steps() == steps


def test_no_other_interval_loses_less() -> None:
    """The share at the optimum is the closed form sqrt(2 C / M) plus what each failure costs anyway."""
    machine = costs(save=3.0, commit=5.0, restart=60.0)
    best = machine.best_interval()
    assert machine.share_lost(best) == pytest.approx(math.sqrt(2 * 3.0 / DAY) + 65.0 / DAY, rel=1e-12)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert machine.share_lost(best * factor) > machine.share_lost(best)


def test_the_share_is_that_of_a_clock_with_failures() -> None:
    """Failures spread evenly over the intervals of a long run cost what the formula says."""
    machine = costs(save=4.0, commit=6.0, restart=30.0, mtbf=50_000.0)
    interval, failures = 500.0, 1000
    lost = sum(interval * (number + 0.5) / failures + 6.0 + 30.0 for number in range(failures)) / failures
    assert machine.share_lost(interval) == pytest.approx(4.0 / interval + lost / 50_000.0, rel=1e-9)


def test_a_save_has_the_time_to_be_committed() -> None:
    """The next one would wait for it."""
    assert costs(save=0.001, commit=90.0, mtbf=1000.0).best_steps() == 90


def test_the_present_value_is_judged_by_the_same_curve() -> None:
    found = Recommendation(costs(save=2.0, mtbf=2500.0), Present("checkpoints.save_every 400", 400.0))
    assert found.save_every == 100
    assert found.share == pytest.approx(0.04)
    assert found.present_share == pytest.approx(2 / 400 + 200 / 2500)
    assert Recommendation(costs(), Present("by epochs", None)).present_share is None
