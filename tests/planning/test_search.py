"""The search finds what simulating every candidate would find, with a part of the simulations."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from accel_train.config import UsageError
from accel_train.cost_model.times import StepTime
from accel_train.planning.candidates import Candidate, Space
from accel_train.planning.chains import UNDERSTATED, Chain, best, seconds_to_beat, smallest
from accel_train.planning.flags import Goal
from accel_train.planning.memory import GIB, Budget
from accel_train.planning.plan import make_plan
from accel_train.planning.probe import Probe
from accel_train.planning.search import Point, _towards_the_limit, search
from tests.planning.made_up import STATES, made_up, space
from tests.planning.test_choices import config

LIMITS = [5.0, 6.0, 7.0, 9.0, 10.0, 12.0, 14.0, 17.0, 20.0, 24.0, 31.0, 40.0, 80.0]


def every_candidate(given: Space) -> list[Probe]:
    found = []
    for strategy, mode, size in itertools.product(given.strategies, given.modes, given.sizes):
        candidate = Candidate(strategy, mode, size)
        found.append(made_up(candidate, given.micro_batches(candidate)))
    return found


@pytest.mark.parametrize("goal", ["speed", "balanced"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("gpus", "batch"), [(1, 32), (2, 96), (8, 64), (4, 4)])
def test_the_fastest_that_fits_is_found(gpus: int, batch: int, limit: float, goal: Goal) -> None:
    given = space(gpus, batch)
    budget = Budget(limit, 0.0, gpus)
    simulated: list[Candidate] = []

    def measure(candidate: Candidate) -> Probe:
        simulated.append(candidate)
        return made_up(candidate, given.micro_batches(candidate))

    chains = search(given, goal, budget, measure)
    expected = best([Chain("", "", tuple(every_candidate(given)))], goal, budget)
    found = best(chains, goal, budget)
    assert (found and found.time.total) == (expected and expected.time.total)
    assert len(set(simulated)) == len(simulated), "nothing is simulated twice"
    assert len(simulated) <= 5 * len(chains), "of each strategy and mode"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("gpus", "batch"), [(1, 32), (2, 96), (8, 64)])
def test_the_smallest_is_found(gpus: int, batch: int, limit: float) -> None:
    given = space(gpus, batch)
    budget = Budget(limit, 0.0, gpus)
    chains = search(given, "memory", budget, lambda candidate: made_up(candidate, given.micro_batches(candidate)))
    expected = min(probe.tensors for probe in every_candidate(given))
    nearest = smallest(chains)
    assert nearest is not None
    assert nearest.tensors == expected
    found = best(chains, "memory", budget)
    assert (found is not None) == nearest.fits(budget)


def test_the_next_larger_micro_batch_was_simulated_and_does_not_fit() -> None:
    given = space(1, 64)
    budget = Budget(18.0, 0.0, 1)
    chains = search(given, "speed", budget, lambda candidate: made_up(candidate, given.micro_batches(candidate)))
    for chain in chains:
        sizes = {probe.candidate.micro_batch_size: probe.fits(budget) for probe in chain.probes}
        fitting = [size for size, fits in sizes.items() if fits]
        # A chain that cannot be the fastest is left after one simulation.
        assert bool(fitting) == (chain.left_out is None), chain
        if fitting:
            larger = given.sizes[given.sizes.index(max(fitting)) + 1]
            assert sizes[larger] is False, chain


def test_few_sizes_are_simulated() -> None:
    """60 divisors: memory is a line, so that the search meets the limit after a few of them."""
    given = space(1, 5040)
    budget = Budget(300.0, 0.0, 1)
    chains = search(given, "speed", budget, lambda candidate: made_up(candidate, given.micro_batches(candidate)))
    assert len(given.sizes) == 60
    assert max(len(chain.probes) for chain in chains) <= 5


def test_what_fits_whole_is_simulated_once() -> None:
    given = space(2, 96)
    budget = Budget(300.0, 0.0, 2)
    chains = search(given, "speed", budget, lambda candidate: made_up(candidate, given.micro_batches(candidate)))
    assert [len(chain.probes) for chain in chains] == [1, 0, 0, 1, 0, 0]


def test_states_that_do_not_fit_end_the_search_of_a_strategy() -> None:
    given = space(8, 64)
    budget = Budget(5.0, 0.0, 8)
    chains = search(given, "speed", budget, lambda candidate: made_up(candidate, given.micro_batches(candidate)))
    ddp = [chain for chain in chains if chain.strategy == "ddp"]
    assert [len(chain.probes) for chain in ddp] == [1, 0, 1]
    assert ddp[1].left_out is not None
    assert "alone need 9.46 GiB" in ddp[1].left_out


def test_a_refused_mode_is_left_out_with_its_reason() -> None:
    given = space(1, 4)
    budget = Budget(80.0, 0.0, 1)

    def measure(candidate: Candidate) -> Probe:
        if candidate.mode == "none":
            raise UsageError("not here")
        return made_up(candidate, given.micro_batches(candidate))

    chains = search(given, "speed", budget, measure)
    assert chains[0].refused
    assert chains[0].left_out == "not here"
    found = best(chains, "speed", budget)
    assert found is not None
    assert found.candidate.mode == "selective"


@pytest.mark.parametrize("first_too_large", range(1, 101))
def test_a_long_range_without_effect_takes_few_simulations(first_too_large: int) -> None:
    """As of blocks away from the peak. A line through both ends would go on from each to the next."""
    asked: list[int] = []

    def simulate(value: int) -> Probe:
        asked.append(value)
        larger = max(0, value - first_too_large + 1)
        return replace(made_up(Candidate("single", "full", 1), 1), tensors=GIB * (1 + larger))

    budget = Budget(2.0, 0.0, 1)
    ends = Point(0, simulate(0)), Point(100, simulate(100))
    assert [end.probe.fits(budget) for end in ends] == [True, False]
    probes = _towards_the_limit(range(100), budget, simulate, ends)
    fitting = [value for value, probe in zip(asked[2:], probes, strict=True) if probe.fits(budget)]
    assert max(fitting, default=0) == first_too_large - 1
    assert first_too_large in asked, "that the next one does not fit is shown"
    assert len(set(asked)) == len(asked) <= 12


def test_of_the_same_time_the_fewest_micro_batches_are_planned() -> None:
    """They have the largest kernels. Of equal ones, those with the least memory."""
    given = space(1, 32)
    candidates = [Candidate("single", "none", size) for size in (4, 8, 16)]
    probes = [made_up(candidate, given.micro_batches(candidate)) for candidate in candidates]
    alike = [replace(probe, time=probes[0].time, tensors=GIB + probe.micro_batches) for probe in probes]
    assert [probe.micro_batches for probe in alike] == [8, 4, 2]
    smaller = replace(alike[2], tensors=GIB)
    found = best([Chain("single", "none", (*alike, smaller))], "speed", Budget(80.0, 0.0, 1))
    assert found == smaller


@pytest.mark.parametrize(("ratio", "strategy"), [(0.9 * UNDERSTATED, "ddp"), (1.1 * UNDERSTATED, "fsdp2")])
@pytest.mark.parametrize("activations", [1.0, 20.0])
def test_needless_sharding_has_to_be_faster_by_more_than_the_error_of_the_model(
    ratio: float, strategy: str, activations: float
) -> None:
    """Whether its whole share fits under DDP as well, or only a smaller micro-batch."""
    given = space(2, 96)
    budget = Budget(80.0, 0.0, 2)

    def measure(candidate: Candidate) -> Probe:
        found = made_up(candidate, given.micro_batches(candidate))
        gib = STATES[candidate.strategy] + activations * candidate.micro_batch_size / 48
        seconds = ratio if candidate.strategy == "ddp" else 1.0
        return replace(found, tensors=round(gib * GIB), time=StepTime(seconds, 0, 0, 0, 0, 0))

    chains = search(given, "speed", budget, measure)
    found = best(chains, "speed", budget)
    assert found is not None
    assert found.candidate.strategy == strategy
    plan = make_plan("mmdit", "speed", given, budget, chains, config())
    reason = plan.reasons()["launch file"]
    expected = f"ddp: takes {ratio:.2f} times as long"
    if strategy == "ddp":
        expected = (
            f"fsdp2: takes {1 / ratio:.2f} times as long, but the states take 8.00 of 80 GiB whole, so it has to be "
            f"{UNDERSTATED:g} times as fast in a model that does not count its hooks"
        )
    assert reason == expected


def test_what_does_not_fit_is_not_said_to_be_slower_alone() -> None:
    """DDP needs 4 GiB more than there are with the whole share, and is slower than FSDP2 with any size."""
    given = space(2, 96)
    budget = Budget(24.0, 0.0, 2)

    def measure(candidate: Candidate) -> Probe:
        found = made_up(candidate, given.micro_batches(candidate))
        gib = 20.0 if candidate.strategy == "ddp" else 10.0
        tensors = round((gib + 6 * candidate.micro_batch_size / 48) * GIB)
        return replace(found, tensors=tensors, time=StepTime(2.0 if gib == 20 else 1.0, 0, 0, 0, 0, 0))

    chains = search(given, "speed", budget, measure)
    reason = make_plan("mmdit", "speed", given, budget, chains, config()).reasons()["launch file"]
    needed = budget.needed_gib(26 * GIB)
    assert reason == (
        f"ddp: needs {needed:.2f} GiB, {needed - 24:.2f} too much, with micro_batch_size 48, and with a smaller one "
        "takes at best 2.00 times as long as fsdp2, activation_checkpointing.mode none, micro_batch_size 48"
    )


@pytest.mark.parametrize(
    ("vram", "mode", "factor"), [(40.0, "none", UNDERSTATED), (40.0, "full", 1.0), (9.0, "none", 1.0)]
)
def test_only_needless_sharding_has_to_be_faster(vram: float, mode: str, factor: float) -> None:
    """States of 8 GiB, beside 40 % of a GPU's memory. More recomputation to do without sharding is no gain."""
    sharded = made_up(Candidate("fsdp2", "none", 1), 1)
    other = made_up(Candidate("ddp", mode, 1), 1)
    budget = Budget(vram, 0.0, 2)
    assert seconds_to_beat(sharded, budget, other) == sharded.time.total * factor
    assert seconds_to_beat(sharded, budget, sharded) == sharded.time.total
    # Of an update of 10 GiB or more each device steps its own part, which the linter's rule leaves out as well.
    held = {"parameters": 4 * GIB, "optimizer state": 8 * GIB}
    large = replace(other, counted={**other.counted, "trained": GIB, "held": held})
    for micro_batches, expected in ((1, 1.0), (2, factor)):
        several = replace(sharded, micro_batches=micro_batches)
        assert seconds_to_beat(several, budget, large) == sharded.time.total * expected
    frozen = replace(large, counted={**large.counted, "trained": GIB // 4})
    assert seconds_to_beat(sharded, budget, frozen) == sharded.time.total * factor
    offloaded = replace(sharded, candidate=Candidate("zero3_offload", "none", 1))
    assert seconds_to_beat(offloaded, budget, large) == sharded.time.total * factor
    whole = made_up(Candidate("ddp", "none", 1), 1)
    assert seconds_to_beat(whole, budget, sharded) == whole.time.total
