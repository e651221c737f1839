"""Offload of activations: what checkpointed blocks keep for the backward lies in host memory until shortly before.

A checkpointed block keeps its inputs. Those of a block are sent to pinned memory while the next block computes, and
their memory on the device is given up when the one after that begins. In the backward each block's inputs are fetched
while the block behind it computes. So the inputs of two blocks lie on the device at a time, and those of the last two
blocks, with which the backward begins, never leave it.

``torch.autograd.graph.save_on_cpu`` copies on the stream of the kernels, which wait for each copy, and fetches a tensor
only when it is needed. torch's own copies beside the kernels are for compiled graphs (``torch/_functorch``).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from accel_train.config import UsageError
from accel_train.speed.memory.allocator import gpu_index
from accel_train.speed.memory.transfers import PinnedTransfers, Transfers
from accel_train.speed.options import ActivationCheckpointingConfig

logger = logging.getLogger(__name__)
LEAST_BYTES = 1 << 20
"""Smallest storage that is sent. The device copies less in about 20 us, which is what the launch takes the host."""
BLOCKS_ON_DEVICE = 2


def input_offload(
    config: ActivationCheckpointingConfig, device: torch.device, compile_mode: str
) -> InputOffload | None:
    """Return the offload that the option asks for, None without. Raises ``UsageError`` where it is not possible."""
    if not config.offload:
        return None
    option = "activation_checkpointing.offload: true"
    if device.type != "cuda":
        raise UsageError(
            f"{option}: a {device.type} device has no other memory to offload to; a CUDA device is required. Leave the "
            "option out"
        )
    if compile_mode != "off":
        raise UsageError(
            f"{option}: inputs are exchanged around each block, which compile.mode {compile_mode} cannot trace; use "
            "--compile.mode off"
        )
    # With an index, as tensors have it.
    return InputOffload(PinnedTransfers(torch.device("cuda", gpu_index(device))))


class InputOffload:
    """Runs checkpointed blocks whose inputs wait for the backward in host memory.

    Results are those of ``checkpoint`` to the bit: the recomputation reads the same bytes at the same strides. No order
    of blocks is assumed: the inputs that were kept before a block's are those needed behind them in the backward.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._newest: Callable[[], _Inputs | None] = _nothing
        """Weak, like all links between inputs: the graph owns them, and they go with it."""
        self._has_warned = False
        self._known: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        """Storages that are kept for a backward, by address on the device."""

    def refuse_too_few(self, blocks: int) -> None:
        """Raise ``UsageError`` for so few checkpointed blocks that nothing would be sent."""
        if blocks <= BLOCKS_ON_DEVICE:
            raise UsageError(
                f"activation_checkpointing.offload: true: the inputs of the last {BLOCKS_ON_DEVICE} checkpointed "
                f"blocks stay on the device, and there are {blocks}; at least {BLOCKS_ON_DEVICE + 1} are required. "
                "Leave it out"
            )

    def run(self, method: Callable[..., Any], module: nn.Module, arguments: Any, named: Any) -> Any:
        """Call the method, recomputed in the backward from inputs that were in host memory meanwhile."""
        # torch saves tensors that are arguments themselves. It would keep those within a list or a named argument on
        # the device, beside its hooks.
        leaves, form = tree_flatten((arguments, named), _is_leaf)
        inputs = self._keep(leaves)
        call = _Call(method, module, form, [(arguments, named)])
        with saved_tensors_hooks(inputs.pack, inputs.unpack):
            return checkpoint(call, *leaves, use_reentrant=False)

    def _keep(self, leaves: Sequence[Any]) -> _Inputs:
        """Keep the inputs of the next block, and move on with those of the blocks before it."""
        previous = self._newest()
        inputs = _Inputs(self._storages_of(leaves), self._newest)
        self._newest = weakref.ref(inputs)
        if previous is None:
            return inputs
        before = previous.previous()
        if before is not None:
            before.leave()
        sent = previous.send()
        if before is not None and not sent:
            self._warn_once()
        return inputs

    def _warn_once(self) -> None:
        """Say that a micro-batch is too small. No error: later ones may be larger, as those of other processes."""
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "activation_checkpointing.offload: nothing is sent to host memory in a micro-batch like this one, of which "
            f"no block keeps an input of at least {LEAST_BYTES >> 20} MiB that the next block does not take as well; "
            "raise micro_batch_size, or leave it out"
        )

    def _storages_of(self, leaves: Sequence[Any]) -> dict[int, _Storage]:
        """Return what can be sent, by address.

        What one of the two blocks before keeps as well stays on the device: conditions and positions, which are the
        same for all blocks.
        """
        found: dict[int, _Storage] = {}
        for memory in _worth_it(leaves, self._transfers.device):
            address = memory.data_ptr()
            known = self._known.get(address)
            if known is None or not known.is_at(address):
                known = _Storage(self._transfers, memory)
            else:
                known.stays = True
            found[address] = self._known[address] = known
        return found


def _nothing() -> None:
    return None


def _is_leaf(value: Any) -> bool:
    # A container of another class, such as a cache, must be the same object in the block.
    return type(value) not in (tuple, list, dict)


@dataclass(frozen=True)
class _Call:
    """A call of a block, once with the arguments as they are and then with those that were kept."""

    method: Callable[..., Any]
    module: nn.Module
    form: Any
    given: list[tuple[Any, Any]]

    def __call__(self, *leaves: Any) -> Any:
        # The forward gets the very lists of the caller, to which a block may append.
        if self.given:
            arguments, named = self.given.pop()
        else:
            arguments, named = tree_unflatten(leaves, self.form)
        return self.method(self.module, *arguments, **named)


