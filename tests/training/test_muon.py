"""Muon against torch.optim.Muon, which parameters it takes, and its state in a checkpoint. One process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn

from accel_train.checkpoints import restore
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.checkpoints.saver import Saver
from accel_train.config import UsageError, as_written
from accel_train.domains.models.mmdit import ModelConfig, MultimodalMMDiT
from accel_train.hub.options import HubConfig
from accel_train.store import atomic_files, commit, manifest
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.optimizer_classes import muon
from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_frozen, set_learning_rate
from accel_train.training.shards import Shards

CPU = torch.device("cpu")
SHAPES = [(7, 20), (20, 7), (16, 16), (1, 9), (33, 32)]


def newton_schulz_fp64(grad: Tensor, coefficients: tuple[float, ...], steps: int, eps: float) -> Tensor:
    """torch's own formula in fp64, with torch's signature."""
    a, b, c = coefficients
    x = grad.double()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Block(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
        self.adaln = nn.Linear(width, width)
        self.gates = nn.Parameter(torch.ones(2, width))
        self.lora_head = nn.Linear(width, width)
        self.relative_embedding = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) * self.gates[0] + self.adaln(x)
        y = self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.tanh(self.up(y))) * self.gates[1] + self.lora_head(self.relative_embedding(y))


class Model(nn.Module):
    def __init__(self, width: int = 8, wide: int = 20) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, width), nn.ModuleList(Block(width, wide) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


HIDDEN = {"attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "down.weight"}


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return {g["name"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, 4, generator=generator), torch.randn(6, 5, 3, generator=generator)


def train(
    model: nn.Module, optimizer: Any, steps: range, then: Callable[[int], None] = lambda step: None
) -> list[float]:
    losses: list[float] = []
    for step in steps:
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        then(step)
    return losses


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_against_fp64(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    untouched = matrix.clone()
    found = muon.orthogonalise(matrix)
    expected = newton_schulz_fp64(matrix, muon.COEFFICIENTS, muon.STEPS, muon.EPS)
    assert (found.shape, found.dtype) == (matrix.shape, torch.float32)
    assert torch.allclose(found.double(), expected, rtol=0, atol=2e-5)
    assert torch.equal(matrix, untouched)


def test_singular_values_become_about_one() -> None:
    u, _, v = torch.linalg.svd(torch.randn(24, 24, generator=torch.Generator().manual_seed(2)))
    matrix = u @ torch.diag(torch.logspace(-1.5, 1, 24)) @ v
    values = torch.linalg.svdvals(muon.orthogonalise(matrix))
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    assert torch.equal(muon.orthogonalise(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equals_torch_muon(precision: Any, nesterov: bool, adjust: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 is torch's optimizer to the bit; fp32 is it with Newton-Schulz in fp64, up to rounding."""
    if precision == "fp32":
        monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz_fp64)
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(s, generator=generator) for s in SHAPES]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    reference = torch.optim.Muon(
        theirs, lr=0.05, weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust
    )
    settings = {"momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust, "precision": precision, "muon": True}
    group = {"params": ours, "lr": 0.05, "weight_decay": 0.3, **settings}
    optimizer = muon.MuonAdamW([group], betas=(0.9, 0.95), eps=1e-8, fused=True)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b, at in zip(ours, theirs, start, strict=True):
        momentum = optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"]
        assert torch.equal(*momentum)
        assert not torch.allclose(a, at, atol=0.05)
        assert torch.equal(a, b) if precision == "bf16" else torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_rest_is_torch_adamw(model: Model) -> None:
    torch.manual_seed(0)
    reference = Model()
    config = OptimizerConfig(name="muon", lr=1e-2, betas=(0.8, 0.9), weight_decay=0.5, muon_lr=1e-9)
    optimizer, line = build_optimizer(model, config, CPU)
    assert "Muon (Newton-Schulz in fp32) and AdamW, fused" in line
    rest = group_names(model, optimizer)
    frozen = [p for n, p in reference.named_parameters() if n in rest["muon"]]
    trainable = {n: p for n, p in reference.named_parameters() if n not in rest["muon"]}
    groups = [
        {"params": [p for n, p in trainable.items() if n in rest["decay"]], "weight_decay": 0.5},
        {"params": [p for n, p in trainable.items() if n in rest["no_decay"]], "weight_decay": 0.0},
    ]
    by_hand = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), fused=True)
    for step in range(3):
        for one in (model, reference):
            x, y = batch(step)
            (one(x) - y).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad
        optimizer.step()
        by_hand.step()
        optimizer.zero_grad()
    assert all(p.grad is not None for p in frozen)
    found = dict(model.named_parameters())
    assert all(torch.equal(found[n], p) for n, p in trainable.items())


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_rows_of_ranks_are_those_of_chunk(world: int) -> None:
    """As FSDP2 shards: the last ranks may have fewer rows, or none."""
    for rows in range(1, 12):
        sizes = [len(chunk) for chunk in torch.arange(rows).chunk(world)]
        assert muon._rows_of_ranks(rows, world) == sizes + [0] * (world - len(sizes))


