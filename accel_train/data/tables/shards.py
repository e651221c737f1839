"""Shards of a table on disk: their files, and the places of their blocks of rows.

A block is the unit of reading: a row group of parquet, a record batch of Arrow, or some thousand lines of JSONL. Only
an index of a few numbers per block is kept in memory. It is cached by the size and date of the files.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from accel_train.config import UsageError, expand_path
from accel_train.data.artifacts import cached_folder
from accel_train.data.tables.formats import (
    BYTES_PER_BLOCK,
    LINES_PER_BLOCK,
    PLURALS,
    SUFFIXES,
    UNITS,
    Block,
    index_file,
)
from accel_train.data.tables.run_files import listed, run_file_notices, without_run_files
from accel_train.data.tables.text_sources import is_saved_dataset
from accel_train.wording import shortened

logger = logging.getLogger(__name__)

INDEX_FORMAT = 1
SHOWN = 4


class ShardIndex(NamedTuple):
    """Locations of the rows of a table."""

    option: str
    """Option naming the files, for messages."""
    files: tuple[Path, ...]
    format: str
    identities: tuple[tuple[int, int], ...]
    """Size in bytes and date (mtime in ns) of each file."""
    types: tuple[dict[str, str], ...]
    """Arrow types of the columns of each file. Empty for JSONL."""
    blocks: tuple[Block, ...]
    key: str
    """Hash of names, sizes and dates of the files."""
    notices: tuple[str, ...]
    """Lines for the log."""


def index_shards(
    option: str, value: str, cache: Path, *, rank: int = 0, barrier: Callable[[], None] = lambda: None
) -> ShardIndex:
    """Find the shards of a file, folder or glob, and index their blocks. Every rank calls it (two barriers).

    Rank 0 reads the footers of parquet, the metadata of Arrow, and all of JSONL, unless the index is cached. Refuses
    an empty glob, a folder of several formats, one file under two names, unreadable files and tables without rows.
    """
    # On every rank: a host without the files is named here and not in the first step.
    files, kind = find_shards(option, value)
    stats = [file.stat() for file in files]
    identities = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
    # Size and date, not content: to hash terabytes at every start would take hours. Texts are compared by their ids.
    described = [INDEX_FORMAT, kind, [str(file) for file in files], identities, LINES_PER_BLOCK, BYTES_PER_BLOCK]
    key = hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def write(directory: Path) -> None:
        found = [index_file(option, file, kind) for file in files]
        (directory / "index.json").write_text(json.dumps(found), "utf-8")

    folder = cached_folder(cache / "shards" / key, write, rank=rank, barrier=barrier)
    if rank == 0:
        by_file = dict(zip(map(str, files), identities, strict=True))
        warn_of_changes(option, value, cache, by_file)
    text = (folder / "index.json").read_text("utf-8")
    saved: list[tuple[dict[str, str], list[list[int]]]] = json.loads(text)
    blocks: list[Block] = []
    for number, (_, of_file) in enumerate(saved):
        # Blocks without rows would be draws without a sample.
        blocks += [Block(number, *numbers) for numbers in of_file if numbers[1] > 0]
    types = tuple(columns for columns, _ in saved)
    filled = {block.file for block in blocks}
    empty = [str(file) for number, file in enumerate(files) if number not in filled]
    if not blocks:
        raise UsageError(f"{option} {value!r}: {shortened(empty, SHOWN)} contain no rows. At least 1 row is required.")
    shards = _counted(len(files), f"{kind} shard", f"{kind} shards")
    notices = [f"{shards} in {_counted(len(blocks), UNITS[kind], PLURALS[kind])}"]
    path = expand_path(value)
    if not path.is_file():
        notices += run_file_notices(listed(path))
    if empty:
        notices.append(f"shards without rows are left out: {shortened(empty, SHOWN)}")
    return ShardIndex(option, tuple(files), kind, identities, types, tuple(blocks), key, tuple(notices))


def _counted(number: int, one: str, several: str) -> str:
    if number == 1:
        return f"1 {one}"
    return f"{number:,} {several}"


def warn_of_changes(option: str, value: str, cache: Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Name the shards that came, went or changed since the last start of this cache with the same `value`.

    A run refuses changed data by their fingerprint, which does not name files.
    """
    # By the path as it was given: the same folder through another glob is another choice of files.
    name = hashlib.sha256(str(expand_path(value)).encode()).hexdigest()
    listing = cache / "shards" / f"{name}.last.json"
    try:
        listed = json.loads(listing.read_text("utf-8"))
        before = {file: tuple(identity) for file, identity in listed.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # the first start, or a damaged listing
        before = dict(files)
    kinds = {
        "removed": [file for file in before if file not in files],
        "added": [file for file in files if file not in before],
        "written again": [file for file in files if before.get(file, files[file]) != files[file]],
    }
    for kind, names in kinds.items():
        if names:
            logger.warning("%s %r: since the last start, %s: %s", option, value, kind, shortened(names, SHOWN))
    # In a cache of another user that cannot be written, the listing stays as it is: it serves the log alone.
    with contextlib.suppress(OSError):
        _write_listing(listing, files)


def _write_listing(listing: Path, files: Mapping[str, tuple[int, int]]) -> None:
    listing.parent.mkdir(parents=True, exist_ok=True)
    part = listing.with_name(f".{listing.name}.{socket.gethostname()}.{os.getpid()}.part")
    part.write_text(json.dumps(files), "utf-8")
    part.replace(listing)


# ------------------------------------------------------------------------------------------------------------- files
def find_shards(option: str, value: str) -> tuple[list[Path], str]:
    """Return the shards of a file, folder or glob in the order of their names, and their format."""
    path = expand_path(value)
    if path.is_dir():
        inside = [file for file in without_run_files(path.iterdir())[0] if file.is_file()]
        found = sorted(file for file in inside if file.suffix in SUFFIXES)
        nothing = f"{path} holds no such file"
    # An existing file may have brackets in its name.
    elif path.exists() or not glob.has_magic(str(path)):
        found = [path]
        nothing = ""
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        # A glob may match folders too.
        found = [file for file in without_run_files(found)[0] if file.is_file()]
        nothing = f"{path} matches no file"
    if not found:
        raise UsageError(
            f"{option} {value!r}: {nothing}. Give a folder or glob of {', '.join(SUFFIXES)} files, such as "
            "'data/*.parquet'."
        )
    if not found[0].exists():
        raise UsageError(f"{option} {value!r}: {found[0]} does not exist. Give a file, folder or glob that exists.")
    if found[0].is_fifo():
        # Opening one blocks until somebody writes to it.
        raise UsageError(
            f"{option} {value!r}: {found[0]} is a named pipe, and blocks are read more than once. Give a file."
        )
    return found, _format_of(option, value, found)


def is_shards(value: str) -> bool:
    """Return True for a glob, an Arrow file, or a folder with parquet or Arrow files: readable in blocks only.

    False for a folder written by `dataset.save_to_disk`.
    """
    path = expand_path(value)
    if path.is_dir():
        # `datasets` has an order and splits of its own for such a folder.
        return not is_saved_dataset(path) and any(file.suffix in (".parquet", ".arrow") for file in path.iterdir())
    return path.suffix == ".arrow" or (glob.has_magic(str(path)) and not path.exists())


def _format_of(option: str, value: str, files: Sequence[Path]) -> str:
    formats: dict[str, list[str]] = {}
    for file in files:
        if file.suffix not in SUFFIXES:
            raise UsageError(
                f"{option} {value!r}: {file} is not a shard. Files ending in {', '.join(SUFFIXES)} are read by blocks."
            )
        formats.setdefault(SUFFIXES[file.suffix], []).append(file.name)
    if len(formats) > 1:
        counts = ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in formats.items())
        raise UsageError(
            f"{option} {value!r}: files of several formats, {counts}; one is required. Name one with a glob, such as "
            f"'*{files[0].suffix}'."
        )
    _refuse_second_names(option, files)
    return next(iter(formats))


