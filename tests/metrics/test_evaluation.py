"""Held-out sums on one process: what they add up to, and what an evaluation leaves as it was."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.heldout import heldout_batches, heldout_pairs, pairs_of_a_kind, partners_of, size_notices
from accel_train.loop import heldout_means
from accel_train.metrics.evaluation import (
    EvaluationStopped,
    evaluating,
    first_samples,
    stoppable,
    stopping_point,
    weighted_sums,
)
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.shards import Shards

CPU = torch.device("cpu")


class Drawn:
    """Sample i draws with all three generators, as an augmentation may."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {"x": torch.tensor([index + random.random(), np.random.random(), float(torch.rand(()))])}


def sums_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"x": (batch["x"] * batch["weight"].unsqueeze(1)).sum(0), "samples": batch["weight"].sum()}


def total(accelerator: Accelerator, batch_size: int, world_size: int) -> dict[str, Tensor]:
    parts = [heldout_batches(Drawn(), 23, batch_size, rank, world_size, CPU) for rank in range(world_size)]
    return weighted_sums(accelerator, (batch for part in parts for batch in part), sums_of)


@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 1), (23, 1), (64, 1), (1, 3), (7, 2)])
def test_sums_are_those_of_every_sample_once(accelerator: Accelerator, batch_size: int, world_size: int) -> None:
    torch.manual_seed(batch_size)  # what another part of a program did before
    (whole,) = heldout_batches(Drawn(), 23, 23, 0, 1, CPU)
    found = total(accelerator, batch_size, world_size)
    assert found["samples"] == 23
    assert found["x"].dtype == torch.float64
    torch.testing.assert_close(found["x"], whole["x"].double().sum(0), rtol=1e-7, atol=0)


@pytest.mark.parametrize("shape", [(), (5, 1), (1,)])
def test_a_heldout_metric_without_a_value_for_each_sample_is_refused(
    accelerator: Accelerator, shape: tuple[int, ...]
) -> None:
    """A mean would count padding, and (B, 1) times the weights (B,) every sample B times."""
    model = nn.Linear(3, 1)
    prepared: Any = SimpleNamespace(accelerator=accelerator, model=model, ema=ema_of(accelerator, model))
    found = heldout_means(prepared, Drawn(), 5, lambda model, batch: {"loss": model(batch["x"])[:, 0].square()})
    assert found == {"heldout_loss": pytest.approx(whole_mean(model), rel=1e-6)}
    with pytest.raises(UsageError, match=rf"metrics_of: 'loss' has shape {re.escape(str(shape))}, and one .* 5 samp"):
        heldout_means(prepared, Drawn(), 5, lambda model, batch: {"loss": torch.ones(shape)})
    with pytest.raises(UsageError, match="metrics_of: 'samples' counts the samples"):
        heldout_means(prepared, Drawn(), 5, lambda model, batch: {"samples": batch["weight"]})


def ema_of(accelerator: Accelerator, model: nn.Module) -> Ema:
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return Ema(EmaConfig(0.0), Shards(model, optimizer))


def whole_mean(model: nn.Module) -> float:
    (whole,) = heldout_batches(Drawn(), 23, 23, 0, 1, CPU)
    with torch.no_grad():
        return float(model(whole["x"]).square().mean())


def test_an_evaluation_leaves_the_random_states_alone() -> None:
    states = random.getstate(), torch.get_rng_state()
    list(heldout_batches(Drawn(), 23, 4, 0, 1, CPU))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_sums_are_exact_where_fp32_would_lose_them(accelerator: Accelerator) -> None:
    values = [torch.tensor(2.0**25), *[torch.tensor(1.0)] * 40]
    assert float(weighted_sums(accelerator, values, lambda v: {"v": v})["v"]) == 2.0**25 + 40


