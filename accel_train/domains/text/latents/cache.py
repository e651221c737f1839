"""Cache of computed latents: checksummed safetensors shards, built once by all processes together.

A cache folder is named by the hash of texts, encoder and format, so it is never read for other texts or encoders.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.progress import Progress
from accel_train.data.tables.text_sources import texts_hash

if TYPE_CHECKING:
    from accel_train.domains.text.encoders import LatentEncoder

FORMAT = "latents-1"
ROWS_PER_SHARD = 4096
BLOCK_BYTES = 2**26
ROWS_WORTH_A_SELECTION = 8
"""Average rows per shard in a batch. With fewer, reading row by row is faster than one selection per shard."""


@dataclass(frozen=True)
class LatentTable:
    """Latents (L, Dz) by row, from memory-mapped shards. Each process opens a shard on first use."""

    files: tuple[Path, ...]
    shard_of: Tensor  # (N,) int64
    row_of: Tensor  # (N,) int64
    opener: Callable[[Path], Tensor]
    identity: str = ""
    """Source and encoder of ready-made latents whose bytes depend on the encoding machine. Empty for others."""
    _open: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.shard_of)

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the shards itself. Pickled tensors would copy their rows to every worker.
        return {**self.__dict__, "_open": {}}

    def _shard(self, number: int) -> Tensor:
        if number not in self._open:
            self._open[number] = self.opener(self.files[number])
        return self._open[number]

    @property
    def shape(self) -> tuple[int, int]:
        """(L, Dz)"""
        shard = self._shard(int(self.shard_of[0]))
        return shard.shape[1], shard.shape[2]

    def row(self, index: int) -> Tensor:
        """Read one row, (L, Dz) float32."""
        shard = self._shard(int(self.shard_of[index]))
        row = int(self.row_of[index])
        return shard[row].float()

    def rows(self, indices: Tensor, out: Tensor | None = None) -> Tensor:
        """Read rows (n,) int64 as (n, L, Dz) float32, into `out` if given. One copy, straight from the mapped file."""
        if out is None:
            out = torch.empty(len(indices), *self.shape)
        shards = self.shard_of[indices]
        rows = self.row_of[indices]
        numbers = shards.tolist()
        opened = {number: self._shard(number) for number in numbers}
        # Common for small datasets: all rows are in one shard, so select them straight into the result.
        if len(opened) == 1:
            return _select(opened[numbers[0]], rows, out)
        if len(opened) > len(numbers) // ROWS_WORTH_A_SELECTION:
            places = zip(numbers, rows.tolist(), strict=True)
            one_by_one = [opened[number][row] for number, row in places]
            return torch.stack(one_by_one, out=out)
        for number, shard in opened.items():
            here = shards == number
            chosen = shard[rows[here]]
            out[here] = chosen.float()
        return out

    def blocks(self, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first index, latents (n, L, Dz)) in order. `size` None: as many rows as fit into 64 MiB."""
        return row_blocks(self, size)


