"""Every mode computes the same numbers from fewer kept bytes, for any model with a list of blocks."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from accel_train import rng
from accel_train.config import UsageError
from accel_train.domains.models.mmdit import MMDiTBlock, MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.models.token_blocks import BlockShape, ModulatedBlock
from accel_train.domains.pde.tokens import DecoderLayer, DecoderShape
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.blocks import blocks_of
from accel_train.speed.options import ActivationCheckpointingConfig
from tests.speed.checkpointing import MODES, PARTIAL, config_of

ROOT = Path(__file__).parents[2]


def build() -> MultimodalMMDiT:
    torch.manual_seed(0)
    model = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=3, heads=4), 50, 6, 8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(step: int = 0) -> dict[str, Tensor]:
    """Noise keyed by (seed, step, sample), as in training."""
    keys = rng.sample_keys(0, "test", step, torch.arange(4))
    tokens = (rng.uniform(keys, (8,)) * 50).long()
    times = rng.uniform(keys, (2,))
    mask = torch.arange(8) < torch.tensor([[8], [5], [1], [3]])
    return {
        "tokens": tokens,
        "latents": rng.normal(keys, (3, 6)),
        "text_time": times[:, 0],
        "latent_time": times[:, 1],
        "text_mask": mask,
    }


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    output = model(**batch(step))
    return output.text_logits.square().mean() + output.latents.square().mean()


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_bytes(model: nn.Module) -> int:
    """What autograd's own hooks see: inputs of checkpointed parts, and all that is kept of the others."""
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        total[0] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model)
    return total[0]


def applied(mode: Any) -> MultimodalMMDiT:
    model = build()
    apply_activation_checkpointing(model, config_of(mode))
    return model


# Called twice, a block finds its weights cast already: autocast keeps them until its end.
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_bitwise_those_of_no_checkpointing(mode: str, autocast: bool, calls: int) -> None:
    reference, model = build(), applied(mode)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [sum((loss_of(each, step) for step in range(calls)), torch.zeros(())) for each in (reference, model)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(expected.grad, found.grad), name


@pytest.mark.parametrize("mode", MODES)
def test_trainings_are_bitwise_equal(mode: str) -> None:
    assert train(applied(mode)) == train(build())


@pytest.mark.parametrize("mode", MODES)
def test_parameters_keep_their_names_and_order(mode: str) -> None:
    model, reference = applied(mode), build()
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in reference.named_modules()]
    model.load_state_dict(reference.state_dict())


def test_less_is_kept_the_more_is_computed_again() -> None:
    kept = {mode: saved_bytes(applied(mode)) for mode in MODES}
    assert kept["full"] < kept[PARTIAL] < kept["none"]
    assert kept["full"] < min(kept["attention"], kept["ffn"])
    assert max(kept["attention"], kept["ffn"]) < kept["none"]
    assert kept["full"] < 0.2 * kept["none"]
    by_blocks: list[int] = []
    for blocks in (1, 2, 3):
        model = build()
        apply_activation_checkpointing(model, ActivationCheckpointingConfig("full", blocks))
        by_blocks.append(saved_bytes(model))
    steps = [one - other for one, other in zip([kept["none"], *by_blocks], by_blocks, strict=False)]
    assert steps[0] == steps[1] == steps[2] > 0, "the blocks are alike"
    assert by_blocks[-1] == kept["full"]


def test_a_number_of_blocks_is_obeyed_or_refused() -> None:
    model = build()
    notice = apply_activation_checkpointing(model, ActivationCheckpointingConfig("full", blocks=2))
    # The first: the backward begins with the last one, at the peak of memory.
    assert ["forward" in vars(block) for block in blocks_of(model)] == [True, True, False]
    assert "2 of 3 blocks" in notice
    with pytest.raises(UsageError, match=r"blocks: 4: MultimodalMMDiT has 3 blocks \(MMDiTBlock\); give 1 to 3"):
        apply_activation_checkpointing(build(), ActivationCheckpointingConfig("full", blocks=4))
    with pytest.raises(UsageError, match=r"blocks: 2: has no effect with activation_checkpointing\.mode: none"):
        ActivationCheckpointingConfig(blocks=2)


class Counter(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] = self.counts.get(func.name(), 0) + 1
        return func(*args, **(kwargs or {}))


