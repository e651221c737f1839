"""Batches cut by length: the same samples and the same gradient, less padding, on every rank alike."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Subset

from accel_train.config import UsageError
from accel_train.data.grouping.bucketing import Buckets, choose_shapes, resolve_buckets
from accel_train.data.loader import StepBatches, iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.domains.models import flops
from accel_train.domains.models.mmdit import ModelConfig, MultimodalMMDiT
from accel_train.domains.text import modes
from accel_train.domains.text.corpus import DEMO_FILE
from accel_train.domains.text.dataset import DataAssets, TextLatentDataset, statistics
from accel_train.domains.text.latents.files import read_latents, write_latents
from accel_train.domains.text.lengths import LengthEstimate
from accel_train.domains.text.tokenizer import train_tokenizer
from recipes import mmdit as recipe

CPU = torch.device("cpu")
BUCKETED = LoaderConfig(num_workers=0, bucket_by_length=True)
GLOBAL_BATCH = 22
LONGEST = 40
# Python 3.12 and later warn of any fork in a process with threads
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


# --------------------------------------------------------------------------------------------------------- the cut
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20), st.integers(0, 30))
def test_every_cut_holds_the_global_batch_and_pads_all_ranks_alike(batch, world_size, micro_batch_size, step):
    world_size = min(world_size, batch)
    sampler = StepSampler(70, batch, seed=0)
    lengths = [1 + (7 * n) % 37 for n in range(70)]
    buckets = Buckets(lengths.__getitem__, (16, 24, 40))
    ranks = [
        buckets.micro_batches(sampler.draws(step), BatchShard(r, world_size, micro_batch_size))
        for r in range(world_size)
    ]
    plain = [sampler.micro_batches(step, r, world_size, micro_batch_size) for r in range(world_size)]
    pieces = [draws for rank in ranks for draws, _ in rank]
    assert Counter(d for draws in pieces for d in draws if d.weight) == Counter(sampler.draws(step))
    assert [[len(draws) for draws, _ in rank] for rank in ranks] == [[len(draws) for draws in rank] for rank in plain]
    assert sum(d.weight == 0 for draws in pieces for d in draws) == -batch % world_size
    padded = [[length for _, length in rank] for rank in ranks]
    assert all(each == padded[0] for each in padded)
    assert padded[0] == sorted(padded[0], reverse=True)
    for number, length in enumerate(padded[0]):
        longest = max(lengths[d.sample] for rank in ranks for d in rank[number][0])
        assert length == min(shape for shape in buckets.shapes if shape >= longest)
    tokens = [sum(lengths[d.sample] for draws, _ in rank for d in draws) for rank in ranks]
    assert max(tokens) - min(tokens) <= max(lengths)  # no rank gets all the long ones


def test_equal_lengths_keep_the_order_of_positions():
    sampler = StepSampler(40, 8, seed=0)
    [(first, _), (second, _)] = Buckets(lambda _: 5, (8,)).micro_batches(sampler.draws(2), BatchShard(0, 1, 4))
    assert first + second == sampler.draws(2)


# ------------------------------------------------------------------------------------------------------ the lengths
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(1, 12), st.integers(0, 9), min_size=1), st.integers(1, 6))
def test_shapes_pad_least(needed, count):
    def padding(shapes: tuple[int, ...]) -> int:
        return sum(samples * min(s for s in shapes if s >= length) for length, samples in needed.items())

    chosen = choose_shapes(needed, count)
    assert len(chosen) <= count
    assert chosen[-1] == max(needed)
    assert set(chosen) <= set(needed)
    others = [length for length in needed if length != max(needed)]
    possible = (
        (*some, max(needed)) for size in range(min(count, len(needed))) for some in itertools.combinations(others, size)
    )
    assert padding(chosen) == min(padding(shapes) for shapes in possible)


class Lengths:
    """Sample n has n + 1 tokens; its one field is padded to 60."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"text": (torch.arange(60) <= index).long(), "other": torch.tensor(index)}

    def length(self, index: int) -> int:
        return index + 1

    def trim(self, batch: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
        return {**batch, "text": batch["text"][:, :length].contiguous()}


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_lengths_are_few_multiples_of_8_and_the_share_of_padding_is_told(count):
    sampler, cut = StepSampler(60, 16, seed=1), BatchShard(1, 2, 2)
    buckets, choice = resolve_buckets(Lengths(), sampler, cut, count)
    assert len(buckets.shapes) <= count
    assert all(shape % 8 == 0 for shape in buckets.shapes)
    assert buckets.shapes[-1] == 64  # 60 tokens and more come in some step, if not in the first
    steps = range(64)
    padded = [p for step in steps for _, p in buckets.micro_batches(sampler.draws(step), cut)]
    assert f"{sum(padded) / len(padded) / 64:.0%} of 64 on average" in choice
    assert resolve_buckets(Lengths(), sampler, cut._replace(rank=0), count)[0].shapes == buckets.shapes


def test_more_shapes_never_pad_more():
    shares = [
        int(
            resolve_buckets(Lengths(), StepSampler(60, 16, seed=1), BatchShard(0, 1, 4), n)[1].split("%")[0].split()[-1]
        )
        for n in (1, 2, 4)
    ]
    assert shares[0] == 100
    assert shares[2] < shares[1] < shares[0]


def test_one_micro_batch_per_step_is_still_cut_to_the_longest_of_the_step():
    [batch] = next(iterate(Lengths(), BatchShard(0, 1, 8), BUCKETED, batch=8)).micro_batches
    longest = max(draw.sample for draw in StepSampler(60, 8, seed=3).draws(0)) + 1
    assert longest <= batch["text"].shape[1] < longest + 16
    assert batch["text"].is_contiguous()
    assert torch.equal(batch["text"].sum(-1), batch["sample"] + 1)  # not one token is lost


def test_what_was_chosen_is_printed(caplog):
    with caplog.at_level(logging.INFO, "accel_train.data.loader"):
        next(iterate(Lengths(), BatchShard(0, 1, 2), BUCKETED, batch=8))
    assert "bucket_by_length, padded to" in caplog.text
    assert "of 64 on average" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_shapes": 3}, ["loader.bucket_shapes: 3", "give --loader.bucket_by_length"]),
        (
            {"bucket_by_length": True},
            ["loader.bucket_by_length=True: Subset does not know", "length(index)", "to False"],
        ),
    ],
)
def test_options_are_obeyed_or_refused(options, words):
    with pytest.raises(UsageError) as error:
        iterate(Subset(Lengths(), range(60)), BatchShard(0, 1, 4), LoaderConfig(**options))
    assert all(word in str(error.value) for word in words), str(error.value)


