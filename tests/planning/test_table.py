"""The table of plans in docs/planning.md is what the planner chooses."""

from __future__ import annotations

import pytest

from accel_train.planning.candidates import Candidate
from accel_train.planning.simulator import Simulator
from tests.planning import table
from tests.planning.table import (
    COUNTS,
    DEVICES,
    PAGE,
    PRESET,
    RECIPE,
    Counts,
    chosen,
    counted_gpus,
    installed,
    page,
    read,
)

VERSIONS, KNOWN = read()
COUNTED = Counts(KNOWN, simulates=False)
OUTDATED = "run: python -m tests.planning.table"
same_versions = pytest.mark.skipif(installed() != VERSIONS, reason=f"{COUNTS.name} is of other versions; {OUTDATED}")


def test_the_page_has_the_table_of_the_counts() -> None:
    text = PAGE.read_text()
    assert text == page(text, COUNTED, VERSIONS), OUTDATED


def test_more_memory_is_never_slower_on_the_same_device() -> None:
    for gpus in counted_gpus(KNOWN):
        plans = [chosen(COUNTED, gpus, gib)[0] for gib in DEVICES if DEVICES[gib] == "rtx-4090"]
        seconds = [plan.time.total for plan in plans if plan is not None]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds


def planned() -> list[tuple[int, Candidate]]:
    """Those of the table, each once."""
    found: list[tuple[int, Candidate]] = []
    for gpus in counted_gpus(KNOWN):
        for gib in DEVICES:
            plan, _ = chosen(COUNTED, gpus, gib)
            if plan is not None and (gpus, plan.candidate) not in found:
                found.append((gpus, plan.candidate))
    return found


# Slow: half a minute for each simulation.
@pytest.mark.slow
@same_versions
@pytest.mark.parametrize(("gpus", "candidate"), planned(), ids=str)
def test_a_planned_simulation_counts_the_same_again(gpus: int, candidate: Candidate) -> None:
    again = table.simulated(Simulator(RECIPE, [PRESET], gpus), candidate)
    assert again == KNOWN[f"{gpus} GPU(s), {candidate}"]
