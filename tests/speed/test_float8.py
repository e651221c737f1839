"""float8 layers: which, refused where, and wired in right. No GPU here: products are emulated by torchao in fp32.

So these are tests of the wiring and of the rounding, not of the kernels.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train import startup
from accel_train.config import UsageError
from accel_train.domains.models.layers import Float32Linear
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.speed import apply, float8
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.attention.table import AttentionNeeds
from accel_train.speed.compile import apply_compile
from accel_train.speed.float8 import apply_float8, gains, large_linears, refuse_float8
from accel_train.speed.options import ActivationCheckpointingConfig, CompileConfig
from accel_train.training.parameters import kinds
from recipes import mmdit
from tests.distributed.launching import ROOT, Finished, Layout, command, environment
from tests.speed.checkpointing import MODES, config_of
from tests.waiting import PATIENCE_SECONDS

CUDA = torch.device("cuda")
RECIPES = ("tensorwise", "rowwise")
pytestmark = pytest.mark.filterwarnings(  # torch's own, when it imports inductor, and when it traces
    "ignore:.*script_method:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)


# ------------------------------------------------------------------------------------------------------ which layers
def build(width: int = 384, depth: int = 2, **shape: Any) -> MultimodalMMDiT:
    torch.manual_seed(0)
    config = MMDiTConfig(width=width, depth=depth, heads=width // 64, **shape)
    model = MultimodalMMDiT(MultimodalMMDiTConfig(config, 2048, 16, 8, 3))
    with torch.no_grad():
        for parameter in model.parameters():  # gates are zero at the start, and most layers without effect
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def names_of(model: nn.Module, recipe: Any) -> list[str]:
    return [name.removeprefix("transformer.blocks.") for name in large_linears(model, recipe)]


def test_large_layers_of_the_blocks_are_chosen_and_nothing_else() -> None:
    """Not modulation (384 -> 2304), the head (384 -> 2048) or the times, which are in fp32; the others are small."""
    expected = [
        f"{block}.streams.{stream}.{part}" for block in "01" for stream in "01" for part in ("qkv", "ffn.expand")
    ]
    assert names_of(build(), "tensorwise") == expected
    assert names_of(build(), "rowwise") == []
    with torch.device("meta"):
        large = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=1536, depth=1, heads=24), 2048, 16, 8, 3))
    parts = {recipe: {name.split(".", 3)[3] for name in names_of(large, recipe)} for recipe in RECIPES}
    assert parts == {"tensorwise": {"qkv", "out", "ffn.expand", "ffn.project"}, "rowwise": {"qkv", "ffn.expand"}}


class Mlp(nn.Module):
    def __init__(self, inputs: int, hidden: int, special: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.expand, self.project = nn.Linear(inputs, hidden), nn.Linear(hidden, inputs)
        self.special = special(inputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(F.gelu(self.expand(x)) * torch.tanh(self.special(x)))


class Stack(nn.Module):
    """A model of someone else: blocks in a list, large layers before and behind them."""

    def __init__(self, *sizes: Any, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(sizes[0], sizes[0])
        self.blocks = nn.ModuleList(Mlp(*sizes) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_sides_are_multiples_of_sixteen_and_other_classes_are_left_alone() -> None:
    assert list(large_linears(Stack(32, 2048), "tensorwise")) == [
        f"blocks.{i}.{part}" for i in "01" for part in ("expand", "special")
    ]
    assert list(large_linears(Stack(32, 2048, Float32Linear), "tensorwise")) == ["blocks.0.expand", "blocks.1.expand"]
    assert not large_linears(Stack(40, 2048), "tensorwise")
    assert not large_linears(Stack(32, 2056), "tensorwise")


def test_the_rule_is_torchaos() -> None:
    ao = pytest.importorskip("torchao.float8")
    sides = (16, 24, 1008, 1024, 1040, 2048, 2064, 4096, 4104, 4112, 8192)
    for recipe in RECIPES:
        theirs = ao._auto_filter_for_recipe(recipe, [])
        for outputs, inputs in itertools.product(sides, sides):
            with torch.device("meta"):
                layer = nn.Linear(inputs, outputs)
            assert gains(recipe, outputs, inputs) == theirs(layer, "blocks.0.x"), (recipe, outputs, inputs)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- refused
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with an H100 and torchao; a test takes away what it is about."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: "NVIDIA L4")
    monkeypatch.setattr(float8, "version", lambda _name: "0.18.0")
    return monkeypatch


def missing(_name: str) -> str:
    raise PackageNotFoundError


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
@pytest.mark.usefixtures("gpu")
def test_what_can_be_obeyed_is_not_refused(strategy: str) -> None:
    for recipe in RECIPES:
        refuse_float8(recipe, CUDA, "bf16", strategy)  # type: ignore[arg-type]


def test_none_asks_for_nothing() -> None:
    refuse_float8("none", torch.device("cpu"), "fp32", "zero3")
    assert apply_float8(Stack(8, 8), "none") == "float8: none"


@pytest.mark.parametrize(
    ("recipe", "found", "says"),
    [
        (
            "tensorwise",
            (8, 6),
            r"^float8: tensorwise needs compute capability 8\.9, NVIDIA L4 has 8\.6; use --float8 none$",
        ),
        ("rowwise", (8, 6), r"^float8: rowwise needs compute capability 9\.0, NVIDIA L4 has 8\.6; use --float8 none$"),
        ("rowwise", (8, 9), r"needs compute capability 9\.0, NVIDIA L4 has 8\.9; .*none, --float8 tensorwise$"),
    ],
)
def test_a_device_without_the_units_is_refused(
    recipe: Any, found: tuple[int, int], says: str, gpu: pytest.MonkeyPatch
) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda _device: found)
    with pytest.raises(UsageError, match=says):
        refuse_float8(recipe, CUDA, "bf16", "single")


def test_a_tensorwise_card_is_enough_for_tensorwise(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    refuse_float8("tensorwise", CUDA, "bf16", "single")


@pytest.mark.parametrize(
    ("device", "precision", "strategy", "says"),
    [
        (
            "cpu",
            "bf16",
            "single",
            r"tensorwise needs an NVIDIA GPU of compute capability 8\.9, but the device is cpu; use --",
        ),
        ("mps", "bf16", "single", r"the device is mps"),
        ("cuda", "fp32", "single", r"tensorwise with precision fp32: .*use --precision bf16, or --float8 none"),
        ("cuda", "fp16", "single", r"with precision fp16"),
        ("cuda", "bf16", "zero1", r"runs under single, ddp, fsdp2, this is zero1: .*accelerate_configs/fsdp2\.yaml"),
        ("cuda", "bf16", "zero3", r"this is zero3"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_what_cannot_be_obeyed_is_refused(device: str, precision: str, strategy: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        refuse_float8("tensorwise", torch.device(device), precision, strategy)


def test_an_amd_gpu_is_refused(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UsageError, match="the device is an AMD GPU, on which it has never been run"):
        refuse_float8("rowwise", CUDA, "bf16", "single")


@pytest.mark.parametrize(
    ("version", "says"), [(missing, "it is not installed"), (lambda _: "0.15.0", r"0\.15\.0 is installed")]
)
def test_a_missing_package_is_refused(version: Callable[[str], str], says: str, gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(float8, "version", version)
    with pytest.raises(
        UsageError, match=rf"needs torchao 0\.16 or newer, and {says}; run pip install \"accel-train\[fl"
    ):
        refuse_float8("tensorwise", CUDA, "bf16", "single")


def test_a_package_that_does_not_fit_this_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match=r"with torch 2\.\S+ it cannot be imported \(.*pytorch/ao#2919"):
        apply_float8(Stack(32, 2048), "tensorwise")


@pytest.mark.parametrize(
    ("recipe", "sizes", "says"),
    [
        (
            "tensorwise",
            (64, 256),
            r"of 6 linear layers in the blocks of Stack the largest has 256 outputs and 64 inputs; ",
        ),
        (
            "tensorwise",
            (40, 2048),
            r"multiples of 16, with more than 1024 outputs or more than 4096 inputs\. Train in bf16",
        ),
        (
            "rowwise",
            (1024, 4096),
            r"more than 2048 outputs, more than 1024 inputs, and more than 4096 outputs or 2048 inputs",
        ),
    ],
)
def test_a_model_without_such_layers_is_refused(recipe: Any, sizes: tuple[int, int], says: str) -> None:
    with torch.device("meta"):
        model = Stack(*sizes)
    with pytest.raises(UsageError, match=says):
        apply_float8(model, recipe)


@pytest.mark.usefixtures("fresh")
def test_the_recipe_refuses_before_it_touches_data(tmp_path: Path) -> None:
    config = mmdit.Config(output_dir=str(tmp_path / "run"), max_steps=1, float8="tensorwise", precision="bf16")
    with pytest.raises(UsageError, match=r"^float8: tensorwise needs an NVIDIA GPU"):
        startup.start(config)


def test_speed_options_refuse_what_the_start_did_not_see() -> None:
    needs = AttentionNeeds(torch.device("cpu"), torch.bfloat16, 64, heads=6, length=11, batch=4)
    with pytest.raises(UsageError, match="float8: rowwise needs an NVIDIA GPU"):
        apply.apply_speed_options(build(), apply.SpeedOptions(float8="rowwise"), needs.device, "bf16", needs)


# ------------------------------------------------------------------------------------------------------------- wired
@pytest.fixture
def ao() -> Iterator[None]:
    """torchao, and options of torch as they were."""
    pytest.importorskip("torchao.float8")
    from torch._inductor import config

    with config.patch(emulate_precision_casts=False):
        yield


def emulated(model: nn.Module, recipe: Any = "tensorwise") -> nn.Module:
    """In float8 without a GPU. What CUDA's autocast does to the input of such a layer, a hook does here."""
    apply_float8(model, recipe, emulate=True)
    for name, layer in model.named_modules():
        if type(layer).__name__ == "Float8Linear":
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
            assert "blocks" in name
    return model


