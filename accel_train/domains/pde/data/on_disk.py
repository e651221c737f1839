"""Checks that all of an array is on disk, and in which files.

HDF5 and zarr silently read what is missing, such as an absent chunk or source of a virtual dataset, as the fill value.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.domains.pde.data.stored_arrays import ZARR, hdf5
from accel_train.store.atomic_files import fsync_directory

VIRTUAL = "a virtual dataset, read from other files,"
ONE_FILE = "write the fields into one file without virtual datasets."


@contextlib.contextmanager
def whole_hdf5(file: Path) -> Generator[Any]:
    """Open a new HDF5 file, which gets its name when the block ends. After an error, only the old file is left.

    A reader of a contiguous dataset could not tell which parts were never written.
    """
    # A fixed name, so that the next write replaces what a crash has left.
    temporary = file.with_name(f".{file.name}.tmp")
    # Outside the block below, so that a file which another process is writing is not deleted.
    content = hdf5().File(temporary, "w")
    try:
        with content:
            yield content
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(file.parent)


def require(file: Path, content: Any, names: Sequence[str]) -> None:
    """Refuse an open file in which one of these datasets is missing, incomplete or not of real numbers.

    The error about a missing dataset lists what the file holds.
    """
    if missing := [name for name in names if name not in content]:
        raise UsageError(
            f"--data.path: {file} has no dataset {missing[0]!r}; it contains {contents_of(content)}. "
            f"{' and '.join(names)} are required: check what the file is."
        )
    for name in names:
        stored = content.get(name)
        if getattr(stored, "shape", None) is None:
            raise UsageError(
                f"--data.path: {file}, {name!r}, is {_kind_of(stored).strip('()')}; a dataset is required: check what "
                "the file is."
            )
        if stored.dtype.kind not in "biuf":
            raise UsageError(
                f"--data.path: {file}, {name!r}, has values of type {stored.dtype}; real numbers are required: write "
                "it as float32."
            )
        refuse_absent_chunks(file, name, stored)


def contents_of(content: Any) -> str:
    """List the datasets of an open file with their shapes."""
    return ", ".join(f"{name} {_kind_of(content.get(name))}" for name in content) or "nothing"


def _kind_of(item: Any) -> str:
    if item is None:
        return "(a link to nothing)"
    shape = getattr(item, "shape", "(a group)")
    return "(without values)" if shape is None else str(shape)


def refuse_absent_chunks(file: Path, dataset: str, stored: Any) -> None:
    """Refuse an array with fewer chunks on disk than its shape has, or with values that are in no file.

    Otherwise an unfinished copy of a zarr folder, or an HDF5 file whose writer was interrupted, would look complete.
    """
    if file.suffix == ZARR:
        _refuse_absent_chunks_of_zarr(file, dataset, stored)
    elif stored.external:
        names = ", ".join(name for name, *_ in stored.external)
        raise UsageError(
            f"--data.path: {file}, {dataset!r}, is kept in raw files ({names}), which HDF5 looks for in the working "
            "folder of the process. A dataset inside the file is required: write it again without external storage."
        )
    elif stored.is_virtual:
        _refuse_absent_sources(file, dataset, stored)
    elif stored.size:
        _refuse_unwritten_storage(file, dataset, stored)


def _refuse_absent_sources(file: Path, dataset: str, stored: Any) -> None:
    """Refuse a virtual dataset if parts of it or of its sources would be read as the fill value."""
    where = f"--data.path: {file}, {dataset!r}, is {VIRTUAL}"
    absent = f"All are required, because they would be read as {stored.fillvalue}:"
    covered = 0
    for mapping, source in _sources(stored):
        if not source.is_file():
            raise UsageError(
                f"{where} and its source {source} is missing. {absent} copy that file to this path, or {ONE_FILE}"
            )
        try:
            with hdf5().File(source, "r") as content:
                require(source, content, (mapping.dset_name,))
                fits = _fits(mapping, content[mapping.dset_name])
        except OSError as error:
            raise UsageError(
                f"{where} and its source {source} cannot be read ({error}). {absent} copy a whole one, or {ONE_FILE}"
            ) from None
        if not fits:
            raise UsageError(
                f"{where} and {mapping.dset_name!r} of its source {source} has fewer values than are taken from it. "
                f"{absent} copy the whole source, or {ONE_FILE}"
            )
        covered += _points(mapping.vspace, stored.size)
    if covered < stored.size:
        raise UsageError(
            f"{where} and {stored.size - covered} of its {stored.size} values have no source. {absent} write it again "
            f"with the sources of all, or {ONE_FILE}"
        )


def _points(space: Any, unlimited: int) -> int:
    """Count the selected values. An unlimited selection has no count: returns ``unlimited``."""
    try:
        return space.get_select_npoints()
    except RuntimeError:
        return unlimited


def _fits(mapping: Any, source: Any) -> bool:
    """Return True if the source has all values that the virtual dataset maps from it."""
    try:
        _, last = mapping.src_space.get_select_bounds()
    except (ValueError, RuntimeError):  # all values, or an unlimited selection
        return source.size >= _points(mapping.vspace, 0)
    return all(end < length for end, length in zip(last, source.shape, strict=True))


def _sources(stored: Any) -> Iterator[tuple[Any, Path]]:
    """Yield the mappings of a virtual dataset, each with the path where HDF5 looks for its source file."""
    outer = Path(stored.file.filename)
    for mapping in stored.virtual_sources():
        if "%b" in mapping.file_name + mapping.dset_name:
            raise UsageError(
                f"--data.path: {outer}, {stored.name!r}, is {VIRTUAL} and names them by the pattern "
                f"{mapping.file_name!r}. Names are required, because a file that is missing would be read as "
                f"{stored.fillvalue}: name each source, or {ONE_FILE}"
            )
        named = Path(mapping.file_name)
        places = [outer.parent / named, outer.resolve().parent / named, outer.parent / named.name]
        found = next((place for place in places if place.is_file()), places[0])
        yield mapping, outer if mapping.file_name == "." else found


def source_files(file: Path, datasets: Sequence[str]) -> list[Path]:
    """Return the other files that the datasets are read from, through virtual datasets and links, recursively."""
    if file.suffix == ZARR:
        return []
    with hdf5().File(file, "r") as content:
        sources: dict[Path, None] = {}
        for stored in map(content.get, datasets):
            sources[Path(stored.file.filename)] = None
            for mapping, source in _sources(stored) if stored.is_virtual else ():
                sources[source] = None
                sources.update(dict.fromkeys(source_files(source, (mapping.dset_name,))))
    sources.pop(file, None)
    return list(sources)


def state_of(file: Path) -> tuple[int, ...]:
    """Return what a write changes: size, mtime and ctime in ns, and inode. A zarr folder's cover all of its files.

    A copy by tar or rsync may keep the mtime of its source, but not the ctime.
    """
    stats = [file.stat()]
    if file.is_dir():
        stats += [entry.stat() for entry in file.rglob("*") if entry.is_file()]
    size = sum(stat.st_size for stat in stats)
    date = max(stat.st_mtime_ns for stat in stats)
    change = max(stat.st_ctime_ns for stat in stats)
    return size, date, change, stats[0].st_ino


def _refuse_unwritten_storage(file: Path, dataset: str, stored: Any) -> None:
    if stored.chunks is None:
        expected, written = 1, int(stored.id.get_storage_size() > 0)
    else:
        counts = [math.ceil(length / step) for length, step in zip(stored.shape, stored.chunks, strict=True)]
        expected, written = math.prod(counts), stored.id.get_num_chunks()
    if written < expected:
        raise UsageError(
            f"--data.path: {file}, {dataset!r}: {expected - written} of {expected} chunks were never written. All are "
            f"required, because they would be read as {stored.fillvalue}: write the file again, to its end."
        )


def _refuse_absent_chunks_of_zarr(file: Path, dataset: str, stored: Any) -> None:
    """Compare the expected chunks with one listing of the folder. The writer may have skipped chunks of fill values."""
    folder = file / dataset
    size: tuple[int, ...] = stored.shards or stored.chunks  # a shard is a file of several chunks
    counts = [math.ceil(length / step) for length, step in zip(stored.shape, size, strict=True)]
    # Not by zarr's `nchunks_initialized`, whose cost is quadratic and which rounds shards up.
    keys: Any = map(stored.metadata.encode_chunk_key, itertools.product(*map(range, counts)))
    present: set[str] = set()
    for directory, _, names in os.walk(folder):
        place = Path(directory).relative_to(folder)
        present.update((place / name).as_posix() for name in names)
    absent: list[str] = [key for key in keys if key not in present]
    if absent:
        raise UsageError(
            f"--data.path: {file}, {dataset!r}: {len(absent)} of {math.prod(counts)} chunks are absent, the first is "
            f"{absent[0]}. All are required, because after an unfinished copy they would be read as "
            f"{stored.fill_value}: copy the folder again, or, if it was written without chunks of the fill value, "
            "write it with zarr's write_empty_chunks=True."
        )