def counts_of(model: nn.Module) -> dict[str, int]:
    with Counter() as counter:
        loss_of(model).backward()
    return counter.counts


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def test_selective_computes_all_again_but_products_and_attention() -> None:
    none, selective, full = (counts_of(applied(mode)) for mode in ("none", "selective", "full"))
    for operator in ("aten::mm", "aten::addmm", ATTENTION):
        assert selective.get(operator) == none.get(operator), operator
    assert full[ATTENTION] == 2 * none[ATTENTION]
    assert full["aten::mm"] > none["aten::mm"]
    for operator in ("aten::gelu", "aten::native_layer_norm"):
        assert selective[operator] > none[operator]


class Products(nn.Module):
    """A block with every product of matrices of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        x = (rows @ self.weight).view_as(x) + torch.addmm(rows, rows, self.weight).view_as(x)
        batched = self.weight.expand(len(x), 4, 4)
        return (torch.bmm(x, batched) + torch.baddbmm(x, x, batched)).tanh()


def test_selective_keeps_every_product() -> None:
    def counted(mode: Any) -> dict[str, int]:
        blocks = nn.ModuleList(Products() for _ in range(2))
        apply_activation_checkpointing(nn.ModuleDict({"blocks": blocks}), ActivationCheckpointingConfig(mode))
        with Counter() as counter:
            blocks[1](blocks[0](torch.randn(2, 3, 4))).sum().backward()
        return counter.counts

    none, selective, full = (counted(mode) for mode in ("none", "selective", "full"))
    for operator in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
        assert selective[operator] == none[operator] < full[operator], operator
    assert selective["aten::tanh"] == 2 * none["aten::tanh"]


def test_a_part_alone_is_computed_again() -> None:
    none, attention, ffn = (counts_of(applied(mode)) for mode in ("none", "attention", "ffn"))
    assert (attention[ATTENTION], ffn[ATTENTION]) == (2 * none[ATTENTION], none[ATTENTION])
    assert attention["aten::gelu"] == none["aten::gelu"]
    assert ffn["aten::gelu"] > none["aten::gelu"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_nothing_is_computed_again_without_gradients(mode: str) -> None:
    model, reference = applied(mode), build()
    with torch.no_grad():
        with Counter() as counter:
            found = loss_of(model)
        with Counter() as plain:
            expected = loss_of(reference)
    assert torch.equal(found, expected)
    assert counter.counts == plain.counts


@pytest.mark.parametrize("mode", ["full", "attention", "selective"])
def test_copies_are_checkpointed_and_their_own(mode: str) -> None:
    model = applied(mode)
    expected = loss_of(model)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1.0)
    assert not torch.equal(loss_of(again), expected)
    assert torch.equal(loss_of(model), expected)
    assert saved_bytes(again) == saved_bytes(model) < saved_bytes(build())
    assert torch.equal(loss_of(pickle.loads(pickle.dumps(model))), expected)


def test_attention_is_computed_again_by_the_same_kernel() -> None:
    """A context around the forward is gone when the backward computes again: the model's own kernel is not."""
    from accel_train.speed.attention.kernels import build_attention
    from accel_train.speed.attention.selection import apply_attention

    model = applied("full")
    apply_attention(model, build_attention("sdpa_math"))
    assert not any("flash" in operator for operator in counts_of(model))
    other = applied("full")
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(other)
    with pytest.raises(CheckpointError):  # what the first lines avoid
        loss.backward()