def batch(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "tokens": torch.randint(0, 2048, (rows, 8), generator=generator),
        "latents": torch.randn(rows, 3, 16, generator=generator),
        "text_time": torch.rand(rows, generator=generator),
        "latent_time": torch.rand(rows, generator=generator),
        "text_mask": torch.arange(8) < torch.tensor([8, 5, 1, 3] * rows)[:rows, None],
    }


def loss_of(model: nn.Module, **inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**(inputs or batch()))
    text = F.cross_entropy(output.text_logits.float().flatten(0, 1), batch()["tokens"].flatten())
    return text + output.latents.float().square().mean()


def train(model: nn.Module, steps: int = 8) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4)
    losses: list[float] = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("ao")
def test_parameters_are_the_same_objects_under_the_same_names() -> None:
    model, plain = build(), build()
    before = dict(model.named_parameters())
    modules = [name for name, _ in model.named_modules()]
    line = apply_float8(model, "tensorwise", emulate=True)
    assert line == "float8: tensorwise in 8 of 16 linear layers of the blocks, 58% of weights"
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert [name for name, _ in model.named_modules()] == modules
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    for muon in (False, True):  # weight decay and Muon choose as before
        both = [[kinds(m, muon=muon)[id(p)] for p in m.parameters()] for m in (model, plain)]
        assert both[0] == both[1]
    with pytest.raises(UsageError, match="finds no layer to work on: of 8 "):  # once only
        apply_float8(model, "tensorwise", emulate=True)


