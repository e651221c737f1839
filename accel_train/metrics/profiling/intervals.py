"""Sets of points in time, as sorted, disjoint intervals."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""Start and end, in microseconds."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union, sorted and without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the points in both. Both are merged, and so is the result."""
    common: list[Interval] = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        # The one that ends first cannot meet anything later.
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the points of ``first`` outside ``second``. Both are merged, and so is the result."""
    left: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        # One of `second` may reach into the next of `first`, so j itself stays.
        k = j
        while k < len(second) and second[k][0] < end:
            if start < second[k][0]:
                left.append((start, second[k][0]))
            start = max(start, second[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of merged intervals."""
    return sum(end - start for start, end in intervals)
