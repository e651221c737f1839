"""Norms by part of the model, against torch's own norms of the same gradients, updates and weights."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from accel_train.metrics.details.by_part import MOST_PARTS, PartNorms, parts_of
from accel_train.training.accumulation import GradientWindow
from accel_train.training.shards import Shards
from tests.distributed.launching import Layout, run_recipe


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        nn.init.zeros_(self.unused.weight)
        nn.init.zeros_(self.unused.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@pytest.mark.parametrize("by", ["parts", "blocks"])
def test_gradients_and_updates_are_those_of_torch(accelerator: Accelerator, by: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = PartNorms(accelerator, Shards(model, optimizer), by, ratios=True)
    norms.before()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs = {"x": torch.randn(8, 6)}
    window = GradientWindow(accelerator, model, [(inputs, torch.tensor(8.0))], {"main": 1.0}, 0)
    for batch in window:
        window.backward(model(batch["x"]).square().sum())
    result = window.finish(0.05)  # clips
    optimizer.step()
    optimizer.zero_grad()
    fields = norms.take(result, float(result.grad_norm))

    model.zero_grad()
    with torch.no_grad():
        after = {name: p.clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    (model(inputs["x"]).square().sum() / 8).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    parts = ["embed", "blocks", "head"] if by == "parts" else ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    for part in parts:
        names = [name for name in before if name.startswith(f"{part}.")]
        assert fields[f"grad_norm_{part}"] == pytest.approx(norm([gradients[name] for name in names]), rel=1e-5)
        ratio = norm([after[name] - before[name] for name in names]) / norm([before[name] for name in names])
        assert fields[f"update_ratio_{part}"] == pytest.approx(ratio, rel=1e-5)
    assert fields["grad_norm_unused"] == 0.0  # without a gradient
    assert "update_ratio_unused" not in fields  # weights of 0
    expected = {f"{kind}_{part}" for kind in ("grad_norm", "update_ratio") for part in parts}
    assert set(fields) == expected | {"grad_norm_unused"}
    assert set(norms.take(result, 1.0)) == {f"grad_norm_{part}" for part in [*parts, "unused"]}, "no weights were kept"


def test_parts_are_named_by_their_modules() -> None:
    language = [f"model.layers.{n}.{part}.weight" for n in range(3) for part in ("attention.q", "mlp.up")]
    names = [*language, "model.embed_tokens.weight", "lm_head.weight"]
    found = parts_of(names, blocks=False)
    assert set(found.values()) == {"model.layers", "model.embed_tokens", "lm_head"}
    found = parts_of(names, blocks=True)
    assert set(found.values()) == {f"model.layers.{n}" for n in range(3)} | {"model.embed_tokens", "lm_head"}
    adapters = [f"base.model.blocks.{n}.to_q.lora_A.weight" for n in range(2)]
    assert set(parts_of(adapters, blocks=False).values()) == {"blocks"}
    many = [f"a.part{n}.x.weight" for n in range(40)] + ["b.y.weight", "scale"]
    assert set(parts_of(many, blocks=False).values()) == {"a", "b", "scale"}
    assert len(set(parts_of([f"a.part{n}.x.weight" for n in range(MOST_PARTS)], blocks=False).values())) == MOST_PARTS


@pytest.mark.slow  # tests/distributed/test_invariance.py compares them under FSDP2 every day
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_they_are_the_same_under_any_strategy(strategy: str, tmp_path: Path) -> None:
    flags = ("--max_steps", "3", "--log.log_every", "1", "--log.update_ratios", "true")
    one = run_recipe(Layout("single", 1), tmp_path / "one" / "run", *flags).train_lines()
    two = run_recipe(Layout(strategy, 2), tmp_path / "two" / "run", *flags).train_lines()
    for step, line in one.items():
        norms = {name: value for name, value in line.items() if name.startswith(("grad_norm_", "update_ratio_"))}
        assert len(norms) >= 10
        if strategy == "zero2":  # its engine keeps the gradients
            norms = {name: value for name, value in norms.items() if name.startswith("update_ratio_")}
        found = {name: value for name, value in two[step].items() if name.startswith(("grad_norm_", "update_ratio_"))}
        # The first updates of Adam are those of rounding where a gradient is nearly 0.
        assert found == pytest.approx(norms, rel=1e-3, abs=1e-6)
        parts = [value for name, value in norms.items() if name.startswith("grad_norm_")]
        if parts:
            assert math.sqrt(sum(value**2 for value in parts)) == pytest.approx(line["grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("by", "kind", "model", "reason"),
    [
        ("blocks", DistributedType.DEEPSPEED, Net(), "DeepSpeed's engine keeps the gradients to itself"),
        ("blocks", DistributedType.NO, nn.Sequential(nn.Linear(2, 2)), "the model has one part"),
        ("blocks", DistributedType.NO, Net(), None),
        ("parts", DistributedType.DEEPSPEED, Net(), None),
    ],
)
def test_blocks_without_norms_are_named(by: Any, kind: DistributedType, model: nn.Module, reason: str | None) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=kind)
    shards: Any = SimpleNamespace(parameters=dict(model.named_parameters()))
    found = PartNorms(accelerator, shards, by, ratios=False)
    assert found.notices == ([f"log.grad_norms: blocks: no norms by part, because {reason}"] if reason else [])
