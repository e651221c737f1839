"""Groups, fused AdamW, learning rate and freezing against torch.optim.AdamW used by hand."""

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from accel_train.config import UsageError
from accel_train.training.optimizers import (
    OptimizerConfig,
    build_optimizer,
    set_frozen,
    set_learning_rate,
)

CPU = torch.device("cpu")


class CustomRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 8))


class GPT2Conv1D(nn.Module):
    """A matrix held by a leaf module of a type that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.zeros(8))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.custom_norm = CustomRMSNorm()
        self.attention = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 8)
        self.projection = GPT2Conv1D()
        self.modulation = nn.Parameter(torch.zeros(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), x, x)[0]
        x = self.up(x * self.custom_norm.scale) @ self.projection.weight + self.projection.bias
        return x * (1 + self.modulation[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, 8))
        self.embed = nn.Embedding(16, 8)
        self.patch = nn.Conv1d(8, 8, 1)
        self.text = Block()
        self.text_head = nn.Linear(8, 16)
        self.latent = Block()
        self.untrained = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.patch((self.embed(tokens) + self.positions).transpose(1, 2)).transpose(1, 2)
        return self.text_head(self.latent(self.text(x)))


def block_names(prefix: str) -> tuple[set[str], set[str]]:
    decay = {"attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "projection.weight"}
    every = {name for name, _ in Block().named_parameters()}
    return {f"{prefix}.{n}" for n in decay}, {f"{prefix}.{n}" for n in every - decay}


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return {g["name"]: [names[id(p)] for p in g["params"]] for g in optimizer.param_groups}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, factor: float | None = None) -> None:
    tokens = torch.arange(8).reshape(2, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        if factor is not None:
            set_learning_rate(optimizer, factor)
        optimizer.step()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_groups_by_module_type(model):
    optimizer, reason = build_optimizer(model, OptimizerConfig(weight_decay=0.3), CPU)
    groups = group_names(model, optimizer)
    text, latent = block_names("text"), block_names("latent")
    assert list(groups) == ["decay", "no_decay"]
    assert set(groups["decay"]) == {"patch.weight", "text_head.weight"} | text[0] | latent[0]
    bare = {"positions", "embed.weight", "patch.bias", "text_head.bias"}
    assert set(groups["no_decay"]) == bare | text[1] | latent[1]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert all(g["base_lr"] == 1e-4 for g in optimizer.param_groups)
    assert "no_decay 20 tensors (424 values)" in reason


def test_order_is_that_of_the_model(model):
    optimizer, _ = build_optimizer(model, OptimizerConfig(), CPU, {"text": ["text_head", "text"]})
    order = [name for name, _ in model.named_parameters()]
    for members in group_names(model, optimizer).values():
        assert members == sorted(members, key=order.index)


def test_a_matrix_shared_with_an_embedding_does_not_decay(model):
    model.text_head.weight = model.embed.weight
    optimizer, _ = build_optimizer(model, OptimizerConfig(), CPU)
    groups = group_names(model, optimizer)
    assert "embed.weight" in groups["no_decay"]
    assert sum("embed.weight" in members or "text_head.weight" in members for members in groups.values()) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_equals_torch_adamw(model, fused):
    torch.manual_seed(0)
    reference = Model()
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5, fused=fused)
    optimizer, _ = build_optimizer(model, config, CPU)
    decayed = set(group_names(model, optimizer)["decay"])
    trainable = {n: p for n, p in reference.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for n, p in trainable.items() if n in decayed], "weight_decay": 0.5},
        {"params": [p for n, p in trainable.items() if n not in decayed], "weight_decay": 0.0},
    ]
    by_hand = torch.optim.AdamW(groups, lr=0.25e-2, betas=(0.8, 0.9), eps=1e-6, fused=fused)
    train(model, optimizer, 10, factor=0.25)
    train(reference, by_hand, 10)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(model.text_head.weight, Model().text_head.weight)


@pytest.mark.parametrize(("fused", "reason"), [("auto", "auto: cpu has it"), (True, "asked for")])
def test_fused_on_cpu(model, fused, reason):
    optimizer, line = build_optimizer(model, OptimizerConfig(fused=fused), CPU)
    assert optimizer.defaults["fused"] is True
    assert reason in line


def test_fused_where_there_is_none(model):
    meta = torch.device("meta")
    optimizer, line = build_optimizer(model, OptimizerConfig(), meta)
    assert not optimizer.defaults["fused"]
    assert "no fused AdamW on meta" in line
    with pytest.raises(UsageError, match=r"fused=True: .* on meta.*cuda.*Set fused to auto or False"):
        build_optimizer(model, OptimizerConfig(fused=True), meta)
    model.spectral = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    optimizer, line = build_optimizer(model, OptimizerConfig(), CPU)
    assert not optimizer.defaults["fused"]
    assert "complex64" in line
    with pytest.raises(UsageError, match="complex64"):
        build_optimizer(model, OptimizerConfig(fused=True), CPU)


def test_frozen_part_stays_and_the_rest_trains(model):
    config = OptimizerConfig(lr=1e-2, weight_decay=0.5)
    optimizer, _ = build_optimizer(model, config, CPU, {"text": ["text", "text_head"], "latent": ["latent"]})
    text, latent = block_names("text"), block_names("latent")
    groups = group_names(model, optimizer)
    assert set(groups["text/decay"]) == text[0] | {"text_head.weight"}
    assert set(groups["latent/no_decay"]) == latent[1]
    set_frozen(optimizer, ["text"])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, 3, factor=1.0)
    unchanged = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    frozen = text[0] | text[1] | {"text_head.weight", "text_head.bias"}
    assert unchanged == frozen | {"untrained.weight", "untrained.bias"}
    assert all(p.requires_grad for n, p in model.named_parameters() if n in frozen)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert optimizer.state[model.text.up.weight]["exp_avg"].abs().sum() > 0


def test_release_restores_decay_and_rate(model):
    optimizer, _ = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.5), CPU, {"text": ["text"]})
    fresh = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    set_frozen(optimizer, {"text"})
    set_learning_rate(optimizer, 0.5)
    rates = {g["name"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert rates["text/decay"] == rates["text/no_decay"] == (0.0, 0.0)
    assert rates["decay"] == (0.005, 0.5)
    set_frozen(optimizer, ())
    set_learning_rate(optimizer, 1.0)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == fresh


def test_unknown_and_overlapping_parts(model):
    optimizer, _ = build_optimizer(model, OptimizerConfig(), CPU, {"text": ["text"]})
    with pytest.raises(UsageError, match=r"\['image'\] is no freezable part.*\['text'\]"):
        set_frozen(optimizer, ["image"])
    with pytest.raises(ValueError, match="no trainable parameter is under 'tex'"):
        build_optimizer(model, OptimizerConfig(), CPU, {"text": ["tex"]})
    with pytest.raises(ValueError, match=r"'text.up.weight' is in both 'a' and 'b'"):
        build_optimizer(model, OptimizerConfig(), CPU, {"a": ["text.up"], "b": ["text.up.weight"]})


def test_nothing_to_train(model):
    with pytest.raises(UsageError, match="no trainable parameter"):
        build_optimizer(model.requires_grad_(False), OptimizerConfig(), CPU)


@pytest.mark.parametrize(
    "values",
    [
        *({"lr": value} for value in (0.0, -1.0, math.nan, math.inf)),
        *({"betas": value} for value in ((0.9, 1.0), (-0.1, 0.9), (0.9,), (math.nan, 0.9))),
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"weight_decay": math.inf},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": math.nan},
        {"fused": "yes please"},
    ],
)
def test_values_that_config_refuses(values):
    with pytest.raises(ValidationError):
        TypeAdapter(OptimizerConfig).validate_python(values)
    assert TypeAdapter(OptimizerConfig).validate_python({"lr": 1e-3, "betas": [0.9, 0.99]}).lr == 1e-3
