"""Samples of several shapes: whole global batches on any machine, one shape in a micro-batch, groups in the order."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data import progress
from accel_train.data.grouping.shape_groups import GroupOrder, ShapeGroups, shape_groups
from accel_train.data.heldout import heldout_batches, heldout_pairs
from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, Draw, StepSampler

CPU = torch.device("cpu")
SHAPES = [(2, 3), (3, 2), (2, 2), (4, 4), (1, 6)]


class Shaped:
    """Samples of different shapes, with a random draw in each."""

    def __init__(self, size: int, shapes: int = 5) -> None:
        self.size = size
        self.shapes = shapes

    def __len__(self) -> int:
        return self.size

    def sample_shape(self, index: int) -> tuple[int, int]:
        return SHAPES[(index * index) % 11 % self.shapes]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"values": torch.full(self.sample_shape(index), float(index)), "draw": torch.rand(())}


# --------------------------------------------------------------------------------------------------------- the cut
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20), st.integers(0, 30), st.integers(1, 5))
def test_every_cut_holds_the_global_batch_and_has_one_shape_in_each_part(batch, world_size, micro, step, shapes):
    world_size = min(world_size, batch)
    dataset = Shaped(70, shapes)
    sampler = StepSampler(70, batch, seed=0)
    groups = ShapeGroups(dataset.sample_shape)
    ranks = [groups.micro_batches(sampler.draws(step), BatchShard(r, world_size, micro)) for r in range(world_size)]
    pieces = [draws for rank in ranks for draws, _ in rank]
    assert Counter(d for draws in pieces for d in draws if d.weight) == Counter(sampler.draws(step))
    assert all(1 <= len(draws) <= micro for draws in pieces)
    assert all(len({dataset.sample_shape(d.sample) for d in draws}) == 1 for draws in pieces)
    assert len({len(rank) for rank in ranks}) == 1
    # As few as any division into micro-batches of one shape needs.
    counts = Counter(dataset.sample_shape(d.sample) for d in sampler.draws(step))
    fewest = sum(-(-count // micro) for count in counts.values())
    assert len(ranks[0]) == -(-fewest // world_size)
    # Padding is whole micro-batches of weight 0, fewer than processes.
    padded = [draws for draws in pieces if not draws[0].weight]
    assert all(not d.weight for draws in padded for d in draws)
    assert len(padded) < world_size


def test_work_is_spread_evenly() -> None:
    shapes = {0: (4, 4), 1: (2, 2)}
    groups = ShapeGroups(lambda sample: shapes[sample % 2])
    draws = [Draw(sample, sample, sample, 1.0) for sample in range(16)]
    sizes = [[len(d) for d, _ in groups.micro_batches(draws, BatchShard(rank, 4, 8))] for rank in range(4)]
    # Three processes share the large ones, not one of them.
    assert sorted(sizes) == [[2], [3], [3], [8]]


def test_datasets_of_one_shape_are_divided_as_ever() -> None:
    assert shape_groups(Shaped(20, 1), 20) is None
    assert shape_groups([{"values": torch.zeros(2)}], 1) is None
    assert shape_groups(Shaped(20), 20) is not None


# ------------------------------------------------------------------------------------------------------- the order
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 9), st.integers(0, 5))
def test_each_epoch_has_each_sample_once(size, group, epoch):
    order = GroupOrder([Shaped(size).sample_shape(n) for n in range(size)], group)
    rows = order.rows(3, epoch, 0, size)
    assert sorted(rows) == list(range(size))
    middle = size // 2
    assert list(order.rows(3, epoch, middle, size)) == list(rows)[middle:]


@pytest.mark.parametrize("group", [2, 4])
def test_steps_of_whole_groups_have_one_shape_for_each(group: int) -> None:
    dataset = Shaped(203)
    order = GroupOrder([dataset.sample_shape(n) for n in range(203)], group)
    sampler = StepSampler(203, 4, seed=1, blocks=order)
    pure = mixed = 0
    for step in range(400):
        draws = sampler.draws(step)
        for start in range(0, 4, group):
            shapes = {dataset.sample_shape(draw.sample) for draw in draws[start : start + group]}
            pure += len(shapes) == 1
            mixed += len(shapes) > 1
    # Each of 8 epochs leaves fewer than `group` samples of each of 5 shapes.
    assert mixed <= 9 * 5
    assert pure > 5 * mixed


def test_the_order_depends_on_seed_and_epoch_and_mixes_shapes() -> None:
    shapes = [SHAPES[n % 5] for n in range(100)]
    order = GroupOrder(shapes, 4)
    first = order.rows(0, 0, 0, 100)
    assert first != order.rows(1, 0, 0, 100)
    assert first != order.rows(0, 1, 0, 100)
    changes = sum(shapes[first[n]] != shapes[first[n + 4]] for n in range(0, 96, 4))
    assert changes > 10
    with pytest.raises(UsageError, match="group=0"):
        GroupOrder(shapes, 0)


# -------------------------------------------------------------------------------------------------------- the loader
def batches(world_size: int, micro: int, workers: int, steps: int = 6, start: int = 0) -> list[list[dict[str, Any]]]:
    dataset = Shaped(41)
    order = GroupOrder([dataset.sample_shape(n) for n in range(41)], 4)
    sampler = StepSampler(41, 8, seed=5, blocks=order)
    found: list[list[dict[str, Any]]] = [[] for _ in range(steps)]
    counts: list[list[int]] = []
    for rank in range(world_size):
        shard = BatchShard(rank, world_size, micro)
        config = LoaderConfig(num_workers=workers)
        made = iterate_steps(dataset, sampler, shard, start_step=start, max_steps=steps, device=CPU, config=config)
        of_rank: list[int] = []
        for step in made:
            found[step.step] += step.micro_batches
            of_rank.append(len(step.micro_batches))
        counts.append(of_rank)
    assert all(each == counts[0] for each in counts)
    return found


def contents(step: list[dict[str, Any]]) -> set[tuple[int, int, float, tuple[int, ...]]]:
    rows: set[tuple[int, int, float, tuple[int, ...]]] = set()
    for batch in step:
        for place, weight in enumerate(batch["weight"].tolist()):
            if weight:
                values = batch["values"][place]
                assert values.flatten()[0] == batch["sample"][place]
                key = (int(batch["occurrence"][place]), int(batch["position"][place]))
                rows.add((*key, float(batch["draw"][place]), tuple(values.shape)))
    return rows


# Python 3.12 and later warn of any fork in a process with threads
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("world_size", "micro", "workers"), [(1, 2, 0), (2, 8, 0), (3, 3, 0), (5, 1, 0), (1, 4, 2)])
def test_samples_and_their_draws_are_those_of_one_process(world_size: int, micro: int, workers: int) -> None:
    expected = [contents(step) for step in batches(1, 8, 0)]
    assert [len(step) for step in expected] == [8] * 6
    assert [contents(step) for step in batches(world_size, micro, workers)] == expected


def test_a_resume_reads_the_same_steps() -> None:
    expected = [contents(step) for step in batches(1, 4, 0)]
    assert [contents(step) for step in batches(1, 4, 0, start=3)][3:] == expected[3:]


def test_the_log_tells_what_shapes_cost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "accel_train.data.loader"):
        batches(1, 8, 0)
    assert "4 sample shapes: " in caplog.text
    assert "micro-batches per step and process, 1 if all were of one shape" in caplog.text


def test_lengths_and_shapes_exclude_each_other() -> None:
    sampler = StepSampler(41, 8, seed=5)
    with pytest.raises(UsageError, match="Shaped does not know the lengths"):
        iterate_steps(
            Shaped(41),
            sampler,
            BatchShard(0, 1, 8),
            start_step=0,
            max_steps=1,
            device=CPU,
            config=LoaderConfig(num_workers=0, bucket_by_length=True),
        )


# ----------------------------------------------------------------------------------------------------------- held out
@pytest.mark.parametrize("world_size", [1, 2, 5, 30])
def test_held_out_samples_come_once_on_any_number_of_processes(world_size: int) -> None:
    dataset = Shaped(23)
    ranks = [list(heldout_batches(dataset, 19, 4, rank, world_size, CPU)) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    seen = Counter[int]()
    draws: dict[int, float] = {}
    for batch in (batch for rank in ranks for batch in rank):
        for sample, weight, draw in zip(batch["sample"], batch["weight"], batch["draw"], strict=True):
            seen[int(sample)] += int(weight)
            assert draws.setdefault(int(sample), float(draw)) == float(draw)
    assert dict(seen) == dict.fromkeys(range(19), 1)


def test_the_progress_of_an_evaluation_counts_samples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not batches, of which one shape may have few."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    list(heldout_batches(Shaped(23), 19, 4, 0, 1, CPU))
    assert "evaluation: 19 of 19 samples" in capsys.readouterr().out.splitlines()[-1]


def test_pairs_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        next(heldout_pairs(Shaped(23), 19, 4, 0, 1, CPU))
