"""The fewest checkpointed blocks with which the chosen micro-batch fits: as many as it takes, and no more."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.cost_model.devices import rated
from accel_train.planning import report
from accel_train.planning.candidates import BLOCKS, MICRO_BATCH, MODE, NOT_CONSIDERED, Candidate, Space, space_of
from accel_train.planning.flags import Goal
from accel_train.planning.memory import Budget
from accel_train.planning.plan import Plan, make_plan, without_needless_checkpointing
from accel_train.planning.probe import Probe
from accel_train.planning.search import search
from accel_train.planning.writing import PRESET, write
from accel_train.speed.options import ActivationCheckpointingConfig
from tests import zygote
from tests.distributed.launching import environment
from tests.planning import made_up
from tests.planning.made_up import space
from tests.planning.test_choices import config
from tests.planning.test_command import CHOSEN, plan, read
from tests.waiting import PATIENCE_SECONDS

LIMITS = [5.0, 6.0, 7.0, 9.0, 10.0, 12.0, 14.0, 17.0, 20.0, 24.0, 31.0, 40.0, 80.0]


class Measured:
    """Made-up candidates, each at most once."""

    def __init__(self, given: Space, change: Callable[[Probe], Probe] = lambda probe: probe) -> None:
        self._given = given
        self._change = change
        self.simulated: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Probe:
        assert candidate not in self.simulated, "nothing is simulated twice"
        self.simulated.append(candidate)
        return self.of(candidate)

    def of(self, candidate: Candidate) -> Probe:
        return self._change(made_up.made_up(candidate, self._given.micro_batches(candidate)))


def planned(given: Space, budget: Budget, goal: Goal, measure: Callable[[Candidate], Probe]) -> Plan:
    chains = search(given, goal, budget, measure)
    found = make_plan("mmdit", goal, given, budget, chains, config())
    return without_needless_checkpointing(found, measure)


@pytest.mark.parametrize("launched", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("goal", ["speed", "balanced"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("gpus", "batch", "offloads"), [(1, 32, False), (2, 96, True), (8, 64, False), (4, 4, False)])
def test_the_fastest_size_and_number_of_blocks_that_fit_are_found(
    monkeypatch: pytest.MonkeyPatch, gpus: int, batch: int, offloads: bool, limit: float, goal: Goal, launched: float
) -> None:
    monkeypatch.setattr(made_up, "LAUNCHED", launched)
    given = space(gpus, batch, offloads=offloads)
    budget = Budget(limit, 0.0, gpus)
    measure = Measured(given)
    try:
        found = planned(given, budget, goal, measure)
    except UsageError:
        return
    whole = found.whole.candidate
    every = [whole]
    if whole.mode != "none":
        every = candidates(whole.strategy, [size for size in given.sizes if size <= whole.micro_batch_size])
    fitting = [probe for probe in map(measure.of, every) if probe.fits(budget)]
    assert found.chosen.time.total == min(probe.time.total for probe in fitting)
    assert found.chosen.fits(budget)
    assert found.chosen.time.total <= found.whole.time.total


def candidates(strategy: str, sizes: Sequence[int]) -> list[Candidate]:
    """Every mode, on every number of blocks."""
    found: list[Candidate] = []
    for size in sizes:
        found.append(Candidate(strategy, "none", size))
        for blocks in (None, *range(1, made_up.BLOCKS)):
            found += [Candidate(strategy, mode, size, blocks) for mode in ("selective", "full")]
    return found


def test_a_smaller_micro_batch_that_recomputes_less_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its further kernels take less than the recomputation that it spares."""
    monkeypatch.setattr(made_up, "LAUNCHED", 0.01)
    given = dataclasses.replace(space(1, 64), modes=("full",), fixed=frozenset({MODE}))
    budget = Budget(15.5, 0.0, 1)
    measure = Measured(given)
    found = planned(given, budget, "speed", measure)
    assert found.whole.candidate == Candidate("single", "full", 32)
    size = 4
    assert found.chosen.candidate == Candidate("single", "full", size, 1)
    larger = [probe for probe in map(measure.of, candidates("single", [2 * size])) if probe.candidate.mode == "full"]
    beside = min((probe for probe in larger if probe.fits(budget)), key=lambda probe: probe.time.total)
    times = beside.time.total / found.chosen.time.total
    reason = f"{2 * size} fits with {beside.checkpointed} blocks of mode full, but takes {times:.2f} times as long"
    assert found.reasons()[MICRO_BATCH] == reason
    text = report.describe(found, rated("h100-sxm", "bf16", 1), explain=True)
    assert reason in text


