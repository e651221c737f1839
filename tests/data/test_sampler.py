"""Order and cuts of the global batch, against what the definition says."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_train import rng
from accel_train.config import UsageError
from accel_train.data.sampler import Draw, StepSampler, accumulation_steps, even_settings, notices


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_every_epoch_is_a_permutation_and_batches_run_on(size):
    batch = min(size, 16)
    sampler = StepSampler(size, batch, seed=3)
    steps = 3 * size // batch + 1
    order = [draw for step in range(steps) for draw in sampler.draws(step)]
    for epoch in range(3):
        this = order[epoch * size : (epoch + 1) * size]
        assert sorted(draw.sample for draw in this) == list(range(size))
        assert all(draw.occurrence == epoch * size + draw.sample for draw in this)
    assert [draw.position for draw in order] == list(range(batch)) * steps
    assert all(draw.weight == 1.0 for draw in order)


def test_order_depends_on_seed_and_epoch_and_not_on_the_batch():
    def samples(seed: int, batch: int, shuffle: bool = True) -> list[int]:
        sampler = StepSampler(100, batch, seed, shuffle)
        return [d.sample for step in range(200 // batch) for d in sampler.draws(step)]

    assert samples(0, 10) == samples(0, 25) == samples(0, 100)
    assert samples(0, 10) != samples(1, 10)
    assert samples(0, 10)[:100] != samples(0, 10)[100:]
    assert samples(0, 10, shuffle=False) == list(range(100)) * 2


def test_the_order_of_a_seed_is_fixed():
    # changing these numbers changes the data order of every run that is resumed
    assert [d.sample for d in StepSampler(10, 5, seed=0).draws(1)] == [3, 1, 5, 9, 8]


def test_the_order_is_one_permutation_however_it_is_computed():
    sampler = StepSampler(10_000, 3_000, seed=2)
    order = torch.tensor([d.sample for step in range(7) for d in sampler.draws(step)])
    epochs = [rng.permute(torch.arange(10_000), 10_000, rng.key(2, "order", epoch)) for epoch in range(3)]
    assert torch.equal(order, torch.cat(epochs)[: len(order)])


def test_any_step_without_the_ones_before_and_far_away():
    sampler = StepSampler(10**12, 4, seed=1)
    draws = sampler.draws(10**15)
    assert all(d.occurrence // 10**12 == 4000 for d in draws)
    assert len({d.sample for d in draws}) == 4
    assert draws == StepSampler(10**12, 4, seed=1).draws(10**15)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [16, 3, 1])
def test_every_cut_covers_the_same_draws(world_size, micro_batch_size):
    sampler = StepSampler(40, 14, seed=0)
    for step in range(8):
        ranks = [sampler.micro_batches(step, r, world_size, micro_batch_size) for r in range(world_size)]
        counted = [d for pieces in ranks for piece in pieces for d in piece if d.weight]
        assert counted == sampler.draws(step)  # contiguous, in order, once each
        fillers = Counter(d.weight for pieces in ranks for piece in pieces for d in piece)[0.0]
        assert fillers == -14 % world_size


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20), st.integers(0, 30))
def test_cuts_are_even(batch, world_size, micro_batch_size, step):
    world_size = min(world_size, batch)
    sampler = StepSampler(70, batch, seed=0)
    ranks = [sampler.micro_batches(step, r, world_size, micro_batch_size) for r in range(world_size)]
    assert [d for pieces in ranks for piece in pieces for d in piece if d.weight] == sampler.draws(step)
    sizes = [[len(piece) for piece in pieces] for pieces in ranks]
    assert all(size == sizes[0] for size in sizes)
    assert len(sizes[0]) == accumulation_steps(batch, world_size, micro_batch_size)
    assert len(sizes[0]) == -(-max(map(sum, sizes)) // micro_batch_size)  # no more forwards than needed
    assert 1 <= min(sizes[0]) <= max(sizes[0]) <= min(micro_batch_size, min(sizes[0]) + 1)
    shares = [sum(d.weight for piece in pieces for d in piece) for pieces in ranks]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == batch


def test_filler_repeats_the_last_sample_of_the_rank():
    first, second = (StepSampler(9, 3, seed=0).micro_batches(0, r, 2, 1) for r in range(2))
    assert [len(piece) for piece in first] == [len(piece) for piece in second] == [1, 1]
    assert second[1] == [Draw(*second[0][0][:3], weight=0.0)]


def test_epoch_is_a_fraction():
    sampler = StepSampler(40, 10, seed=0)
    assert [sampler.epoch(step) for step in (0, 1, 4, 6)] == [0.0, 0.25, 1.0, 1.5]


@pytest.mark.parametrize(
    ("size", "batch", "words"),
    [
        (0, 8, ["empty", "at least 1"]),
        (7, 8, ["global_batch_size: 8", "7 samples", "lower it to 7"]),
        (7, 0, ["global_batch_size: 0"]),
    ],
)
def test_datasets_that_are_too_small(size, batch, words):
    with pytest.raises(UsageError) as error:
        StepSampler(size, batch, seed=0)
    assert all(word in str(error.value) for word in words)


def test_fewer_samples_than_processes():
    with pytest.raises(
        UsageError, match=r"global_batch_size: 3 is smaller than the 4 processes.*--global_batch_size 4"
    ):
        StepSampler(100, 3, seed=0).micro_batches(0, 0, 4, 1)
    with pytest.raises(UsageError, match="micro_batch_size: 0 must be at least 1"):
        accumulation_steps(8, 2, 0)


def test_even_settings_by_hand():
    assert even_settings(96, 3, 16) == []
    assert even_settings(16, 2, 16) == []  # one forward of 8 on each
    assert even_settings(20, 1, 16) == []  # two forwards of 10
    assert even_settings(100, 3, 16)[0] == (96, 16, 2)
    assert (20, 5, 4) in even_settings(20, 1, 8)  # keeps the batch with shorter pieces
    assert even_settings(50, 4, 4) == [(48, 4, 3), (64, 4, 4), (60, 3, 5)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 64))
def test_even_settings_are_even(batch, world_size, micro_batch_size):
    world_size = min(world_size, batch)

    def forwards(total: int, micro: int) -> set[int]:
        ranks = [StepSampler(total, total, 0).micro_batches(0, r, world_size, micro) for r in range(world_size)]
        return {sum(d.weight == 1 for d in piece) for pieces in ranks for piece in pieces}

    found = even_settings(batch, world_size, micro_batch_size)
    assert bool(found) == (len(forwards(batch, micro_batch_size)) > 1)
    assert len(found) == len({setting.global_batch_size for setting in found}) <= 3
    for total, micro, accumulation in found:
        assert total == world_size * micro * accumulation
        assert micro <= micro_batch_size
        assert forwards(total, micro) == {micro}


def test_a_micro_batch_above_the_share_of_a_process_is_said():
    [notice] = notices(64, 1, 512)
    assert "micro_batch_size: 512 is more than the 64 samples" in notice
    assert "every forward takes 64" in notice
    [shared] = notices(64, 2, 64)
    assert "every forward takes 32" in shared
    assert notices(64, 2, 32) == []


def test_notice_of_an_uneven_setting():
    assert notices(96, 3, 16) == []
    [notice] = notices(100, 3, 16)
    assert "global_batch_size 100 over 3" in notice
    assert "--global_batch_size 96 --micro_batch_size 16" in notice
