"""Scan of a source: each picture is read once, for its content hash, its size, and to see if it can be decoded.

Pictures decoded without a fault are remembered by content hash. A later start reads and hashes each file, and decodes
only the new ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from accel_train.config import UsageError, expand_path
from accel_train.cores import usable_cores
from accel_train.data.progress import Progress
from accel_train.data.tables.hub_datasets import parse_hub_id
from accel_train.domains.images.sources import (
    Bytes,
    Entry,
    LeftOut,
    Listing,
    Source,
    is_saved_dataset,
    left_out_notices,
)
from accel_train.domains.models.pictures import decoding
from accel_train.domains.models.pictures.decoding import PictureError

SCAN_FORMAT = 1
READ_BY = {
    "split": "a saved dataset with splits, or one of the Hub",
    "image_column": "a table or dataset",
    "caption_column": "a table, a dataset, or a metadata.jsonl or .csv",
    "caption_extension": "a folder of pictures without metadata.jsonl or .csv",
}
"""Options of a source, and the sources that read them, for messages."""


class Scan(NamedTuple):
    """Result of reading one picture file."""

    content: str
    """sha256 of the file, in hexadecimal."""
    width: int = 0
    height: int = 0
    """Width and height are those of the upright picture, in pixels."""
    frames: int = 1
    fault: str = ""
    """Reason why it cannot be decoded. Empty if it can."""


class Picture(NamedTuple):
    """A decodable picture."""

    name: str
    caption: str | None
    content: str
    """sha256 of the file, in hexadecimal. A move to another folder does not change it, but an edit does."""
    width: int
    height: int
    """Width and height are those of the upright picture, in pixels."""
    bytes: Bytes


@dataclass(frozen=True)
class Pictures:
    """All usable pictures of a source."""

    pictures: Sequence[Picture]
    left_out: Sequence[LeftOut]
    animated: int = 0
    """Pictures with several frames. The first one is taken."""
    about_source: Sequence[str] = ()
    """Lines about the source itself."""

    @property
    def notices(self) -> list[str]:
        """Lines for the log: omissions and their reasons."""
        lines = [*left_out_notices(self.left_out), *self.about_source]
        if self.animated:
            lines.append(f"only the first frame is used of {self.animated:,} pictures with several")
        return lines

    def __len__(self) -> int:
        return len(self.pictures)


def read_pictures(
    source: Source,
    cache: Path,
    *,
    min_side: int = 1,
    max_pixels: int = decoding.MAX_PIXELS,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    progress: bool = True,
) -> Pictures:
    """List a source and read each of its pictures once. Collective if processes are connected: they share the reading
    (one barrier).

    Undecodable pictures, and those with a side below `min_side` or more than `max_pixels`, are left out with the
    reason. Pictures without a caption stay. Raises ``UsageError`` for a source without pictures.
    """
    listing = list_pictures(source, cache)
    memory = _memory_file(cache, source, max_pixels)
    known = _remembered(memory)
    # Every n-th entry, not a contiguous range: large pictures often lie side by side.
    own = range(rank, len(listing.entries), world_size)
    with Progress("pictures", len(own), enabled=progress and rank == 0) as bar:
        scanned = _scan_all(listing.entries, own, known, max_pixels, bar.update)
    # Another host may take longer to read than a collective would wait.
    barrier()
    scans = _scans_of_all_ranks(scanned, world_size)
    if rank == 0:
        _remember(memory, scans)
    pictures: list[Picture] = []
    left_out = list(listing.left_out)
    animated = 0
    for entry, scan in zip(listing.entries, scans, strict=True):
        reason = _reason(entry, scan, min_side)
        if reason is not None:
            left_out.append(reason)
            continue
        animated += scan.frames > 1
        pictures.append(Picture(entry.name, entry.caption, scan.content, scan.width, scan.height, entry.content))
    return Pictures(pictures, left_out, animated, listing.notices)


def list_pictures(source: Source, cache: Path) -> Listing:
    """List a folder, parquet or Arrow files, a saved dataset, one of the Hub, or bundled emoji. Reads no picture."""
    # Imported late, because tables need much that folders do not.
    from accel_train.domains.images.demo import emoji
    from accel_train.domains.images.folders import list_folder
    from accel_train.domains.images.tables import list_dataset, list_shards

    if emoji.is_meant(source.path):
        return emoji.list_source(source)
    path = expand_path(source.path)
    if path.suffix in (".parquet", ".arrow") or _has_tables(path):
        return list_shards(source, cache)
    if is_saved_dataset(path):
        return list_dataset(source)
    if path.is_dir():
        return list_folder(path, source, cache)
    if path.exists() or path.is_symlink() or path.suffix in (".zip", ".tar", ".json", ".csv", ".txt"):
        raise UsageError(
            f"{source.named}: a folder of pictures, parquet files, a folder of dataset.save_to_disk or a Hub id is "
            "required. Unpack an archive first."
        )
    # The Hub would answer a path with the syntax of its ids. None of them begins with a dot.
    if parse_hub_id(source.path) is None or source.path.startswith("."):
        raise UsageError(
            f"{source.named}: there is no {path}; a folder of pictures, parquet files, a folder of "
            "dataset.save_to_disk or a Hub id (owner/name) is required. Correct the path."
        )
    return list_dataset(source)


def options_read(source: Source) -> set[str]:
    """Return the names of the options that a source of this kind reads: all of them if it is not on this machine."""
    from accel_train.domains.images.demo import emoji
    from accel_train.domains.images.folders import has_rows

    columns = {"image_column", "caption_column"}
    path = expand_path(source.path)
    if emoji.is_meant(source.path):
        return set()
    if path.suffix in (".parquet", ".arrow") or _has_tables(path):
        return columns
    if is_saved_dataset(path) and not (path / "dataset_dict.json").is_file():
        return columns
    if is_saved_dataset(path):
        return {*columns, "split"}
    if has_rows(path, below=False):
        return {"caption_column"}
    if path.is_dir():
        return {"caption_extension", "caption_column"} if has_rows(path, below=True) else {"caption_extension"}
    return {*columns, "split", "caption_extension"}


def options_given(source: Source) -> dict[str, Any]:
    """Return the options of a source that differ from their defaults."""
    defaults = Source(source.path)
    values = {name: getattr(source, name) for name in READ_BY}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def refuse_options(source: Source, read_by: Iterable[Collection[str]]) -> None:
    """Raise ``UsageError`` if an option of a source is given, but none of several sources reads it.

    ``read_by`` has the options that each of them reads. It is not iterated if no option is given, because finding them
    may list all files of a folder.
    """
    given = options_given(source)
    read = set[str]().union(*read_by) if given else set[str]()
    for name, value in given.items():
        if name not in read:
            raise UsageError(
                f"{source.options[name]} {value!r} has no effect with {source.named}: {READ_BY[name]} is required to "
                "read it. Leave it out, or give such pictures."
            )


def without_unread_columns(source: Source) -> Source:
    """Return a source without column options that it does not read: they may be meant for another source."""
    columns = {"image_column", "caption_column"}
    # The kind of source comes last, because finding it may list all files.
    if columns.isdisjoint(options_given(source)) or options_read(source) & columns:
        return source
    return replace(source, image_column=None, caption_column=None)


def _has_tables(path: Path) -> bool:
    if is_saved_dataset(path):
        return False
    if path.is_dir():
        return any(path.glob("*.parquet")) or any(path.glob("*.arrow"))
    return "*" in path.name


def scan_picture(content: bytes, known: Mapping[str, Scan], max_pixels: int = decoding.MAX_PIXELS) -> Scan:
    """Hash a file, and decode it unless its hash is `known`."""
    digest = hashlib.sha256(content).hexdigest()
    if digest in known:
        return known[digest]
    try:
        # First, because a small file may unpack to gigabytes of pixels.
        header = decoding.read_header(content, max_pixels=max_pixels)
        # All pixels, because a truncated file still has a whole header.
        decoding.decode_picture(content, max_pixels=max_pixels)
    except PictureError as error:
        return Scan(digest, fault=str(error))
    return Scan(digest, header.width, header.height, header.frames)


def _scan_all(
    entries: Sequence[Entry],
    own: Sequence[int],
    known: Mapping[str, Scan],
    max_pixels: int,
    done: Callable[[int], None],
) -> list[tuple[int, Scan]]:
    """Scan the entries with the indices `own`, in threads: decoders release the interpreter's lock."""

    def scan(index: int) -> tuple[int, Scan]:
        try:
            content = entries[index].content.read()
        except OSError as error:
            # An unreadable file is left out with its reason, and does not end the run.
            return index, Scan("", fault=f"cannot be read: {error}")
        return index, scan_picture(content, known, max_pixels)

    cores, _ = usable_cores()
    found: list[tuple[int, Scan]] = []
    with ThreadPoolExecutor(max(1, cores)) as pool:
        for result in pool.map(scan, own):
            found.append(result)
            done(1)
    return found


