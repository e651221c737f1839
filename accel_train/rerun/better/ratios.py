"""Metrics of an evaluation as ratios of sums over its samples.

An evaluation reports means: a sum of values over a sum of weights, tokens or points. Which two sums make a metric is
not declared anywhere. It is found by trial: the ratio that has the value of the metric on both sides. Metrics that are
no ratio of sums, such as a perplexity, are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Recorded = Sequence[Sequence[Mapping[str, Any]]]
"""Record of ``metrics.evaluation`` read from JSON: for each call and sample, nested lists of numbers by name."""
TOLERANCE = 1e-9
"""Relative. Both are computed from the same fp64 sums, in another order."""


@dataclass(frozen=True)
class Sums:
    """Sums of one call: name -> (samples, elements)."""

    values: Mapping[str, Values]
    groups: Mapping[str, Sequence[str]]
    """Name of a vector or of a row of a matrix -> the names of its elements."""

    @property
    def count(self) -> int:
        return len(next(iter(self.values.values())))


@dataclass(frozen=True)
class Metric:
    """A mean of ratios: each sum of ``over`` divided by the sum of ``under`` at the same position."""

    name: str
    call: int
    over: tuple[str, ...]
    under: tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """A metric of one side."""

    value: float
    influence: Values
    """(samples,). Contribution of each sample to ``value``. Their mean is 0 and varies as ``value`` does."""
    bits: bytes
    """Bytes of all sums that ``value`` is made of, to tell whether two sides are equal bit for bit."""


def read_sums(recorded: Recorded) -> list[Sums]:
    """Split the sums of each call into their elements."""
    found: list[Sums] = []
    for call in recorded:
        values: dict[str, Values] = {}
        groups: dict[str, list[str]] = {}
        for name in call[0]:
            stacked = np.asarray([sample[name] for sample in call], dtype=np.float64)
            for place in itertools.product(*map(range, stacked.shape[1:])):
                element = name + "".join(f"[{number}]" for number in place)
                values[element] = stacked[(slice(None), *place)]
                # The last dimension is that of a row.
                if place:
                    row = name + "".join(f"[{number}]" for number in place[:-1])
                    groups.setdefault(row, []).append(element)
        found.append(Sums(values, groups))
    return found


def find_metrics(
    a: Sequence[Sums], b: Sequence[Sums], metrics_a: Mapping[str, float], metrics_b: Mapping[str, float]
) -> list[Metric]:
    """Return the metrics that are ratios of sums on both sides, in the order of the evaluation."""
    metrics: list[Metric] = []
    for name, value in metrics_a.items():
        if name not in metrics_b:
            continue
        for candidate in _candidates(name, a, b):
            if _close(_value(a, candidate), value) and _close(_value(b, candidate), metrics_b[name]):
                metrics.append(candidate)
                break
    return metrics


def _candidates(name: str, a: Sequence[Sums], b: Sequence[Sums]) -> Iterator[Metric]:
    """Yield the ratios that could be a metric, the likeliest first."""
    for number, sums in enumerate(a):
        weights = _weights(sums, b[number])
        singles = [(key,) for key in sums.values if key not in weights]
        # Terms are named after what they are terms of.
        terms = tuple(key for key in sums.values if key.startswith(f"{name}_"))
        rows = [tuple(elements) for elements in sums.groups.values()]
        # Sums named like the metric first, because two sums may be equal. A weight is a metric only by its name.
        overs = sorted([terms, *singles, *rows], key=lambda over: over != (name,))
        if name in weights:
            overs.insert(0, (name,))
        for over in filter(None, overs):
            for weight in weights:
                yield Metric(name, number, over, (weight,) * len(over))
            for under in rows:
                if len(under) == len(over) and all(key in weights for key in under):
                    yield Metric(name, number, over, under)
    # Last, because only a metric with one value on both sides can be made of these: that of a count that did not
    # change, such as of correct answers.
    for number, sums in enumerate(a):
        for over, under in itertools.permutations(_weights(sums, b[number]), 2):
            yield Metric(name, number, (over,), (under,))


def _weights(a: Sums, b: Sums) -> list[str]:
    """Return the names of sums that can be weights: they depend on the data alone, so both sides have the same."""
    return [
        key
        for key, values in a.values.items()
        if values.min() >= 0 and values.sum() > 0 and np.array_equal(values, b.values[key])
    ]


def _value(sums: Sequence[Sums], metric: Metric) -> float:
    values = sums[metric.call].values
    pairs = zip(metric.over, metric.under, strict=True)
    ratios = [float(values[over].sum() / values[under].sum()) for over, under in pairs]
    return sum(ratios) / len(ratios)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=0.0)


def estimate(sums: Sequence[Sums], metric: Metric) -> Estimate:
    """Return the value of a metric on one side, with the influence of each sample (delta method of a ratio)."""
    values = sums[metric.call].values
    count = sums[metric.call].count
    influence = np.zeros(count)
    parts: list[Values] = []
    for over, under in zip(metric.over, metric.under, strict=True):
        ratio = values[over].sum() / values[under].sum()
        # Linear in each sample's two sums, at the ratio of all.
        residual = values[over] - ratio * values[under]
        influence += residual / values[under].mean() / len(metric.over)
        parts += [values[over], values[under]]
    return Estimate(_value(sums, metric), influence, b"".join(part.tobytes() for part in parts))