def test_nothing_to_evaluate_is_an_error(accelerator: Accelerator) -> None:
    with pytest.raises(UsageError, match="no batch to evaluate"):
        weighted_sums(accelerator, list[Tensor](), lambda v: {"v": v})
    batches = heldout_batches([], 0, 4, 0, 1, CPU)
    with pytest.raises(UsageError, match=r"held-out set: it has 0 samples, .* check its path, split and filters"):
        weighted_sums(accelerator, batches, lambda batch: {"v": batch["weight"].sum()})
    with pytest.raises(UsageError, match="held-out set: it has 2 samples, an evaluation of 0 is asked for"):
        next(heldout_pairs([{"x": torch.zeros(1)}] * 2, 0, 4, 0, 1, CPU))


@pytest.mark.parametrize(
    ("kinds", "same"),
    [("abcdefg", 0), ("abcdabcdabcd", 0), ("aabb", 0), ("abac", 0), ("aab", 1), ("aaaaab", 4), ("aaa", 3), ("a", 1)],
)
def test_a_partner_is_of_another_kind_where_there_is_one(kinds: str, same: int) -> None:
    partners = partners_of(kinds)
    assert sorted(partners) == list(range(len(kinds)))
    assert len(kinds) == 1 or all(index != partner for index, partner in enumerate(partners))
    assert pairs_of_a_kind(kinds) == same == max(0, 2 * max(map(kinds.count, kinds)) - len(kinds))


@pytest.mark.parametrize("count", [2, 7, 512])
def test_partners_of_different_kinds_are_half_of_the_samples_away(count: int) -> None:
    assert partners_of([f"text {index}" for index in range(count)]) == [
        (index + count // 2) % count for index in range(count)
    ]


class Classes(Drawn):
    """Four classes, of which each third sample is the first."""

    def kind(self, index: int, /) -> int:
        return index % 3 and index % 4


@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 1), (3, 2)])
def test_pairs_of_classes_are_those_of_different_ones(batch_size: int, world_size: int) -> None:
    data = Classes()
    for rank in range(world_size):
        for batch, shuffled in heldout_pairs(data, 20, batch_size, rank, world_size, CPU):
            pairs = zip(batch["sample"].tolist(), shuffled["sample"].tolist(), strict=True)
            assert all(data.kind(one) != data.kind(other) for one, other in pairs)


def test_no_sample_is_shown_twice(accelerator: Accelerator) -> None:
    assert first_samples(accelerator, Drawn(), 30)["sample"].tolist() == list(range(23))
    assert first_samples(accelerator, Drawn(), 4)["sample"].tolist() == [0, 1, 2, 3]


def test_options_of_more_samples_than_are_held_out_are_named() -> None:
    asked = {"evaluation.samples": 512, "evaluation.shown": 6}
    assert size_notices(asked, 512) == []
    assert size_notices(asked, 11) == ["--evaluation.samples 512: 11 samples are held out, and all of them are used"]
    (line,) = size_notices(asked, 4)
    assert line.startswith("--evaluation.samples 512 and --evaluation.shown 6: 4 samples are held out")


def test_modes_weights_and_gradients_come_back() -> None:
    linear, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model = nn.Sequential(linear, nn.Dropout(0.9), norm)
    norm.eval()  # frozen by its owner

    def master(_: str) -> Tensor:
        return linear.weight.data

    def show(tensors: dict[str, Tensor]) -> None:
        linear.weight.data.copy_(tensors["weight"])

    view: Any = SimpleNamespace(
        parameters=["weight"], optimizer=None, master=master, show=show, agree_on_buffers=lambda: None
    )
    average = Ema(EmaConfig(), view)
    average.averages["weight"].zero_()
    before = linear.weight.detach().clone()
    with evaluating(model, average):
        assert not any(module.training for module in model.modules())
        assert not linear.weight.any()
        assert not model(torch.ones(3, 2)).requires_grad
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert torch.equal(linear.weight, before)
    assert torch.is_grad_enabled()


def test_the_evaluation_of_a_run_within_another_leaves_its_stop_alone() -> None:
    with stoppable(lambda: True):
        with stoppable(lambda: False):
            stopping_point()
        with pytest.raises(EvaluationStopped):
            stopping_point()
    stopping_point()
