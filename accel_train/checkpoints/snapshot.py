"""Which rank writes which tensor, and a true copy of each in that rank's memory.

Whole tensors belong to one rank each, spread evenly by bytes. Their pieces travel from the ranks that hold them
straight into the owner's buffer, a bucket at a time: beside its own share no rank allocates more than a bucket.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.precision import Precision, dtype_of

logger = logging.getLogger(__name__)

SHARD_BYTES = 2_000_000_000
"""Largest file; above it a tensor collection is split, with an index beside it as the Hub expects."""
BUCKET_BYTES = 64 << 20
"""What may be under way between ranks at one time."""
ALIGNMENT = 64

DTYPE_NAMES: dict[Precision, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""As safetensors files spell them."""


@dataclass(frozen=True)
class Collection:
    """Tensors of one kind by parameter name: the weights, the average, or one key of the optimizer's state."""

    stem: str
    read: Callable[[str], Tensor]
    """This rank's shard by parameter name, live: cut like the parameter."""
    precision: Precision = "fp32"
    spread: bool = False
    """Split by rank even where one file would hold all. Weights are not: one file loads with every library."""
    names: Sequence[str] | None = None
    """The parameters that have such a tensor. None: all."""


@dataclass(frozen=True)
class Placed:
    """One whole tensor: where it goes."""

    name: str
    collection: int
    owner: int
    file: str
    start: int
    """First byte in the owner's buffer."""
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Every tensor of a checkpoint, its file, and its place in its owner's memory. The same on every rank."""

    tensors: tuple[Placed, ...]
    sizes: tuple[int, ...]
    """Bytes of buffer each rank needs."""

    def files(self, stem: str) -> dict[str, str]:
        """Tensor name -> file, for the collection ``stem``."""
        return {t.name: t.file for t in self.tensors if t.file.startswith((f"{stem}.", f"{stem}-"))}

    def jobs(
        self, rank: int, collections: Sequence[Collection], shape: Callable[[str], Sequence[int]]
    ) -> list[dict[str, Any]]:
        """The files of ``rank`` as its writer wants them: where each starts in the buffer, and its tensors in order."""
        files: dict[str, dict[str, Any]] = {}
        for tensor in (t for t in self.tensors if t.owner == rank):
            dtype = DTYPE_NAMES[collections[tensor.collection].precision]
            entry = {"name": tensor.name, "dtype": dtype, "shape": list(shape(tensor.name)), "bytes": tensor.bytes}
            file = files.setdefault(tensor.file, {"name": tensor.file, "start": tensor.start, "tensors": []})
            file["tensors"].append(entry)
        return list(files.values())