@pytest.mark.usefixtures("ao")
def test_training_follows_bf16() -> None:
    """Emulated: the wiring and the rounding, not the kernel. Losses fall by more than half in these steps.

    The difference grows to about 0.015 and stays there while the loss falls on: in more steps than these, two per cent
    of the loss would be less than what two kinds of CPU differ by.
    """
    expected, found = train(build(), steps=5), train(emulated(build()), steps=5)
    assert expected[-1] < 0.5 * expected[0]
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("ao")
def test_gradients_are_those_of_bf16_to_within_three_bits(recipe: Any) -> None:
    """e4m3 has 3 bits of fraction: values are off by up to 1/16, in the mean by about 1/40; three products in a row."""
    plain, model = Stack(1040, 4112, blocks=1), Stack(1040, 4112, blocks=1)
    emulated(model, recipe)
    x = torch.randn(20, 1040, generator=torch.Generator().manual_seed(1))
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x).float().square().mean()
        loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert (found.grad.dtype, found.grad.shape) == (torch.float32, expected.shape)
        error = float((found.grad - expected.grad).norm() / expected.grad.norm())
        assert 1e-4 < error < 0.12, (name, error)
    from torch._inductor import config

    assert config.emulate_precision_casts is (recipe == "rowwise")  # else NaN, some day (pytorch#150859)


