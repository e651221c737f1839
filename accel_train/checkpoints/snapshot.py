"""Copy the planned tensors into the memory of their writing ranks.

Each rank sends its pieces of a tensor into the owner's buffer, one bucket at a time. Besides its own share, no rank
allocates more than a bucket.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.store.planning import ALIGNMENT, Collection, Piece, Plan, TensorSlot, cover

logger = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
"""Most bytes in flight between ranks."""
CLONE_BYTES = 256 << 20
"""Most bytes of one clone on the device: few calls for a large model, and small enough for fragmented memory."""
CLONES_SENT_AT_ONCE = 8
"""Clones that go to the host together: the first ones early, and with few switches of streams, which cost time."""
DEVICE_MARGIN = 1.1  # room for rounding and fragmentation in the caching allocator


class Snapshot:
    """Copy of the planned tensors in their owners' buffers. Built on every rank and reused for every save.

    ``extents`` are every rank's ``Shards.extent`` by name, or None if each rank holds everything. Shards in host memory
    are sent over ``host_group`` (gloo, because NCCL takes no host tensors), others over the default group.
    """

    def __init__(
        self,
        planned: Plan,
        collections: Sequence[Collection],
        buffer: Any,
        extents: Sequence[Mapping[str, tuple[int, int]]] | None,
        rank: int,
        host_group: Any = None,
    ) -> None:
        self._plan = planned
        self._collections = collections
        self._rank = rank
        self._host_group = host_group
        self._whole = torch.frombuffer(buffer, dtype=torch.uint8)
        own = [slot for slot in planned.tensors if slot.owner == rank]
        self._views = self._view(own)
        self._own = [(bucket, self._runs(bucket)) for bucket in _buckets(own, CLONE_BYTES)]
        """Own buckets with their runs, for saves without an exchange. Computed once, because a save has only
        milliseconds for it."""
        self._pieces = _pieces_of(extents)
        self._clones: list[tuple[Tensor, Tensor]] = []
        """Place in the buffer and clone on the device, until the copy between them is done."""
        self._copied: torch.cuda.Event | None = None
        self._peak: int | None = None
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and len(self._whole):
            self._stream = _pinned_stream(self, self._whole)

    def _view(self, slots: Sequence[TensorSlot]) -> dict[tuple[int, str], Tensor]:
        """Map collection and name of each tensor to its place in the buffer, flat and in the dtype of its file."""
        places = _views(self._whole, 0, self._runs(slots))
        return {(slot.collection, slot.name): place for slot, place in zip(slots, places, strict=True)}

    def _runs(self, slots: Iterable[TensorSlot]) -> list[_Run]:
        runs: list[_Run] = []
        end = -1
        for slot in slots:
            dtype = self._dtype_of(slot)
            if slot.start != end or dtype != runs[-1].dtype:
                runs.append(_Run(dtype, slot.start))
            runs[-1].elements.append(slot.bytes // dtype.itemsize)
            end = slot.start + slot.bytes
        return runs

    def _dtype_of(self, slot: TensorSlot) -> torch.dtype:
        return self._collections[slot.collection].dtype(slot.name)

    @torch.no_grad()
    def take(self) -> None:
        """Copy everything. The live tensors may change as soon as it returns. A collective if ``extents`` were given.

        On a GPU with enough free memory the copy is made on the device, and reaches the host while training continues.
        The buffer is complete once ``ready`` returns True. ``torch.OutOfMemoryError`` names the memory needed.
        """
        try:
            if self._pieces is None:
                self._copy_all()
                return
            for bucket in _buckets(self._plan.tensors, BUCKET_BYTES):
                for part in self._by_device(bucket):
                    self._exchange(part)
        except Exception as error:
            self._forget_clones()
            if isinstance(error, torch.OutOfMemoryError):
                largest = max(
                    sum(slot.bytes for slot in bucket) for bucket in _buckets(self._plan.tensors, BUCKET_BYTES)
                )
                error.add_note(
                    f"a snapshot needs room for up to {largest:,} bytes on the device, in addition to the state itself"
                )
            raise

    def _forget_clones(self) -> None:
        """Free the clones of a snapshot that failed, once none of their copies can reach the buffer of the next one."""
        if self._stream is not None:
            self._stream.synchronize()
        self._clones = []

    def _by_device(self, bucket: Sequence[TensorSlot]) -> Sequence[Sequence[TensorSlot]]:
        """Split a bucket by device. With offload, buffers are on the GPU and the trained weights in host memory."""
        if not any(slot.name in self._collections[slot.collection].own_dtypes for slot in bucket):
            return [bucket]
        parts: dict[str, list[TensorSlot]] = {}
        for slot in bucket:
            parts.setdefault(self._shard(slot).device.type, []).append(slot)
        # The same order on all ranks, because their sends and receives must match.
        return [parts[device] for device in sorted(parts)]

    def _copy_all(self) -> None:
        """Copy the tensors written by this rank, where every rank holds everything."""
        needed = DEVICE_MARGIN * self._plan.sizes[self._rank]
        on_device = self._stream is not None and self._free_device_memory() > needed
        unsent = 0
        for bucket, runs in self._own:
            sources = [self._shard(slot) for slot in bucket]
            if on_device and _is_on_gpu(sources[0]) and self._clone(runs, sources):
                unsent += 1
            else:
                targets = [self._views[slot.collection, slot.name] for slot in bucket]
                torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
            if unsent == CLONES_SENT_AT_ONCE:
                self._send_clones(unsent)
                unsent = 0
        if unsent:
            self._send_clones(unsent)
        if self._clones:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def ready(self, *, wait: bool) -> bool:
        """True once the buffer holds the snapshot. Blocks until then with ``wait``."""
        if self._copied is not None:
            if wait:
                self._copied.synchronize()
            elif not self._copied.query():
                return False
            self._copied = None
            self._clones = []
        return True

    def _free_device_memory(self) -> float:
        """Return the bytes left for clones while the next steps run, assuming that these need no more than the peak."""
        if self._peak is None:
            self._peak = torch.cuda.max_memory_allocated()  # before the first clone, which would count
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - self._peak

    def _clone(self, runs: Sequence[_Run], sources: list[Tensor]) -> bool:
        """Copy a bucket into one clone on the device. Returns False if the device has no room for it.

        The tensors lie in the clone as they do in the buffer, so that one copy brings them all to the host. Launching
        thousands of small copies would take the host longer than the device needs for them.
        """
        first = runs[0].start
        end = runs[-1].end
        base = first - first % ALIGNMENT  # any dtype can be viewed at the same offset as in the buffer
        try:
            clone = torch.empty(end - base, dtype=torch.uint8, device=sources[0].device)
        except torch.OutOfMemoryError:  # the free memory is fragmented
            return False
        torch._foreach_copy_(_views(clone, base, runs), sources)  # pyright: ignore[reportPrivateUsage]
        # Kept until the copy to the host is done, or the allocator would give its memory to the next step.
        self._clones.append((self._whole[first:end], clone[first - base :]))
        return True

    def _send_clones(self, newest: int) -> None:
        """Copy the newest clones to the host on a separate stream."""
        assert self._stream is not None
        # The copies read a clone only once the compute stream has filled it.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, clone in self._clones[-newest:]:
                target.copy_(clone, non_blocking=True)

    def _exchange(self, bucket: Sequence[TensorSlot]) -> None:
        """Send this rank's pieces of a bucket to their owners and receive the pieces of its own tensors."""
        assert self._pieces is not None
        device = self._shard(bucket[0]).device
        group = self._host_group if device.type == "cpu" else None
        operations: list[dist.P2POp] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        # Every rank walks the same pieces in the same order, so sends and receives match.
        for slot in bucket:
            for piece in self._pieces[slot.name]:
                is_owner = slot.owner == self._rank
                is_sender = piece.rank == self._rank
                if is_owner and is_sender:
                    self._target(slot, piece).copy_(self._read(slot, piece))
                elif is_owner:
                    target = landing = self._target(slot, piece)
                    if device.type != "cpu":
                        # NCCL receives into device memory only, gloo straight into the buffer.
                        landing = torch.empty_like(target, device=device)
                        arrivals.append((target, landing))
                    operations.append(dist.P2POp(dist.irecv, landing, piece.rank, group))
                elif is_sender:
                    outgoing = self._outgoing(slot, piece)
                    operations.append(dist.P2POp(dist.isend, outgoing, slot.owner, group))
        _transfer(operations)
        for target, landing in arrivals:
            target.copy_(landing)

    def _target(self, slot: TensorSlot, piece: Piece) -> Tensor:
        """Return the flat view of this rank's buffer that receives ``piece``."""
        view = self._views[slot.collection, slot.name]
        return view[piece.start : piece.start + piece.length]

    def _outgoing(self, slot: TensorSlot, piece: Piece) -> Tensor:
        # Rounded before it travels, because the owner receives in the dtype of the file.
        return self._read(slot, piece).to(self._dtype_of(slot)).contiguous()

    def _read(self, slot: TensorSlot, piece: Piece) -> Tensor:
        """Return this rank's part of ``piece``, flat."""
        return self._shard(slot)[piece.skipped : piece.skipped + piece.length]

    def _shard(self, slot: TensorSlot) -> Tensor:
        """Return this rank's live shard of a tensor, flat."""
        return self._collections[slot.collection].read(slot.name).reshape(-1)