def plan(collections: Sequence[Collection], elements: Mapping[str, int], world_size: int) -> Plan:
    """Split into files of at most ``SHARD_BYTES`` and give each to the rank that has least, largest first.

    ``elements`` is the number of elements of each parameter. A single tensor larger than a file gets its own.
    """
    load = [0] * world_size
    parts: list[tuple[int, str, int, list[str]]] = []  # collection, file, owner, names
    for index, collection in sorted(enumerate(collections), key=lambda item: item[1].spread):
        itemsize, names = dtype_of(collection.precision).itemsize, set(collection.names or elements)
        sizes = {n: e * itemsize for n, e in elements.items() if n in names}
        groups = _by_rank(sizes, load) if collection.spread else [(None, names) for names in _in_files(sizes)]
        for number, (rank, names) in enumerate(groups, 1):
            owner = load.index(min(load)) if rank is None else rank
            if rank is None:
                load[owner] += sum(sizes[n] for n in names)
            of = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            parts.append((index, f"{collection.stem}{of}.safetensors", owner, names))
    placed: list[Placed] = []
    filled = [0] * world_size
    for index, file, owner, names in parts:
        itemsize = dtype_of(collections[index].precision).itemsize
        filled[owner] = -(-filled[owner] // ALIGNMENT) * ALIGNMENT
        for name in names:
            size = elements[name] * itemsize
            placed.append(Placed(name, index, owner, file, filled[owner], size))
            filled[owner] += size
    return Plan(tuple(placed), tuple(filled))


def _in_files(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in order, cut where a file would exceed its limit."""
    files: list[list[str]] = [[]]
    filled = 0
    for name in sorted(sizes):
        if files[-1] and filled + sizes[name] > SHARD_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += sizes[name]
    return files


def _by_rank(sizes: Mapping[str, int], load: list[int]) -> list[tuple[int | None, list[str]]]:
    """Tensors to the rank that has least, largest first; then files of each rank. Adds to ``load``."""
    mine: dict[int, dict[str, int]] = {rank: {} for rank in range(len(load))}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = load.index(min(load))
        mine[rank][name] = sizes[name]
        load[rank] += sizes[name]
    return [(rank, names) for rank, part in mine.items() if part for names in _in_files(part)]


class Snapshot:
    """Copies the planned tensors into their owners' buffers. Built on every rank; buffers outlive a save.

    ``extents`` are every rank's ``Shards.extent`` by name, None where each rank holds everything. Shards in host memory
    travel over ``host_group`` (gloo; the device's own backend takes no host tensors), others over the default group.
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
        self._plan, self._collections, self._rank = planned, collections, rank
        self._host_group = host_group
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        self._views = {
            (t.collection, t.name): whole[t.start : t.start + t.bytes].view(self._dtype(t))
            for t in planned.tensors
            if t.owner == rank
        }
        self._covers = {n: cover([e[n] for e in extents]) for n in extents[0]} if extents is not None else None
        self._clones: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None
        self._peak: int | None = None
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and len(whole):
            self._stream = _pinned_stream(self, whole)

    def _dtype(self, tensor: Placed) -> torch.dtype:
        return dtype_of(self._collections[tensor.collection].precision)

    @torch.no_grad()
    def take(self) -> None:
        """Copy everything; when it returns the live tensors may change. A collective unless ranks hold everything.

        On a GPU with room for it the copy is made on the device and travels to the host while training goes on: the
        buffer holds it once ``ready``.
        """
        on_device = self._stream is not None and self._room() > 1.1 * self._plan.sizes[self._rank]
        for bucket in _buckets(self._plan.tensors):
            if self._covers is not None:
                self._exchange(bucket)
            elif own := [t for t in bucket if t.owner == self._rank]:
                sources = [self._collections[t.collection].read(t.name).reshape(-1) for t in own]
                targets = [self._views[t.collection, t.name] for t in own]
                if on_device and sources[0].is_cuda:
                    self._clone(targets, sources)
                else:
                    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
        if self._clones:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def ready(self, *, wait: bool) -> bool:
        """Whether the buffer holds the snapshot; waits for it with ``wait``."""
        if self._copied is not None:
            if wait:
                self._copied.synchronize()
            elif not self._copied.query():
                return False
            self._copied, self._clones = None, []
        return True

    def _room(self) -> float:
        """Device memory that clones may take while the next steps run, which need as much as the largest before."""
        if self._peak is None:
            self._peak = torch.cuda.max_memory_allocated()  # before the first clone
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - self._peak

    def _clone(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy on the device now, to the host on a stream of its own; the clones live until that is done."""
        assert self._stream is not None
        try:
            clones = [source.clone() for source in sources]
        except torch.OutOfMemoryError:  # in pieces too small to be of use
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, clones, non_blocking=True)  # pyright: ignore[reportPrivateUsage]
        self._clones += clones

    def _exchange(self, bucket: Sequence[Placed]) -> None:
        """Every rank sends its pieces of a bucket to their owners and receives those of its own."""
        assert self._covers is not None
        first = bucket[0]
        device = self._collections[first.collection].read(first.name).device
        group = self._host_group if device.type == "cpu" else None
        operations: list[dist.P2POp] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        for tensor in bucket:
            read = self._collections[tensor.collection].read
            for source, start, length, skipped in self._covers[tensor.name]:
                if tensor.owner != self._rank != source:
                    continue
                target: Tensor | None = None
                if tensor.owner == self._rank:
                    target = self._views[tensor.collection, tensor.name][start : start + length]
                if source != self._rank:
                    assert target is not None
                    landing = target if device.type == "cpu" else torch.empty_like(target, device=device)
                    operations.append(dist.P2POp(dist.irecv, landing, source, group))
                    arrivals.append((target, landing))
                    continue
                piece = read(tensor.name).reshape(-1)[skipped : skipped + length]
                if target is not None:
                    target.copy_(piece)
                else:
                    outgoing = piece.to(self._dtype(tensor)).contiguous()
                    operations.append(dist.P2POp(dist.isend, outgoing, tensor.owner, group))
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        for target, landing in arrivals:
            if landing is not target:
                target.copy_(landing)


def _pinned_stream(owner: object, buffer: Tensor) -> torch.cuda.Stream | None:
    """A stream for copies that run beside everything else, into the buffer, which is locked in memory for as long as
    ``owner`` lives. None where it cannot be locked: copies are waited for then."""
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    if code := int(runtime.cudaHostRegister(address, len(buffer), 0)):
        logger.warning("%d bytes of host memory cannot be locked (CUDA error %d): saves wait longer", len(buffer), code)
        return None
    weakref.finalize(owner, runtime.cudaHostUnregister, address)
    return torch.cuda.Stream()


def _buckets(tensors: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Runs of tensors of at most ``BUCKET_BYTES``, a larger one alone."""
    bucket: list[Placed] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.bytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.bytes
    yield bucket


def cover(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """The pieces that put a whole together: (rank, first element of the whole, length, elements of the shard to skip).

    ``extents`` are each rank's (first element, number). Ranks that hold the same again (replicas) send nothing.
    """
    pieces: list[tuple[int, int, int, int]] = []
    reached = 0
    for rank, (start, length) in sorted(enumerate(extents), key=lambda item: (item[1][0], -item[1][1])):
        if length and start + length > reached:
            assert start <= reached, f"elements {reached} to {start} are on no rank"
            pieces.append((rank, reached, start + length - reached, reached - start))
            reached = start + length
    return pieces
