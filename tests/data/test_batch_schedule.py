"""Batch sizes that change in the course of a run, against a list of all steps."""

from __future__ import annotations

import math
from itertools import accumulate, chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train import experiment
from accel_train.config import UsageError
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.data.leaving_out import without_samples
from accel_train.data.options import BatchScheduleConfig
from accel_train.data.sampler import StepSampler, refuse_small_batches, scheduled
from accel_train.experiment_options import ExperimentConfig
from accel_train.linting.facts import Facts

GROWING = BatchScheduleConfig(steps=(3, 5, 9), sizes=(8, 12, 6))
SIZES = [4, 4, 4, 8, 8, 12, 12, 12, 12, 6, 6, 6]
"""Of the first twelve steps with 4 samples at first."""


def test_sizes_and_sums_are_those_of_the_list() -> None:
    assert [GROWING.size(4, step) for step in range(12)] == SIZES
    before = [0, *accumulate(SIZES)]
    assert [GROWING.samples_before(4, step) for step in range(13)] == before
    for step, samples in enumerate(before):
        assert GROWING.steps_for(4, samples) == step
        assert GROWING.steps_for(4, samples + 0.5) == step + 1


@given(
    first=st.integers(1, 9),
    parts=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9)), max_size=4),
    samples=st.integers(0, 600).map(lambda halves: halves / 2),
)
def test_a_number_of_samples_takes_the_fewest_steps(first: int, parts: list[tuple[int, int]], samples: float) -> None:
    steps = tuple(accumulate(length for length, _ in parts))
    schedule = BatchScheduleConfig(steps, tuple(size for _, size in parts))
    found = schedule.steps_for(first, samples)
    assert schedule.samples_before(first, found) >= samples
    assert found == 0 or schedule.samples_before(first, found - 1) < samples


def test_a_fraction_of_epochs_takes_no_step_more_by_rounding() -> None:
    """1.1 * 50_000 is 55000.00000000001. The run and the linter count alike."""
    options: dict[str, Any] = {"max_epochs": 1.1, "global_batch_size": 100}
    assert experiment._max_steps(ExperimentConfig(**options), 50_000) == 550
    assert Facts(options, dataset_size=50_000).steps == 550
    assert BatchScheduleConfig().steps_for_epochs(100, 1.1, 50_001) == 551


@pytest.mark.parametrize(("rule", "factor"), [("constant", 1.0), ("linear", 3.0), ("sqrt", math.sqrt(3))])
def test_the_learning_rate_follows_its_rule(rule: str, factor: float) -> None:
    schedule = BatchScheduleConfig(GROWING.steps, GROWING.sizes, rule)  # type: ignore[arg-type]
    assert schedule.factor(4, 2) == 1.0
    assert schedule.factor(4, 5) == factor


def test_steps_take_the_endless_order_on_without_a_gap() -> None:
    plain = StepSampler(31, 4, seed=3)
    order = scheduled(plain, GROWING)
    drawn = [order.draws(step) for step in range(12)]
    assert [len(draws) for draws in drawn] == SIZES == [order.batch_size(step) for step in range(12)]
    endless = chain.from_iterable(StepSampler(31, 1, seed=3).draws(step) for step in range(sum(SIZES)))
    assert [draw.occurrence for draw in chain.from_iterable(drawn)] == [draw.occurrence for draw in endless]
    assert all([draw.position for draw in draws] == list(range(len(draws))) for draws in drawn)
    assert order.epoch(5) == 28 / 31
    # A schedule without a change is none, to the last bit of the order.
    assert scheduled(plain, BatchScheduleConfig()) is plain


@pytest.mark.parametrize(("world_size", "micro"), [(1, 5), (2, 3), (3, 2), (4, 12)])
def test_shares_of_all_processes_are_the_batch(world_size: int, micro: int) -> None:
    order = scheduled(StepSampler(31, 4, seed=3), GROWING)
    for step in range(12):
        shares = [order.micro_batches(step, rank, world_size, micro) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        counted = [draw for share in shares for cut in share for draw in cut if draw.weight]
        assert counted == order.draws(step)
        assert all(len(cut) <= micro for share in shares for cut in share)


def test_samples_left_out_keep_the_sizes() -> None:
    order = without_samples(scheduled(StepSampler(31, 4, seed=3), GROWING), [5, 6])
    assert [order.batch_size(step) for step in range(12)] == SIZES == [len(order.draws(step)) for step in range(12)]


def test_what_cannot_be_obeyed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch_schedule\.steps \[3\], batch_schedule\.sizes \[\]: 1 and 0 values"):
        BatchScheduleConfig(steps=(3,))
    with pytest.raises(UsageError, match=r"steps \[5, 5\]: each must be above the one before"):
        BatchScheduleConfig((5, 5), (8, 9))
    with pytest.raises(UsageError, match=r"learning_rate: sqrt: has no effect without batch_schedule\.steps"):
        BatchScheduleConfig(learning_rate="sqrt")
    with pytest.raises(UsageError, match=r"sizes: \[8, 12, 6\]: the dataset has 11 samples"):
        scheduled(StepSampler(11, 4, seed=3), GROWING)
    with pytest.raises(UsageError, match=r"steps \[3, 5, 9\]: TaskSampler gives every step the same number"):
        scheduled(TaskSampler((31, 31), 4, 3), GROWING)
    with pytest.raises(UsageError, match=r"sizes \[3\]: 3 is smaller than the 4 processes"):
        refuse_small_batches(scheduled(StepSampler(31, 4, 3), BatchScheduleConfig((2,), (3,))), 4, 1)
    left_out = without_samples(scheduled(StepSampler(31, 4, 3), BatchScheduleConfig((2,), (3,))), [5])
    with pytest.raises(UsageError, match=r"sizes \[3\]: 3 is smaller than the 4 processes"):
        refuse_small_batches(left_out, 4, 1)
    refuse_small_batches(scheduled(StepSampler(31, 4, 3), BatchScheduleConfig((2,), (4,))), 4, 1)


def test_changes_behind_the_end_are_said() -> None:
    first, second, third = GROWING.notices(max_steps=6)
    assert first == "batch_schedule: 8 samples per step after step 3"
    assert second == "batch_schedule: 12 samples per step after step 5"
    assert third == "batch_schedule: 6 samples per step after step 9: not in this run, which ends at step 6"


def test_a_smoke_run_has_one_size() -> None:
    config = ExperimentConfig(max_steps=9, batch_schedule=GROWING)
    values = config.smoke_values({})
    assert values["batch_schedule.steps"] == values["batch_schedule.sizes"] == []