def _pieces_of(extents: Sequence[Mapping[str, tuple[int, int]]] | None) -> dict[str, list[Piece]] | None:
    """Map each name to the pieces that the ranks hold of it. Returns None if each rank holds everything."""
    if extents is None:
        return None
    return {name: cover([of_rank[name] for of_rank in extents]) for name in extents[0]}


@dataclass
class _Run:
    """Adjacent tensors of one dtype, without gaps."""

    dtype: torch.dtype
    start: int
    """First byte in the owner's buffer."""
    elements: list[int] = field(default_factory=list[int])
    """Number of elements of each tensor."""

    @property
    def end(self) -> int:
        return self.start + sum(self.elements) * self.dtype.itemsize


def _views(memory: Tensor, base: int, runs: Iterable[_Run]) -> list[Tensor]:
    """Return the place of each tensor in ``memory``, which begins at byte ``base`` of the buffer."""
    views: list[Tensor] = []
    for run in runs:
        typed = memory[run.start - base : run.end - base].view(run.dtype)
        # One call for all: slicing and viewing each tensor would take the host longer than the copies on the device.
        views += typed.split(run.elements)
    return views


def _transfer(operations: list[dist.P2POp]) -> None:
    if not operations:  # `batch_isend_irecv` fails on an empty list
        return
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def _buckets(tensors: Sequence[TensorSlot], limit: int) -> Iterator[list[TensorSlot]]:
    """Group consecutive tensors into buckets of at most ``limit`` bytes. A larger tensor is alone."""
    bucket: list[TensorSlot] = []
    filled = 0
    for slot in tensors:
        # An empty bucket takes any tensor, however large.
        if bucket and filled + slot.bytes > limit:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(slot)
        filled += slot.bytes
    if bucket:
        yield bucket


def _is_on_gpu(tensor: Tensor) -> bool:
    """Return False for tensors kept in host memory by offload."""
    return tensor.is_cuda


def _pinned_stream(owner: object, buffer: Tensor) -> torch.cuda.Stream | None:
    """Pin the buffer for the lifetime of ``owner`` and return a stream for asynchronous copies into it.

    Returns None if it cannot be pinned: copies are then synchronous.
    """
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    code = int(runtime.cudaHostRegister(address, len(buffer), 0))
    if code != 0:
        logger.warning("cannot pin %d bytes of host memory (CUDA error %d): saves block longer", len(buffer), code)
        return None
    weakref.finalize(owner, runtime.cudaHostUnregister, address)
    return torch.cuda.Stream()