# ------------------------------------------------------------------------------------------------ models of others
class Noisy(nn.Module):
    """A block that draws, so that computing it again could give other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.dropout(torch.tanh(self.linear(x)))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers = nn.ModuleList(Noisy() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


@pytest.mark.parametrize("mode", ["none", "full", PARTIAL, "selective"])
def test_any_model_with_a_list_of_blocks_and_dropout_is_repeated_exactly(mode: Any) -> None:
    gradients: list[list[Tensor]] = []
    for chosen in ("none", mode):
        torch.manual_seed(0)
        model = Stack()
        notice = apply_activation_checkpointing(model, config_of(chosen))
        model(torch.randn(5, 8)).square().sum().backward()
        gradients.append([p.grad for layer in model.layers for p in layer.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 6
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert mode == "none" or notice.endswith(f"{'1 of 3' if mode == PARTIAL else '3 of 3'} blocks (Noisy)")


def test_blocks_are_found() -> None:
    assert all(isinstance(block, MMDiTBlock) for block in blocks_of(build()))
    assert len(blocks_of(build())) == 3
    assert blocks_of(nn.ModuleDict({"inner": build()})) != []  # a model inside another
    stack = Stack()
    assert blocks_of(stack) == list(stack.layers)  # the list with most parameters

    class Named(nn.Module):
        _repeated_blocks: ClassVar[list[str]] = ["Linear"]

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    named = Named()
    assert blocks_of(named) == [named.first, named.second]
    with pytest.raises(UsageError, match="Linear: has no list of blocks"):
        blocks_of(nn.Linear(2, 2))


def test_blocks_of_several_classes_are_all_named() -> None:
    class Wide(nn.Linear):
        pass

    class Mixed(nn.Sequential):
        _no_split_modules = ("Linear", "Wide")

    model = Mixed(nn.Linear(2, 2), Wide(2, 2), Wide(2, 2))
    with pytest.raises(UsageError, match=r"Mixed has 3 blocks \(1 Linear, 2 Wide\); give 1 to 3"):
        apply_activation_checkpointing(model, ActivationCheckpointingConfig("full", 4))
    notice = apply_activation_checkpointing(model, ActivationCheckpointingConfig("full", 2))
    assert notice == "activation checkpointing: full, 2 of 3 blocks (1 Linear, 1 Wide)"


def test_a_transformer_of_another_library() -> None:
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    torch.manual_seed(0)
    shape = {"sample_size": 4, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
    shape |= {"num_attention_heads": 2, "joint_attention_dim": 8, "caption_projection_dim": 16}
    model = SD3Transformer2DModel(**shape, pooled_projection_dim=8, out_channels=4, pos_embed_max_size=4)
    inputs = (torch.randn(2, 4, 4, 4), torch.randn(2, 3, 8), torch.randn(2, 8), torch.rand(2))
    losses: list[Tensor] = []
    for mode in ("none", "full"):
        notice = apply_activation_checkpointing(model, ActivationCheckpointingConfig(mode))  # type: ignore[arg-type]
        losses.append(model(*inputs).sample.square().sum())
        losses[-1].backward()
    assert notice.endswith("2 of 2 blocks (JointTransformerBlock)")
    assert torch.equal(*losses)


# ---------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("mode", ["attention", "ffn"])
def test_a_part_that_no_block_names_is_refused(mode: Any) -> None:
    with pytest.raises(UsageError, match=f"mode {mode}: the blocks of Stack do not name this part.*checkpoint_parts"):
        apply_activation_checkpointing(Stack(), ActivationCheckpointingConfig(mode))


def test_twice_and_after_compilation_are_refused() -> None:
    model = applied("full")
    with pytest.raises(UsageError, match="already checkpointed"):
        apply_activation_checkpointing(model, ActivationCheckpointingConfig("selective"))
    model = build()
    blocks_of(model)[0].compile(backend="eager")
    with pytest.raises(UsageError, match="Apply checkpointing first"):
        apply_activation_checkpointing(model, ActivationCheckpointingConfig("full"))


COMPILED = """
import copy, sys, torch
from accel_train.domains.models import mmdit
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.options import ActivationCheckpointingConfig
from accel_train.speed.compile import apply_compile
from accel_train.speed.options import CompileConfig

torch.manual_seed(0)
shape = mmdit.MultimodalMMDiTConfig(mmdit.MMDiTConfig(width=64, depth=2, heads=2), 300, 64, 32, 1)
plain = mmdit.MultimodalMMDiT(shape)
for parameter in plain.parameters():  # gates are zero at the start, and attention without effect
    parameter.data.add_(torch.randn_like(parameter) * 0.02)
compiled = copy.deepcopy(plain)
apply_activation_checkpointing(compiled, ActivationCheckpointingConfig(mode=sys.argv[1]))
apply_compile(compiled, CompileConfig(mode="on"), torch.device("cpu"))
time, mask = torch.rand(4), torch.arange(32) < torch.tensor([[32], [20], [7], [32]])
inputs = torch.randint(0, 300, (4, 32)), torch.randn(4, 1, 64), time, time.flip(0), mask
for model in (plain, compiled):
    output = model(*inputs)
    (output.text_logits.logsumexp(-1).sum() + output.latents.square().sum()).backward()
