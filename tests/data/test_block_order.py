"""The order of blocks: a permutation of each epoch, mixed within windows, the same on any layout of processes."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from accel_train.config import UsageError
from accel_train.data.sampler import StepSampler
from accel_train.data.tables import block_order
from accel_train.data.tables.block_order import BlockOrder

SIZES = (7, 0, 5, 11, 1, 9, 4)  # 37 rows


def epoch_of(order: BlockOrder, seed: int, epoch: int) -> list[int]:
    rows: list[int] = []
    while len(rows) < len(order):
        rows += order.rows(seed, epoch, len(rows), len(order) - len(rows))
    return rows


def blocks_of(order: BlockOrder, rows: list[int]) -> list[int]:
    return (np.searchsorted(order.starts, rows, side="right") - 1).tolist()


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("chunk", [3, 4096])
def test_an_epoch_has_every_row_once_and_its_windows_have_whole_blocks(
    window: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_order, "CHUNK", chunk)
    order = BlockOrder(SIZES, window)
    for epoch in range(3):
        rows = epoch_of(order, 5, epoch)
        assert sorted(rows) == list(range(37))
        # A block ends before the block after the next window of blocks begins: never more than `window` are open.
        blocks = blocks_of(order, rows)
        spans = {block: (blocks.index(block), 36 - blocks[::-1].index(block)) for block in set(blocks)}
        for place in range(37):
            assert sum(first <= place <= last for first, last in spans.values()) <= window


def test_any_place_is_found_without_those_before_it() -> None:
    order = BlockOrder(SIZES, 2)
    rows = epoch_of(order, 1, 4)
    for place in (36, 20, 3, 0):
        assert order.rows(1, 4, place, 1) == [rows[place]]


def test_seeds_epochs_and_blocks_are_mixed() -> None:
    order = BlockOrder([50] * 20, 4)
    orders = {(seed, epoch): tuple(epoch_of(order, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    # Each epoch has other blocks together, and the rows of a window in no block's own order.
    firsts = [frozenset(blocks_of(order, list(rows[:200]))) for rows in orders.values()]
    assert all(len(first) == 4 for first in firsts)
    assert len(set(firsts)) > 6
    blocks = [blocks_of(order, list(rows)) for rows in orders.values()]
    changes = [sum(a != b for a, b in itertools.pairwise(each)) for each in blocks]
    # 3 of 4 neighbours come from another block: 750 of 1,000.
    assert all(690 < change < 810 for change in changes)


def test_each_window_mixes_its_rows_in_an_order_of_its_own() -> None:
    order = BlockOrder([50] * 20, 4)
    rows = epoch_of(order, 0, 0)
    places = {block: place for place, block in enumerate(block_order._layout(order, 0, 0).blocks.tolist())}
    within = [places[row // 50] % 4 * 50 + row % 50 for row in rows]
    assert len({tuple(within[start : start + 200]) for start in range(0, 1000, 200)}) == 5


def test_rows_of_a_window_are_equally_likely_everywhere() -> None:
    order = BlockOrder([4, 4, 4, 4], 2)
    first = Counter(epoch_of(order, 0, epoch)[0] for epoch in range(480))
    assert len(first) == 16
    assert all(12 < count < 52 for count in first.values())  # 30 expected, standard deviation 5.3


def test_the_sampler_is_the_same_on_any_layout_and_drops_nothing() -> None:
    sampler = StepSampler(37, 8, 3, blocks=BlockOrder(SIZES, 2))
    steps = [sampler.draws(step) for step in range(20)]
    flat = [draw for step in steps for draw in step]
    assert sorted(draw.sample for draw in flat[:37]) == list(range(37))
    assert [draw.occurrence for draw in flat[:74]] == [
        number // 37 * 37 + draw.sample for number, draw in enumerate(flat[:74])
    ]
    for world_size in (1, 2, 4):
        for step in (0, 7, 19):
            ranks = [sampler.micro_batches(step, rank, world_size, 2) for rank in range(world_size)]
            assert [draw for rank in ranks for batch in rank for draw in batch] == steps[step]


def test_blocks_of_another_dataset_and_an_empty_window_are_refused() -> None:
    with pytest.raises(ValueError, match="the blocks have 37 rows, but the dataset has 38"):
        StepSampler(38, 8, 3, blocks=BlockOrder(SIZES, 2))
    with pytest.raises(UsageError, match="window=0"):
        BlockOrder(SIZES, 0)
