"""The collector runs where it is told to, and is put back as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from accel_train.runtime import step_overhead


class Knot:
    """Refers to itself: reference counts alone never free it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations of the collections that ran."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def allocate_much() -> None:
    kept = [[] for _ in range(200_000)]
    assert len(kept) == 200_000


def is_looked_at(thing: object) -> bool:
    """Whether a collection looks at it: what is frozen is in no generation."""
    return any(candidate is thing for candidate in gc.get_objects())


def test_nothing_is_collected_but_when_told(collections: list[int]) -> None:
    allocate_much()
    assert collections, "this would start collections"
    with step_overhead.garbage_frozen():
        collections.clear()
        knot = weakref.ref(Knot())
        allocate_much()
        assert collections == []
        assert knot() is not None
        assert step_overhead.collect_garbage() >= 1
        assert collections == [2]
        assert knot() is None
    allocate_much()
    assert len(collections) > 1


def test_a_collection_leaves_out_what_was_there_before() -> None:
    gc.collect()
    before = len(gc.get_objects())
    with step_overhead.garbage_frozen():
        assert gc.get_freeze_count() > 0.9 * before
        assert sum(len(gc.get_objects(generation=g)) for g in range(3)) < 0.1 * before
    assert gc.get_freeze_count() == 0


def test_objects_without_cycles_are_freed_at_once() -> None:
    with step_overhead.garbage_frozen():
        freed = weakref.ref(set())
        assert freed() is None


def test_an_error_puts_the_collector_back() -> None:
    with pytest.raises(RuntimeError), step_overhead.garbage_frozen():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_body_within_a_body_and_a_disabled_collector_change_nothing() -> None:
    with step_overhead.garbage_frozen():
        later = Knot()
        with step_overhead.garbage_frozen():
            assert is_looked_at(later), "frozen by the inner body"
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0, "thawed by the inner body"
    gc.disable()
    with step_overhead.garbage_frozen():
        assert gc.get_freeze_count() == 0
    assert not gc.isenabled()


def test_collect_leaves_a_collector_alone_that_runs_by_itself(collections: list[int]) -> None:
    assert step_overhead.collect_garbage() == 0
    assert collections == []