class LatentRows(Protocol):
    """Latents (L, Dz) float32 by row."""

    def __len__(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def row(self, index: int, /) -> Tensor: ...
    def rows(self, indices: Tensor, out: Tensor | None = None, /) -> Tensor: ...
    def blocks(self, size: int | None = None, /) -> Iterator[tuple[int, Tensor]]: ...


def row_blocks(table: LatentRows, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (first index, latents (n, L, Dz)) in order. `size` None: as many rows as fit into 64 MiB."""
    row_bytes = 4 * math.prod(table.shape)
    if size is None:
        size = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, len(table), size):
        stop = min(start + size, len(table))
        yield start, table.rows(torch.arange(start, stop))


class BatchMemory:
    """Pool of float32 tensors. Memory returns to the pool once nothing refers to its tensor, on any thread.

    Fresh memory costs several times as much as the copy into it: the system clears each page on first use, and malloc
    gives large blocks back when they are freed. The pool never shrinks: it keeps the largest amount ever in use.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[NDArray[np.float32]]] = {}

    def __reduce__(self) -> tuple[type[BatchMemory], tuple[()]]:
        return BatchMemory, ()

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor. Memory is only reused for the same shape."""
        free = self._free.setdefault(shape, [])
        memory = free.pop() if free else np.empty(shape, np.float32)
        # The tensor's storage, and so any view of the tensor, keeps this numpy view alive.
        owner = memory.view()
        # Not at exit: nothing will reuse the memory then.
        weakref.finalize(owner, free.append, memory).atexit = False
        return torch.from_numpy(owner)


def _select(shard: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    if shard.dtype == out.dtype:
        return torch.index_select(shard, 0, rows, out=out)
    return out.copy_(shard.index_select(0, rows))


def latent_key(texts: Sequence[str], identity: str) -> str:
    facts = f"{FORMAT} {identity} {texts_hash(texts)}"
    return hashlib.sha256(facts.encode()).hexdigest()


def cached_latents(
    texts: Sequence[str],
    encoder: LatentEncoder,
    cache: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    progress: bool = False,
) -> LatentTable:
    """Load the latents of all texts and compute the missing ones. Every rank calls it (two barriers).

    Rank r first builds shards r, r + world_size, ... Then each rank builds the shards still missing on its own disk,
    so hosts with separate disks also end up complete. Each process reads every shard once to verify it.
    """
    folder = cache / "latents" / latent_key(texts, encoder.identity)
    folder.mkdir(parents=True, exist_ok=True)
    # Shards are separate files with a fixed number of rows, so that an interrupted build keeps the finished ones.
    count = math.ceil(len(texts) / ROWS_PER_SHARD)
    shards = list(range(count))
    # Each rank starts at a different shard, so that ranks with a shared disk seldom build the same one at once.
    start = rank % max(1, len(shards))
    rotated = shards[start:] + shards[:start]
    # After the first barrier a shared disk has every shard, so the second pass only builds on separate disks.
    for assigned in (shards[rank::world_size], rotated):
        _build(folder, assigned, texts, encoder, progress and rank == 0)
        barrier()
    rows = torch.arange(len(texts))
    files = tuple(shard_file(folder, number) for number in shards)
    return LatentTable(files, rows // ROWS_PER_SHARD, rows % ROWS_PER_SHARD, open_shard)


def _build(folder: Path, shards: Sequence[int], texts: Sequence[str], encoder: LatentEncoder, progress: bool) -> None:
    """Build those of `shards` that are missing or damaged. Another process may build the same ones at the same time."""

    def is_intact(number: int) -> bool:
        rows = _rows_of_shard(number, len(texts))
        return intact(shard_file(folder, number), rows, encoder.dim)

    missing = [number for number in shards if not is_intact(number)]
    if not missing:
        return
    rows = sum(_rows_of_shard(number, len(texts)) for number in missing)
    with Progress("latents", rows, progress) as bar:
        for number in missing:
            # Another process may have finished this shard in the meantime.
            if is_intact(number):
                continue
            start = number * ROWS_PER_SHARD
            own = texts[start : start + ROWS_PER_SHARD]
            latents = encode_rows(own, encoder, bar.update)
            check_finite(torch.from_numpy(latents), start, texts)
            write_shard(shard_file(folder, number), latents[:, None, :])


def encode_rows(texts: Sequence[str], encoder: LatentEncoder, done: Callable[[int], None]) -> NDArray[np.float32]:
    """Encode texts to (n, Dz) in batches of similar length, which keeps padding low."""
    numbers = range(len(texts))
    order = sorted(numbers, key=lambda index: -len(texts[index]))
    latents = np.empty((len(texts), encoder.dim), np.float32)
    for start in range(0, len(order), encoder.batch_size):
        batch = order[start : start + encoder.batch_size]
        encoded = encoder.encode([texts[index] for index in batch])
        # Written back in the order of the texts.
        latents[batch] = encoded
        done(len(batch))
    return latents


def check_finite(latents: Tensor, start: int, texts: Sequence[str], first: int = 0) -> None:
    """Refuse NaN and infinity, naming the first such text.

    `start` is the index of the first latent, `first` that of the first text.
    """
    finite = torch.isfinite(latents.flatten(1))
    broken = ~finite.all(1)
    wrong = broken.nonzero().flatten().tolist()
    if wrong:
        index = start + wrong[0]
        more = ""
        if len(wrong) > 1:
            more = f", so do {len(wrong) - 1} after it"
        raise UsageError(
            f"--data.path: the latent of sample {index} ({texts[index - first][:60]!r}) contains NaN or "
            f"infinity{more}. Finite latents are required: check the encoder's weights and that text."
        )


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"


def write_shard(file: Path, latents: NDArray[np.float32]) -> None:
    """Write a shard atomically, with its checksum in the header. It is complete or absent after any crash."""
    from safetensors.numpy import save

    checksum = hashlib.sha256(latents.tobytes()).hexdigest()
    metadata = {"sha256": checksum, "format": FORMAT}
    content = save({"latents": np.ascontiguousarray(latents)}, metadata=metadata)
    # Two hosts with a shared disk may write the same shard at the same time. The last rename wins.
    part = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        # Otherwise, after a power failure, the file could have its final name but not its data.
        os.fsync(stream.fileno())
    part.replace(file)


def open_shard(file: Path) -> Tensor:
    """Memory-map a shard as (n, L, Dz)."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as shard:
        return shard.get_tensor("latents")


def _rows_of_shard(number: int, total: int) -> int:
    """Return the number of rows of a shard. The last shard may have fewer than the others."""
    return min(ROWS_PER_SHARD, total - number * ROWS_PER_SHARD)


def intact(file: Path, rows: int, dim: int) -> bool:
    """Check shape, dtype, checksum and finiteness of a shard. False for an unreadable file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as shard:
            latents: NDArray[Any] = shard.get_tensor("latents")
            metadata: dict[str, str] = shard.metadata() or {}
    except (OSError, SafetensorError):
        return False
    if latents.shape != (rows, 1, dim) or latents.dtype != np.float32:
        return False
    checksum = hashlib.sha256(latents.tobytes()).hexdigest()
    if metadata.get("sha256") != checksum:
        return False
    # A faulty encoder may have written NaN, with a correct checksum.
    return bool(np.isfinite(latents).all())
