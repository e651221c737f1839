"""Frozen blocks brought from host memory: the same bits as with all of them on the device, in two buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.pipelines.objective import ObjectiveConfig
from accel_train.domains.models.lora import LoraConfig, apply_lora
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.blocks import innermost_blocks
from accel_train.speed.memory import fitting, frozen_offload
from accel_train.speed.memory.frozen_offload import blocks_in_order, offload_frozen_blocks, offloaded_bytes
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_objective import SEED, STEP, Made
from tests.domains.language import tiny as language
from tests.speed.checkpointing import PARTIAL, config_of

CPU = torch.device("cpu")
WIDTH = 16
DEPTH = 5


class Block(nn.Module):
    """Adapters on a frozen layer, as far as offload is concerned: weights of both kinds, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.condition = nn.Linear(WIDTH, 2 * WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(False)
        self.condition.requires_grad_(False)

    def forward(self, x: Tensor, text: Tensor, vector: Tensor) -> tuple[Tensor, dict[str, Any]]:
        scale, shift = self.condition(vector).chunk(2, -1)
        x = x + self.frozen((x * scale + shift).tanh()) + self.adapter(x)
        text = text + self.frozen(text).sigmoid()
        return x, {"text": [text]}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        vector = self.condition(x).tanh()
        text = x.flip(0) * self.condition.weight.mean()
        for block in self.blocks:
            x, found = block(x, text, vector)
            (text,) = found["text"]
        return (x + text).square().mean()


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def offloaded(model: nn.Module, mode: str = "none") -> nn.Module:
    apply_activation_checkpointing(model, config_of(mode))
    offload_frozen_blocks(model, CPU, "single", "off")
    return model


def gradients(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], steps: int = 3) -> list[dict[str, Tensor]]:
    """Of a few steps, with a forward without gradients after each, as an evaluation has them."""
    found: list[dict[str, Tensor]] = []
    for step in range(steps):
        model.zero_grad()
        value = loss(model, step)
        value.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            evaluated = loss(model, step)
        found.append({"loss": value.detach(), "evaluated": evaluated, **grads})
    return found


def loss_of_chain(model: nn.Module, step: int) -> Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)))


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("mode", ["none", "full", "selective", PARTIAL])
def test_the_bits_are_those_without_offload(mode: str) -> None:
    plain = chain()
    apply_activation_checkpointing(plain, config_of(mode))
    expected = gradients(plain, loss_of_chain)
    assert len(expected[0]) == DEPTH + 4
    assert_same(gradients(offloaded(chain(), mode), loss_of_chain), expected)


def test_weights_begin_at_multiples_that_any_kernel_takes() -> None:
    """Of any size and dtype before them: kernels read many bytes at a time."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
            self.second = nn.Parameter(torch.randn(5), requires_grad=False)
            self.third = nn.Parameter(torch.randn(7), requires_grad=False)

    blocks = nn.ModuleList(Odd() for _ in range(DEPTH))
    offload_frozen_blocks(nn.ModuleDict({"blocks": blocks}), CPU, "single", "off")
    starts = [p.storage_offset() * p.element_size() for p in blocks.parameters()]
    assert starts == [0, frozen_offload.ALIGNMENT, 2 * frozen_offload.ALIGNMENT] * DEPTH


def test_two_forwards_before_one_backward() -> None:
    def both(model: nn.Module, step: int) -> Tensor:
        return loss_of_chain(model, step) * loss_of_chain(model, step + 10)

    assert_same(gradients(offloaded(chain()), both), gradients(chain(), both))


def test_a_model_that_was_moved_since() -> None:
    """As Accelerate does with several processes on a CPU."""
    expected = gradients(chain(), loss_of_chain)
    moved = offloaded(chain())
    before = moved.get_parameter("blocks.0.frozen.weight").data_ptr()
    moved.to("cpu:0")
    assert moved.get_parameter("blocks.0.frozen.weight").data_ptr() != before
    assert_same(gradients(moved, loss_of_chain), expected)
    assert moved.get_parameter("blocks.0.frozen.weight").data_ptr() == before


def test_weights_that_are_not_brought_again_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: without the second fetch a backward reads another block."""
    expected = gradients(chain(), loss_of_chain)
    fetch = frozen_offload._Residents.fetch

    def forward_only(self: Any, number: int, *, backward: bool) -> None:
        if not backward:
            fetch(self, number, backward=False)

    monkeypatch.setattr(frozen_offload._Residents, "fetch", forward_only)
    with pytest.raises(AssertionError):
        assert_same(gradients(offloaded(chain()), loss_of_chain), expected)