# ------------------------------------------------------------------------------------- the recipe's data and model
@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextLatentDataset:
    """Texts of 1 to 40 tokens with latents of two tokens."""
    lines = DEMO_FILE.read_text().splitlines()[:60]
    lines = [" ".join(line.split()[: 1 + i % 9]) for i, line in enumerate(lines)]
    folder: Path = tmp_path_factory.mktemp("latents")
    write_latents(folder, lines, np.random.default_rng(0).standard_normal((60, 2, 6)).astype(np.float32))
    table = read_latents(folder, [(0, i) for i in range(60)])
    tokenizer, (mean, std) = train_tokenizer(lines, 300), statistics(table)
    assets = DataAssets(tokenizer, None, LONGEST, mean, std, LengthEstimate(torch.zeros(9), 2.0, 1.0, 3, 20), 2)
    return TextLatentDataset(lines, tokenizer.tokenise(lines, LONGEST), table, assets, "f")


def iterate(
    dataset, cut: BatchShard, config: LoaderConfig, *, batch: int = GLOBAL_BATCH, start: int = 0, stop: int = 3
):
    sampler = StepSampler(60, batch, seed=3)
    return iterate_steps(dataset, sampler, cut, start_step=start, max_steps=stop, device=CPU, config=config)


def gradients(dataset: TextLatentDataset, world_size: int, config: LoaderConfig, step: int) -> tuple[Tensor, ...]:
    """Loss and gradient of one global batch as the recipe has it, weights in fp64, the ranks one after another."""
    experiment = recipe.Config(max_steps=5, global_batch_size=GLOBAL_BATCH, seed=11)
    ranks = [next(iterate(dataset, BatchShard(r, world_size, 4), config, start=step)) for r in range(world_size)]
    corrupted = [
        recipe.corrupt(experiment, batch, step, GLOBAL_BATCH, 1) for rank in ranks for batch in rank.micro_batches
    ]
    weights = {name: torch.cat([w[name].double() for _, w in corrupted]).sum() for name in corrupted[0][1]}
    assert float(weights["latent"]) == GLOBAL_BATCH
    coefficients = modes.coefficients(experiment.modes, modes.mode_of_step(experiment.modes, experiment.seed, step))
    torch.manual_seed(0)
    shape = ModelConfig(width=32, depth=2, heads=2).multimodal(300, LONGEST, (2, 6))
    model = MultimodalMMDiT(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.double()
    loss = torch.zeros((), dtype=torch.float64)
    for inputs, _ in corrupted:
        wide = {k: v.double() if v.is_floating_point() and "time" not in k else v for k, v in inputs.items()}
        sums = recipe.loss_sums(experiment, model, wide, mask_id=1)
        loss = loss + torch.stack([sums[k].double().sum() * coefficients[k] / weights[k] for k in coefficients]).sum()
    loss.backward()
    tokens = torch.stack([torch.as_tensor(flops.work(shape, rank.micro_batches)["tokens"]) for rank in ranks]).sum()
    return loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), tokens


