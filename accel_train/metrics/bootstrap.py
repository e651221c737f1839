"""The median of a few measurements, and how far it may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

LEVEL = 0.95
RESAMPLES = 9999
ROUNDS_FOR_LEVEL = 5
"""With fewer values the interval, their whole range, holds the true median much less often than LEVEL says. From 5 on
it does in 0.93 to 0.96 of cases, with 7 and 8 values in 0.87 to 0.93: simulated for normal and exponential values."""


@dataclass(frozen=True)
class Estimate:
    """A median with its interval."""

    median: float
    low: float | None = None
    """None, like ``high``, where there is no interval: fewer than two values, or one that is not finite."""
    high: float | None = None
    count: int = 1
    """Values that it is the median of."""

    def includes(self, value: float) -> bool:
        """Whether ``value`` is in the interval; False where there is none."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def estimate(values: Sequence[float]) -> Estimate:
    """Median and bootstrap percentile interval (Efron, 1979) at ``LEVEL``; the same values give the same interval.

    The percentile method and not BCa: BCa is not defined where all values are equal, which losses of one seed are.
    About 2 ms. Raises ``ValueError`` for no values.
    """
    if not values:
        raise ValueError("no values to take the median of")
    sample = np.asarray(values, dtype=np.float64)
    median = float(np.median(sample))
    if len(sample) < 2 or not all(map(isfinite, values)):
        return Estimate(median, count=len(sample))
    from scipy import stats

    bootstrap: Any = stats.bootstrap  # typed without random_state, the name that versions before 1.15 know as well
    interval: Any = bootstrap(
        (sample,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(median, float(interval.low), float(interval.high), len(sample))


def coverage_of_range(count: int) -> float:
    """How often the range of ``count`` independent values holds the true median: 1 - 2^(1 - count).

    It is missed where all values are on one side of it.
    """
    return 1 - 2.0 ** (1 - count)
