"""Rows of files and datasets in blocks, each read by itself, so no more than one is in memory.

A block is a row group of parquet, a record batch of Arrow, up to 4,096 lines (8 MiB) of JSONL or text, paragraphs of
about 8 MiB, a whole document, a whole CSV or JSON file, or 1,024 rows of a dataset. Every row has a place for messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from accel_train.config import UsageError
from accel_train.data.tables.formats import (
    BYTES_PER_BLOCK,
    KINDS,
    UNITS,
    Block,
    csv_columns,
    identity_of,
    index_file,
    mentions,
    parse_line,
    read_batch,
    refuse_changed,
)
from accel_train.data.tables.json_rows import parse_json
from accel_train.data.tables.text_sources import table
from accel_train.wording import shortened

SampleBy = Literal["line", "paragraph", "document"]
SHOWN = 4
THREADS = 8
"""Files hashed at a time."""
ROWS_AT_ONCE = 1024
"""Rows turned into Python's objects at a time: of parquet, of Arrow, and of a dataset."""
VERSIONS = {"csv": "csv-2"}
"""Versions of formats whose rows have changed. Part of the key, so that rows cached earlier are not reused."""
BLANK_LINE = re.compile(rb"\n\s*\n")
PlacedRow = tuple[str, Mapping[str, Any] | str]
"""Place, and the fields or the fault of the row."""


class RowBlocks(Protocol):
    """Rows of a source. Can be pickled: a worker reads for itself."""

    @property
    def option(self) -> str:
        """Option naming the source, for messages."""
        ...

    @property
    def key(self) -> str:
        """Hash of all that decides the rows: the contents of the files, not their names or dates."""
        ...

    @property
    def names(self) -> list[str]:
        """Names of the files or datasets in the places of rows, in an order that ``key`` decides."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """Number of rows of each block, exact or approximate. Reads the files where the format needs it."""
        ...

    @property
    def notices(self) -> list[str]:
        """Lines for the log."""
        ...

    def schemas(self, column: str) -> Iterator[Sequence[str] | None]:
        """Yield each table's columns. None stands for a file whose rows name their own fields, maybe ``column``."""
        ...

    def read(self, number: int, /) -> Iterator[PlacedRow]:
        """Yield the rows of a block. Raises ``UsageError`` for a file that is damaged or was written meanwhile."""
        ...