pairs = [(a.grad, b.grad) for a, b in zip(plain.parameters(), compiled.parameters())]
print(max(float((a - b).norm() / a.norm().clamp(min=1e-3)) for a, b in pairs))
"""


def test_no_block_of_this_project_works_in_place() -> None:
    """What torch warns of when such a block is checkpointed and compiled, and why the warning is dropped for them."""
    width, tokens, one = 32, torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 32)
    shape = DecoderShape(latent_width=width, width=width, head_width=16, layers=1, octaves=2)
    calls: list[tuple[nn.Module, tuple[Any, ...]]] = [
        (MMDiTBlock(MMDiTConfig(width=width, heads=2)), ([tokens, tokens], one, None)),
        (ModulatedBlock(BlockShape(width, 16, width)), (tokens, one, torch.rand(2))),
        (DecoderLayer(shape), (tokens, tokens)),
    ]
    files = (ROOT / "accel_train" / "domains").rglob("*.py")
    assert {type(block).__name__ for block, _ in calls} == {name for path in files for name in named_blocks(path)}
    with Counter() as torchs:  # it adds its epsilon to a mean of its own
        torch.nn.functional.rms_norm(tokens, (width,))
    with Counter() as counter:
        for block, arguments in calls:
            block(*arguments)
    assert "aten::mm" in counter.counts
    in_place = {name for name in counter.counts if name.split(".")[0].endswith("_")}
    assert in_place <= torchs.counts.keys()


def named_blocks(path: Path) -> list[str]:
    """Classes in `_no_split_modules` of a file."""
    found = re.findall(r"_no_split_modules: ClassVar\[list\[str\]\] = \[(.*)\]", path.read_text())
    return [name.strip(' "') for line in found for name in line.split(",")]


def test_the_warning_stays_for_blocks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    monkeypatch.setattr(logger, "filters", [])
    apply_activation_checkpointing(Stack(), ActivationCheckpointingConfig("full"))
    assert not logger.filters
    applied("full")
    applied("selective")
    (check,) = logger.filters
    text = "\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\nPlease make sure ..."
    record = partial(logging.LogRecord, logger.name, logging.WARNING, "", 0)
    assert not check(record(text, (), None))
    assert check(record("anything else", (), None))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "attention"])
def test_compiled_blocks_compute_attention_on_the_memory_it_was_given(mode: str, tmp_path: Path) -> None:
    """torch 2.13 recomputes the CPU kernel on tensors of a layout that it cannot read, and nothing says so. What it
    reads beside them is whatever was there; here the allocator fills it, so that it shows every time."""
    environment = os.environ | {"MALLOC_PERTURB_": "1", "OMP_NUM_THREADS": "1"}
    (tmp_path / "program.py").write_text(COMPILED)
    command = [sys.executable, str(tmp_path / "program.py"), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4
    assert "context_fn" not in done.stderr


# ------------------------------------------------------------------------------------------ models of other libraries
@pytest.mark.parametrize("kind", ["llama", "gpt", "sd3", "unet"])
def test_blocks_of_other_libraries_are_recomputed_once_with_the_same_gradients(kind: Any) -> None:
    from tests.distributed import foreign_models

    torch.manual_seed(0)
    model = foreign_models.MODELS[kind]().train()
    batch = foreign_models.few(foreign_models.rows(kind))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(foreign_models.losses(model, kind, batch).sum(), parameters)

    expected = gradients()
    blocks = blocks_of(model)
    inner = [module for block in blocks for module in block.modules() if list(module.parameters(recurse=False))]
    runs: list[nn.Module] = []
    for module in inner:
        module.register_forward_hook(lambda module, *_: runs.append(module))
    apply_activation_checkpointing(model, ActivationCheckpointingConfig("full"))
    found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # A block within a block would be recomputed again in each recomputation of the outer one.
    assert max(runs.count(module) for module in set(inner)) == 2
    names = {type(block).__name__ for block in blocks}
    assert kind != "unet" or names == {"BasicTransformerBlock", "ResnetBlock2D", "CrossAttnUpBlock2D"}
