"""Bytes by category, against sums by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.training.ema import Ema, EmaConfig, OptimizerAverage
from accel_train.training.memory.description import described
from accel_train.training.memory.held import Held, count, held, held_gradients
from accel_train.training.optimizer_classes.offload import HostAdamW
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard

CPU = torch.device("cpu")
WIDTH = 8
MATRIX = 4 * WIDTH * WIDTH
"""Bytes of a matrix in fp32."""


class Toy(nn.Module):
    """Two layers with one matrix, a frozen one in bf16, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.one.weight
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.tied(self.one(x)).bfloat16()).float()


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def build(kind: Any = torch.optim.AdamW, decay: float = 0.9, **options: Any) -> tuple[nn.Module, Any, Ema]:
    model = Toy()
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
    return model, optimizer, Ema(EmaConfig(decay), Shards(model, optimizer))


def test_each_category_is_its_closed_form() -> None:
    model, optimizer, ema = build()
    fixed = {"weights": MATRIX, "frozen_weights": MATRIX // 2, "buffers": 4 * WIDTH}
    assert held(ema, CPU).device == fixed | {"ema": MATRIX}
    backward(model)
    assert held(ema, CPU).device == fixed | {"gradients": MATRIX, "ema": MATRIX}
    assert held_gradients(ema.shards, CPU).device == {"gradients": MATRIX}
    optimizer.step()
    optimizer.zero_grad()
    after = held(ema, CPU)
    assert after.device == fixed | {"optimizer_state": 2 * MATRIX + 4, "ema": MATRIX}
    assert after.total == sum(after.device.values())
    assert after.host == {}


def test_without_an_ema_there_is_none() -> None:
    assert "ema" not in held(build(decay=0.0)[2], CPU).device


def test_an_average_that_is_computed_on_demand_is_not_computed_for_its_size() -> None:
    model = Toy()
    optimizer = torch.optim.AdamW([model.one.weight])  # it could not even be asked for one
    average = OptimizerAverage(EmaConfig(0.0), Shards(model, optimizer), StepGuard(), optimizer)
    average._averages = {"one.weight": torch.zeros(WIDTH, WIDTH)}
    average.update(0)
    assert held(average, CPU).device["ema"] == MATRIX


def test_what_is_offloaded_is_apart() -> None:
    model, optimizer, ema = build(HostAdamW, betas=(0.9, 0.95), eps=1e-8)
    backward(model)
    optimizer.step()
    # Copies of weight and gradient, two moments and a count of steps.
    assert held(ema, CPU).device["optimizer_state"] == 4 * MATRIX + 4
    elsewhere = held(ema, torch.device("cuda"))
    assert elsewhere.device == {}
    assert elsewhere.host["optimizer_state"] == 4 * MATRIX + 4
    mixed = count({"a": [torch.zeros(4), torch.zeros(2, device="meta")]}, torch.device("meta"))
    assert (mixed.device, mixed.host) == ({"a": 8}, {"a": 16})


def test_a_storage_counts_once_and_whole_in_the_first_category() -> None:
    flat = torch.zeros(10)
    views = {"a": [flat[:4], flat[2:6]], "b": [flat[8:], torch.zeros(3)], "c": [torch.zeros(0)]}
    assert count(views, CPU).device == {"a": 40, "b": 12}


def test_the_scales_of_a_four_bit_weight_count() -> None:
    model, _, ema = build()
    inner = SimpleNamespace(absmax=torch.zeros(2), code=torch.zeros(16), state2=None)
    scales = SimpleNamespace(absmax=torch.zeros(5, dtype=torch.uint8), blocksize=64, state2=inner)
    model.frozen.weight.quant_state = scales  # type: ignore[union-attr]
    assert held(ema, CPU).device["frozen_weights"] == MATRIX // 2 + 5 + 8 + 64


def test_the_larger_of_two_counts() -> None:
    one = Held({"gradients": 4, "ema": 1}, {"gradients": 2})
    one.raise_to(Held({"gradients": 3, "weights": 7}, {"gradients": 9}))
    assert one == Held({"gradients": 4, "ema": 1, "weights": 7}, {"gradients": 9})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"held_bytes": {"weights": 2_100_000_000, "optimizer_state": 4200}}, "weights 2.1 GB, optimizer state 4.2 kB"),
        (
            {"held_bytes": {"ema": 5}, "host_bytes": {"gradients": 7}, "peak_bytes": 9, "micro_batch_size": 3},
            "ema 5 B; in host memory gradients 7 B; peak 9 B",
        ),
        ({"held_bytes": "nothing", "host_bytes": {"ema": "x"}}, ""),
    ],
)
def test_the_memory_in_words(fields: dict[str, Any], text: str) -> None:
    assert described(fields) == text