@dataclass(frozen=True)
class FileRows:
    """Rows of files, in the order of the files."""

    option: str
    """Option naming the files, for messages."""
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    """Columns to read, where a table has them. A row of text has its piece in the first one."""
    sample_by: SampleBy
    """Unit of a row in text."""
    identities: tuple[tuple[int, int], ...]
    """Size and date of each file when it was hashed."""
    key: str

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks with the rows. Reads the footers of tables, and all of JSONL and text, once."""
        blocks: list[Block] = []
        for number, file in enumerate(self.files):
            blocks += [Block(number, *numbers) for numbers in self._index(file)]
        return tuple(block for block in blocks if block.rows > 0)

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return [str(file) for file in self.files]

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each block. In text and JSONL blank lines count."""
        return self._rows

    @cached_property
    def _rows(self) -> list[int]:
        return [block.rows for block in self.blocks]

    @property
    def notices(self) -> list[str]:
        """Name the files without rows."""
        filled = {block.file for block in self.blocks}
        empty = [str(file) for number, file in enumerate(self.files) if number not in filled]
        return [f"files without rows are left out: {shortened(empty, SHOWN)}"] if empty else []

    def schemas(self, column: str) -> Iterator[Sequence[str] | None]:
        """Yield the columns of each table, and None for lines of text and for JSONL that has ``column`` somewhere.

        JSONL without it has the columns of its first row. Reads footers, headers, and JSONL up to the column.
        """
        for file in self.files:
            kind = KINDS[file.suffix]
            if kind in ("parquet", "arrow"):
                types, _ = index_file(self.option, file, kind)
                yield list(types)
            elif kind == "csv":
                yield csv_columns(file)
            elif kind == "jsonl" and not mentions(file, column):
                first = next(_json_rows(file, Block(0, 0, 1, size=BYTES_PER_BLOCK)), ("", {}))[1]
                yield list(first) if isinstance(first, Mapping) else []
            else:
                yield None

    def _index(self, file: Path) -> list[tuple[int, ...]]:
        kind = KINDS[file.suffix]
        if kind in ("csv", "json") or (kind == "text" and self.sample_by == "document"):
            return [(0, 1, 0, file.stat().st_size)]
        if kind == "text" and self.sample_by == "paragraph":
            return list(_paragraph_blocks(file))
        _, blocks = index_file(self.option, file, kind)
        return blocks

    def read(self, number: int) -> Iterator[PlacedRow]:
        """Yield the rows of a block. Raises ``UsageError`` for a file that is damaged, gone or written meanwhile."""
        block = self.blocks[number]
        file = self.files[block.file]
        kind = KINDS[file.suffix]
        refuse_changed(self.option, file, self.identities[block.file])
        if kind == "jsonl":
            yield from _json_rows(file, block)
        elif kind == "text":
            yield from self._text_rows(file, block)
        elif kind == "json":
            yield from _json_list(self.option, file)
        elif kind == "csv":
            for index, fields in enumerate(table(file, self.columns, self.option)):
                yield f"row {index} of {file}", fields
        else:
            yield from self._table_rows(file, kind, block.number, _batches(file, kind, block, self.columns))

    def _table_rows(self, file: Path, kind: str, number: int, batches: Iterator[Any]) -> Iterator[PlacedRow]:
        place = f"{file}, {UNITS[kind]} {number}"
        count = 0
        try:
            for batch in batches:
                for fields in batch.to_pylist():
                    yield f"{place}, row {count}", fields
                    count += 1
        except Exception as error:  # damaged files raise half a dozen types
            raise UsageError(
                f"{self.option}: {place} cannot be read ({' '.join(str(error).split())[:200]}). Its bytes are "
                "damaged: copy the file again, or remove it."
            ) from None

    def _text_rows(self, file: Path, block: Block) -> Iterator[PlacedRow]:
        try:
            text = _bytes_of(file, block).decode("utf-8-sig" if block.offset == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.option}: {file} cannot be read as UTF-8 ({error}). Convert it first.") from None
        # A "\r\n" is one end of a line, as in a file that is opened as text.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        for number, part in enumerate(_parts(text, self.sample_by), block.line):
            # A line may hold other characters that end a line for Python.
            pieces = part.splitlines() if self.sample_by == "line" else [part]
            for piece in pieces:
                if piece.strip():
                    yield f"{file}:{self.sample_by} {number}", {self.columns[0]: piece}


def file_rows(
    option: str, files: Sequence[Path], columns: Sequence[str], sample_by: SampleBy, sha256: Callable[[Path], str]
) -> FileRows:
    """Return the rows of files. ``sha256`` hashes a file, or remembers the hash of an unchanged one."""
    identities = tuple(identity_of(file) for file in files)
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = list(pool.map(sha256, files))
    found = [KINDS[file.suffix] for file in files]
    kinds = [VERSIONS.get(kind, kind) for kind in found]
    described = json.dumps(["files", kinds, hashes, list(columns), sample_by])
    key = hashlib.sha256(described.encode()).hexdigest()
    return FileRows(option, tuple(files), tuple(columns), sample_by, identities, key)


def _parts(text: str, sample_by: SampleBy) -> list[str]:
    if sample_by == "document":
        return [text]
    if sample_by == "paragraph":
        return re.split(r"\n\s*\n", text)
    return text.split("\n")


def _bytes_of(file: Path, block: Block) -> bytes:
    with file.open("rb") as content:
        content.seek(block.offset)
        return content.read(block.size)


def _json_rows(file: Path, block: Block) -> Iterator[PlacedRow]:
    content = _bytes_of(file, block)
    if block.offset == 0:
        content = content.removeprefix(b"\xef\xbb\xbf")  # the byte-order mark of some editors
    for number, line in enumerate(content.split(b"\n"), block.line):
        parsed = parse_line(line)
        # A blank line is no row.
        if parsed != "":
            yield f"{file}:{number}", parsed