def test_two_blocks_lie_on_the_device() -> None:
    model = chain()
    frozen = [p for block in model.blocks for p in block.parameters() if not p.requires_grad]
    each = frozen[: len(frozen) // DEPTH]
    # Each tensor begins at a multiple of 256 bytes.
    block_bytes = sum(-(-p.nbytes // 256) * 256 for p in each)
    meta = fitting.size_of(Chain, offload_frozen=True)
    assert offloaded_bytes(model) == meta.offloaded_bytes == (DEPTH - 2) * block_bytes
    assert fitting.size_of(Chain).offloaded_bytes == 0
    offloaded(model)
    assert len({p.untyped_storage().data_ptr() for p in frozen}) == 2
    assert (
        sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in frozen}.values()) == 2 * block_bytes
    )


def test_each_block_is_copied_once_for_forward_and_once_for_backward() -> None:
    model = offloaded(chain())
    residents: Any = next(cell.cell_contents for cell in model.blocks[0].forward.__closure__ if _has_blocks(cell))
    brought: list[int] = []
    bring = residents._bring

    def counted(number: int) -> None:
        if residents._resident[residents._blocks[number].buffer] != number:
            brought.append(number)
        bring(number)

    residents._bring = counted
    loss_of_chain(model, 0).backward()
    assert brought == [0, 1, 2, 3, 4, 2, 1, 0]
    brought.clear()
    loss_of_chain(model, 0).backward()
    # 0 and 1 are still there, and what comes next is copied before it is asked for.
    assert brought == [2, 3, 4, 2, 1, 0]
    asked: list[tuple[int, int]] = []
    fetch = residents.fetch
    residents.fetch = lambda number, backward: (asked.append((number, len(brought))), fetch(number, backward=backward))
    brought.clear()
    loss_of_chain(model, 0).backward()
    ahead = dict(asked[:DEPTH])
    # When block 3 begins, block 4 has not been asked for; when it is, nothing remains to be copied.
    assert brought == [2, 3, 4, 2, 1, 0]
    assert [ahead[number] for number in range(DEPTH)] == [0, 0, 1, 2, 3]


def _has_blocks(cell: Any) -> bool:
    return isinstance(cell.cell_contents, frozen_offload._Residents)


def test_the_state_has_the_values_of_the_host() -> None:
    model = chain()
    expected = copy.deepcopy(model.state_dict())
    offloaded(model)
    loss_of_chain(model, 0).backward()
    state = model.state_dict()
    assert list(state) == list(expected)
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []


def test_a_weight_of_two_blocks_stays_on_the_device() -> None:
    model = chain()
    model.blocks[1].frozen.weight = model.blocks[3].frozen.weight
    plain = copy.deepcopy(model)
    pointer = model.blocks[1].frozen.weight.data_ptr()
    offloaded(model)
    assert model.blocks[1].frozen.weight.data_ptr() == pointer == model.blocks[3].frozen.weight.data_ptr()
    assert_same(gradients(model, loss_of_chain), gradients(plain, loss_of_chain))


@pytest.mark.parametrize(
    ("name", "precision"),
    # Of the other dtypes a UNet and a transformer.
    [
        *(
            # As sd1 a UNet, and the largest.
            pytest.param(name, "fp32", marks=pytest.mark.slow if name == "sdxl" else ())
            for name in tiny.PIPELINES
        ),
        ("sd1", "bf16"),
        ("flux", "bf16"),
        ("sd1", "fp8"),
        ("flux", "fp8"),
    ],
)
def test_denoisers_of_diffusers(name: str, precision: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    made = Made(name, tmp_path, ObjectiveConfig(), TimeConfig())
    inputs = made.process.noised(made.batch, SEED, STEP, 6)

    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            return (made.process.errors(model, inputs) * (1 + step)).mean()

    torch.manual_seed(1)
    compute = "fp32" if precision == "fp32" else "bf16"
    apply_lora(made.model, LoraConfig(rank=2, targets=("attention",), base_precision=precision), compute)
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            # The second matrices are zero, with which the first have no gradient.
            nn.init.normal_(parameter, std=0.1)
    plain = copy.deepcopy(made.model)
    notice = offload_frozen_blocks(made.model, CPU, "single", "off")
    # One of Sana's named classes has no parameters.
    count = sum(1 for block in innermost_blocks(plain) if list(block.parameters()))
    assert f"of {count} blocks" in notice
    found = gradients(made.model, loss, 2)
    assert len(found[0]) > 4
    assert_same(found, gradients(plain, loss, 2))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_language_model_of_transformers(mode: str) -> None:
    pytest.importorskip("peft")
    model: Any = language.model()
    torch.manual_seed(1)
    apply_lora(model, LoraConfig(rank=2), "fp32")
    tokens = torch.arange(24).reshape(2, 12) + 3
    plain = copy.deepcopy(model)
    apply_activation_checkpointing(plain, config_of(mode))

    def loss(model: Any, step: int) -> Tensor:
        return model(input_ids=tokens + step, labels=tokens, use_cache=False).loss

    assert_same(gradients(offloaded(model, mode), loss), gradients(plain, loss))


def test_neighbours_in_a_unet_have_different_buffers(tmp_path: Path) -> None:
    model = Made("sdxl", tmp_path, ObjectiveConfig(), TimeConfig()).model
    names = {module: name for name, module in model.named_modules()}
    ordered = [names[block] for block in blocks_in_order(model)]
    assert sorted(ordered) == sorted(names[block] for block in innermost_blocks(model))
    downs = [name for name in ordered if name.startswith("down_blocks")]
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in downs]
    assert numbers == sorted(numbers)


class Odd(Block):
    def forward(self, x: Tensor, text: Tensor, vector: Tensor) -> Any:
        found = super().forward(x, text, vector)
        return type("Answer", (), {"found": found})()


@pytest.mark.parametrize(
    ("change", "strategy", "mode", "says"),
    [
        (None, "fsdp2", "off", "offload_frozen: fsdp2 divides or moves the weights itself"),
        (None, "zero1", "off", "offload_frozen: zero1 divides or moves the weights itself"),
        (None, "single", "on", "compile.mode on cannot trace; use --compile.mode off"),
        (lambda model: model.requires_grad_(True), "single", "off", "none of the 5 blocks of Chain has a frozen"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(change: Any, strategy: str, mode: str, says: str) -> None:
    model = chain()
    if change is not None:
        change(model)
    with pytest.raises(UsageError, match=says):
        offload_frozen_blocks(model, CPU, strategy, mode)


def test_a_block_whose_outputs_are_not_found_is_refused() -> None:
    model: Any = chain()
    model._no_split_modules = ["Block", "Odd"]
    model.blocks[2].__class__ = Odd
    offloaded(model)
    with pytest.raises(UsageError, match="Odd returns a Answer, in which no tensor was found"):
        loss_of_chain(model, 0)


def test_weights_of_bitsandbytes_are_refused() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    model = chain()
    apply_lora(model, LoraConfig(rank=2, targets=("frozen",), base_precision="nf4"), "bf16")
    with pytest.raises(UsageError, match=r"weight is a weight of bitsandbytes.*base_precision fp8 or bf16"):
        offload_frozen_blocks(model, CPU, "single", "off")
