"""Metrics found among the sums of single samples, and the statistics of their differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from accel_train.rerun.better import paired_test, ratios
from accel_train.rerun.better.paired_test import Difference, compare, decide
from accel_train.rerun.better.ratios import Metric

TOKENS = [3.0, 1.0, 7.0, 2.0]


def call(*values: float) -> list[dict[str, Any]]:
    """A loss over tokens, two bands over samples, and a matrix of weights, errors and gaps at two times."""
    found: list[dict[str, Any]] = []
    for value, tokens in zip(values, TOKENS, strict=True):
        matrix = [[1.0, 1.0], [value, 2 * value], [value / 3, value / 7]]
        bands = {"loss_band_1": value, "loss_band_2": 3 * value}
        found.append({"nll": value * tokens, "tokens": tokens, "samples": 1.0, **bands, "rollout": matrix})
    return found


def metrics_of(values: list[float]) -> dict[str, float]:
    tokens = sum(TOKENS)
    nll = sum(value * count for value, count in zip(values, TOKENS, strict=True)) / tokens
    mean = sum(values) / 4
    return {
        "nll": nll,
        "perplexity": float(np.exp(nll)),
        "loss": 2 * mean,
        "rollout_error": 1.5 * mean,
        "last": 2 * mean,
    }


def test_metrics_are_the_ratios_that_the_evaluation_made() -> None:
    values_a, values_b = [1.0, 2.0, 4.0, 3.0], [1.5, 2.0, 4.5, 2.0]
    a, b = (ratios.read_sums([call(*values)]) for values in (values_a, values_b))
    found = ratios.find_metrics(a, b, metrics_of(values_a), metrics_of(values_b))
    # No ratio of sums is a perplexity. Weights are those sums that both sides have.
    assert [metric.name for metric in found] == ["nll", "loss", "rollout_error", "last"]
    assert found[0] == Metric("nll", 0, ("nll",), ("tokens",))
    assert found[1].over == ("loss_band_1", "loss_band_2")
    assert found[2].over == ("rollout[1][0]", "rollout[1][1]")
    one = ratios.estimate(a, found[0])
    assert one.value == pytest.approx(metrics_of(values_a)["nll"])
    assert one.influence.mean() == pytest.approx(0)


def test_a_metric_is_the_ratio_that_has_its_value_on_both_sides() -> None:
    """On one side alone two sums may have the same value by chance."""
    a = ratios.read_sums([[{"x": value, "y": value, "n": 1.0} for value in (1.0, 3.0)]])
    b = ratios.read_sums([[{"x": value, "y": 2 * value, "n": 1.0} for value in (2.0, 4.0)]])
    (found,) = ratios.find_metrics(a, b, {"error": 2.0}, {"error": 6.0})
    assert found.over == ("y",)


def test_a_metric_whose_sums_did_not_change_is_found_and_equal() -> None:
    """Equal counts of correct answers look like a weight."""

    def side(nll: float) -> list[ratios.Sums]:
        counted = zip((1.0, 0.0, 2.0), (2.0, 1.0, 5.0), strict=True)
        return ratios.read_sums([[{"nll": nll * n, "correct": yes, "tokens": n} for yes, n in counted]])

    a, b = side(2.0), side(3.0)
    found = ratios.find_metrics(a, b, {"nll": 2.0, "accuracy": 3 / 8}, {"nll": 3.0, "accuracy": 3 / 8})
    assert [metric.name for metric in found] == ["nll", "accuracy"]
    assert found[1] == Metric("accuracy", 0, ("correct",), ("tokens",))
    accuracy = compare("accuracy", ratios.estimate(a, found[1]), ratios.estimate(b, found[1]), "max", deciding=2)
    assert accuracy.equal
    assert decide([accuracy]) == "equal"


def test_the_influence_of_a_sample_is_that_of_the_jackknife() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(1, 30, 400).astype(float)
    nll = tokens * random.lognormal(size=400)
    sums = [ratios.Sums({"nll": nll, "tokens": tokens}, {})]
    found = ratios.estimate(sums, Metric("nll", 0, ("nll",), ("tokens",)))
    without = (nll.sum() - nll) / (tokens.sum() - tokens)
    assert np.allclose((found.value - without) * 399, found.influence, rtol=0.1, atol=0.02)


def difference(a: Any, b: Any, better: paired_test.Direction | None = "min", deciding: int = 1) -> Difference:
    weights = np.ones(len(a))
    estimates = [
        ratios.estimate([ratios.Sums({"x": x, "n": weights}, {})], Metric("x", 0, ("x",), ("n",))) for x in (a, b)
    ]
    return compare("x", *estimates, better, deciding)  # pyright: ignore[reportCallIssue]


def test_intervals_are_those_of_scipy() -> None:
    random = np.random.default_rng(1)
    a = random.normal(size=50)
    b = a + random.normal(0.02, 0.1, size=50)
    found = difference(a, b)
    reference: Any = stats.ttest_rel(b, a)
    interval = reference.confidence_interval(0.95)
    assert found.half_width == pytest.approx((interval.high - interval.low) / 2)
    assert found.p == pytest.approx(reference.pvalue)
    errors = np.hypot(stats.sem(a), stats.sem(b))
    assert found.unpaired_half_width == pytest.approx(float(stats.t.ppf(0.975, 49) * errors))
    # Of four that decide at once, each has a quarter of the level.
    shared = difference(a, b, deciding=4)
    assert shared.half_width == pytest.approx(reference.confidence_interval(1 - 0.05 / 4).high - found.difference)
    assert shared.p == pytest.approx(min(1.0, 4 * reference.pvalue))
    # One that decides nothing is tested alone.
    assert difference(a, b, None, deciding=4).p == pytest.approx(reference.pvalue)


def test_what_is_said_to_be_resolved_is_shown_four_times_in_five() -> None:
    random = np.random.default_rng(2)
    resolves = [difference(*(random.normal(size=(2, 40)))).resolves for _ in range(100)]
    size = float(np.mean([value for value in resolves if value is not None]))
    shown = [difference(random.normal(size=40), random.normal(size, 1, size=40)).is_shown for _ in range(600)]
    assert 0.75 < np.mean(shown) < 0.85


@pytest.mark.parametrize("count", [10, 32])
def test_chance_decides_in_one_of_twenty(count: int) -> None:
    random = np.random.default_rng(3)
    wrong = [difference(*random.lognormal(size=(2, count))).is_shown for _ in range(800)]
    assert np.mean(wrong) < 0.06


def test_verdicts() -> None:
    a = np.linspace(1, 2, 20)
    lower, higher = a - 0.1 - 0.01 * np.sin(a), a + 0.1 + 0.01 * np.sin(a)
    assert decide([difference(a, lower)]) == "B"
    assert decide([difference(a, higher)]) == "A"
    assert decide([difference(a, higher, "max")]) == "B"
    # The second does not decide.
    assert decide([difference(a, lower), difference(a, higher, None)]) == "B"
    assert decide([difference(a, lower, deciding=2), difference(a, higher, deciding=2)]) == "divided"
    same = difference(a, a.copy())
    assert (same.difference, same.half_width, same.p, same.equal) == (0.0, 0.0, 1.0, True)
    assert decide([same]) == "equal"
    assert decide([same, difference(a, lower)]) == "B"
    assert decide([difference(a, a + 0.1 * np.cos(50 * a))]) == "not resolved"
    assert decide([difference(a[:9], lower[:9])]) == "not resolved"


def test_what_decides_is_found_by_name_or_by_its_last_word() -> None:
    names = ["darcy_nrmse", "mean_nrmse", "nll", "l2t_nll_shuffled"]
    found = paired_test.directions(names, {"nrmse": "min", "nll": "max"})
    assert found == {"darcy_nrmse": "min", "mean_nrmse": "min", "nll": "max"}