def test_hidden_matrices_only(model: Model) -> None:
    optimizer, _ = build_optimizer(model, OptimizerConfig(name="muon"), CPU)
    groups = group_names(model, optimizer)
    assert groups["muon"] == {f"blocks.{i}.{name}" for i in range(2) for name in HIDDEN}
    kept = {"adaln.weight", "lora_head.weight", "relative_embedding.weight"}
    assert groups["decay"] == {"embed.weight", "head.weight"} | {f"blocks.{i}.{n}" for i in range(2) for n in kept}
    assert "blocks.0.gates" in groups["no_decay"]


def test_a_list_of_one_module_is_no_row_of_blocks(model: Model) -> None:
    model.single = nn.ModuleList([nn.Linear(8, 8)])
    groups = group_names(model, build_optimizer(model, OptimizerConfig(name="muon"), CPU)[0])
    assert "single.0.weight" in groups["decay"]


def test_what_it_takes_of_an_mmdit() -> None:
    """Blocks are those that FSDP2 shards; modulation, conditioning, embeddings and heads stay with AdamW."""
    shape = ModelConfig(width=8, depth=2, heads=2).multimodal(16, 4, (1, 6))
    model = MultimodalMMDiT(shape)
    names = group_names(model, build_optimizer(model, OptimizerConfig(name="muon"), CPU)[0])["muon"]
    ends = ("qkv.weight", "out.weight", "ffn.expand.weight", "ffn.project.weight")
    expected = {f"transformer.blocks.{b}.streams.{s}.{end}" for b in range(2) for s in range(2) for end in ends}
    assert names == expected


def test_a_matrix_shared_with_the_embedding_stays_with_adamw(model: Model) -> None:
    model.blocks[0].up = nn.Linear(8, 8)
    model.tokens = nn.Embedding(8, 8)
    model.blocks[0].up.weight = model.tokens.weight
    groups = group_names(model, build_optimizer(model, OptimizerConfig(name="muon"), CPU)[0])
    assert "blocks.0.up.weight" in groups["no_decay"]


def test_own_rates_decay_and_parts(model: Model) -> None:
    config = OptimizerConfig(name="muon", lr=1e-3, weight_decay=0.1, muon_lr=0.02, muon_weight_decay=0.3)
    optimizer, _ = build_optimizer(model, config, CPU, {"first": ["blocks.0"]})
    rates = {g["name"]: (g["base_lr"], g["base_weight_decay"]) for g in optimizer.param_groups}
    assert rates["muon"] == rates["first/muon"] == (0.02, 0.3)
    assert rates["decay"] == (1e-3, 0.1)
    assert rates["first/no_decay"] == (1e-3, 0.0)
    set_learning_rate(optimizer, 0.5)
    assert {g["name"]: g["lr"] for g in optimizer.param_groups}["muon"] == 0.01
    same, _ = build_optimizer(model, OptimizerConfig(name="muon", lr=1e-3, weight_decay=0.1), CPU)
    (matrices,) = (g for g in same.param_groups if g["muon"])
    assert (matrices["lr"], matrices["weight_decay"]) == (1e-3, 0.1)
    assert (matrices["momentum"], matrices["nesterov"], matrices["precision"]) == (0.95, True, "fp32")
    assert matrices["adjust_lr_fn"] == "match_rms_adamw"


def test_a_zero_that_is_given_is_no_default(model: Model) -> None:
    config = OptimizerConfig(
        name="muon", weight_decay=0.1, muon_weight_decay=0.0, muon_momentum=0.0, muon_nesterov=False
    )
    optimizer, _ = build_optimizer(model, config, CPU)
    (matrices,) = (g for g in optimizer.param_groups if g["muon"])
    assert (matrices["weight_decay"], matrices["momentum"], matrices["nesterov"]) == (0.0, 0.0, False)


def test_frozen_matrices_stay_and_their_momentum_goes_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.5)
    optimizer, _ = build_optimizer(model, config, CPU, {"first": ["blocks.0"]})
    set_frozen(optimizer, ["first"])
    set_learning_rate(optimizer, 1.0)
    seen: list[tuple[int, ...]] = []
    real = muon.orthogonalise
    monkeypatch.setattr(muon, "orthogonalise", lambda m, d: seen.append(m.shape) or real(m, d))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, range(3))
    unchanged = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert unchanged == {n for n, _ in model.named_parameters() if n.startswith("blocks.0.")}
    assert len(seen) == 3 * len(HIDDEN)  # nothing is spent on frozen matrices
    frozen = model.blocks[0].up.weight
    assert optimizer.state[frozen]["momentum_buffer"].abs().sum() > 0
    set_frozen(optimizer, ())
    set_learning_rate(optimizer, 1.0)
    train(model, optimizer, range(3, 4))
    assert not torch.equal(frozen, before["blocks.0.up.weight"])


