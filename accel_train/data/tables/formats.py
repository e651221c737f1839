"""Formats of shards: where the blocks of a file are, and how one is read.

A block is the unit of reading: a row group of parquet, a record batch of Arrow, or some thousand lines.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_train.config import UsageError
from accel_train.data.tables.json_rows import parse_row

SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""Files with random access to their blocks."""
KINDS = {**SUFFIXES, ".txt": "text", ".csv": "csv", ".json": "json"}
"""All files of rows. A .json file is one list of rows. In a folder such files may be something else, and are not
read."""
UNITS = {"parquet": "row group", "arrow": "record batch", "jsonl": "block of lines"}
PLURALS = {"parquet": "row groups", "arrow": "record batches", "jsonl": "blocks of lines"}
LINES_PER_BLOCK = 4096
BYTES_PER_BLOCK = 2**23
PIECE_BYTES = 2**22
ENCODED = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip-compressed"}


class Block(NamedTuple):
    """Rows that are read together."""

    file: int
    """Index of the shard."""
    number: int
    """Row group, record batch or block of lines in its file."""
    rows: int
    """Number of rows. In JSONL the number of lines, blank and damaged ones included."""
    offset: int = 0
    """First byte, where the format needs it."""
    size: int = 0
    """Bytes of the block in a JSONL file."""
    line: int = 1
    """First line of the block in a JSONL file."""


def index_file(option: str, file: Path, kind: str) -> tuple[dict[str, str], list[tuple[int, ...]]]:
    """Return the types of the columns, and for each block the fields of `Block` after `file`."""
    # Text is cut at the ends of lines, as JSONL is.
    index = {"parquet": _index_parquet, "arrow": _index_arrow, "jsonl": _index_jsonl, "text": _index_jsonl}[kind]
    try:
        return index(file)
    except UsageError:
        raise
    except Exception as error:  # damaged files raise half a dozen types
        raise UsageError(
            f"{option}: {file} cannot be read as {kind} ({' '.join(str(error).split())[:200]}). A complete file is "
            "required: copy it again, or remove it."
        ) from None


def _index_parquet(file: Path) -> tuple[dict[str, str], list[tuple[int, ...]]]:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as content:
        metadata: Any = content.metadata
        types = {field.name: str(field.type) for field in content.schema_arrow}
        groups = range(metadata.num_row_groups)
        return types, [(number, metadata.row_group(number).num_rows) for number in groups]


def _index_arrow(file: Path) -> tuple[dict[str, str], list[tuple[int, ...]]]:
    """Index an Arrow file, or a stream as `datasets` writes. Reads only the metadata of a stream."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        if is_arrow_file(file):
            content: Any = pyarrow.ipc.open_file(source)
            rows = [content.get_batch(number).num_rows for number in range(content.num_record_batches)]
            return _types(content.schema), list(enumerate(rows))
        stream: Any = pyarrow.ipc.open_stream(source)
        blocks: list[tuple[int, ...]] = []
        while True:
            offset = source.tell()
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                return _types(stream.schema), blocks
            blocks.append((len(blocks), batch.num_rows, offset))


def is_arrow_file(file: Path) -> bool:
    """Return True for the random-access format, False for a stream."""
    with file.open("rb") as content:
        return content.read(6) == b"ARROW1"


def _types(schema: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _index_jsonl(file: Path) -> tuple[dict[str, str], list[tuple[int, ...]]]:
    """Cut a file into blocks of up to 4,096 lines or about 8 MiB. Reads it once, a few MiB at a time."""
    blocks: list[tuple[int, ...]] = []
    line = 1
    start = 0
    for end, lines in _line_blocks(file):
        blocks.append((len(blocks), lines, start, end - start, line))
        start = end
        line += lines
    return {}, blocks


def _line_blocks(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the end in bytes and the number of lines of each block."""
    start = position = lines = 0
    last = b"\n"
    with file.open("rb") as content:
        while piece := content.read(PIECE_BYTES):
            if position == 0 and piece[:2] in ENCODED:
                raise ValueError(f"it is {ENCODED[piece[:2]]}, but UTF-8 is required")
            values = np.frombuffer(piece, np.uint8)
            ends = position + 1 + np.flatnonzero(values == ord("\n"))
            while len(ends):
                # The line that completes a block, by number or by size.
                by_size = int(np.searchsorted(ends, start + BYTES_PER_BLOCK))
                count = min(LINES_PER_BLOCK - lines, by_size + 1)
                if count > len(ends):
                    lines += len(ends)
                    break
                yield int(ends[count - 1]), lines + count
                start = int(ends[count - 1])
                ends = ends[count:]
                lines = 0
            position += len(piece)
            last = piece[-1:]
    # The last line may lack its end.
    lines += last != b"\n"
    if lines:
        yield position, lines


