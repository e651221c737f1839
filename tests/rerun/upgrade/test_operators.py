"""The record of a step: every operator with its module, that of a backward too, and no uninitialised memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accel_train.rerun.upgrade import operators
from accel_train.rerun.upgrade.operators import Recorder


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(4, 8)
        self.project = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x)))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def record(model: nn.Module, keep: int | None = None) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Record a step of AdamW with fixed weights and inputs."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.linspace(-1, 1, 12).view(3, 4)
    recorder = Recorder(keep)
    hooks = [hook for name, module in model.named_modules() for hook in recorder.hook(module, name)]
    with recorder:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return recorder.finish(), recorder.kept


def places(records: list[dict[str, Any]], operator: str) -> list[tuple[str, str]]:
    return [(one["module"], one["backward"]) for one in records if one["operator"] == operator]


def test_operators_have_their_modules_in_the_forward_and_in_the_backward() -> None:
    records, _ = record(Model())
    assert places(records, "aten.gelu.default") == [("blocks.0", ""), ("blocks.1", "")]
    assert places(records, "aten.gelu_backward.default") == [
        ("blocks.1", "GeluBackward0"),
        ("blocks.0", "GeluBackward0"),
    ]
    linear = [f"blocks.{block}.{part}" for block in (0, 1) for part in ("expand", "project")]
    assert [module for module, _ in places(records, "aten.addmm.default")] == linear
    modules = [module for module, node in places(records, "aten.mm.default") if node]
    assert list(dict.fromkeys(modules)) == linear[::-1]
    gelu = next(one for one in records if one["operator"] == "aten.gelu.default")
    assert gelu["caller"].startswith(f"{__name__}:")
    assert gelu["caller"].endswith(" in forward")
    assert [value["tensor"] for value in gelu["inputs"]] == ["float32[3, 8]"]
    # The optimizer is no module, and writes to the weights.
    names = [one["operator"] for one in records]
    assert names[-1].startswith(("aten._foreach_", "aten.addcdiv_", "aten._fused_adamw"))
    assert records[-1]["module"] == ""


def test_a_forward_again_of_activation_checkpointing_has_its_modules() -> None:
    records, _ = record(Model(checkpointed=True))
    # Forward, and again in the backward: the last block first.
    assert places(records, "aten.gelu.default") == [(f"blocks.{n}", "") for n in (0, 1, 1, 0)]
    assert places(records, "aten.gelu_backward.default") == [
        ("blocks.1", "GeluBackward0"),
        ("blocks.0", "GeluBackward0"),
    ]


def test_two_recordings_are_the_same_and_uninitialised_memory_is_in_neither() -> None:
    records, _ = record(Model())
    assert record(Model())[0] == records
    names = {one["operator"] for one in records}
    assert not [name for name in names if "empty" in name or "view" in name or name == "aten.t.default"]
    assert all(value["hash"] is not None for one in records for value in one["outputs"])


def test_the_outputs_of_one_operator_are_kept_as_they_were() -> None:
    records, _ = record(Model())
    position = next(n for n, one in enumerate(records) if one["operator"] == "aten.gelu.default")
    _, kept = record(Model(), keep=position)
    model = Model()
    record_inputs = torch.linspace(-1, 1, 12).view(3, 4)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))
        expand = model.get_submodule("blocks.0.expand")
        assert torch.equal(kept["0"], F.gelu(expand(record_inputs)))


def test_what_an_operator_writes_to_is_its_output() -> None:
    weight = torch.ones(3)
    with Recorder() as recorder:
        torch._foreach_add_([weight, weight[:2]], 1.0)  # pyright: ignore[reportPrivateUsage]
        weight.mul_(2)
    added, multiplied = recorder.finish()
    assert [value["tensor"] for value in added["outputs"]] == ["float32[3]", "float32[2]"]
    assert (added["inputs"], added["arguments"]) == ([], {"scalar": "1.0"})
    assert len(multiplied["outputs"]) == 1


def test_parts_of_tensors_are_found_and_described() -> None:
    a, b = torch.ones(2), torch.zeros(1, dtype=torch.int64)
    assert [id(one) for one in operators.tensors_of({"x": [a, (b,)], "y": 3})] == [id(a), id(b)]
    assert operators.text([a, 1.5, None]) == "[float32[2], 1.5, None]"
    assert operators.text(torch.Generator()) == "Generator"