@pytest.mark.parametrize("step", [0, 1, 2])
def test_loss_and_gradient_are_those_of_the_plain_cut(texts: TextLatentDataset, step: int) -> None:
    expected = gradients(texts, 1, LoaderConfig(num_workers=0), step)
    assert float(expected[0]) > 0.1
    for world_size in (1, 2, 3):
        found = gradients(texts, world_size, BUCKETED, step)
        for one, other in zip(found, expected, strict=True):
            # the times' embedding and the losses are computed in fp32 whatever the weights are
            torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6 * float(other.abs().max()))


def test_noise_of_a_token_does_not_depend_on_the_length_of_its_batch(texts: TextLatentDataset) -> None:
    experiment = recipe.Config(max_steps=5, global_batch_size=GLOBAL_BATCH)

    def seen(config: LoaderConfig) -> dict[int, tuple[list[int], list[float], float, float]]:
        found = {}
        for batch in next(iterate(texts, BatchShard(0, 1, 4), config, start=1)).micro_batches:
            noisy, _ = recipe.corrupt(experiment, batch, 1, GLOBAL_BATCH, 1)
            for i, n in enumerate(batch["text_mask"].sum(-1).tolist()):
                times = float(noisy["text_time"][i]), float(noisy["latent_time"][i])
                latent = noisy["noisy_latent"][i].flatten().tolist()
                found[int(batch["occurrence"][i])] = (noisy["noisy_tokens"][i, :n].tolist(), latent, *times)
        return found

    assert seen(BUCKETED) == seen(LoaderConfig(num_workers=0))


def shapes(steps: list[StepBatches]) -> list[list[int]]:
    return [[batch["tokens"].shape[1] for batch in step.micro_batches] for step in steps]


def test_the_padding_goes_and_the_rest_stays(texts: TextLatentDataset) -> None:
    plain = list(iterate(texts, BatchShard(0, 1, 4), LoaderConfig(num_workers=0)))
    steps = list(iterate(texts, BatchShard(0, 1, 4), BUCKETED))
    assert len({length for step in shapes(steps) for length in step}) <= 4
    assert sum(map(sum, shapes(steps))) < 0.7 * sum(map(sum, shapes(plain)))
    for a, b in zip(plain, steps, strict=True):
        rows = [
            {
                int(n): {k: v[i] for k, v in batch.items()}
                for batch in s.micro_batches
                for i, n in enumerate(batch["position"])
            }
            for s in (a, b)
        ]
        assert rows[0].keys() == rows[1].keys() == set(range(GLOBAL_BATCH))
        for position, row in rows[0].items():
            for name, value in rows[1][position].items():
                kept = row[name][: len(value)] if name in TextLatentDataset.PADDED else row[name]
                assert torch.equal(value, kept)
            assert not row["text_mask"][len(rows[1][position]["tokens"]) :].any()


def test_workers_and_a_resumed_run_give_the_same(texts: TextLatentDataset) -> None:
    cut = BatchShard(1, 2, 3)
    whole = list(iterate(texts, cut, BUCKETED, stop=4))
    with_workers = LoaderConfig(num_workers=2, bucket_by_length=True)
    for others, expected in (
        (list(iterate(texts, cut, with_workers, stop=4)), whole),
        (list(iterate(texts, cut, BUCKETED, start=2, stop=4)), whole[2:]),
        (list(iterate(texts, cut, with_workers, start=3, stop=4)), whole[3:]),
    ):
        assert [s.step for s in others] == [s.step for s in expected]
        for a, b in zip(others, expected, strict=True):
            for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
                assert x.keys() == y.keys()
                assert all(torch.equal(x[name], y[name]) for name in x)