def test_a_smaller_micro_batch_that_cannot_be_faster_costs_one_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up, "LAUNCHED", 1.0)
    given = dataclasses.replace(space(1, 64), modes=("full",), fixed=frozenset({MODE}))
    measure = Measured(given)
    found = planned(given, Budget(15.5, 0.0, 1), "speed", measure)
    assert found.chosen.candidate.micro_batch_size == found.whole.candidate.micro_batch_size == 32
    with_fewer_blocks = {one.micro_batch_size for one in measure.simulated if one.blocks is not None}
    assert with_fewer_blocks == {32}


@pytest.mark.parametrize("limit", [4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
def test_one_block_less_was_simulated_and_does_not_fit(limit: float) -> None:
    given = space(8, 64)
    budget = Budget(limit, 0.0, 8)
    measure = Measured(given)
    found = planned(given, budget, "speed", measure)
    chosen = found.chosen.candidate
    assert chosen.mode != "none"
    fewer = (chosen.blocks or made_up.BLOCKS) - 1
    beside = dataclasses.replace(chosen, blocks=fewer)
    if not fewer:
        beside = dataclasses.replace(chosen, mode="none", blocks=None)
    assert beside in measure.simulated
    assert beside in [probe.candidate for probe in found.exceeding()]
    # The lines between the two ends are straight.
    assert len([one for one in measure.simulated if one.blocks is not None]) <= 4
    reason = found.reasons()[BLOCKS]
    assert reason.startswith(f"the fewest that fit: with {fewer} it needs {measure.of(beside).needed_gib(budget):.2f}")


def test_what_fits_without_checkpointing_costs_nothing_more() -> None:
    given = space(1, 32)
    budget = Budget(80.0, 0.0, 1)
    measure = Measured(given)
    found = planned(given, budget, "speed", measure)
    assert found.chosen is found.whole
    assert found.chosen.candidate == Candidate("single", "none", 32)
    assert measure.simulated == [found.chosen.candidate]
    assert BLOCKS not in found.reasons()
    assert BLOCKS not in report.describe(found, None, explain=True)
    assert report.as_json(found, None)["plan"]["blocks"] is None


def test_curved_memory_is_followed_to_the_limit() -> None:
    """The last block frees nothing, as where the peak is its own recomputation."""
    given = dataclasses.replace(space(8, 64), modes=("none", "full"))

    def flat_at_the_end(probe: Probe) -> Probe:
        candidate = probe.candidate
        if candidate.mode == "full" and candidate.blocks is None:
            return dataclasses.replace(probe, tensors=measure.of(dataclasses.replace(candidate, blocks=5)).tensors)
        return probe

    measure = Measured(given, flat_at_the_end)
    whole = measure.of(Candidate("fsdp2", "full", 8))
    budget = Budget(Budget(1.0, 0.0, 8).needed_gib(whole.tensors) + 0.01, 0.0, 8)
    found = planned(given, budget, "speed", measure)
    assert found.chosen.candidate == Candidate("fsdp2", "full", 8, 5)
    assert Candidate("fsdp2", "full", 8, 4) in measure.simulated


def test_a_mode_that_is_given_has_at_least_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dataclasses.replace(space(1, 32), modes=("full",), fixed=frozenset({MODE}))
    found = planned(given, Budget(80.0, 0.0, 1), "speed", Measured(given))
    assert found.chosen.candidate == Candidate("single", "full", 32, 1)
    assert found.reasons()[BLOCKS] == f"at least one, which {MODE} full requires"
    # So that a smaller micro-batch is no alternative.
    monkeypatch.setattr(made_up, "LAUNCHED", 1.0)
    tight = planned(given, Budget(20.0, 0.0, 1), "speed", Measured(given))
    assert 1 < (tight.chosen.candidate.blocks or 0) < made_up.BLOCKS


@pytest.mark.parametrize("refused", ["none", "full"])
def test_a_refused_mode_is_not_tried_again(refused: str) -> None:
    given = space(8, 64)

    def refuse(probe: Probe) -> Probe:
        if probe.candidate.mode == refused:
            raise UsageError("not here")
        return probe

    found = planned(given, Budget(9.0, 0.0, 8), "speed", Measured(given, refuse))
    assert found.chosen.candidate.mode == "selective"
    assert found.chosen.candidate.blocks is not None
    assert {probe.candidate.mode for chain in found.chains for probe in chain.probes}.isdisjoint({refused})


def test_the_number_of_a_preset_is_kept_for_every_candidate() -> None:
    three = config(activation_checkpointing=ActivationCheckpointingConfig("full", blocks=3))
    given = space_of(three, {MODE: "command line", BLOCKS: "preset"}, 1)
    assert given.blocks == 3
    measure = Measured(given)
    found = planned(given, Budget(60.0, 0.0, 1), "speed", measure)
    assert {candidate.blocks for candidate in measure.simulated} == {3}
    assert found.chosen.candidate.flags()[-2:] == [f"--{BLOCKS}", "3"]
    assert found.reasons()[BLOCKS] == "as preset or flag says"
    assert found.reasons()[MICRO_BATCH].startswith("the largest that fits: ")


def test_inputs_in_host_memory_are_refused() -> None:
    offload = config(activation_checkpointing=ActivationCheckpointingConfig("full", offload=True))
    with pytest.raises(UsageError, match=r"offload: true: a plan is simulated, .*false is required\."):
        space_of(offload, {MODE: "command line"}, 1)


def test_the_least_memory_recomputes_what_it_needs_and_no_more() -> None:
    """Of the last three blocks none changes the peak."""
    given = space(1, 8)

    def flat_at_the_end(probe: Probe) -> Probe:
        blocks = probe.candidate.blocks
        if probe.candidate.mode == "full" and (blocks is None or blocks > 6):
            return measure.of(dataclasses.replace(probe.candidate, blocks=6))
        return probe

    def kept(probe: Probe) -> Probe:
        return dataclasses.replace(flat_at_the_end(probe), candidate=probe.candidate)

    measure = Measured(given, kept)
    found = planned(given, Budget(80.0, 0.0, 1), "memory", measure)
    assert found.chosen.tensors == found.whole.tensors
    assert found.chosen.candidate == dataclasses.replace(found.whole.candidate, blocks=6)
    assert found.reasons()[BLOCKS].startswith("the fewest with the least memory: with 5 it needs")


@pytest.mark.parametrize(("gpus", "batch"), [(1, 2), (1, 8), (1, 32), (2, 4), (4, 4), (8, 16), (8, 64)])
@pytest.mark.parametrize("modes", [made_up.MODES, made_up.MODES[1:], made_up.MODES[2:]])
def test_the_least_memory_is_found_for_any_share(gpus: int, batch: int, modes: tuple[str, ...]) -> None:
    """A whole share may need less than two micro-batches of half its size."""
    given = dataclasses.replace(space(gpus, batch), modes=modes)
    measure = Measured(given)
    found = planned(given, Budget(80.0, 0.0, gpus), "memory", measure)
    every = candidates(found.chosen.candidate.strategy, [given.sizes[0], given.sizes[-1]])
    allowed = [one for one in every if one.mode in modes]
    assert found.chosen.tensors == min(measure.of(one).tensors for one in allowed)


def test_the_size_keeps_its_reason_where_another_mode_is_faster_on_some_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Full on four of eight blocks recomputes less than selective on all."""
    given = dataclasses.replace(space(8, 128), modes=("selective", "full"))
    monkeypatch.setitem(made_up.RECOMPUTED, "selective", 2.0)
    monkeypatch.setitem(made_up.RECOMPUTED, "full", 2.45)
    found = planned(given, Budget(10.0, 0.0, 8), "speed", Measured(given))
    assert (found.whole.candidate.mode, found.chosen.candidate.mode) == ("selective", "full")
    assert found.chosen.candidate.blocks == 4
    assert found.reasons()[MICRO_BATCH].startswith("the largest that fits with selective: 16 needs")
    assert "selective: takes 1." in found.reasons()[MODE]


def test_the_output_names_the_value_and_the_nearest_that_does_not_fit() -> None:
    given = space(8, 64)
    found = planned(given, Budget(6.0, 0.0, 8), "speed", Measured(given))
    chosen = found.chosen.candidate
    assert chosen.blocks is not None
    text = report.describe(found, rated("h100-sxm", "bf16", 1), explain=True)
    assert f"{BLOCKS} {chosen.blocks} of {made_up.BLOCKS} " in text
    exceeding = text.partition("nearest that do not fit:\n")[2].splitlines()[0]
    assert exceeding.strip().startswith(str(dataclasses.replace(chosen, blocks=chosen.blocks - 1)))
    listed = report.as_json(found, rated("h100-sxm", "bf16", 1))
    json.dumps(listed)
    assert (listed["plan"]["blocks"], listed["blocks_of_model"]) == (chosen.blocks, made_up.BLOCKS)
    assert listed["plan"]["reasons"][BLOCKS] == found.reasons()[BLOCKS]
    assert not any("blocks" in name for name in NOT_CONSIDERED)


def test_the_number_is_written_and_read(tmp_path: Path) -> None:
    loaded = read(["demo", *CHOSEN])
    _, preset = write(str(tmp_path / "some"), "accel-train plan", Candidate("single", "full", 16, 1), 1, loaded)
    assert read([str(preset)]).config.activation_checkpointing == ActivationCheckpointingConfig("full", blocks=1)
    _, preset = write(str(tmp_path / "all"), "accel-train plan", Candidate("single", "full", 16), 1, loaded)
    assert "blocks" not in preset.read_text()


DEPTH = 4
MODEL = ("--model.depth", str(DEPTH))


def needed(*words: str) -> float:
    """GiB of a step, by ``accel-train simulate``."""
    head = [sys.executable, "-m", "accel_train.cli", "simulate", "mmdit"]
    done = zygote.run([*head, *words, "--json"], env=environment(), timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert (found["blocks"], found["micro_batches"]) == (DEPTH, 1)
    return Budget(1.0, 0.0, 1).needed_gib(found["peak_in_blocks"])


# Slow: ten simulations of a minute; the choice is tested above, and the flag's effect in tests/speed.
@pytest.mark.slow
def test_a_written_plan_fits_and_with_one_block_less_it_does_not(tmp_path: Path) -> None:
    """The limit is between the memory with no block checkpointed and that with all."""
    none, every = (needed("demo", *CHOSEN, *MODEL, f"--{MICRO_BATCH}", "16", f"--{MODE}", m) for m in ("none", "full"))
    limit = every + 0.2 * (none - every)
    files = tmp_path / "planned"
    flags = [*MODEL, f"--{MODE}", "full", f"--{MICRO_BATCH}", "16"]
    done = plan(*flags, "--gpus", "1", "--vram_gib", str(limit), "--margin_gib", "0", "--json", "--write", str(files))
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    found = printed["plan"]
    blocks = found["blocks"]
    assert 1 < blocks < printed["blocks_of_model"] == DEPTH
    preset = str(files / PRESET)
    assert read([preset]).config.activation_checkpointing == ActivationCheckpointingConfig("full", blocks=blocks)
    assert needed(preset) == found["needed_gib"] <= limit
    assert needed(preset, f"--{BLOCKS}", str(blocks - 1)) > limit
