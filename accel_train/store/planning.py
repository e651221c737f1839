"""Assignment of each tensor of a checkpoint to a file, and of each file to the rank writing it.

Each whole tensor has one owner, and owners are balanced by bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from accel_train.precision import Precision, dtype_of
from accel_train.store.strict_json import Json
from accel_train.store.weights import DTYPE_NAMES

SHARD_BYTES = 2_000_000_000
"""Largest file. A larger collection is split, with an index in the Hub's format."""
ALIGNMENT = 64  # a cache line; any dtype can be viewed at such an offset


@dataclass(frozen=True)
class Collection:
    """Tensors of one kind by name: the weights, the EMA, or one key of the optimizer state."""

    stem: str
    read: Callable[[str], Tensor]
    """Return this rank's live shard by name. It is sharded like the parameter."""
    precision: Precision = "fp32"
    own_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    """Dtypes of tensors saved as they are instead of in ``precision``, by name."""
    spread: bool = False
    """Split by rank even if one file could hold everything. Weights are not: any library can load a single file."""
    names: Sequence[str] | None = None
    """Names of the parameters with such a tensor. None: all."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the file."""
        return self.own_dtypes.get(name, dtype_of(self.precision))

    def widest_first(self, names: Iterable[str]) -> list[str]:
        """Sort by the size of an element, so that tensors without gaps are all aligned. Otherwise keeps the order."""
        return sorted(names, key=lambda name: self.dtype(name).itemsize, reverse=True)


