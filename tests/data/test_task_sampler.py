"""Steps of several tasks: balanced, complete, and independent of how the batch is cut."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, Draw, StepSampler

SIZES = (40, 23, 100)


def offset(task: int) -> int:
    return sum(SIZES[:task])


def task_of_sample(sample: int) -> int:
    return sum(sample >= offset(task) for task in (1, 2))


def test_one_task_is_a_step_sampler():
    one, plain = TaskSampler((40,), 14, seed=5), StepSampler(40, 14, seed=5)
    for step in range(12):
        assert one.task_of_step(step) == 0
        assert one.draws(step) == plain.draws(step)
        assert one.micro_batches(step, 1, 3, 2) == plain.micro_batches(step, 1, 3, 2)
        assert one.epoch(step) == plain.epoch(step)


def test_every_block_holds_every_task_once_in_orders_that_differ():
    sampler = TaskSampler(SIZES, 14, seed=0)
    blocks = [tuple(sampler.task_of_step(3 * block + slot) for slot in range(3)) for block in range(600)]
    assert {tuple(sorted(block)) for block in blocks} == {(0, 1, 2)}
    counts = Counter(blocks)
    assert len(counts) == 6
    assert max(counts.values()) < 150  # 100 expected; 150 is five standard deviations away
    assert [TaskSampler(SIZES, 14, seed=1).task_of_step(step) for step in range(60)] != [
        sampler.task_of_step(step) for step in range(60)
    ]


def test_weights_are_steps_of_each_block():
    sampler = TaskSampler(SIZES, 14, seed=0, weights=(1, 3, 2))
    for block in range(40):
        tasks = Counter(sampler.task_of_step(6 * block + slot) for slot in range(6))
        assert tasks == {0: 1, 1: 3, 2: 2}


@pytest.mark.parametrize("weights", [None, (1, 3, 2)])
def test_no_sample_is_lost_in_an_epoch_of_its_task(weights):
    sampler = TaskSampler(SIZES, 14, seed=3, weights=weights)
    seen: list[list[Draw]] = [[], [], []]
    for step in range(90):
        draws = sampler.draws(step)
        assert {task_of_sample(draw.sample) for draw in draws} == {sampler.task_of_step(step)}
        assert [draw.position for draw in draws] == list(range(14))
        seen[sampler.task_of_step(step)] += draws
    total = sampler.dataset_size
    for task, draws in enumerate(seen):
        size = SIZES[task]
        assert len(draws) > 2 * size
        for epoch in range(len(draws) // size):
            this = draws[epoch * size : (epoch + 1) * size]
            assert sorted(draw.sample for draw in this) == list(range(offset(task), offset(task) + size))
            assert {draw.occurrence for draw in this} == {epoch * total + draw.sample for draw in this}
    occurrences = [draw.occurrence for draws in seen for draw in draws]
    assert len(set(occurrences)) == len(occurrences)  # each is the key of one noise


def test_tasks_of_one_size_are_read_in_orders_of_their_own():
    sampler = TaskSampler((50, 50), 50, seed=0)
    orders = {sampler.task_of_step(step): [d.sample % 50 for d in sampler.draws(step)] for step in range(2)}
    assert orders[0] != orders[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 23), st.integers(1, 5), st.integers(1, 8), st.integers(0, 10**9))
def test_every_cut_covers_the_same_draws(batch, world_size, micro_batch_size, step):
    world_size = min(world_size, batch)
    sampler = TaskSampler(SIZES, batch, seed=2, weights=(2, 1, 1))
    ranks = [sampler.micro_batches(step, rank, world_size, micro_batch_size) for rank in range(world_size)]
    assert [d for pieces in ranks for piece in pieces for d in piece if d.weight] == sampler.draws(step)
    assert len({tuple(len(piece) for piece in pieces) for pieces in ranks}) == 1
    assert sum(d.weight for pieces in ranks for piece in pieces for d in piece) == batch


def test_the_order_of_a_seed_is_fixed():
    # changing these numbers changes the data order of every run that is resumed
    sampler = TaskSampler((10, 12), 5, seed=0)
    assert [sampler.task_of_step(step) for step in range(8)] == [1, 0, 0, 1, 1, 0, 0, 1]
    assert [d.sample for d in sampler.draws(3)] == [15, 17, 21, 13, 18]


def test_epoch_counts_samples_of_all_tasks():
    assert [TaskSampler((40, 60), 10, seed=0).epoch(step) for step in (0, 1, 25)] == [0.0, 0.1, 2.5]


@pytest.mark.parametrize(
    ("sizes", "weights", "words"),
    [
        ((40, 7), None, ["global_batch_size: 8", "task 2 of 2 has 7 samples", "lower it to 7"]),
        ((40, 0), None, ["task 2 of 2 has 0 samples"]),
        ((), None, ["task_weights []", "0 task(s)"]),
        ((40, 40), (1,), ["task_weights [1] for 2 task(s)", "leave task_weights out"]),
        ((40, 40), (1, 0), ["task_weights [1, 0]", "1 or more"]),
    ],
)
def test_tasks_that_cannot_be_sampled(sizes, weights, words):
    with pytest.raises(UsageError) as error:
        TaskSampler(sizes, 8, seed=0, weights=weights)
    assert all(word in str(error.value) for word in words), str(error.value)


class Tasks:
    """Samples of a shape that belongs to their task, and that know which they are."""

    def __len__(self) -> int:
        return sum(SIZES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"value": torch.full((task_of_sample(index) + 1,), index), "noise": torch.rand(())}


def rows(cut: BatchShard, start: int = 0, workers: int = 0) -> dict[tuple[int, int], tuple[list[int], float]]:
    """(step, position) -> value and noise, of the samples that count."""
    sampler = TaskSampler(SIZES, 14, seed=5)
    steps = iterate_steps(
        Tasks(), sampler, cut, start_step=start, max_steps=8, device=torch.device("cpu"),
        config=LoaderConfig(num_workers=workers),
    )  # fmt: skip
    found: dict[tuple[int, int], tuple[list[int], float]] = {}
    for step in steps:
        for batch in step.micro_batches:
            for i, weight in enumerate(batch["weight"].tolist()):
                assert batch["value"][i].tolist() == [int(batch["sample"][i])] * batch["value"].shape[1]
                if weight:
                    key = step.step, int(batch["position"][i])
                    found[key] = batch["value"][i].tolist(), float(batch["noise"][i])
    return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_loader_reads_it_in_any_cut_with_workers_and_from_any_step():
    whole = rows(BatchShard(0, 1, 14))
    assert len(whole) == 8 * 14
    cut = [rows(BatchShard(rank, 3, 2)) for rank in range(3)]
    assert cut[0] | cut[1] | cut[2] == whole
    assert rows(BatchShard(0, 1, 5), workers=2) == whole
    assert rows(BatchShard(0, 1, 5), start=6) == {key: row for key, row in whole.items() if key[0] >= 6}
