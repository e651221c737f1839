"""Differences that are held to a tolerance. Standard library only.

NaN counts as infinite. Every comparison with it is false, so that ``difference > tolerance`` would pass it, and
Python's ``max`` drops it unless it comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def nan_as_infinite(difference: float) -> float:
    """Return the difference, infinity for NaN."""
    if math.isnan(difference):
        return math.inf
    return difference


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference, infinity if one is NaN, 0 for none."""
    return max(map(nan_as_infinite, differences), default=0.0)


def relative(a: float, b: float) -> float:
    """Return |a - b| relative to |a|. 0 for equal values and for two NaN, infinite next to NaN or infinity."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    # No difference is small beside 0.
    if a == 0:
        return math.inf
    return nan_as_infinite(abs(a - b) / abs(a))
