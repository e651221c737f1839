"""Ledger of every byte held by the tensors of a step, from allocation until nothing refers to it any more.

torch calls a dispatch mode for each operator, forward and backward, whether its tensors are real or fake. A storage is
recorded when it first appears in a result, and its release is seen through a weak reference, as an allocator would. Its
purpose is often known only later: a gradient, for example, when the optimizer steps. The ledger therefore keeps all
events, and finds the peak and its parts by replaying them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.simulation.tensors.fake_tensors import DEVICE, tensors_in

PARAMETERS = "parameters"
BUFFERS = "buffers"
MASTERS = "master weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
EMA = "EMA"
BESIDE = "other modules"
BATCH = "batch"
GATHERED = "gathered weights"
UNREDUCED = "unreduced gradients"
COMMUNICATION = "communication buffers"
ACTIVATIONS = "activations"
TEMPORARY = "temporaries"
CATEGORIES = (
    *(PARAMETERS, MASTERS, BUFFERS, GRADIENTS, OPTIMIZER, EMA, BESIDE, BATCH),
    *(GATHERED, UNREDUCED, COMMUNICATION, ACTIVATIONS, TEMPORARY),
)
HOST = "in host memory"
"""Category of host memory. It is not among ``CATEGORIES``, because a peak is that of the device."""
BLOCK = 512
"""Bytes of a block. torch's CUDA allocator rounds each tensor up to whole blocks."""


@dataclass
class Record:
    """One storage during its lifetime."""

    phase: str
    """Part of the step in which it was allocated: "forward", "backward" or another one."""
    category: str | None = None
    size: int = 0
    alive: bool = True


@dataclass(frozen=True)
class Event:
    """A change in size of one storage."""

    record: Record
    before: int
    after: int
    place: str


@dataclass(frozen=True)
class Peak:
    """The instant with the most bytes."""

    total: int
    by_category: dict[str, int]
    place: str
    """Module and direction, such as "forward of ..."."""
    event: int
    """Index of the event that reaches it."""


