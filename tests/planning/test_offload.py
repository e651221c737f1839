"""Plans with states in host memory: chosen where they win or nothing else fits, within the memory of the host."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from accel_train.config import UsageError
from accel_train.cost_model.devices import rated
from accel_train.cost_model.times import StepTime
from accel_train.planning import report
from accel_train.planning.candidates import OFFLOADS, Candidate, Space, space_of
from accel_train.planning.chains import Chain, best
from accel_train.planning.command import budget_of
from accel_train.planning.flags import Goal, Options
from accel_train.planning.memory import GIB, HOST_RULES, MARGIN_SHARE, Budget
from accel_train.planning.plan import Plan, make_plan
from accel_train.planning.probe import Probe, least_offloaded
from accel_train.planning.search import search
from accel_train.speed.memory.fitting import host_bytes
from tests.planning.made_up import ON_HOST, made_up, space
from tests.planning.test_choices import config, flags

PLENTY = 1000.0


def searched(given: Space, budget: Budget, goal: Goal = "speed") -> tuple[list[Chain], list[Candidate]]:
    simulated: list[Candidate] = []

    def measure(candidate: Candidate) -> Probe:
        simulated.append(candidate)
        return made_up(candidate, given.micro_batches(candidate))

    return search(given, goal, budget, measure), simulated


def planned(limit: float, host: float = PLENTY, gpus: int = 1, goal: Goal = "speed") -> Plan:
    given = space(gpus, 64, offloads=True)
    budget = Budget(limit, 0.0, gpus, host_gib=host)
    return make_plan("mmdit", goal, given, budget, searched(given, budget, goal)[0], config())


@pytest.mark.parametrize("goal", ["speed", "memory"])
@pytest.mark.parametrize("host", [PLENTY, 14.0, 9.0])
@pytest.mark.parametrize("limit", [1.0, 2.5, 4.0, 7.0, 12.0, 20.0, 80.0])
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_best_that_fits_gpu_and_host_is_found(gpus: int, limit: float, host: float, goal: Goal) -> None:
    given = space(gpus, 32, offloads=True)
    budget = Budget(limit, 0.0, gpus, host_gib=host)
    every = [Candidate(*names) for names in itertools.product(given.strategies, given.modes, given.sizes)]
    simple = Chain("", "", tuple(made_up(one, given.micro_batches(one)) for one in every))
    chains, simulated = searched(given, budget, goal)
    found = best(chains, goal, budget)
    expected = best([simple], goal, budget)
    if goal == "memory":
        assert (found and found.tensors) == (expected and expected.tensors)
    else:
        assert (found and found.time.total) == (expected and expected.time.total)
    assert len(set(simulated)) == len(simulated)


def test_an_offload_is_planned_where_nothing_else_fits() -> None:
    found = planned(4.0)
    assert found.chosen.candidate.strategy == "zero2_offload"
    assert "single: weights, gradients, optimizer and EMA alone need" in found.reasons()["launch file"]


def test_an_offload_is_planned_where_it_is_the_fastest() -> None:
    """One GPU holds 64 samples without weights and optimizer, and one with them."""
    found = planned(11.6)
    assert found.chosen.candidate.strategy == "zero2_offload"
    assert any(probe.candidate.strategy == "single" for chain in found.chains for probe in chain.probes)


def test_what_fits_without_an_offload_costs_one_simulation_of_each() -> None:
    given = space(1, 64, offloads=True)
    chains, simulated = searched(given, Budget(100.0, 0.0, 1))
    found = best(chains, "speed", Budget(100.0, 0.0, 1))
    assert found is not None
    assert found.candidate == Candidate("single", "none", 64)
    assert [one.strategy for one in simulated] == ["single", *OFFLOADS]


def with_bound(given: Space, budget: Budget, goal: Goal, seconds: float) -> tuple[list[Chain], list[Candidate]]:
    """The search where every step is known to take so long at least with an offload."""
    simulated: list[Candidate] = []

    def measure(candidate: Candidate) -> Probe:
        simulated.append(candidate)
        return replace(made_up(candidate, given.micro_batches(candidate)), least_offloaded=seconds)

    return search(given, goal, budget, measure), simulated


@pytest.mark.parametrize("limit", [4.0, 7.0, 11.6, 12.0, 20.0, 40.0, 80.0])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_bound_spares_simulations_and_changes_no_plan(gpus: int, limit: float) -> None:
    given = space(gpus, 64, offloads=True)
    budget = Budget(limit, 0.0, gpus, host_gib=PLENTY)
    every = [Candidate(*names) for names in itertools.product(OFFLOADS, given.modes, given.sizes)]
    fastest = min(made_up(one, given.micro_batches(one)).time.total for one in every)
    expected = best(searched(given, budget)[0], "speed", budget)
    found = best(with_bound(given, budget, "speed", fastest)[0], "speed", budget)
    assert found == (expected and replace(expected, least_offloaded=fastest))


def test_an_offload_that_cannot_be_the_fastest_is_not_simulated() -> None:
    given = space(1, 64, offloads=True)
    budget = Budget(100.0, 0.0, 1)
    fastest = made_up(Candidate("single", "none", 64), 1).time.total
    chains, simulated = with_bound(given, budget, "speed", 1.5 * fastest)
    assert simulated == [Candidate("single", "none", 64)]
    left_out = {chain.left_out for chain in chains if chain.strategy in OFFLOADS}
    (reason,) = left_out
    assert reason is not None
    assert reason.startswith(
        f"takes at least 1.50 times as long as {simulated[0]}: counting products, attention, and states"
    )
    plan = make_plan("mmdit", "speed", given, budget, chains, config())
    assert plan.reasons()["launch file"] == f"zero2_offload and zero3_offload: {reason}"
    assert reason in report.describe(plan, None, explain=True)
    # It may be faster, or it is the memory that counts, or nothing else fits.
    cases: list[tuple[Goal, float, float]] = [("speed", 0.9, 100.0), ("memory", 1.5, 100.0), ("speed", 1.5, 4.0)]
    for goal, seconds, limit in cases:
        _, simulated = with_bound(given, replace(budget, vram_gib=limit), goal, seconds * fastest)
        assert OFFLOADS[0] in {one.strategy for one in simulated}


@pytest.mark.parametrize(("strategy", "state"), [("single", 8 * 10**9), ("ddp", 8 * 10**9), ("fsdp2", 4 * 10**9)])
def test_the_bound_by_hand(strategy: str, state: int) -> None:
    """A billion values with AdamW and no EMA: 28 bytes on the host and 6 copied of each, over the processes."""
    processes = 1 if strategy == "single" else 2
    rates = rated("h100-sxm", "bf16", processes).rates
    counted = {"held": {"optimizer state": state}, "trained": 10**9, "processes": processes, "strategy": strategy}
    seconds = least_offloaded(counted, StepTime(3.0, 2.0, 1.0, 100.0, 0.0, 0.0), rates)
    values = 10**9 / processes
    assert seconds == pytest.approx(3.0 + 2.0 + 28 * values / rates.on_host + 6 * values / rates.copied)


@pytest.mark.parametrize("gpus", [1, 4])
def test_host_memory_is_of_the_machine_and_shared(gpus: int) -> None:
    budget = Budget(80.0, 0.0, gpus, host_gib=PLENTY)
    probe = made_up(Candidate("zero2_offload", "none", 64), 1)
    each = ON_HOST["zero2_offload"]
    fixed, share = (sum(getattr(rule, name) for rule in HOST_RULES) for name in ("gib", "share"))
    needed = probe.needed_host_gib(budget)
    assert needed == pytest.approx(gpus * (each * (1 + share) + fixed))
    enough = needed / (1 - MARGIN_SHARE)
    assert probe.fits(Budget(80.0, 0.0, gpus, host_gib=enough + 0.01))
    assert not probe.fits(Budget(80.0, 0.0, gpus, host_gib=enough - 0.01))
    plain = made_up(Candidate("single", "none", 1), 1)
    assert plain.needed_host_gib(budget) == 0
    assert plain.fits(Budget(80.0, 0.0, gpus, host_gib=0.1))


def test_too_little_host_memory_says_how_much_would_do() -> None:
    with pytest.raises(
        UsageError, match=r"a machine with (\d+) GiB of memory instead of 8, for zero2_offload"
    ) as error:
        planned(4.0, host=8.0)
    text = str(error.value)
    assert "(single, activation_checkpointing.mode full" in text, "the smallest on the GPU that the host allows"
    enough = float(text.split("a machine with ")[1].split(" ")[0])
    assert planned(4.0, host=enough).chosen.candidate.strategy == "zero2_offload"
    with pytest.raises(UsageError):
        planned(4.0, host=enough - 1.5)


def test_an_offload_that_only_the_host_rules_out_is_named_with_the_memory_for_it() -> None:
    with pytest.raises(UsageError) as error:
        planned(4.0, host=4.0)
    text = str(error.value)
    assert text.count("of host memory") == 1, "one sentence for both"
    assert ". zero2_offload.yaml and zero3_offload.yaml: needs at least 4.5 GiB of host memory, 0.70 too much" in text
    assert "a machine with at least 5 GiB of memory instead of 4, for zero2_offload.yaml or zero3_offload.yaml" in text
    with pytest.raises(UsageError) as error:
        planned(0.5, host=4.0)
    assert "a machine with" not in str(error.value), "no host memory helps a GPU without room for a process"


def test_without_deepspeed_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.planning.candidates.find_spec", lambda name: object())
    assert space_of(config(), {}, 1).strategies == ("single", *OFFLOADS)
    assert space_of(config(), {}, 2).strategies == ("fsdp2", "ddp", *OFFLOADS)
    assert not any("ZeRO" in name for name in space_of(config(), {}, 1).not_considered())
    monkeypatch.setattr("accel_train.planning.candidates.find_spec", lambda name: None)
    given = space_of(config(), {}, 2)
    assert given.strategies == ("fsdp2", "ddp")
    (reason,) = (reason for name, reason in given.not_considered().items() if "ZeRO" in name)
    assert reason == "DeepSpeed is not installed: pip install 'accel-train[deepspeed]'"
    chains, _ = searched(given, Budget(2.0, 0.0, 2))
    with pytest.raises(UsageError, match=r"pip install 'accel-train\[deepspeed\]', for zero2_offload"):
        make_plan("mmdit", "speed", given, Budget(2.0, 0.0, 2), chains, config())


def lines_of(text: str, *beginnings: str) -> Sequence[str]:
    return [next(line for line in text.splitlines() if line.strip().startswith(start)) for start in beginnings]


def test_the_output_has_the_host_with_the_origin_of_each_figure() -> None:
    found = planned(4.0, host=64.0)
    named = rated("rtx-4090", "bf16", 1)
    text = report.describe(found, named, explain=True)
    host = text.partition("host memory of the machine, 1 process(es)\n")[2]
    state, processes, blocks, needed, limit = host.splitlines()[:5]
    assert state.split()[:2] == ["optimizer", "state"]
    assert state.endswith("exact")
    assert "a rule, not measured" in processes
    assert "a rule, not measured" in blocks
    assert needed.endswith("modelled")
    assert "60.80 GiB" in limit
    copies, optimizer = lines_of(text, "copies", "optimizer on the host")
    assert copies.endswith("at 80% of 32 GB/s of PCIe 4 x16, a rule, not measured")
    assert optimizer.endswith("at 60% of 89.6 GB/s of 2 channels of DDR5-5600, a rule, not measured")
    assert "copies and the optimizer on the host" in text

    listed = report.as_json(found, named)
    chosen = listed["plan"]
    json.dumps(listed)
    assert (chosen["launch_file"], listed["host_gib"]) == ("zero2_offload.yaml", 64.0)
    assert chosen["needed_host_gib"] == found.chosen.needed_host_gib(found.budget)
    assert (chosen["origins"]["host_bytes"], chosen["origins"]["needed_host_gib"]) == ("exact", "modelled")
    assert chosen["seconds"]["on_host"] > 0


def test_without_an_offload_the_host_is_not_mentioned() -> None:
    text = report.describe(planned(100.0), rated("rtx-4090", "bf16", 1), explain=False)
    assert "host memory of the machine" not in text
    assert "optimizer on the host" not in text


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_host_without_memory_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"host_gib: .*give --host_gib 256"):
        flags("--gpus", "1", "--vram_gib", "8", "--host_gib", value)


def test_without_the_flag_it_is_the_memory_of_this_machine() -> None:
    assert budget_of(Options(1, 80.0, host_gib=512.0)).host_gib == 512.0
    assert budget_of(Options(1, 80.0)).host_gib == host_bytes() / GIB > 0


def test_a_limit_of_this_machine_is_named_as_one() -> None:
    probe = made_up(Candidate("zero2_offload", "none", 1), 1)
    here = Budget(80.0, 0.0, 1, host_gib=8.0, host_is_here=True)
    assert probe.needs(here).endswith(
        "12.0 GiB of host memory, 4.40 too much of 7.6 GiB, this machine's; give --host_gib for that of the target"
    )
    assert probe.needs(replace(here, host_is_here=False)).endswith("12.0 GiB of host memory, 4.40 too much")
    assert budget_of(Options(1, 80.0)).host_is_here
    assert not budget_of(Options(1, 80.0, host_gib=8.0)).host_is_here


def test_a_difference_that_rounds_to_nothing_is_in_mib() -> None:
    probe = made_up(Candidate("single", "none", 1), 1)
    needed = probe.needed_gib(Budget(80.0, 0.0, 1))
    assert probe.needs(Budget(needed - 3 / 1024, 0.0, 1)) == f"{needed:.2f} GiB, 3.0 MiB too much"
    assert probe.needs(Budget(needed - 1.5, 0.0, 1)) == f"{needed:.2f} GiB, 1.50 too much"


@pytest.mark.parametrize("goal", ["speed", "memory"])
def test_an_offload_that_cannot_fit_is_not_simulated(goal: Goal) -> None:
    """By the rules and what is known of the states: 0.56 GiB and weights in two bytes on the GPU, 4 GiB for the process
    and a third more than the fp32 weights of 100 million values on the host."""
    given = space(1, 64, offloads=True)
    weights = 2 * 10**8 * 1.05 / GIB
    host = 4 + 4 * 10**8 * 4 / 3 / GIB
    for limit, host_gib, expected in (
        (0.5625 + weights + 0.01, host + 0.01, set(OFFLOADS)),
        (0.5625 + weights - 0.01, host + 0.01, {"zero3_offload"}),
        (0.55, host + 0.01, set[str]()),
        (0.5625 + weights + 0.01, host - 0.01, set[str]()),
    ):
        budget = Budget(limit, 0.0, 1, host_gib=host_gib / 0.95)
        chains, simulated = searched(given, budget, goal)
        assert {one.strategy for one in simulated} - {"single"} == expected
    (reason,) = {chain.left_out for chain in chains if chain.strategy in OFFLOADS}
    assert reason == f"needs at least {host:.1f} GiB of host memory, 10.2 MiB too much"
    with pytest.raises(UsageError, match=r"\. zero2_offload.yaml and zero3_offload.yaml: needs at least"):
        make_plan("mmdit", goal, given, budget, chains, config())
