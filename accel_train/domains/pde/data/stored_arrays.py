"""Arrays of fields in HDF5 files and zarr folders, read with bounded memory.

A contiguous HDF5 dataset is memory-mapped, and its pages are released to the system once they exceed a limit. A chunked
or compressed one is read in whole chunks, which a bounded cache keeps.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
from collections.abc import Generator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data.tables.block_cache import BlockCache

ZARR = ".zarr"
Array = NDArray[Any]


class StoredArray(Protocol):
    """An array (N, T, ...) on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, first: range, second: range, /) -> Array:
        """Return an array (len(first), len(second), ...). It may be a view of the file: copy what you keep."""
        ...


def hdf5() -> Any:
    """Import h5py. Raises `UsageError`, which names the extra to install, if it is missing."""
    try:
        import h5py
    except ImportError:
        raise UsageError(
            "--data.path: fields are kept in HDF5 files, and the package h5py, which reads them, is not installed; "
            "pip install 'accel-train[pde]'"
        ) from None
    return h5py


def zarr() -> Any:
    """Import zarr. Raises `UsageError`, which names the extra to install, if it is missing."""
    try:
        return importlib.import_module("zarr")
    except ImportError:
        raise UsageError(
            "--data.path: the package zarr, which reads .zarr folders, is not installed; pip install "
            "'accel-train[zarr]', or convert the fields to HDF5"
        ) from None


@contextlib.contextmanager
def open_fields(file: Path) -> Generator[Any]:
    """Open an HDF5 file or a zarr folder as a group with `attrs`, `in` and `[name]`. Raises `OSError` as h5py does."""
    if file.suffix != ZARR:
        with hdf5().File(file, "r") as content:
            yield content
        return
    package = zarr()
    try:
        content = package.open_group(str(file), mode="r")
    except Exception as error:  # zarr's own errors, and those of the format and of JSON
        raise OSError(f"{type(error).__name__}: {error}") from None
    yield content


def open_array(file: Path, dataset: str, cache: BlockCache[Array]) -> StoredArray:
    """Open a dataset for reading. Each process and worker must open its own."""
    if file.suffix == ZARR:
        stored = zarr().open_array(str(file / dataset), mode="r")
        return ChunkedArray(file, dataset, stored, cache)
    content = hdf5().File(file, "r")
    stored = content[dataset]
    offset = stored.id.get_offset()
    if offset is None:  # chunked or compressed
        # The file stays open, because chunks are read through it.
        return ChunkedArray(file, dataset, stored, cache)
    # The map needs the offset but no HDF5 handle. For an external link, the offset is in the file that it points to.
    mapped = MappedArray(Path(stored.file.filename), offset, stored.shape, stored.dtype, cache.limit_bytes)
    content.close()
    return mapped


class MappedArray:
    """A contiguous dataset, memory-mapped. At most about `limit_bytes` of it stay in this process's memory."""

    def __init__(self, file: Path, offset: int, shape: tuple[int, ...], dtype: Any, limit_bytes: int) -> None:
        with file.open("rb") as content:
            self._map = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        self._array: Array = np.ndarray(shape, dtype, self._map, offset)
        self._limit_bytes = limit_bytes
        self._read_bytes = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def read(self, first: range, second: range) -> Array:
        """View rows `first` and entries `second` of the second axis. Both ranges ascend."""
        if self._read_bytes > self._limit_bytes:
            # The pages stay in the system's cache while it has room. Windows has no such call and needs none.
            if hasattr(self._map, "madvise"):
                self._map.madvise(mmap.MADV_DONTNEED)
            self._read_bytes = 0
        values = self._array[_slice(first), _slice(second)]
        # Count the entries that a step skips as well: their pages are often read all the same.
        self._read_bytes += values.nbytes * first.step * second.step
        return values


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)


class ChunkedArray:
    """A chunked dataset. It decodes and caches whole chunks of the first two axes, with all of the other axes."""

    def __init__(self, file: Path, dataset: str, stored: Any, cache: BlockCache[Array]) -> None:
        self._file = file
        self._dataset = dataset
        self._stored = stored
        self._dtype = stored.dtype
        self._shape: tuple[int, ...] = tuple(stored.shape)
        self._cache = cache
        # A dataset without written storage has no chunks.
        chunks: tuple[int, ...] = stored.chunks or (1, *stored.shape[1:])
        self._chunk = chunks[:2]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def read(self, first: range, second: range) -> Array:
        """Copy rows `first` and entries `second` of the second axis."""
        values = np.empty((len(first), len(second), *self.shape[2:]), self._dtype)
        by_first = _by_chunk(first, self._chunk[0])
        by_second = _by_chunk(second, self._chunk[1])
        for row, (to_rows, rows) in by_first.items():
            for column, (to_columns, columns) in by_second.items():
                key = (self._file, self._dataset, row, column)
                chunk = self._cache.get(key, lambda at=(row, column): self._decode(*at), lambda array: array.nbytes)
                values[np.ix_(to_rows, to_columns)] = chunk[np.ix_(rows, columns)]
        return values

    def _decode(self, row: int, column: int) -> Array:
        height, width = self._chunk
        rows = slice(row * height, (row + 1) * height)
        columns = slice(column * width, (column + 1) * width)
        try:
            return np.asarray(self._stored[rows, columns])
        except Exception as error:  # h5py, zarr and each compression raise errors of their own
            raise UsageError(
                f"--data.path: {self._file}, {self._dataset!r}, the chunk of samples {rows.start} to "
                f"{min(rows.stop, self.shape[0]) - 1} cannot be read ({' '.join(str(error).split())[:200]}). Its bytes "
                "are damaged: copy the file again."
            ) from None


def _by_chunk(numbers: range, size: int) -> dict[int, tuple[list[int], list[int]]]:
    """Map each chunk to the positions of its entries in `numbers` and within the chunk."""
    chunks: dict[int, tuple[list[int], list[int]]] = {}
    for place, number in enumerate(numbers):
        to, within = chunks.setdefault(number // size, ([], []))
        to.append(place)
        within.append(number % size)
    return chunks
