"""Find the first operator whose result differs in two recordings of one step.

Operators are compared in their order. Where the environments call different ones, as after a kernel was fused, both
sides are searched for the place from which they call the same ones again. The operators in between are blamed only if
their result differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

Record = Mapping[str, Any]
"""One operator as recorded by ``operators.Recorder``."""
Trace = Sequence[Record]
Values = Literal["inputs", "outputs"]
Unstable = frozenset[tuple[Values, int, int]]
"""Values that differ between two recordings of one environment: the operator's position and the value's number."""
Kind = Literal["output", "arguments", "inputs", "operators"]
Span = tuple[int, int]
"""Range of operators of one trace, the end excluded."""

HORIZON = 256
"""Operators searched for the place from which both sides call the same ones again."""
ENOUGH = 3
"""Equal operators in a row for such a place."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two traces."""

    kind: Kind
    """``output``: equal inputs give another output. ``arguments``: called with other numbers. ``inputs``: an input
    differs that no recorded operator has computed. ``operators``: other operators are called, with another result."""
    here: Span
    """One operator for all kinds but ``operators``, which may have none or several."""
    there: Span


@dataclass(frozen=True)
class Recorded:
    """A trace, and its values that cannot be compared."""

    trace: Trace
    unstable: Unstable = frozenset()


def first_difference(here: Recorded, there: Recorded) -> Difference | None:
    """Return the first difference, or None. Values that are unstable on either side are passed over."""
    a, b = here.trace, there.trace
    spans: list[tuple[Span, Span]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if _call(a[i]) != _call(b[j]):
            i2, j2 = _meet_again(a, i, b, j)
            if (i2, j2) == (len(a), len(b)):
                # Nothing after it tells whether the result is the same.
                break
            spans.append(((i, i2), (j, j2)))
            i, j = i2, j2
            continue
        at = ((i, i + 1), (j, j + 1))
        number = _first_unequal("inputs", here, i, there, j)
        if number is not None:
            span = _origin(number, (here, i), (there, j), spans)
            return Difference("inputs", *at) if span is None else Difference("operators", *span)
        if a[i]["arguments"] != b[j]["arguments"]:
            return Difference("arguments", *at)
        if _first_unequal("outputs", here, i, there, j) is not None:
            return Difference("output", *at)
        i, j = i + 1, j + 1
    if i < len(a) or j < len(b):
        return Difference("operators", (i, len(a)), (j, len(b)))
    return None


def unstable_values(first: Trace, second: Trace) -> Unstable:
    """Return the values that differ in two recordings of one environment."""
    unstable: set[tuple[Values, int, int]] = set()
    sides: tuple[Values, Values] = ("inputs", "outputs")
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        for side in sides:
            for number, (x, y) in enumerate(_hashes(side, a, b)):
                if x != y:
                    unstable.add((side, i, number))
    return frozenset(unstable)


def _call(record: Record) -> str:
    """Identify an operator with the types and shapes of its inputs."""
    shapes = [value["tensor"] for value in record["inputs"]]
    return f"{record['operator']} {shapes}"


def _hashes(side: Values, a: Record, b: Record) -> Iterator[tuple[int | None, int | None]]:
    for x, y in zip(a[side], b[side], strict=False):
        yield x["hash"], y["hash"]


def _first_unequal(side: Values, here: Recorded, i: int, there: Recorded, j: int) -> int | None:
    """Return the number of the first value that differs in any bit, or None."""
    for number, (x, y) in enumerate(_hashes(side, here.trace[i], there.trace[j])):
        is_unstable = (side, i, number) in here.unstable or (side, j, number) in there.unstable
        if x != y and not is_unstable:
            return number
    return None


def _origin(
    number: int, here: tuple[Recorded, int], there: tuple[Recorded, int], spans: Sequence[tuple[Span, Span]]
) -> tuple[Span, Span] | None:
    """Return the span of different operators that an input comes from, or None if it cannot come from any."""
    ours = _producer(*here, number)
    theirs = _producer(*there, number)
    for span in reversed(spans):
        # A value without a producer has passed a view. All equal operators before had equal outputs.
        if ours is None or theirs is None or _within(ours, span[0]) or _within(theirs, span[1]):
            return span
    return None


def _producer(side: Recorded, position: int, number: int) -> int | None:
    """Return the last operator before ``position`` that computed its input, or None."""
    wanted = side.trace[position]["inputs"][number]["hash"]
    for before in reversed(range(position)):
        if any(value["hash"] == wanted for value in side.trace[before]["outputs"]):
            return before
    return None


def _within(position: int, span: Span) -> bool:
    return span[0] <= position < span[1]


def _meet_again(a: Trace, i: int, b: Trace, j: int) -> tuple[int, int]:
    """Return the positions from which both sides call the same operators again, or their ends."""
    ours = [_call(record) for record in a[i : i + HORIZON]]
    theirs = [_call(record) for record in b[j : j + HORIZON]]
    for block in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        is_end = i + block.a + block.size == len(a) and j + block.b + block.size == len(b)
        if block.size >= ENOUGH or is_end:
            return i + block.a, j + block.b
    return len(a), len(b)