class _Inputs:
    """What one call of a block keeps for its backward."""

    def __init__(self, storages: dict[int, _Storage], previous: Callable[[], _Inputs | None]) -> None:
        self._storages = storages
        self.previous = previous
        """The inputs kept before these, as long as they are needed."""

    def send(self) -> bool:
        """Begin to copy them to the host. Return True if there is anything."""
        sent = [storage.send() for storage in self._storages.values()]
        return any(sent)

    def leave(self) -> None:
        """Give up their memory on the device."""
        for storage in self._storages.values():
            storage.leave()

    def fetch(self) -> None:
        """Begin to copy them to the device."""
        for storage in self._storages.values():
            storage.fetch()

    def pack(self, tensor: Tensor) -> _Watched | _View:
        """Return what the graph holds in place of the tensor."""
        # It shares the version, and not the graph.
        watched = _Watched(tensor.detach(), tensor._version)
        storage = None
        if _can_be_sent(tensor):
            storage = self._storages.get(tensor.untyped_storage().data_ptr())
        if storage is None:
            return watched
        storage.watched.append(watched)
        return _View(storage, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, packed: _Watched | _View) -> Tensor:
        """Return the tensor for the recomputation, and fetch the inputs that are needed next."""
        tensor = packed.tensor_again()
        previous = self.previous()
        if previous is not None:
            previous.fetch()
        return tensor


class _Watched(NamedTuple):
    """A saved tensor. torch does not look at the version of what hooks return."""

    tensor: Tensor
    version: int

    def tensor_again(self) -> Tensor:
        """Return it. Raises ``RuntimeError`` if it was changed."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"an input of a checkpointed block, {self.tensor.dtype} {list(self.tensor.shape)}, was changed in "
                f"place, and the backward needs what it was (version {self.tensor._version}, saved at {self.version})"
            )
        return self.tensor


class _View(NamedTuple):
    """A saved tensor by its place in a storage, wherever that lies."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor_again(self) -> Tensor:
        """Return it, on the device."""
        memory = self.storage.on_device()
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class _Storage:
    """The bytes of a storage: on the device, in host memory, or on the way."""

    def __init__(self, transfers: Transfers, storage: torch.UntypedStorage) -> None:
        self._transfers = transfers
        self._bytes = storage.nbytes()
        self._memory: Tensor | None = _bytes_of(storage)
        self._host: Any = None
        self._copying: Any = None
        """The event of the newest copy, until it was waited for."""
        self.stays = False
        self.watched: list[_Watched] = []
        """Saved tensors in it that may still be changed."""

    def is_at(self, address: int) -> bool:
        """Return True if it lies there. Once it was given up, something else may."""
        return self._memory is not None and self._memory.data_ptr() == address

    def send(self) -> bool:
        """Begin to copy it to the host. Return False if it stays."""
        self._check()
        if self.stays:
            return False
        if self._host is None:
            assert self._memory is not None
            self._host, self._copying = self._transfers.send(self._memory)
        return True

    def leave(self) -> None:
        """Give up the memory of the device, unless it stays there."""
        if self._host is None or self.stays:
            return
        self._check()
        # What is launched next may be given this memory.
        self._wait()
        self._memory = None
        self.watched.clear()

    def fetch(self) -> None:
        """Begin to copy it to the device, unless it is there."""
        if self._memory is not None:
            return
        # Allocated for the current stream, which waits for the copy: nothing has to be recorded for the allocator.
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=self._transfers.device)
        self._copying = self._transfers.fetch(self._host, memory)
        self._memory = memory

    def on_device(self) -> Tensor:
        """Return its bytes, of which kernels launched from now on may read."""
        self.fetch()
        self._check()
        self._wait()
        assert self._memory is not None
        return self._memory

    def _check(self) -> None:
        for each in self.watched:
            each.tensor_again()

    def _wait(self) -> None:
        if self._copying is not None:
            self._transfers.wait(self._copying)
            self._copying = None

    def __del__(self) -> None:
        # A graph may go without a backward, while a copy is on its way to memory that is free now.
        self._wait()
        if self._host is not None:
            self._transfers.free(self._host)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _worth_it(leaves: Sequence[Any], device: torch.device) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    used: Counter[int] = Counter()
    for leaf in leaves:
        if _can_be_sent(leaf) and leaf.device == device:
            storage = leaf.untyped_storage()
            found[storage.data_ptr()] = storage
            used[storage.data_ptr()] += leaf.nbytes
    chosen: list[torch.UntypedStorage] = []
    for address, storage in found.items():
        size = storage.nbytes()
        # A small part of a large tensor is left where it is: someone else holds the rest.
        if size >= LEAST_BYTES and size <= 2 * used[address]:
            chosen.append(storage)
    return chosen


def _can_be_sent(value: Any) -> bool:
    """Return True for a plain tensor that is no parameter, on whichever device."""
    # A subclass may have no storage, and a leaf with a gradient is held by who made it.
    if type(value) is not Tensor or (value.is_leaf and value.requires_grad):
        return False
    # Other layouts have no storage, and a lazy negation is no part of it.
    return value.layout == torch.strided and value.is_floating_point() and not value.is_neg()