@dataclass(frozen=True)
class TensorSlot:
    """Position of one whole tensor: its owner, file and offset."""

    name: str
    collection: int
    owner: int
    file: str
    start: int
    """First byte in the owner's buffer."""
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Slots of all tensors of a checkpoint. The same on every rank."""

    tensors: tuple[TensorSlot, ...]
    sizes: tuple[int, ...]
    """Buffer size of each rank in bytes."""

    def files(self, stem: str) -> dict[str, str]:
        """Map tensor names to files, for the collection ``stem``."""
        # With the character after the stem, because exp_avg_sq begins like exp_avg.
        beginnings = (f"{stem}.", f"{stem}-")
        return {slot.name: slot.file for slot in self.tensors if slot.file.startswith(beginnings)}

    def jobs(self, rank: int, collections: Sequence[Collection], shape: Callable[[str], Sequence[int]]) -> list[Json]:
        """List the files of ``rank`` for its writer: the offset of each in the buffer, and its tensors in order."""
        files: dict[str, Json] = {}
        for slot in self.tensors:
            if slot.owner != rank:
                continue
            dtype = DTYPE_NAMES[collections[slot.collection].dtype(slot.name)]
            entry = {
                "name": slot.name,
                "dtype": dtype,
                "shape": list(shape(slot.name)),
                "bytes": slot.bytes,
            }
            begun: Json = {"name": slot.file, "start": slot.start, "tensors": []}
            file = files.setdefault(slot.file, begun)
            file["tensors"].append(entry)
        return list(files.values())


@dataclass(frozen=True)
class _File:
    """One planned file: its owner and the names of its tensors."""

    name: str
    collection: int
    owner: int
    tensors: Sequence[str]


def plan(collections: Sequence[Collection], elements: Mapping[str, int], world_size: int) -> Plan:
    """Split into files of at most ``SHARD_BYTES`` and assign them greedily, largest first, to the least-loaded rank.

    ``elements`` is the number of elements of each parameter. A tensor larger than the limit gets its own file.
    """
    # In bytes, because the time for writing and hashing is proportional to them.
    load = [0] * world_size
    files: list[_File] = []
    # Collections that are not spread come first. Those that are spread then even out the load.
    in_order = sorted(enumerate(collections), key=lambda item: item[1].spread)
    for index, collection in in_order:
        names = set(elements if collection.names is None else collection.names)
        sizes: dict[str, int] = {}
        for name, count in elements.items():
            if name in names:
                sizes[name] = count * collection.dtype(name).itemsize
        assigned = _assign_tensors(sizes, load) if collection.spread else _assign_files(sizes, load)
        for number, (owner, tensors) in enumerate(assigned, 1):
            suffix = f"-{number:05d}-of-{len(assigned):05d}" if len(assigned) > 1 else ""
            files.append(_File(f"{collection.stem}{suffix}.safetensors", index, owner, tensors))
    return _place(files, collections, elements, world_size)


def _place(
    files: Sequence[_File], collections: Sequence[Collection], elements: Mapping[str, int], world_size: int
) -> Plan:
    """Give every tensor its offset in the buffer of its owner."""
    slots: list[TensorSlot] = []
    filled = [0] * world_size
    for file in files:
        collection = collections[file.collection]
        # The tensors of a file lie without gaps, because the writer copies a file's data in one piece.
        start = -(-filled[file.owner] // ALIGNMENT) * ALIGNMENT
        for name in collection.widest_first(file.tensors):
            size = elements[name] * collection.dtype(name).itemsize
            slots.append(TensorSlot(name, file.collection, file.owner, file.name, start, size))
            start += size
        filled[file.owner] = start
    return Plan(tuple(slots), tuple(filled))


def _assign_files(sizes: Mapping[str, int], load: list[int]) -> list[tuple[int, list[str]]]:
    """Split into files in order of name, and assign each to the least-loaded rank. Adds to ``load``."""
    assigned: list[tuple[int, list[str]]] = []
    for names in _split_into_files(sizes):
        owner = load.index(min(load))
        load[owner] += sum(sizes[name] for name in names)
        assigned.append((owner, names))
    return assigned


def _assign_tensors(sizes: Mapping[str, int], load: list[int]) -> list[tuple[int, list[str]]]:
    """Assign tensors, largest first, to the least-loaded rank, then split by rank into files. Adds to ``load``."""
    shares: list[dict[str, int]] = [{} for _ in load]
    # The name decides among equals, so that every rank comes to the same plan without a message.
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        owner = load.index(min(load))
        load[owner] += sizes[name]
        shares[owner][name] = sizes[name]
    assigned: list[tuple[int, list[str]]] = []
    for owner, share in enumerate(shares):
        if share:
            assigned += [(owner, names) for names in _split_into_files(share)]
    return assigned


def _split_into_files(sizes: Mapping[str, int]) -> list[list[str]]:
    """Split the names, in order, into files of at most ``SHARD_BYTES``."""
    files: list[list[str]] = [[]]
    filled = 0
    for name in sorted(sizes):
        # A file with nothing in it takes any tensor, however large.
        if files[-1] and filled + sizes[name] > SHARD_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += sizes[name]
    return files


class Piece(NamedTuple):
    """A range of a whole tensor, in elements, and the rank to send it."""

    rank: int
    start: int
    """First element in the whole tensor."""
    length: int
    skipped: int
    """Elements of the rank's shard before the piece."""


def cover(extents: Sequence[tuple[int, int]]) -> list[Piece]:
    """List the pieces of a whole tensor. Ranks with a replica of a piece send nothing.

    ``extents`` are each rank's first element and number of elements.
    """
    pieces: list[Piece] = []
    reached = 0

    # By first element. Of several with the same one, the longest comes first.
    def start_and_length(item: tuple[int, tuple[int, int]]) -> tuple[int, int]:
        _, (start, length) = item
        return start, -length

    by_start = sorted(enumerate(extents), key=start_and_length)
    for rank, (start, length) in by_start:
        end = start + length
        # A replica, or a rank with none of it.
        if length == 0 or end <= reached:
            continue
        assert start <= reached, f"elements {reached} to {start} are on no rank"
        pieces.append(Piece(rank, reached, end - reached, reached - start))
        reached = end
    return pieces