def read_schema(file: Path, kind: str) -> Any:
    """Read the Arrow schema of a parquet or Arrow file."""
    import pyarrow.parquet

    if kind == "parquet":
        return pyarrow.parquet.read_schema(file)
    with pyarrow.OSFile(str(file)) as source:
        opened: Any = pyarrow.ipc.open_file(source) if is_arrow_file(file) else pyarrow.ipc.open_stream(source)
        return opened.schema


def read_batch(file: Path, block: Block, columns: Sequence[str], *, required: bool = True) -> Any:
    """Read columns of an Arrow record batch. If not ``required``, those of them that it has, or all if it has none."""
    import pyarrow

    # Not memory-mapped: pages of a map stay in memory for as long as the system likes.
    with pyarrow.OSFile(str(file)) as source:
        if is_arrow_file(file):
            batch: Any = pyarrow.ipc.open_file(source).get_batch(block.number)
        else:
            schema: Any = pyarrow.ipc.open_stream(source).schema
            source.seek(block.offset)
            batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(source), schema)
    if not required:
        columns = [name for name in columns if name in batch.schema.names] or batch.schema.names
    return batch.select(list(columns))


def parse_line(line: bytes) -> dict[str, Any] | str:
    """Return the object of a line, or its fault. A blank line has the fault ""."""
    try:
        decoded = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} of the line is not UTF-8 (iconv -t UTF-8 converts)"
    if not decoded:
        return ""
    return parse_row(decoded)


def mentions(file: Path, column: str) -> bool:
    """Return True if a row of JSONL may have the field ``column``. Reads up to the first occurrence of its name."""
    # Other names have several spellings in JSON.
    if not (column.isascii() and column.isidentifier()):
        return True
    name = f'"{column}"'.encode()
    before = b""
    with file.open("rb") as content:
        while piece := content.read(PIECE_BYTES):
            # In a file that is not UTF-8, names have other bytes.
            if name in before + piece or (not before and piece[:2] in ENCODED):
                return True
            before = piece[-len(name) :]
    return False


def csv_columns(file: Path) -> list[str] | None:
    """Return the names in the first row of a CSV file, None if it cannot be read."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            return next(csv.reader(lines), [])
    except (ValueError, csv.Error):  # reading it reports what is wrong
        return None


def identity_of(file: Path) -> tuple[int, int]:
    """Return size and date of a file, as in `ShardIndex.identities`."""
    stat = os.stat(file)
    return stat.st_size, stat.st_mtime_ns


def refuse_changed(option: str, file: Path, identity: tuple[int, int]) -> None:
    """Raise ``UsageError`` for a file that is gone, or whose ``identity_of`` has changed since it was listed."""
    try:
        changed = identity_of(file) != identity
    except FileNotFoundError:
        raise UsageError(
            f"{option}: {file} has disappeared since this start listed it. Restore it and start again."
        ) from None
    if changed:
        raise UsageError(f"{option}: {file} was written since this start listed it. Start again when it is complete.")