def _scans_of_all_ranks(own: list[tuple[int, Scan]], world_size: int) -> list[Scan]:
    """Return the scans of all ranks, in the order of the entries."""
    from torch import distributed

    together = own
    if world_size > 1 and distributed.is_available() and distributed.is_initialized():
        gathered: list[Any] = [None] * world_size
        distributed.all_gather_object(gathered, own)
        together = [item for part in gathered for item in cast("list[tuple[int, Scan]]", part)]
    return [scan for _, scan in sorted(together)]


def _reason(entry: Entry, scan: Scan, min_side: int) -> LeftOut | None:
    if scan.fault:
        kind, _, detail = scan.fault.partition(": ")
        return LeftOut(entry.name, f"the picture is {kind}" if kind == "damaged" else kind, detail)
    if min(scan.width, scan.height) < min_side:
        return LeftOut(entry.name, f"a side is shorter than {min_side} pixels", f"{scan.width}x{scan.height}")
    return None


# ------------------------------------------------------------------------------------------------- what was decoded
def _memory_file(cache: Path, source: Source, max_pixels: int) -> Path:
    described = json.dumps(
        [SCAN_FORMAT, str(expand_path(source.path)), source.split, max_pixels, list(decoding.FORMATS)]
    )
    return cache / "pictures" / f"{hashlib.sha256(json.dumps(described).encode()).hexdigest()}.json"


def _remembered(file: Path) -> dict[str, Scan]:
    try:
        rows: list[list[Any]] = json.loads(file.read_text("utf-8"))
        return {row[0]: Scan(*row) for row in rows}
    except (OSError, ValueError, TypeError, IndexError):  # absent or damaged: everything is decoded again
        return {}


def _remember(file: Path, scans: Sequence[Scan]) -> None:
    # Without files that could not be read, and without faults that another version of Pillow may not find.
    sound = [list(scan) for scan in scans if not scan.fault]
    # If the cache belongs to another user, or the disk is full, nothing is remembered: the next start decodes again.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.part")
        part.write_text(json.dumps(sound), "utf-8")
        # Renamed when it is complete, because another process may read it at any time.
        part.replace(file)