def _json_list(option: str, file: Path) -> Iterator[PlacedRow]:
    try:
        rows = parse_json(file.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option}: {file} cannot be read as JSON ({error}). Write it again as JSONL.") from None
    if not isinstance(rows, list):
        raise UsageError(
            f"{option}: {file} contains a JSON {type(rows).__name__}; a list of objects is required, or JSONL "
            "(.jsonl) with one object per line."
        )
    found: list[Any] = rows
    for index, row in enumerate(found):
        fault = f"a JSON {type(row).__name__}, not an object; a list of objects is required"
        yield f"row {index} of {file}", row if isinstance(row, dict) else fault


def _batches(file: Path, kind: str, block: Block, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a row group or a record batch, a few at a time."""
    from pyarrow import parquet

    if kind == "arrow":
        batch: Any = read_batch(file, block, columns, required=False)
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield batch.slice(start, ROWS_AT_ONCE)
        return
    # Checksums are compared where the writer has included them.
    with parquet.ParquetFile(file, page_checksum_verification=True) as content:
        stored: Any = content.schema_arrow.names
        wanted = [name for name in columns if name in stored]
        # If it has none of these columns, all are read, so that the message about a row can name them.
        yield from content.iter_batches(ROWS_AT_ONCE, row_groups=[block.number], columns=wanted or None)


def _paragraph_blocks(file: Path) -> Iterator[tuple[int, ...]]:
    """Yield the fields of `Block` after `file`: about 8 MiB up to a blank line, or more in a longer paragraph."""
    start = 0
    first = 1
    held = b""
    with file.open("rb") as content:
        while piece := content.read(BYTES_PER_BLOCK):
            held += piece
            ends = [found.end() for found in BLANK_LINE.finditer(held)]
            # Not a blank line at the very end, which may continue in the next piece.
            inside = [end for end in ends if end < len(held)]
            if inside:
                yield (0, len(inside), start, inside[-1], first)
                first += len(inside)
                start += inside[-1]
                held = held[inside[-1] :]
    if held:
        yield (0, 1, start, len(held), first)


@dataclass(frozen=True)
class DatasetRows:
    """Rows on disk of a dataset of `datasets`."""

    option: str
    """Option naming it, for messages."""
    dataset: Any
    """The dataset with only the columns to read."""
    columns: tuple[str, ...]
    """Names of all columns in the dataset as it was given."""
    name: str
    """Name of the dataset as the user gave it, for messages."""
    key: str

    @property
    def names(self) -> list[str]:
        """Name of the dataset."""
        return [self.name]

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each block."""
        return self._rows

    @cached_property
    def _rows(self) -> list[int]:
        total = len(self.dataset)
        starts = range(0, total, ROWS_AT_ONCE)
        return [min(ROWS_AT_ONCE, total - start) for start in starts]

    @property
    def notices(self) -> list[str]:
        """No lines for the log."""
        return []

    def schemas(self, column: str) -> Iterator[Sequence[str] | None]:
        """Yield the columns."""
        yield self.columns

    def read(self, number: int) -> Iterator[PlacedRow]:
        """Yield the rows of a block."""
        start = number * ROWS_AT_ONCE
        stop = min(start + ROWS_AT_ONCE, len(self.dataset))
        columns: Mapping[str, Sequence[Any]] = self.dataset[start:stop]
        for row in range(stop - start):
            fields = {name: values[row] for name, values in columns.items()}
            yield f"row {start + row} of {self.name}", fields


def dataset_rows(
    option: str, dataset: Any, name: str, split: str, columns: Sequence[str], sha256: Callable[[Path], str]
) -> DatasetRows:
    """Return the rows of a dataset, with those of ``columns`` that it has, or with all columns if it has none of them.

    Hashes its files, or its rows where it is in memory.
    """
    digest = hashlib.sha256(f"dataset {split} {len(dataset)} {dataset.features}".encode())
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    for file in files:
        digest.update(sha256(file).encode())
    if not files:
        for fields in dataset:
            digest.update(repr(fields).encode("utf-8", "surrogatepass"))
    names: list[str] = dataset.column_names
    # Other columns may be images or audio, which `datasets` decodes whenever a row is read.
    wanted = [column for column in columns if column in names] or names
    return DatasetRows(option, dataset.select_columns(wanted), tuple(names), name, digest.hexdigest())