def _refuse_second_names(option: str, files: Sequence[Path]) -> None:
    """Refuse one file under two names, through a link: its rows would count twice."""
    names: dict[tuple[int, int], Path] = {}
    for file in files:
        stat = file.stat()
        # Device and inode identify a file, whatever its name.
        other = names.setdefault((stat.st_dev, stat.st_ino), file)
        if other is not file:
            raise UsageError(
                f"{option}: {other} and {file} are one file under two names, so its rows would count twice. Remove "
                "one of the two."
            )


def check_columns(index: ShardIndex, columns: Sequence[str]) -> None:
    """Refuse a shard that lacks one of `columns`, or has it in another type than the first. JSONL has no types."""
    filled = sorted({block.file for block in index.blocks})
    first = filled[0]
    for column in columns:
        for number in filled:
            types = index.types[number]
            if not types and index.format == "jsonl":
                continue
            if column not in types:
                raise UsageError(
                    f"{index.option}: {index.files[number]} has no column {column!r}; it has {list(types)}. All "
                    "shards need it: name another column, or write the file again."
                )
            if _plain(types[column]) != _plain(index.types[first][column]):
                raise UsageError(
                    f"{index.option}: column {column!r} is {types[column]} in {index.files[number]}, but "
                    f"{index.types[first][column]} in {index.files[first]}. One type is required: write one of them "
                    "again."
                )


def _plain(kind: str) -> str:
    # A large_ type has the same values with longer offsets.
    return kind.replace("large_", "")
