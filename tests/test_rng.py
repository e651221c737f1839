"""Keyed draws: fixed integers, distributions, independence, no dependence on the cut of the batch."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accel_train import rng
from accel_train.config import UsageError

# The first outputs of SplitMix64 for the seed 1234567, as published with its reference implementation.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
# The keys are fixed, so that a p-value either always passes or never does.
TINY = 1e-4


def keys(count, step=0, seed=0, stream="test"):
    return rng.sample_keys(seed, stream, step, torch.arange(count))


def test_draws_are_splitmix64():
    drawn = rng.uniform(torch.tensor([1234567]), (5,))[0]
    assert drawn.tolist() == [(z >> 40) / 2**24 for z in PUBLISHED]


def test_normal_is_box_muller_of_splitmix64():
    z = np.array(PUBLISHED, dtype=np.uint64)
    radius = np.sqrt(-2 * np.log(((z >> np.uint64(24)).astype(np.float64) + 0.5) / 2**40))
    angle = 2 * np.pi * (z & np.uint64(0xFFFFFF)).astype(np.float64) / 2**24
    expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).ravel()
    torch.testing.assert_close(
        rng.normal(torch.tensor(1234567), (10,)), torch.tensor(expected).float(), rtol=2e-6, atol=1e-6
    )


def test_keys_are_fixed_for_ever():
    """A change here changes every run that anyone resumes: it needs a new major version."""
    assert rng.key(0, "a", 3) == -4103336843886333324
    assert rng.sample_keys(0, "a", 3, torch.tensor([0, 1, 2**40])).tolist() == [
        -8814729889720425854,
        -3846863133286323119,
        -7381199828255204579,
    ]
    assert rng.permute(torch.arange(10), 10, rng.key(0, "order", 0)).tolist() == [
        2,
        7,
        0,
        6,
        4,
        3,
        1,
        5,
        9,
        8,
    ]
    assert rng.permute(torch.arange(4), 10**6, rng.key(0, "order", 0)).tolist() == [
        193303,
        245278,
        406838,
        94429,
    ]


def test_seed_range():
    assert rng.key(0, "a", 0) != rng.key(2**32 - 1, "a", 0)
    for seed in (-1, 2**32):
        with pytest.raises(UsageError, match="seed="):
            rng.key(seed, "a", 0)


@pytest.mark.parametrize("step", [0, 1, 7, 10**6, 2**40])
def test_host_scalars_agree_with_tensors(step):
    own = torch.tensor([rng.key(5, "mode", step)])
    assert rng.host_uniform(5, "mode", step) == rng.uniform(own).item()
    weights = [0.2, 0.0, 3.0, 1e-3]
    assert rng.host_choice(5, "mode", step, weights) == rng.categorical(own, torch.tensor(weights).double()).item()


def test_key_derivation_on_host_and_in_tensors_is_the_same_chain():
    parent = rng.key(9, "s", 4)
    assert rng.sample_keys(9, "s", 4, torch.tensor([11])).item() == rng._signed(rng._derive(parent & rng._MASK, 11))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (64,), (1001,)])
def test_the_cut_of_the_batch_does_not_enter(shape, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for draw in (rng.uniform, rng.normal):
            whole = draw(keys(64), shape)
            assert whole.shape == (64, *shape)
            for cut in (1, 3, 16):
                assert torch.equal(torch.cat([draw(part, shape) for part in keys(64).split(cut)]), whole)
            order = torch.randperm(64)
            assert torch.equal(draw(keys(64)[order], shape), whole[order])
    finally:
        torch.set_num_threads(before)


def test_uniform_is_in_range_and_prefix_stable():
    drawn = rng.uniform(keys(500), (1000,))
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
    assert torch.equal(rng.uniform(keys(500), (10,)), drawn[:, :10])
    assert torch.equal(rng.uniform(keys(500), (10, 100)), drawn.view(500, 10, 100))


@pytest.mark.parametrize("layout", [(200_000, ()), (2_000, (100,)), (1, (200_000,))])
def test_uniform_distribution(layout):
    count, shape = layout
    drawn = rng.uniform(keys(count), shape).flatten().numpy()
    assert stats.kstest(drawn, "uniform").pvalue > TINY
    for power in (1, 2, 3, 4):  # E[u^p] = 1 / (p + 1)
        expected, spread = 1 / (power + 1), math.sqrt(1 / (2 * power + 1) - 1 / (power + 1) ** 2)
        assert abs((drawn.astype(np.float64) ** power).mean() - expected) < 4 * spread / math.sqrt(drawn.size)
    bits = (drawn * 2**24).astype(np.int64)
    ones = np.array([(bits >> b & 1).sum() for b in range(24)])
    assert np.abs(ones - drawn.size / 2).max() < 4.5 * math.sqrt(drawn.size) / 2


@pytest.mark.parametrize("layout", [(200_000, (1,)), (100_000, (2,)), (2_000, (100,)), (1, (200_001,))])
def test_normal_distribution(layout):
    count, shape = layout
    drawn = rng.normal(keys(count, stream="n"), shape).flatten().double().numpy()
    assert np.isfinite(drawn).all()
    assert stats.kstest(drawn, "norm").pvalue > TINY
    for power, expected, second in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105), (6, 15, 10395)):
        spread = math.sqrt((second - expected**2) / drawn.size)
        assert abs((drawn**power).mean() - expected) < 4.5 * spread


def test_normal_tail():
    """Beyond 4.5 sigma 13.6 of 2 million are expected, and none of a million pairs may be infinite."""
    drawn = torch.cat([rng.normal(keys(2000, step=step, stream="tail"), (500,)).flatten() for step in range(2)])
    for bound in (3.0, 4.0, 4.5):
        expected = drawn.numel() * 2 * stats.norm.sf(bound)
        assert stats.poisson.cdf((drawn.abs() > bound).sum().item(), expected) > TINY
        assert stats.poisson.sf((drawn.abs() > bound).sum().item() - 1, expected) > TINY


def test_normal_at_the_ends_of_the_radius(monkeypatch):
    """All radius bits 0 or 1, every angle quadrant: finite, and as far out as 40 bits reach."""
    corners = [low | high for low in (0, 0x400000, 0xFFFFFF) for high in (0, 0xFFFFFFFFFF << 24)]
    bits = torch.tensor([[rng._signed(c)] for c in corners])
    monkeypatch.setattr(rng, "_mix", lambda z, last=True: bits.clone())
    drawn = rng.normal(keys(6), (2,))
    assert drawn.isfinite().all()
    assert drawn.abs().max() == pytest.approx(math.sqrt(2 * 41 * math.log(2)), rel=1e-6)


def neighbours(what):
    count, length = 4000, 50
    base = rng.normal(keys(count), (length,))
    if what == "sample":
        return base[:-1], base[1:]
    if what == "element":
        return base[:, :-1], base[:, 1:]
    if what == "step":
        return base, rng.normal(keys(count, step=1), (length,))
    if what == "seed":
        return base, rng.normal(keys(count, seed=1), (length,))
    if what == "stream":
        return base, rng.normal(keys(count, stream="tesu"), (length,))
    if what == "step and sample":  # a key that only adds them up would fail here
        return base[1:], rng.normal(keys(count, step=1), (length,))[:-1]
    if what == "parent":  # the draws of a key against those of the keys derived from it
        own = rng.normal(torch.tensor(rng.key(0, "test", 0)), (count * length,))
        return base, own.view(count, length)
    raise AssertionError(what)


@pytest.mark.parametrize("what", ["sample", "element", "step", "seed", "stream", "step and sample", "parent"])
def test_neighbours_are_independent(what):
    a, b = (part.flatten().double() for part in neighbours(what))
    for f in (lambda x: x, torch.square, torch.abs):  # squares see what a plain correlation does not
        correlation = torch.corrcoef(torch.stack([f(a), f(b)]))[0, 1]
        assert abs(correlation) * math.sqrt(a.numel()) < 4
    cells = [(torch.special.ndtr(x) * 16).long().clamp(0, 15) for x in (a, b)]
    table = torch.bincount(cells[0] * 16 + cells[1], minlength=256).view(16, 16)
    assert stats.chi2_contingency(table.numpy()).pvalue > TINY


def test_no_two_keys_alike():
    everything = torch.cat(
        [keys(2000, step, seed, s) for step in range(5) for seed in range(5) for s in ("a", "b", "c")]
    )
    assert everything.unique().numel() == everything.numel()


def test_categorical():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0])
    drawn = rng.categorical(keys(80_000), weights)
    counts = torch.bincount(drawn, minlength=6)
    assert counts[weights == 0].sum() == 0
    expected = (weights / 8 * 80_000)[weights > 0]
    assert stats.chisquare(counts[weights > 0].numpy(), expected.numpy()).pvalue > TINY
    assert torch.equal(rng.categorical(keys(80_000), weights * 1e-20), drawn)
    assert torch.equal(rng.categorical(keys(80_000), weights.expand(80_000, 6)), drawn)


def test_categorical_row_by_row():
    rows = torch.eye(7)[torch.arange(700) % 7]
    assert torch.equal(rng.categorical(keys(700), rows), torch.arange(700) % 7)


def test_inverse_cdf_never_returns_what_has_no_weight():
    weights = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    positions = torch.tensor([0.0, 0.49999, 0.5, 1 - 2**-40], dtype=torch.float64)
    assert rng.inverse_cdf(positions, weights.double()).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -0.5], [1.0, math.nan], [1.0, math.inf], []])
def test_weights_refused(weights):
    with pytest.raises(UsageError, match="weights="):
        rng.host_choice(0, "mode", 0, weights)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**63), 2**63 - 1))
def test_permute_is_a_bijection(length, key):
    assert sorted(rng.permute(torch.arange(length), length, key).tolist()) == list(range(length))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**62), st.data())
def test_permute_on_demand(length, data):
    """Any index tensor gives the same answers one by one, in range and pairwise different."""
    index = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=8, unique=True))
    together = rng.permute(torch.tensor(index), length, 17)
    assert together.tolist() == [rng.permute(torch.tensor([i]), length, 17).item() for i in index]
    assert 0 <= together.min() <= together.max() < length
    assert together.unique().numel() == len(index)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_order_is_equally_likely(length):
    orders = list(itertools.permutations(range(length)))
    counts = dict.fromkeys(orders, 0)
    for k in range(1500):
        counts[tuple(rng.permute(torch.arange(length), length, rng.key(k, "order", 0)).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > TINY


@pytest.mark.parametrize("length", [1100, 2048, 24_000])
def test_order_looks_random(length):
    runs = [rng.permute(torch.arange(length), length, rng.key(3, "order", epoch)).double() for epoch in range(40)]
    for lag in (1, 2):
        rises = sum((run[lag:] > run[:-lag]).sum().item() for run in runs)
        expected = 40 * (length - lag) / 2
        assert abs(rises - expected) < 4 * math.sqrt(40 * (length + 1) / (12 if lag == 1 else 6))
    fixed = sum((run == torch.arange(length)).sum().item() for run in runs)  # Poisson, mean 1 per run
    assert 40 - 4 * math.sqrt(40) < fixed < 40 + 4 * math.sqrt(40)
    for one, other in itertools.pairwise(runs):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 4.5 / math.sqrt(length)


def test_permute_refuses():
    with pytest.raises(UsageError, match="length=0"):
        rng.permute(torch.arange(0), 0, 1)
    for index in ([5], [-1]):
        with pytest.raises(UsageError, match="index from"):
            rng.permute(torch.tensor(index), 5, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_integers_on_the_device():
    here, there = keys(1000), rng.sample_keys(0, "test", 0, torch.arange(1000, device="cuda"))
    assert torch.equal(here, there.cpu())
    assert torch.equal(rng.uniform(here, (777,)), rng.uniform(there, (777,)).cpu())
    weights = torch.rand(50)
    assert torch.equal(rng.categorical(here, weights), rng.categorical(there, weights.cuda()).cpu())
    index = torch.arange(24_000)
    assert torch.equal(rng.permute(index, 24_000, 3), rng.permute(index.cuda(), 24_000, 3).cpu())
    torch.testing.assert_close(rng.normal(there, (777,)).cpu(), rng.normal(here, (777,)), rtol=1e-5, atol=2e-6)
