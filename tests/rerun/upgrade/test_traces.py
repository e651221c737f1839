"""The first difference of two traces: by output, arguments, inputs, or other operators with another result."""

from __future__ import annotations

import itertools
from typing import Any

from accel_train.rerun.upgrade import traces
from accel_train.rerun.upgrade.traces import Difference, Recorded


def record(name: str, inputs: list[int], outputs: list[int], **arguments: str) -> dict[str, Any]:
    def values(hashes: list[int]) -> list[dict[str, Any]]:
        return [{"tensor": "float32[2]", "hash": one} for one in hashes]

    return {"operator": name, "arguments": arguments, "inputs": values(inputs), "outputs": values(outputs)}


def chain(names: str, first: int = 0) -> list[dict[str, Any]]:
    """Operators that each read the output of the one before; an output is a function of its name and its input."""
    found: list[dict[str, Any]] = []
    value = first
    for name in names:
        result = hash((name, value))
        found.append(record(name, [value], [result]))
        value = result
    return found


def between(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> Difference | None:
    return traces.first_difference(Recorded(here), Recorded(there))


def test_equal_traces_have_no_difference() -> None:
    assert between(chain("abcdef"), chain("abcdef")) is None


def test_the_operator_with_another_output_is_named_and_not_those_behind_it() -> None:
    there = chain("ab")
    there.append(record("c", [there[1]["outputs"][0]["hash"]], [77]))
    there += chain("def", 77)
    assert between(chain("abcdef"), there) == Difference("output", (2, 3), (2, 3))


def test_another_input_or_argument_is_told_apart_from_another_output() -> None:
    here, there = chain("abc"), chain("abc")
    there[1] = record("b", [5], [6])
    assert between(here, there) == Difference("inputs", (1, 2), (1, 2))
    there = chain("abc")
    there[1] = there[1] | {"arguments": {"eps": "1e-06"}}
    there[1]["outputs"] = [{"tensor": "float32[2]", "hash": 3}]
    assert between(here, there) == Difference("arguments", (1, 2), (1, 2))


def test_other_operators_with_the_same_result_are_no_difference_and_those_with_another_are() -> None:
    here = chain("abcdefgh")
    middle = here[3]["outputs"][0]["hash"]
    # c and d are one operator there.
    fused = [record("CD", [here[1]["outputs"][0]["hash"]], [middle])]
    assert between(here, [*here[:2], *fused, *here[4:]]) is None
    rounded = [record("CD", [here[1]["outputs"][0]["hash"]], [99])]
    found = between(here, [*here[:2], *rounded, *chain("efgh", 99)])
    assert found == Difference("operators", (2, 4), (2, 3))
    # The fused one is called there only, and what is behind it is the same, at the end too.
    for place in range(2, len(here)):
        assert between(here, [*here[:place], *fused, *here[place:]]) is None


def test_the_last_operators_are_compared_behind_other_ones() -> None:
    here = chain("abcdefgh")
    there = [*here[:6], record("x", [0], [0]), *chain("gh", here[5]["outputs"][0]["hash"])]
    there[-1]["outputs"][0]["hash"] = 4
    assert between(here, there) == Difference("output", (7, 8), (8, 9))
    # They never meet again.
    assert between(here, [*here[:5], *chain("xyz")]) == Difference("operators", (5, 8), (5, 8))


def test_another_shape_is_another_operator() -> None:
    here, there = chain("abcdef"), chain("abcdef")
    there[2]["inputs"][0]["tensor"] = "float32[3]"
    there[2]["outputs"][0]["hash"] = 1
    there[3]["inputs"][0]["hash"] = 1
    assert between(here, there) == Difference("operators", (2, 3), (2, 3))


def test_an_operator_at_the_end_of_one_side_is_a_difference() -> None:
    assert between(chain("abcdef"), chain("abcd")) == Difference("operators", (4, 6), (4, 4))
    assert between(chain("abcd"), chain("abcdz")) == Difference("operators", (4, 4), (4, 5))


def test_values_that_one_environment_does_not_repeat_are_passed_over() -> None:
    here, there = chain("abcdef"), chain("abcdef")
    # An output of uninitialised memory, which nothing reads, and a difference behind it.
    for number, trace in enumerate((here, there)):
        trace[1]["outputs"].append({"tensor": "float32[0]", "hash": number})
    there[4]["outputs"][0]["hash"] = there[5]["inputs"][0]["hash"] = 8
    assert between(here, there) == Difference("output", (1, 2), (1, 2))
    again = chain("abcdef")
    again[1]["outputs"].append({"tensor": "float32[0]", "hash": 3})
    unstable = traces.unstable_values(here, again)
    assert unstable == {("outputs", 1, 1)}
    found = traces.first_difference(Recorded(here, unstable), Recorded(there))
    assert found == Difference("output", (4, 5), (4, 5))


def test_nothing_is_blamed_if_an_environment_does_not_repeat_itself() -> None:
    here, again, there = chain("abcdef"), chain("ab") + chain("cdef", 5), chain("ab") + chain("cdef", 6)
    for trace in (again, there):
        trace[2]["inputs"] = here[2]["inputs"]
    unstable = traces.unstable_values(here, again)
    assert traces.first_difference(Recorded(here, unstable), Recorded(there)) is None


def test_a_long_trace_with_many_equal_names_is_compared_quickly() -> None:
    names = "".join(itertools.islice(itertools.cycle("abc"), 30_000))
    here = chain(names)
    inserted = record("x", [0], [0])
    assert between(here, [*here[:20_000], inserted, *here[20_000:]]) is None
