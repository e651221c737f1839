"""Rows of tokens in shards on disk, read row by row.

A shard is an entry of the tensor cache. A step reads its rows from the file, without mapping it: mapped pages count as
memory of each process, and an epoch touches all rows. The system's page cache is shared by all processes. Every row is
compared with its checksum.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import weakref
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel_train.data.datasets import Batch
from accel_train.data.tensor_cache import DamagedEntryError, DeletedEntryError, Lease, doubt_folder
from accel_train.domains.language import packing
from accel_train.domains.language.packing import Ints, PackedTexts, Tokens

OPEN_FILES = 64
NUMBERS: Mapping[str, Any] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class Shard(NamedTuple):
    """A file of rows and its counts."""

    file: Path
    rows: int
    texts: int
    tokens: int


def shard_tensors(packed: PackedTexts) -> dict[str, Tensor]:
    """Return the tensors of a shard."""
    bounds = packed.rows.tolist()
    content = packed.tokens.tobytes()
    # A checksum per row, because checking one of the whole file would read all of it. CRC-32 is fast enough per step.
    sums = [zlib.crc32(content[4 * first : 4 * end]) for first, end in itertools.pairwise(bounds)]
    return {
        "tokens": torch.from_numpy(packed.tokens),
        "rows": torch.from_numpy(packed.rows),
        "sums": torch.tensor(sums, dtype=torch.int64),
        "texts": torch.from_numpy(packed.texts),
    }


class ShardFile:
    """Reader of parts of a shard's tensors. Raises ``DamagedEntryError`` for a missing, truncated or damaged file.

    The next start then checks all entries, if the folder can be written to.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._descriptor = os.open(file, os.O_RDONLY)
            # Not by __del__, which may no longer find os when Python exits.
            self._finalizer = weakref.finalize(self, os.close, self._descriptor)
            # The header of safetensors: its length in 8 bytes, then JSON with the place of each tensor.
            length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
            self._fields: dict[str, Any] = json.loads(os.pread(self._descriptor, length, 8))
        except (OSError, ValueError, MemoryError) as error:
            raise self._damaged(str(error)) from None
        self._start = 8 + length

    def read(self, name: str, first: int, end: int) -> Any:
        """Return elements ``first`` to ``end`` - 1 of a tensor, in storage order."""
        try:
            field = self._fields[name]
            dtype = NUMBERS[field["dtype"]]
            count = (end - first) * dtype.itemsize
            place = self._start + field["data_offsets"][0] + first * dtype.itemsize
            # pread has no position to share, so threads may read one file at the same time.
            content = os.pread(self._descriptor, count, place)
        # A damaged header or table of rows names places that are not there.
        except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
            raise self._damaged(f"{name} cannot be read ({error})") from None
        if len(content) != count:
            raise self._damaged("it is shorter than its header says")
        return np.frombuffer(content, dtype)

    def read_all(self, name: str) -> Any:
        """Return a whole tensor, flat."""
        try:
            count = math.prod(self._fields[name]["shape"])
        except (LookupError, TypeError) as error:
            raise self._damaged(f"{name} cannot be read ({error})") from None
        return self.read(name, 0, count)

    def row(self, index: int) -> Tokens:
        """Return the marked tokens of a row, compared with their checksum."""
        first, end = self.read("rows", index, index + 2).tolist()
        tokens: Tokens = self.read("tokens", first, end)
        expected = int(self.read("sums", index, index + 1)[0])
        if zlib.crc32(tokens.tobytes()) != expected:
            raise self._damaged(f"row {index} is not what was written")
        return tokens

    def close(self) -> None:
        self._finalizer()
        # Another file may get the same descriptor later.
        self._descriptor = -1

    def _damaged(self, reason: str) -> DamagedEntryError:
        if doubt_folder(self.file.parents[1]):
            return DeletedEntryError(
                f"{self.file}: {reason}. Start the run again: it first reads all of its entries, and computes the "
                "damaged ones and all tokens after them again"
            )
        return DamagedEntryError(
            f"{self.file}: {reason}. Delete it, or let accel-train data cache verify find all such files, and start "
            "again: the tokens are computed again from there on"
        )


class OpenShards:
    """Shards opened on first read, a bounded number at a time. Can be pickled: a worker opens them itself."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def __reduce__(self) -> tuple[type[OpenShards], tuple[tuple[Path, ...]]]:
        return OpenShards, (self._files,)

    def __getitem__(self, number: int) -> ShardFile:
        if number not in self._open:
            self._open[number] = ShardFile(self._files[number])
            # A process may have 1024 open files by default, and a large source has more shards.
            if len(self._open) > OPEN_FILES:
                _, oldest = self._open.popitem(last=False)
                oldest.close()
        self._open.move_to_end(number)
        return self._open[number]


class TokenDataset:
    """Rows of tokens for the loader. Memory does not depend on their number. Can be pickled.

    A sample has input_ids, labels and position_ids, (S,) int64, and length, (), its tokens without padding. A label is
    the token itself, or -100 where the loss does not count it.
    """

    def __init__(self, shards: Sequence[Shard], max_length: int, pad_id: int, lease: Lease | None = None) -> None:
        self.shards = tuple(shards)
        self.max_length = max_length
        self.texts = sum(shard.texts for shard in shards)
        self.tokens = sum(shard.tokens for shard in shards)
        """Tokens of all texts."""
        self._pad_id = pad_id
        self._rows_end = np.cumsum([shard.rows for shard in shards]).tolist()
        self._texts_end = np.cumsum([shard.texts for shard in shards]).tolist()
        # As long as the dataset lives, nobody deletes the files.
        self._lease = lease
        self._files = OpenShards([shard.file for shard in shards])

    def __getstate__(self) -> dict[str, Any]:
        # The lease stays with the parent process.
        return {**self.__dict__, "_lease": None}

    def __len__(self) -> int:
        return self._rows_end[-1]

    def __getitem__(self, index: int) -> Batch:
        batch = self.batch([index])
        return {name: rows[0] for name, rows in batch.items()}

    def batch(self, indices: list[int]) -> Batch:
        """Return these rows, (B, S) each, and their length (B,). Raises ``DamagedEntryError``."""
        rows: list[Tokens] = []
        for index in indices:
            file, within = self._find(self._rows_end, index)
            rows.append(file.row(within))
        return packing.collate(rows, self.max_length, self._pad_id)

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of one text, (n,) int64, and where they are trained, (n,) bool."""
        file, within = self._find(self._texts_end, index)
        place, length = file.read("texts", 2 * within, 2 * within + 2).tolist()
        return packing.unmarked(file.read("tokens", place, place + length))

    def length(self, index: int) -> int:
        """Return the number of tokens of a row without padding."""
        file, within = self._find(self._rows_end, index)
        bounds: Ints = file.read("rows", within, within + 2)
        return int(bounds[1] - bounds[0])

    def trim(self, batch: Mapping[str, Tensor], length: int) -> Batch:
        """Crop the rows to ``length`` tokens. The caller knows that none is longer."""
        trimmed = dict(batch)
        for name, values in batch.items():
            if values.dim() == 2:
                # Contiguous, because a view would carry the padding to the device.
                trimmed[name] = values[:, :length].contiguous()
        return trimmed

    def _find(self, ends: list[int], index: int) -> tuple[ShardFile, int]:
        """Return the open file of a row or text, and its number in there."""
        if not 0 <= index < ends[-1]:
            raise IndexError(index)
        number = bisect_right(ends, index)
        before = ends[number - 1] if number else 0
        return self._files[number], index - before
