"""docs/plans.md has what the planner chooses."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from accel_train.linting.facts import GIB, Device, Facts, Host, Layout
from accel_train.linting.processes import offload_without_need, sharding_without_need
from accel_train.options.tree import flatten
from accel_train.planning.candidates import Candidate
from accel_train.planning.chains import UNDERSTATED, fastest_of, fitting_probes
from tests.linting.cases import OPTIONS
from tests.planning.plans_page import DEVICES, PAGE, TABLES, Counts, Table, installed, page, planned
from tests.planning.same_counts import assert_same_counts

OUTDATED = "run: python -m tests.planning.plans_page"
NAMES = [table.name for table in TABLES]
CLEARLY_FASTER = {("lora_tune_stable_diffusion_xl", 2, 16)}
"""The states fit easily, but the activations of only half as many samples beside them. The linter counts none."""
each_table = pytest.mark.parametrize("table", TABLES, ids=NAMES)


def test_the_page_is_that_of_the_counts() -> None:
    assert PAGE.read_text() == page(), OUTDATED


@each_table
def test_more_memory_is_never_slower_on_the_same_device(table: Table) -> None:
    counts = Counts(table)
    for gpus, goal in itertools.product(table.gpus, table.goals):
        if goal == "memory":
            continue
        plans = [planned(counts, gpus, gib, goal) for gib in table.gib if DEVICES[gib] == "rtx-4090"]
        fastest = [fastest_of(plan.chains, plan.budget) for plan in plans if plan is not None]
        seconds = [probe.time.total for probe in fastest if probe is not None]
        assert seconds == sorted(seconds, reverse=True)
        # Where the states fit whole, the plan may be one that is slower by what the model leaves out.
        for plan, least in zip([plan for plan in plans if plan is not None], seconds, strict=True):
            assert plan.chosen.time.total <= UNDERSTATED * least


@each_table
def test_no_launch_file_shards_or_offloads_without_need(table: Table) -> None:
    """By the linter's own rules, at a start of the plan. With ``balanced`` and ``memory``, memory is what is spared."""
    counts = Counts(table)
    options = OPTIONS | flatten(dict(table.options()))
    for gpus, gib in itertools.product(table.gpus, table.gib):
        plan = planned(counts, gpus, gib, "speed")
        if plan is None:
            continue
        chosen = plan.chosen
        trained = chosen.counted["trained"]
        weights = chosen.counted["held"]["parameters"] * (gpus if chosen.candidate.strategy == "fsdp2" else 1)
        facts = Facts(
            {**options, "micro_batch_size": chosen.candidate.micro_batch_size},
            Layout(chosen.candidate.strategy, gpus, device="cuda"),
            Host(devices=(Device("", gib * GIB, (9, 0)),) * gpus),
            parameters=trained,
            frozen_bytes=max(0, weights - 4 * trained),
        )
        assert offload_without_need(facts) is None
        if (table.name, gpus, gib) in CLEARLY_FASTER:
            whole = [probe for probe in fitting_probes(plan.chains, plan.budget) if probe.candidate.strategy == "ddp"]
            assert min(probe.time.total for probe in whole) >= UNDERSTATED * chosen.time.total
        else:
            assert sharding_without_need(facts) is None, (gpus, gib, str(chosen.candidate))


@each_table
def test_a_goal_is_kept(table: Table) -> None:
    counts = Counts(table)
    for gpus, gib in itertools.product(table.gpus, table.gib):
        plans = {goal: planned(counts, gpus, gib, goal) for goal in table.goals}
        found = {goal: plan.chosen for goal, plan in plans.items() if plan is not None}
        for probe in found.values():
            assert found["speed"].time.total <= UNDERSTATED * probe.time.total
            assert "memory" not in found or found["memory"].tensors <= probe.tensors
        plan = plans.get("balanced")
        if plan is not None:
            assert plan.chosen.needed_gib(plan.budget) <= 0.8 * 0.95 * gib


def repeated() -> list[tuple[Table, int, Candidate]]:
    """The fastest plans of each table, each once."""
    found: list[tuple[Table, int, Candidate]] = []
    for table in TABLES:
        counts = Counts(table)
        for gpus, gib in itertools.product(table.gpus, table.gib):
            plan = planned(counts, gpus, gib, "speed")
            if plan is not None and (table, gpus, plan.chosen.candidate) not in found:
                found.append((table, gpus, plan.chosen.candidate))
    return found


def short(value: Table | int | Candidate) -> str:
    """Name a parameter, the same in every process."""
    return value.name if isinstance(value, Table) else str(value)


# Slow: half a minute for each simulation.
@pytest.mark.slow
@pytest.mark.parametrize(("table", "gpus", "candidate"), repeated(), ids=short)
def test_a_planned_simulation_counts_the_same_again(
    table: Table, gpus: int, candidate: Candidate, tmp_path: Path
) -> None:
    known = Counts(table)
    if known.versions != installed():
        pytest.skip(f"{known.table.counts.name} is of other versions; {OUTDATED} --simulate")
    assert_same_counts(Counts(table, tmp_path).simulated(gpus, candidate), known.of(gpus, candidate))