def test_models_and_options_that_do_not_fit(model: Model) -> None:
    with pytest.raises(
        UsageError, match=r"optimizer\.name: muon: Linear has no trainable 2-D matrix inside its blocks"
    ):
        build_optimizer(nn.Linear(4, 4), OptimizerConfig(name="muon"), CPU)
    for options in ({"muon_lr": 0.1}, {"muon_nesterov": False}, {"muon_precision": "bf16"}, {"muon_momentum": 0.0}):
        name, value = next(iter(options.items()))
        with pytest.raises(
            UsageError, match=rf"optimizer\.{name}: {as_written(value)}: has no effect with optimizer\.name: adamw"
        ):
            OptimizerConfig(**options)
        OptimizerConfig(name="muon", **options)


def test_a_flattened_matrix_is_refused() -> None:
    """What ZeRO would hand over, if nothing had refused it before."""
    settings = {"momentum": 0.9, "nesterov": True, "adjust_lr_fn": "original", "precision": "fp32", "muon": True}
    flat = nn.Parameter(torch.ones(12))
    optimizer = muon.MuonAdamW(
        [{"params": [flat], "lr": 0.1, "weight_decay": 0.0, **settings}], betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    flat.grad = torch.ones(12)
    with pytest.raises(ValueError, match=r"whole 2-D matrices, this has shape \(12,\)"):
        optimizer.step()


def test_training_works(model: Model) -> None:
    torch.manual_seed(0)
    other = Model()
    losses = train(model, build_optimizer(model, OptimizerConfig(name="muon", lr=3e-3), CPU)[0], range(40))
    adamw = train(other, build_optimizer(other, OptimizerConfig(lr=3e-3), CPU)[0], range(40))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert losses != adamw


class Prepared:
    """A model and its optimizer as a recipe has them, with a run to save into."""

    def __init__(self, out: Path, seed: int, name: Any) -> None:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(seed)
        model = Model()
        optimizer, _ = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2), CPU)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average = Ema(EmaConfig(0.5), Shards(self.model, self.optimizer))
        self.run = Run(out, "toy", None, "", {"experiment": {"global_batch_size": 4}, "resolved": {}})
        self.run.checkpoints.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json_in_place(out / "run.json", {})

    def train(self, steps: range, saver: Saver | None = None) -> list[float]:
        def after(step: int) -> None:
            self.average.update(step)
            if saver is not None and step == 4:
                saver.save(5)

        return train(self.model, self.optimizer, steps, after)

    def resume(self, saved: manifest.Checkpoint) -> int:
        run = replace(self.run, checkpoint=saved)
        return restore.restore(run, self.accelerator, self.average.shards, self.average)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[manifest.Checkpoint, list[float]]]:
    """A checkpoint of a Muon run after 5 steps, and the losses of the 5 after it."""
    first = Prepared(tmp_path / "run", 0, "muon")
    saver = Saver(
        first.accelerator,
        first.run,
        first.average,
        CheckpointConfig(),
        HubConfig(),
        lambda folder: (folder / "config.json").write_text("{}") and None,
        epoch=lambda step: 0.0,
    )
    with saver:
        losses = first.train(range(10), saver)
    yield commit.verify(first.run.checkpoints / "checkpoint_00000005"), losses[5:]
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def test_state_in_a_checkpoint_is_listed_by_who_has_it(saved: Any, tmp_path: Path) -> None:
    checkpoint, losses = saved
    state = json.loads((checkpoint.path / "optimizer" / "index.json").read_text())["state"]
    hidden = {f"blocks.{i}.{name}" for i in range(2) for name in HIDDEN}
    every = {n for n, _ in Model().named_parameters()}
    assert {key: set(names) for key, names in state.items()} == {
        "exp_avg": every - hidden,
        "exp_avg_sq": every - hidden,
        "momentum_buffer": hidden,
    }
    second = Prepared(tmp_path / "second", 1, "muon")
    assert second.resume(checkpoint) == 5
    assert [x.hex() for x in second.train(range(5, 10))] == [x.hex() for x in losses]


def test_another_optimizer_does_not_take_it(saved: Any, tmp_path: Path) -> None:
    other = Prepared(tmp_path / "other", 1, "adamw")
    with pytest.raises(
        UsageError, match=r"optimizer state \(momentum_buffer of .*\['exp_avg', 'exp_avg_sq'\].*init_from"
    ):
        other.resume(saved[0])
