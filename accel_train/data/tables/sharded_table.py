"""Rows of a table in shards, read by blocks, with a bounded cache of decoded blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data.tables.block_cache import BlockCache
from accel_train.data.tables.formats import UNITS, Block, parse_line, read_batch, refuse_changed
from accel_train.data.tables.shards import ShardIndex, check_columns

OPEN_FILES = 8
"""Parquet files kept open. Each holds its footer in memory."""
Ints = NDArray[np.int64]


class DecodedBlock(NamedTuple):
    """Columns of one block in memory."""

    columns: Mapping[str, Any]
    """Column -> pyarrow array or chunked array."""
    faults: Mapping[int, str]
    """Rows without a value, with the reason: damaged lines of JSONL."""
    size: int
    """Bytes in memory."""


class ShardedTable:
    """Random access to some columns of the rows of all shards, numbered in the order of files and rows.

    Memory holds the index, decoded blocks of up to `cache_bytes`, and the block being read. The cache always keeps the
    last block. Each process and each worker has a cache of its own. Errors name file and place.
    """

    def __init__(self, index: ShardIndex, columns: Sequence[str], cache_bytes: int) -> None:
        check_columns(index, columns)
        self.index = index
        self.columns = tuple(columns)
        self.cache_bytes = cache_bytes
        sizes = [block.rows for block in index.blocks]
        ends = np.cumsum(sizes, dtype=np.int64)
        self.starts: Ints = np.concatenate([np.zeros(1, np.int64), ends])
        """First row of each block, and the number of rows in all."""
        self._decoded: BlockCache[DecodedBlock] = BlockCache(cache_bytes)
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A worker opens the files itself.
        return {**self.__dict__, "_open": OrderedDict()}

    def place(self, row: int) -> str:
        """Name file and place of a row: file:line, or file, row group and row in it."""
        number = self.block_of(row)
        block = self.index.blocks[number]
        within = row - int(self.starts[number])
        file = self.file_of(row)
        if self.index.format == "jsonl":
            return f"{file}:{block.line + within}"
        return f"{file}, {UNITS[self.index.format]} {block.number}, row {within}"

    def file_of(self, row: int) -> Path:
        """Return the file of a row."""
        return self.index.files[self.index.blocks[self.block_of(row)].file]

    def block_of(self, row: int) -> int:
        """Return the number of a row's block."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return bisect_right(self.starts, row) - 1

    def take(self, column: str, rows: Sequence[int] | Ints) -> list[Any]:
        """Return the values of a column as Python objects, in the order of `rows`. Reads each block once."""
        wanted = np.asarray(rows, np.int64)
        found: list[Any] = [None] * len(wanted)
        blocks = np.searchsorted(self.starts, wanted, side="right") - 1
        for number in dict.fromkeys(blocks.tolist()):
            here = np.flatnonzero(blocks == number)
            rows = wanted[here] - self.starts[number]
            stored = self.block(number).columns[column]
            values = stored.take(rows).to_pylist()
            for place, value in zip(here.tolist(), values, strict=True):
                found[place] = value
        return found

    def decoded(self) -> Iterator[tuple[int, DecodedBlock]]:
        """Read all blocks in order, without the cache."""
        for number in range(len(self.index.blocks)):
            yield number, self._read(number)

    def block(self, number: int) -> DecodedBlock:
        """Return a block from the cache, or read it."""
        return self._decoded.get(number, lambda: self._read(number), lambda block: block.size)

    # ------------------------------------------------------------------------------------------------------- reading
    def _read(self, number: int) -> DecodedBlock:
        block = self.index.blocks[number]
        file = self.index.files[block.file]
        try:
            self._refuse_changed(block.file)
            if self.index.format == "jsonl":
                decoded = _read_lines(file, block, self.columns)
            elif self.index.format == "parquet":
                columns = list(self.columns)
                table = self._parquet(block.file).read_row_group(block.number, columns, False)
                decoded = _of_table(table)
            else:
                decoded = _of_table(read_batch(file, block, self.columns))
        except UsageError:
            raise
        except Exception as error:  # damaged files raise half a dozen types
            raise UsageError(
                f"{self.index.option}: {file}, {UNITS[self.index.format]} {block.number} cannot be read "
                f"({' '.join(str(error).split())[:200]}). Its bytes are damaged: copy the file again, or remove it."
            ) from None
        rows = {len(column) for column in decoded.columns.values()}
        if rows != {block.rows}:
            raise UsageError(
                f"{self.index.option}: {file}, {UNITS[self.index.format]} {block.number} has {max(rows)} rows, but "
                f"its index requires {block.rows}. Copy the file again, or remove it."
            )
        return decoded

    def _refuse_changed(self, number: int) -> None:
        """Refuse a file that was removed or written since it was indexed. Checked once in each process."""
        if number in self._checked:
            return
        refuse_changed(self.index.option, self.index.files[number], self.index.identities[number])
        self._checked.add(number)

    def _parquet(self, number: int) -> Any:
        from pyarrow import parquet

        if number not in self._open:
            # Checksums are compared where the writer has included them.
            file: Any = parquet.ParquetFile(self.index.files[number], page_checksum_verification=True)
            self._open[number] = file
            if len(self._open) > OPEN_FILES:
                _, closed = self._open.popitem(last=False)
                closed.close()
        self._open.move_to_end(number)
        return self._open[number]


def _of_table(table: Any) -> DecodedBlock:
    columns = {name: table.column(name) for name in table.schema.names}
    return DecodedBlock(columns, {}, table.nbytes)


def _read_lines(file: Path, block: Block, columns: Sequence[str]) -> DecodedBlock:
    """Parse lines of JSONL. A line that is no object is a fault, as is a value whose type differs from the others."""
    with file.open("rb") as content:
        content.seek(block.offset)
        text = content.read(block.size)
    lines = text.split(b"\n")
    if text.endswith(b"\n"):
        lines.pop()
    if block.offset == 0:
        lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")  # the byte-order mark of some editors
    values: dict[str, list[Any]] = {column: [] for column in columns}
    faults: dict[int, str] = {}
    for row, line in enumerate(lines):
        parsed = parse_line(line)
        if isinstance(parsed, str):
            faults[row] = parsed
            parsed = {}
        for column in columns:
            if column not in parsed and row not in faults:
                faults[row] = f"no field {column!r} among {sorted(parsed)}"
            values[column].append(parsed.get(column))
    arrays = {column: _array(column, values[column], faults) for column in columns}
    return DecodedBlock(arrays, faults, sum(array.nbytes for array in arrays.values()))


def _array(column: str, values: list[Any], faults: dict[int, str]) -> Any:
    import pyarrow

    try:
        return pyarrow.array(values)
    except (ValueError, TypeError, OverflowError):  # values of several types, or no UTF-8
        pass
    kinds = [type(value) for value in values if value is not None]
    common = max(dict.fromkeys(kinds), key=kinds.count)
    kept: list[Any] = []
    for row, value in enumerate(values):
        fault = _value_fault(column, value, common)
        if fault is not None:
            faults.setdefault(row, fault)
            value = None
        kept.append(value)
    return pyarrow.array(kept)


def _value_fault(column: str, value: Any, common: type) -> str | None:
    if value is None:
        return None
    if type(value) is not common:
        return f"{column!r} is {type(value).__name__}, but {common.__name__} is required, as in the lines around it"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{column!r} contains half of a surrogate pair, which is not a character"
    return None