class Ledger(TorchDispatchMode):
    """Dispatch mode that records the storages of all tensors on the thread that enters it."""

    def __init__(self, place: Callable[[], tuple[str, str]], on_operator: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.host_phase: str | None = None
        """Part of the step that runs on the host, under an offload. None without one."""
        self._place = place
        self._on_operator = on_operator
        self._records: dict[int, Record] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A DTensor unwraps itself first: its operators on local tensors come here afterwards.
            return NotImplemented
        kwargs = kwargs or {}
        # Function modes are off below the operators, or every shape that is read would pass through ``cuda_casts``.
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **kwargs)
            phase, place = self._place()
            # DTensor finds the shapes of results with whole tensors, which have no memory on any process.
            if not in_shape_propagation():
                for tensor in tensors_in(result):
                    if not has_no_memory(tensor):
                        self._see(tensor.untyped_storage(), phase, place)
            self._on_operator(func, args, kwargs, result)
            return result

    def _see(self, storage: Any, phase: str, place: str) -> Record:
        # The address of the C++ storage, which all views share.
        key = storage._cdata
        record = self._records.get(key)
        if record is None:
            record = Record(phase, HOST if phase == self.host_phase else None)
            self._records[key] = record
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
        # The size of a known storage may have changed by `resize_`.
        size = storage.nbytes()
        if size != record.size:
            self.events.append(Event(record, record.size, size, place))
            record.size = size
        return record

    def _forget(self, key: int) -> None:
        record = self._records.pop(key, None)
        self._references.pop(key, None)
        if record is None:
            return
        record.alive = False
        if record.size:
            self.events.append(Event(record, record.size, 0, self._place()[1]))

    def mark(self, tensors: Iterable[Tensor], category: str) -> int:
        """Assign ``category`` to the storages of ``tensors``, replacing any earlier one. Returns their bytes."""
        total = 0
        phase, place = self._place()
        seen: set[int] = set()
        for tensor in plain(tensors):
            storage: Any = tensor.untyped_storage()
            # Shared storage: tied weights, or gradients in one bucket.
            if storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            record = self._see(storage, phase, place)
            record.category = category
            total += record.size
        return total

    def suggest(self, tensors: Iterable[Tensor], category: str) -> None:
        """Assign ``category`` to those storages of ``tensors`` that have none."""
        phase, place = self._place()
        for tensor in plain(tensors):
            record = self._see(tensor.untyped_storage(), phase, place)
            record.category = record.category or category

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return True if the tensor is known to lie in host memory."""
        (local,) = plain([tensor])
        if has_no_memory(local):
            return False
        storage: Any = local.untyped_storage()
        record = self._records.get(storage._cdata)
        return record is not None and record.category == HOST

    def mark_leftovers(self, phase: str, category: str) -> None:
        """Assign ``category`` to the storages of ``phase`` that are still held and have none."""
        for record in self._records.values():
            if record.phase == phase and record.category is None:
                record.category = category

    def held(self, category: str, phase: str) -> tuple[int, int]:
        """Return the bytes of the held storages of ``category``, and of those of ``phase`` without one.

        Returns their plain size, and their size in whole blocks.
        """
        total = in_blocks = 0
        for record in self._records.values():
            if record.category == category or (record.category is None and record.phase == phase):
                total += record.size
                in_blocks += _rounded(record.size, BLOCK)
        return total, in_blocks

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the body, also ``resize_``, by which FSDP2 frees and refills the memory of gathered weights."""
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            phase, place = self._place()
            record = self._see(storage, phase, place)
            record.category = record.category or GATHERED
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield

    def peak(self) -> Peak:
        """Return the instant with the most bytes, and its parts by category."""
        total = most = 0
        where = -1
        for number, event in enumerate(self.events):
            if category_of(event.record) == HOST:
                continue
            total += event.after - event.before
            if total > most:
                most = total
                where = number
        # A second pass, because a copy of the parts at each new maximum would cost more.
        parts = next(held for number, held in self.replay() if number == where)
        return Peak(most, parts, self.events[where].place, where)

    def replay(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield the bytes by category after each event. It is always the same dictionary, changed in place."""
        held = dict.fromkeys(CATEGORIES, 0)
        for number, event in enumerate(self.events):
            category = category_of(event.record)
            if category != HOST:
                held[category] += event.after - event.before
            yield number, held

    def peak_in_blocks(self) -> int:
        """Return the peak in bytes if each storage takes whole blocks."""
        total = most = 0
        for event in self.events:
            if category_of(event.record) != HOST:
                total += _rounded(event.after, BLOCK) - _rounded(event.before, BLOCK)
            most = max(most, total)
        return most


def has_no_memory(tensor: Tensor) -> bool:
    """Return True for a tensor on the meta device, which has a shape but no memory."""
    return tensor.device.type == "meta"


def in_shape_propagation() -> bool:
    """Return True while DTensor propagates shapes, which it does in a fake-tensor mode above the ledger."""
    above = torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage]
    modes = [torch._C._get_dispatch_stack_at(number) for number in range(above)]  # pyright: ignore[reportPrivateUsage]
    return any(isinstance(mode, FakeTensorMode) for mode in modes)


def category_of(record: Record) -> str:
    """Return the category of a storage. If none was assigned, derive it from the part of the step that allocated it."""
    if record.category is not None:
        return record.category
    return ACTIVATIONS if record.phase == "forward" else TEMPORARY


def _rounded(size: int, block: int) -> int:
    return -(-size // block) * block


def plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the local tensor of each DTensor, and other tensors unchanged."""
    for tensor in tensors:
        yield getattr(tensor, "_local_tensor", tensor)


def storage_of(tensor: Tensor) -> int:
    """Return the address of the C++ storage of a tensor, or of the local part of a DTensor."""
    (local,) = plain([tensor])
    storage: Any = local.untyped_storage()
    return storage._cdata