@pytest.mark.parametrize(("recipe", "least", "most"), [("tensorwise", 1e-4, 1e-2), ("rowwise", 0.0, 1e-5)])
@pytest.mark.usefixtures("ao")
def test_the_cut_of_a_batch_matters_for_tensorwise_alone(recipe: Any, least: float, most: float) -> None:
    """In fp32 but for the float8 operands, so that nothing else rounds. Rows differ in size by a factor of 1000."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 1040, generator=generator) * torch.exp(2 * torch.randn(32, 1, generator=generator))
    gradients: list[Tensor] = []
    for parts in (1, 4):
        model = Stack(1040, 4112, blocks=1)
        apply_float8(model, recipe, emulate=True)
        for piece in x.chunk(parts):
            (model(piece).square().sum() / 32).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    assert least <= difference < most, difference


# Each of the slow ones recomputes a part of what the quick ones do.
@pytest.mark.parametrize(
    "mode", [m if m in ("full", "selective") else pytest.param(m, marks=pytest.mark.slow) for m in MODES[1:]]
)
@pytest.mark.usefixtures("ao")
def test_checkpointed_losses_and_gradients_are_bitwise_the_same(mode: Any) -> None:
    plain, model = emulated(build()), emulated(build())
    apply_activation_checkpointing(model, config_of(mode))
    for each in (plain, model):
        loss_of(each).backward()
    assert torch.equal(loss_of(plain), loss_of(model))
    for (name, expected), found in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(expected.grad, found[1].grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["none", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("ao")
def test_compiled_blocks_are_one_graph_and_train_alike(mode: Any) -> None:
    torch._dynamo.reset()
    plain, model = build(), build()
    for each in (plain, model):
        apply_float8(each, "tensorwise", emulate=True)
    apply_activation_checkpointing(model, config_of(mode))
    watch = apply_compile(model, CompileConfig("on"), torch.device("cpu"), backend="aot_eager")
    assert train(model, 3) == pytest.approx(train(plain, 3), rel=1e-3)
    assert (watch.graphs, watch.recompilations) == (1, 0)
    torch._dynamo.reset()


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 on a CPU has no product with scales of rows")
@pytest.mark.usefixtures("ao")
def test_any_number_of_rows_is_padded_for_the_kernels() -> None:
    """On a GPU the inner side of a product is a multiple of 16; in the weights' gradient it is the number of rows."""
    model = Stack(1040, 4112, blocks=1)
    apply_float8(model, "rowwise")
    assert model.blocks[0].expand.config.pad_inner_dim  # type: ignore[union-attr]
    assert not model.blocks[0].expand.config.emulate  # type: ignore[union-attr]
    sides: list[int] = []
    real = torch._scaled_mm

    def seen(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        sides.append(a.shape[1])
        return real(a, b, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", seen)
        model(torch.randn(10, 1040).bfloat16().float()).sum().backward()
    assert sides
    assert not [side for side in sides if side % 16]


@pytest.mark.usefixtures("ao", "gpu")
def test_speed_options_apply_it_and_say_that_it_wants_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "refuse_float8", lambda *_: None)
    needs = AttentionNeeds(torch.device("cpu"), torch.bfloat16, 64, heads=6, length=11, batch=4)
    for compilation, slow in ((CompileConfig(), True), (CompileConfig("on"), False)):
        model = build()
        options = apply.SpeedOptions("sdpa", ActivationCheckpointingConfig("full"), compilation, "tensorwise")
        applied = apply.apply_speed_options(model, options, needs.device, "bf16", needs)
        assert applied.choices["float8"].startswith("float8: tensorwise in 8 of 16 linear layers")
        assert applied.choices["float8"].endswith("set compile.mode on") is slow
        assert type(copy.deepcopy(model).transformer.blocks[1].streams[0].qkv).__name__ == "Float8Linear"


EMULATED = """
import sys
sys.path.insert(0, {root!r})
from functools import partial
from accel_train import experiment
from accel_train.runtime.exiting import run_main
from accel_train.speed import float8
from accel_train.speed import apply, starting
from recipes import mmdit

starting.refuse_float8 = apply.refuse_float8 = lambda *_: None
apply.apply_float8 = partial(float8.apply_float8, emulate=True)
run_main(mmdit.main)
"""
SHORT = (
    "--max_steps 6 --schedule.warmup_steps 2 --global_batch_size 16 --micro_batch_size 8 --log.log_every 1 "
    "--log.progress_bar off --evaluation.samples 8 --evaluation.timesteps 1 --evaluation.shown 1 "
    "--evaluation.text.steps 1 --evaluation.latent.steps 1 --model.width 384 --model.depth 2 --model.heads 6 "
    "--precision bf16"
).split()


def run(strategy: str, folder: Path, *flags: str) -> Finished:
    folder.mkdir()
    program = folder / "emulated.py"
    program.write_text(EMULATED.format(root=str(ROOT)))
    layout = Layout(strategy, 1 if strategy == "single" else 2)
    arguments = ["demo", *SHORT, "--output_dir", str(folder / "run"), *flags]
    done = subprocess.run(
        command(layout, arguments, folder, program), env=environment(), capture_output=True, text=True, check=False,
        timeout=PATIENCE_SECONDS, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Finished(folder / "run", done.stdout + done.stderr, done.returncode)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("ao")
def test_strategies_train_alike_and_checkpoints_know_nothing_of_it(tmp_path: Path) -> None:
    plain = run("single", tmp_path / "plain")
    runs = {strategy: run(strategy, tmp_path / strategy, "--float8", "tensorwise") for strategy in ("ddp", "fsdp2")}
    for strategy, each in runs.items():
        assert "float8: tensorwise in 8 of 16 linear layers" in each.output
        assert each.losses() == pytest.approx(plain.losses(), rel=3e-3), strategy
        assert each.losses() != plain.losses()
        assert each.tensors(6, "model").keys() == plain.tensors(6, "model").keys()
    there = ["--resume", str(runs["fsdp2"].checkpoint(6)), "--max_steps", "7", "--allow", "float8"]
    assert len(run("single", tmp_path / "resumed", *there).losses()) == 1
