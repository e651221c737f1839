"""Offload of frozen blocks: their weights lie in host memory, and two blocks at a time on the device.

While one block computes, the next one is copied. Group offloading of diffusers and the hooks of Accelerate do so for
inference: they take a block's weights away after its forward, although its backward still needs them. Here a frozen
parameter is a view of one of two buffers for the whole run. What autograd saves stays valid, as long as the right block
lies in the buffer when a kernel reads it: it is brought before each forward and before each backward of a block.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.speed.blocks import innermost_blocks
from accel_train.speed.memory.transfers import copy_beside

GIB = 1 << 30
PIECE_BYTES = 64 << 20
"""Largest allocation of pinned memory. torch rounds each up to a power of two, which could double that of a block."""
ALIGNMENT = 256
"""Alignment of parameters in their buffer, in bytes, as torch's allocator aligns tensors."""
BUFFERS = 2
REPLACED_BY_BITSANDBYTES = ("Params4bit", "Int8Params")


def offload_frozen_blocks(
    model: nn.Module, device: torch.device, strategy: str = "single", compile_mode: str = "off"
) -> str:
    """Move the frozen parameters of the model's blocks to host memory, in place, and return a notice.

    Call it after the weights are loaded and the speed options are applied, before ``prepare`` moves the rest of the
    model to ``device``. On a CPU there is no other memory, and the copies of the blocks save nothing.

    A block is read from the host twice in a step of one micro-batch, for forward and backward. Its ``state_dict`` has
    the values from host memory. Nothing else may read a frozen parameter outside of a forward or backward of its block.

    Raises ``UsageError`` under a strategy that shards or casts the weights, with compiled blocks, with weights of
    bitsandbytes, and if no block has a frozen parameter.
    """
    refuse_offload_strategy(strategy, compile_mode)
    _refuse_quantised(model)
    blocks = blocks_in_order(model)
    chosen = [block for block in blocks if _frozen(model, block)]
    if not chosen:
        raise UsageError(
            f"offload_frozen: none of the {len(blocks)} blocks of {type(model).__name__} has a frozen parameter; leave "
            "it out, or train adapters (--lora.rank 16)"
        )
    sizes = [_bytes(_frozen(model, block)) for block in chosen]
    buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
    frozen_blocks: list[_FrozenBlock] = []
    for number, block in enumerate(chosen):
        frozen_blocks.append(_to_host(_frozen(model, block), number % BUFFERS, buffers[number % BUFFERS]))
    residents = _Residents(frozen_blocks, device)
    for number, block in enumerate(chosen):
        _fetch_around(block, residents, number)
        # The buffers hold two blocks, and a state dict needs the values of all.
        block.register_state_dict_post_hook(functools.partial(_put_host_values, frozen_blocks[number]))
    kept = BUFFERS * max(sizes)
    return (
        f"offload_frozen: {sum(sizes) / GIB:.2f} GiB of {len(chosen)} blocks in host memory, "
        f"{kept / GIB:.2f} GiB for two of them on {device.type}"
    )


def offloaded_bytes(model: nn.Module) -> int:
    """Return the bytes kept off the device by ``offload_frozen_blocks``. The model may be on the meta device."""
    sizes = [_bytes(_frozen(model, block)) for block in innermost_blocks(model)]
    return max(0, sum(sizes) - BUFFERS * max(sizes, default=0))


def refuse_offload_strategy(strategy: str, compile_mode: str) -> None:
    """Raise ``UsageError`` for a strategy or a compile mode under which no frozen weights can be offloaded."""
    if strategy not in ("single", "ddp"):
        raise UsageError(
            f"offload_frozen: {strategy} divides or moves the weights itself; use one process or DDP, or leave it out "
            "(accelerate_configs/fsdp2_offload.yaml keeps the shards in host memory)"
        )
    if compile_mode != "off":
        raise UsageError(
            f"offload_frozen: weights are fetched before each block, which compile.mode {compile_mode} cannot trace; "
            "use --compile.mode off"
        )


