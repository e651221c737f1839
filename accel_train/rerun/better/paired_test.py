"""Student's paired test of two checkpoints, sample by sample, and the verdict of the metrics that decide.

Held-out samples are drawn independently, so the mean of their differences has the variance of one difference over their
number. Several deciding metrics share the level (Bonferroni), so that chance decides at most as often as for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from accel_train.metrics.bootstrap import LEVEL
from accel_train.rerun.better.ratios import Estimate
from accel_train.wording import declared_of

FEWEST = 10
"""Fewest samples for an interval."""
POWER = 0.8
"""Probability of showing a true difference as large as ``Difference.resolves``."""
Direction = Literal["min", "max"]
Winner = Literal["A", "B", "equal", "not resolved", "divided"]


@dataclass(frozen=True)
class Difference:
    """A metric of both checkpoints on the same samples."""

    metric: str
    samples: int
    a: float
    b: float
    difference: float
    """B - A."""
    half_width: float | None
    """Half the interval around ``difference``. None for fewer than ``FEWEST`` samples."""
    unpaired_half_width: float | None
    """Half the interval if the two checkpoints had been measured on different samples."""
    p: float | None
    """Probability of a difference as large by chance, times the number of metrics that decide if this is one."""
    resolves: float | None
    """Smallest true difference to be shown with probability ``POWER``."""
    equal: bool
    """True if every sum of every sample has the same bits."""
    better: Direction | None
    """``min`` if a smaller value is better. None for a metric that does not decide."""

    @property
    def is_shown(self) -> bool:
        """True if chance does not explain the difference."""
        return self.p is not None and not self.equal and self.p < 1 - LEVEL

    @property
    def winner(self) -> Literal["A", "B"] | None:
        """The better checkpoint by this metric. None if that is not shown, or if the metric does not decide."""
        if not self.is_shown or self.better is None:
            return None
        # The difference is B - A: below 0, B has the smaller value.
        return "B" if (self.difference < 0) == (self.better == "min") else "A"


def compare(metric: str, a: Estimate, b: Estimate, better: Direction | None, deciding: int) -> Difference:
    """Test the difference of a metric. ``deciding`` is the number of metrics that decide."""
    # A metric that does not decide names no winner, so it is tested alone.
    shares = deciding if better is not None else 1
    count = len(a.influence)
    equal = a.bits == b.bits
    half_width = unpaired = p = resolves = None
    if count >= FEWEST:
        student = _student()
        # Two-sided, and shared by all metrics that decide.
        chance = (1 - LEVEL) / shares
        critical = float(student.ppf(1 - chance / 2, count - 1))
        error = _error(b.influence - a.influence)
        half_width = critical * error
        # Variances of independent means add up.
        unpaired = critical * math.hypot(_error(a.influence), _error(b.influence))
        beyond = float(student.ppf(POWER, count - 1))
        resolves = (critical + beyond) * error
        p = 1.0 if equal else _p(b.value - a.value, error, count, shares)
    # Equal bits leave no rounding to subtract.
    difference = 0.0 if equal else b.value - a.value
    return Difference(metric, count, a.value, b.value, difference, half_width, unpaired, p, resolves, equal, better)


def _error(influence: Any) -> float:
    # ddof=1, because the mean is estimated from the same samples.
    return float(np.std(influence, ddof=1)) / math.sqrt(len(influence))


def _p(difference: float, error: float, count: int, shares: int) -> float:
    # Every sample differs by the same amount.
    if error == 0:
        return 0.0 if difference else 1.0
    return min(1.0, shares * 2 * float(_student().sf(abs(difference) / error, count - 1)))


def _student() -> Any:
    # Here, because it is slow to import.
    from scipy import stats

    return stats.t


def decide(differences: Sequence[Difference]) -> Winner:
    """Return the better checkpoint by the metrics that decide.

    ``divided``: each is better by another metric. ``equal``: none of their bits differs.
    """
    deciding = [one for one in differences if one.better is not None]
    if all(one.equal for one in deciding):
        return "equal"
    winners: set[Winner] = {one.winner for one in deciding if one.winner is not None}
    if len(winners) > 1:
        return "divided"
    return winners.pop() if winners else "not resolved"


def directions(names: Sequence[str], declared: Mapping[str, Direction]) -> dict[str, Direction]:
    """Return the metrics that decide, with their directions: those declared by name, or by its last words."""
    found: dict[str, Direction] = {}
    for name in names:
        direction = declared_of(name, declared)
        if direction is not None:
            found[name] = direction
    return found
