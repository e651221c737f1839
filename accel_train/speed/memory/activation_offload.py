"""Activation offload: inputs that checkpointed blocks keep for the backward are in host memory until shortly before.

A checkpointed block keeps its inputs. Those of a block are sent to pinned memory while the next block computes, and
their memory on the device is given up when the one after that begins. In the backward each block's inputs are fetched
while the block after it computes. So the inputs of two blocks lie on the device at a time, and those of the last two
blocks, with which the backward begins, never leave it.

``torch.autograd.graph.save_on_cpu`` copies on the stream of the kernels, which wait for each copy, and fetches a tensor
only when it is needed. torch's own copies that overlap with kernels are for compiled graphs (``torch/_functorch``).
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
"""Smallest storage that is sent. A smaller copy takes about 20 us, no more than its launch takes the host."""
BLOCKS_ON_DEVICE = 2


def input_offload(
    config: ActivationCheckpointingConfig, device: torch.device, compile_mode: str
) -> InputOffload | None:
    """Return the requested offload, None if it is off. Raises ``UsageError`` where it is not possible."""
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
    # With an index, like the devices of tensors.
    return InputOffload(PinnedTransfers(torch.device("cuda", gpu_index(device))))


class InputOffload:
    """Runs checkpointed blocks whose inputs wait for the backward in host memory.

    Results are those of ``checkpoint`` to the bit: the recomputation reads the same bytes at the same strides. No order
    of blocks is assumed: the inputs kept just before a block's are those needed just after them in the backward.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._newest: Callable[[], _Inputs | None] = _nothing
        """Weak, like all links between inputs: the graph owns them, and they are freed with it."""
        self._has_warned = False
        self._known: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        """Storages that are kept for a backward, by address on the device."""

    def refuse_too_few(self, blocks: int) -> None:
        """Raise ``UsageError`` for so few checkpointed blocks that nothing would be sent."""
        if blocks <= BLOCKS_ON_DEVICE:
            raise UsageError(
                f"activation_checkpointing.offload: true: the inputs of the last {BLOCKS_ON_DEVICE} checkpointed "
                f"blocks stay on the device, but there are only {blocks}; at least {BLOCKS_ON_DEVICE + 1} are "
                "required. Leave it out"
            )

    def run(self, method: Callable[..., Any], module: nn.Module, arguments: Any, named: Any) -> Any:
        """Call the method. The backward recomputes it, from inputs that were in host memory in between."""
        # torch saves tensors that are positional arguments. Those within a list or a named argument would bypass the
        # hooks and stay on the device.
        leaves, form = tree_flatten((arguments, named), _is_leaf)
        inputs = self._keep(leaves)
        call = _Call(method, module, form, [(arguments, named)])
        with saved_tensors_hooks(inputs.pack, inputs.unpack):
            return checkpoint(call, *leaves, use_reentrant=False)

    def _keep(self, leaves: Sequence[Any]) -> _Inputs:
        """Keep the inputs of the next block, send those of the block before, and free those of the one before that."""
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
        """Warn that a micro-batch is too small. Not an error: later ones or those of other processes may be larger."""
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "activation_checkpointing.offload: nothing is sent to host memory in a micro-batch like this one, because "
            f"no block keeps an input of at least {LEAST_BYTES >> 20} MiB that the next block does not take as well; "
            "raise micro_batch_size, or leave it out"
        )

    def _storages_of(self, leaves: Sequence[Any]) -> dict[int, _Storage]:
        """Return the storages that can be sent, by address.

        A storage that one of the two blocks before keeps as well stays on the device: conditions and positions, which
        are the same for all blocks.
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
    """A call of a block, first with the arguments as they are and then with those that were kept."""

    method: Callable[..., Any]
    module: nn.Module
    form: Any
    given: list[tuple[Any, Any]]

    def __call__(self, *leaves: Any) -> Any:
        # The forward gets the caller's own lists, to which a block may append.
        if self.given:
            arguments, named = self.given.pop()
        else:
            arguments, named = tree_unflatten(leaves, self.form)
        return self.method(self.module, *arguments, **named)


class _Inputs:
    """Inputs that one call of a block keeps for its backward."""

    def __init__(self, storages: dict[int, _Storage], previous: Callable[[], _Inputs | None]) -> None:
        self._storages = storages
        self.previous = previous
        """The inputs kept before these, as long as they are needed."""

    def send(self) -> bool:
        """Begin to copy them to the host. Return True if there is anything to send."""
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
        """Return the object that the graph holds in place of the tensor."""
        # `detach` shares the version counter, but not the graph.
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
    """A saved tensor with its version, which torch does not check for tensors that hooks return."""

    tensor: Tensor
    version: int

    def tensor_again(self) -> Tensor:
        """Return the tensor. Raises ``RuntimeError`` if it was changed in place."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"an input of a checkpointed block, {self.tensor.dtype} {list(self.tensor.shape)}, was changed in "
                f"place, but the backward needs its former value (version {self.tensor._version}, saved at "
                f"{self.version})"
            )
        return self.tensor


class _View(NamedTuple):
    """A saved tensor by its place in a storage, on the device or in host memory."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor_again(self) -> Tensor:
        """Return the tensor, on the device."""
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
        """Return True if the storage is at this address. Once its memory was given up, something else may be there."""
        return self._memory is not None and self._memory.data_ptr() == address

    def send(self) -> bool:
        """Begin to copy the storage to the host. Return False if it stays."""
        self._check()
        if self.stays:
            return False
        if self._host is None:
            assert self._memory is not None
            self._host, self._copying = self._transfers.send(self._memory)
        return True

    def leave(self) -> None:
        """Give up the memory on the device, unless the storage stays there."""
        if self._host is None or self.stays:
            return
        self._check()
        # Kernels launched next may get this memory.
        self._wait()
        self._memory = None
        self.watched.clear()

    def fetch(self) -> None:
        """Begin to copy it to the device, unless it is there."""
        if self._memory is not None:
            return
        # Allocated for the current stream, which waits for the copy: the allocator needs no `record_stream`.
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=self._transfers.device)
        self._copying = self._transfers.fetch(self._host, memory)
        self._memory = memory

    def on_device(self) -> Tensor:
        """Return its bytes on the device, for kernels launched from now on."""
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
        # A graph may be freed without a backward, while a copy still writes to memory that would be free now.
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
    """Return True for a plain tensor that is no parameter, on any device."""
    # A subclass may have no storage, and whoever made a leaf with a gradient holds it anyway.
    if type(value) is not Tensor or (value.is_leaf and value.requires_grad):
        return False
    # Other layouts have no storage, and the storage does not hold a lazy negation.
    return value.layout == torch.strided and value.is_floating_point() and not value.is_neg()