def _refuse_quantised(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in REPLACED_BY_BITSANDBYTES:
            raise UsageError(
                f"offload_frozen: {name} is a weight of bitsandbytes, whose scales would not move with it; use "
                "--lora.base_precision fp8 or bf16"
            )


def blocks_in_order(model: nn.Module) -> list[nn.Module]:
    """Return the innermost blocks in approximately the order of use, so that neighbours get different buffers.

    In a block of a UNet ``resnets.0`` and ``attentions.0`` come before those with number 1, but are registered in two
    lists.
    """
    names = {module: name for name, module in model.named_modules()}

    def place(block: nn.Module) -> list[int]:
        numbers = re.findall(r"\d+", names[block])
        return [int(number) for number in numbers]

    # By the list that holds the outer block, then by the numbers of the path. Sorting keeps the order of equals.
    lists: dict[str, int] = {}
    blocks = innermost_blocks(model)
    for block in blocks:
        lists.setdefault(_list_of(names[block]), len(lists))
    return sorted(blocks, key=lambda block: (lists[_list_of(names[block])], place(block)))


def _list_of(name: str) -> str:
    """Return the path of a block up to its first number."""
    return re.split(r"\d", name, maxsplit=1)[0]


def _frozen(model: nn.Module, block: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen parameters of a block by name, without those shared with another module."""
    found = {name: p for name, p in block.named_parameters() if not p.requires_grad}
    if not found:
        return found
    uses = _uses(model)
    # Used only inside the block. A tied weight is read by two blocks, which cannot both fetch it.
    inside = _uses(block)
    return {name: p for name, p in found.items() if uses[id(p)] == inside[id(p)]}


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _bytes(parameters: dict[str, nn.Parameter]) -> int:
    return sum(_aligned(parameter.nbytes) for parameter in parameters.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class _FrozenBlock:
    buffer: int
    """Index of the buffer it is brought into."""
    pieces: Sequence[tuple[Tensor, Tensor]]
    """Bytes in host memory, and their part of the buffer."""
    places: dict[str, _Place]
    views: Sequence[tuple[nn.Parameter, Tensor]]
    """Each parameter with its view of the buffer."""

    def attach(self) -> None:
        """Make each parameter a view of the buffer again, if something has moved it since.

        ``prepare`` moves a model on CPU processes to ``cpu:0``, for which torch copies what is on ``cpu``.
        """
        for parameter, view in self.views:
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view

    def host_value(self, name: str) -> Tensor:
        """Return a copy of a parameter's value."""
        place = self.places[name]
        whole = torch.cat([host for host, _ in self.pieces])
        flat = whole[place.offset : place.offset + place.size]
        return flat.view(place.dtype).view(place.shape).clone()


class _Place(NamedTuple):
    offset: int
    """Offset of its first byte in the buffer."""
    size: int
    dtype: torch.dtype
    shape: torch.Size


def _to_host(parameters: dict[str, nn.Parameter], number: int, buffer: Tensor) -> _FrozenBlock:
    """Copy the parameters to host memory, and make each a view of the buffer."""
    flat = torch.zeros(_bytes(parameters), dtype=torch.uint8)
    places: dict[str, _Place] = {}
    views: list[tuple[nn.Parameter, Tensor]] = []
    offset = 0
    for name, parameter in parameters.items():
        size = parameter.nbytes
        places[name] = _Place(offset, size, parameter.dtype, parameter.shape)
        values = parameter.detach().cpu().contiguous()
        flat[offset : offset + size] = values.view(-1).view(torch.uint8)
        in_buffer = buffer[offset : offset + size]
        views.append((parameter, in_buffer.view(parameter.dtype).view(parameter.shape)))
        offset += _aligned(size)
    pieces: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(flat), PIECE_BYTES):
        piece = flat[start : start + PIECE_BYTES]
        # A copy, also without pinning, so that the whole is not kept. Only a copy from pinned memory is asynchronous.
        host = piece.pin_memory() if buffer.is_cuda else piece.clone()
        pieces.append((host, buffer[start : start + len(piece)]))
    block = _FrozenBlock(number, pieces, places, views)
    block.attach()
    return block


class _Residents:
    """Keeps track of the block in each buffer, and fetches blocks."""

    def __init__(self, blocks: Sequence[_FrozenBlock], device: torch.device) -> None:
        self._blocks = blocks
        self._device = device
        self._resident: list[int | None] = [None] * BUFFERS
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrivals: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._last: tuple[bool, int] | None = None
        self._following: dict[tuple[bool, int], int] = {}
        """By (is in a backward, block): the block that was used next the last time."""

    def fetch(self, number: int, *, backward: bool) -> None:
        """Let the device wait until the block is there, and begin to copy the one expected next."""
        if self._last is not None and self._last[1] != number:
            # Learned in the first pass and used from the second on: no order of the blocks is assumed.
            self._following[self._last] = number
        self._last = (backward, number)
        self._blocks[number].attach()
        self._bring(number)
        arrival = self._arrivals[self._blocks[number].buffer]
        if arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(arrival)
        expected = self._following.get(self._last)
        # In the same buffer it would overwrite the block that is about to compute.
        if expected is not None and self._blocks[expected].buffer != self._blocks[number].buffer:
            self._bring(expected)

    @torch.no_grad()
    def _bring(self, number: int) -> None:
        block = self._blocks[number]
        if self._resident[block.buffer] == number:
            return
        self._resident[block.buffer] = number
        if self._stream is None:
            for host, target in block.pieces:
                target.copy_(host)
            return
        self._arrivals[block.buffer] = copy_beside(self._stream, self._device, block.pieces)


def _fetch_around(block: nn.Module, residents: _Residents, number: int) -> None:
    """Bring the block before its forward, and again before the backward of its outputs."""
    forward: Callable[..., Any] = block.forward

    def fetch_again(_gradient: Tensor) -> None:
        residents.fetch(number, backward=True)

    @functools.wraps(forward)
    def fetched(*arguments: Any, **named: Any) -> Any:
        residents.fetch(number, backward=False)
        result = forward(*arguments, **named)
        if not torch.is_grad_enabled():
            return result
        tensors = list(_tensors(result))
        if not tensors:
            raise UsageError(
                f"offload_frozen: {type(block).__name__} returns a {type(result).__name__}, in which no tensor was "
                "found, so its weights could not be fetched for the backward; leave the option out"
            )
        for tensor in tensors:
            if tensor.requires_grad:
                # Called right before the backward of the operator that made the tensor, the last one of the block.
                # autograd runs the latest operator that is ready, so none of an earlier block comes between.
                tensor.register_hook(fetch_again)
        return result

    # On the instance, as activation checkpointing does it: no module is wrapped, so parameters keep their names.
    block.forward = fetched


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in cast("dict[str, Any]", value).values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in cast("Sequence[Any]", value):
            yield from _tensors(each)


def _put_host_values(frozen: _FrozenBlock, _module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    for name in frozen.places:
        key = prefix + name
        if key in state:
            state[key] = frozen.host_value(name)
