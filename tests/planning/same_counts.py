"""Comparison of what a simulation counts now with what a file has of it.

A plan reads three digits. One small operator more or less in a step changes bytes and kernels in the sixth, and would
otherwise cost hours of simulations again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

OF_BYTES = {"rel": 2e-3, "abs": 4096}
"""Also a few blocks of the allocator."""
OF_OPERATORS = {"rel": 1e-2, "abs": 2}
"""Numbers of kernels and events, which are smaller."""


def assert_same_counts(found: Any, known: Any, place: str = "") -> None:
    """Compare values at any depth: numbers by the tolerances, all else exactly."""
    if isinstance(known, Mapping):
        assert found.keys() == known.keys(), place
        for name, value in known.items():
            assert_same_counts(found[name], value, f"{place}.{name}")
    elif isinstance(known, Sequence) and not isinstance(known, str):
        assert len(found) == len(known), place
        for number, (one, other) in enumerate(zip(found, known, strict=True)):
            assert_same_counts(one, other, f"{place}[{number}]")
    elif isinstance(known, (int, float)) and not isinstance(known, bool):
        tolerances = OF_BYTES if known > 1e6 else OF_OPERATORS
        assert found == pytest.approx(known, **tolerances), place
    else:
        assert found == known, place
