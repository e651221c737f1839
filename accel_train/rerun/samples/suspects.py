"""Samples whose gradient is out of line with the others of their step.

Distances are robust z-scores of log gradient norms: (log g - median) / (1.4826 MAD), with the median absolute deviation
MAD. Norms are positive and skewed, so their logarithms are compared. Median and MAD, unlike mean and standard
deviation, are not moved by the outliers themselves, up to half of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LIMIT = 6.0
"""Distance above which a sample is a suspect. Chosen on the demos: docs/samples.md has the distances of clean steps."""
NORMAL = 1.4826
"""MAD times this is the standard deviation of a normal distribution."""
SMALLEST_SPREAD = 0.01
"""Smallest spread of the logarithms. Norms within a few per cent of each other have no outliers."""
FEWEST = 10
"""Fewest samples with a gradient from which a spread is estimated."""


def distances(norms: Sequence[float]) -> list[float]:
    """Return how far each gradient norm is above the median, in robust standard deviations.

    Infinite for a norm that is not finite. Negative infinity for no gradient at all, which moves nothing, and for every
    finite norm if fewer than ``FEWEST`` are above 0.
    """
    values = np.asarray(norms, dtype=np.float64)
    found = np.full(len(values), -math.inf)
    found[~np.isfinite(values)] = math.inf
    usual = np.isfinite(values) & (values > 0)
    if usual.sum() >= FEWEST:
        logs = np.log(values[usual])
        middle = np.median(logs)
        spread = NORMAL * float(np.median(np.abs(logs - middle)))
        found[usual] = (logs - middle) / max(spread, SMALLEST_SPREAD)
    return found.tolist()


def comparable(norms: Sequence[float]) -> list[float]:
    """Return the finite norms above 0. Fewer than ``FEWEST`` have no distances."""
    return [norm for norm in norms if math.isfinite(norm) and norm > 0]


def median(norms: Sequence[float]) -> float:
    """Return the median of the finite norms above 0, NaN for none."""
    usual = comparable(norms)
    return float(np.median(usual)) if usual else math.nan
