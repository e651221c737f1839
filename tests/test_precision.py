"""Differences beside a tolerance: a value that is not a number is never small."""

from __future__ import annotations

from math import inf, nan

import pytest

from accel_train.precision import largest, relative


@pytest.mark.parametrize(
    ("differences", "expected"),
    [([], 0.0), ([0.1, 0.3, 0.2], 0.3), ([nan, 0.1], inf), ([0.1, nan], inf), ([0.1, inf], inf)],
)
def test_the_largest_is_infinite_wherever_a_nan_stands(differences: list[float], expected: float) -> None:
    assert largest(differences) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        *((2.0, 1.5, 0.25), (-2.0, -1.5, 0.25), (0.0, -0.0, 0.0), (0.0, 1e-300, inf)),
        *((1.0, nan, inf), (nan, 1.0, inf), (nan, nan, 0.0)),
        *((1.0, inf, inf), (inf, 1.0, inf), (inf, inf, 0.0), (inf, -inf, inf)),
    ],
)
def test_a_relative_difference_is_never_nan(a: float, b: float, expected: float) -> None:
    assert relative(a, b) == expected
