"""Fields on grids in HDF5 files, written in blocks and read sample by sample.

A file of our schema holds

    fields       (N, T, C, H, W) float32, contiguous, with H = 1 for 1-D fields
    parameters   (N, P) float32, further inputs of a model
    attributes   schema, grid (H, W) and those of `FieldHeader`

or is a zarr folder (.zarr) with these arrays and attributes. Both may have any size: `stored_arrays` maps contiguous
datasets and reads others by chunk.
"""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data.tables.block_cache import BlockCache
from accel_train.domains.pde.data.header import SCHEMA, FieldHeader, differences, finite_parameters, read_header
from accel_train.domains.pde.data.on_disk import require, whole_hdf5
from accel_train.domains.pde.data.stored_arrays import StoredArray, hdf5, open_array
from accel_train.wording import shortened

VALUES_PER_BLOCK = 2**24
DEFAULT_CACHE_MIB = 256
Array = NDArray[np.float32]


class FieldPart(NamedTuple):
    """Consecutive samples of one file, numbers first to first + samples - 1, with the channels of `datasets` joined."""

    file: Path
    datasets: tuple[str, ...]
    space: int
    """Spatial axes of datasets (N, X[, Y]) or (N, T, X[, Y][, C]): 1 or 2. 0: the shape is (N, T, C, H, W)."""
    first: int
    samples: int
    stride: int = 1
    """Distance of the points kept along each axis."""

    def open(self, cache: BlockCache[NDArray[Any]]) -> list[FieldView]:
        """Open each dataset as (samples, T, C, H, W). No data are read."""
        return [FieldView(open_array(self.file, name, cache), self) for name in self.datasets]


@dataclass(frozen=True)
class FieldView:
    """An open dataset as (samples, T, C, H, W), whatever its layout on disk."""

    stored: StoredArray
    part: FieldPart

    @property
    def shape(self) -> tuple[int, ...]:
        """(samples, T, C, H, W)"""
        # An array of this shape that takes no memory.
        whole = np.broadcast_to(np.zeros((), np.float32), self.stored.shape)
        kept = self._kept(whole)
        return (self.part.samples, *kept.shape[1:])

    def read(self, samples: slice, times: slice) -> NDArray[Any]:
        """Read (n, t, C, H, W)."""
        count, steps, *_ = self.shape
        rows = range(count)[samples]
        before = self.part.first
        first = range(rows.start + before, rows.stop + before)
        second = range(self.stored.shape[1])
        # Without a time axis, the second axis is spatial and is read whole.
        space = self.part.space
        if space == 0 or len(self.stored.shape) > 1 + space:
            second = range(steps)[times]
        return self._kept(self.stored.read(first, second))

    def _kept(self, array: NDArray[Any]) -> NDArray[Any]:
        """Bring an array from its stored layout into that of the view, keeping every n-th point."""
        stride = self.part.stride
        return _view(array, self.part.space)[..., ::stride, ::stride]


class StoredFields(NamedTuple):
    """All samples of one file."""

    header: FieldHeader
    part: FieldPart
    parameters: Array  # (N, P)

    def select(self, split: str, free: tuple[int, int], count: int, resolution: dict[int, int | None]) -> StoredFields:
        """Select the first `count` samples of the range `free`.

        `resolution` maps the dimensions 1 and 2 to the points to keep along an axis, None for all. Raises `UsageError`
        if the range has fewer samples, the resolution cannot be had by a stride, or a parameter is not finite.
        """
        first, end = free
        if not 0 < count <= end - first:
            raise UsageError(
                f"--data.{split}_samples: {count} of {self.part.file} are needed for {split}, but "
                f"{max(0, end - first)} of its {len(self.parameters)} samples are left for it. At least 1 and "
                "at most that many are required: lower the number, or add more data."
            )
        part = self.part._replace(first=first, samples=count, stride=self._stride(resolution))
        parameters = self.parameters[first : first + count]
        finite_parameters(self.part.file, self.header, parameters, first)
        return self._replace(part=part, parameters=parameters)

    def _stride(self, resolution: dict[int, int | None]) -> int:
        """Return n, to keep every n-th point along each axis. Unlike averages, the kept points are still a solution."""
        _, _, height, width = Fields((self.part,)).shape
        axes = [width] if height == 1 else [height, width]
        points = resolution[len(axes)] or width
        strides: Sequence[int] = range(1, min(axes) + 1)
        rule = "with one n"
        if self.header.boundary == "periodic":
            # The last point must also be n away from the first, across the periodic boundary.
            divided = math.gcd(*axes)
            strides = [stride for stride in strides if divided % stride == 0]
            rule = f"with an n that divides {divided}, because the fields are periodic"
        # If several n give the same number of points, take the smallest.
        choices = {math.ceil(width / stride): stride for stride in reversed(strides)}
        if points in choices:
            return choices[points]
        names = [str(choice) for choice in sorted(choices, reverse=True)]
        raise UsageError(
            f"--data.resolution_{len(axes)}d {points}: {self.part.file} has {height} x {width} points, height x width, "
            f"of which every n-th along each axis can be taken, {rule}. Choose {shortened(names, 8)} for the points "
            "along the width."
        )


def write_fields(
    file: Path,
    header: FieldHeader,
    samples: int,
    blocks: Iterable[tuple[NDArray[Any], NDArray[Any]]],
    written: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the first `samples` of `blocks` of fields (n, T, C, H, W) and parameters (n, P).

    One block is in memory at a time. `written` is called after each block with the number of samples it added. The file
    gets its name only once all samples are in it. Raises `UsageError` for blocks with too few samples or of different
    shapes, and for a header that contradicts them.
    """
    done = 0
    with whole_hdf5(file) as content:
        for fields, parameters in blocks:
            if len(fields) != len(parameters):
                raise UsageError(
                    f"write_fields: a block for {file} has {len(fields)} samples of fields and {len(parameters)} of "
                    "parameters; the same number of both is required: correct the block."
                )
            if not done:
                _create(file, content, header, (samples, *fields.shape[1:]), (samples, *parameters.shape[1:]))
            found = (fields.shape[1:], parameters.shape[1:])
            first = (content["fields"].shape[1:], content["parameters"].shape[1:])
            if found != first:
                raise UsageError(
                    f"write_fields: a block for {file} has samples of fields {found[0]} and parameters {found[1]}; "
                    f"{first[0]} and {first[1]} are required, as in the first block: correct the block."
                )
            # The last block may have more samples than are wanted.
            count = min(samples - done, len(fields))
            stop = done + count
            content["fields"][done:stop] = fields[:count]
            content["parameters"][done:stop] = parameters[:count]
            written(count)
            done = stop
        if done < samples:
            raise UsageError(
                f"write_fields: the blocks for {file} have {done} samples; {samples} are required, because the others "
                "would be read as zeros: give more blocks, or a lower number of samples."
            )


def _create(
    file: Path, content: Any, header: FieldHeader, fields: tuple[int, ...], parameters: tuple[int, ...]
) -> None:
    """Write the header, check it as a reader would, and create datasets of these shapes."""
    content.attrs["schema"] = SCHEMA
    content.attrs["grid"] = fields[-2:]
    content.attrs.update(_attributes(header))
    read_header(file, dict(content.attrs), fields, parameters)
    # Without chunks or compression, so that readers can map it.
    content.create_dataset("fields", fields, np.float32)
    content.create_dataset("parameters", parameters, np.float32)


def _attributes(header: FieldHeader) -> dict[str, Any]:
    names = np.array(header.parameters, dtype=hdf5().string_dtype())
    return asdict(header) | {"parameters": names}


def read_stored(file: Path, content: Any) -> StoredFields:
    """Read header and parameters of an open file of our schema. The fields stay on disk."""
    require(file, content, ("fields", "parameters"))
    # A few numbers per sample: unlike the fields, they fit into memory.
    parameters = content["parameters"][...]
    shape = content["fields"].shape
    header = read_header(file, dict(content.attrs), shape, parameters.shape)
    part = FieldPart(file, ("fields",), 0, 0, shape[0])
    return StoredFields(header, part, parameters.astype(np.float32))


def _view(array: NDArray[Any], space: int) -> NDArray[Any]:
    if space == 0:
        return array
    if array.ndim == 1 + space:  # no time
        array = array[:, None]
    if array.ndim == 2 + space:  # no channels
        array = array[..., None]
    array = np.moveaxis(array, -1, 2)
    if space == 1:
        array = array[:, :, :, None]
    return array


@dataclass(frozen=True)
class Fields:
    """N samples of shape (T, C, H, W) in physical units, read on demand."""

    parts: tuple[FieldPart, ...]
    cache_bytes: int = DEFAULT_CACHE_MIB * 2**20
    """Limit on the decoded chunks together, and on each mapped dataset, in the memory of a process or worker."""
    _cache: BlockCache[NDArray[Any]] = field(init=False, repr=False, compare=False)
    _open: dict[tuple[int, int], list[FieldView]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ends: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ends = itertools.accumulate(part.samples for part in self.parts)
        object.__setattr__(self, "_ends", tuple(ends))
        object.__setattr__(self, "_cache", BlockCache(self.cache_bytes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        # A worker opens the files itself. Pickled arrays would copy the data to every worker.
        return {**self.__dict__, "_open": {}}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(T, C, H, W)"""
        first, *more = self._views(0)
        _, times, channels, height, width = first.shape
        return times, channels + sum(view.shape[2] for view in more), height, width

    @property
    def stride(self) -> int:
        """Largest distance between the points read from the files, 1 if all points are read."""
        return max(part.stride for part in self.parts)

    def snapshots(self, sample: int, times: slice) -> Array:
        """Copy the snapshots (times, C, H, W) of a sample."""
        # Found by the ends of the files, without a list of all samples.
        number = bisect_right(self._ends, sample)
        first = self._ends[number] - self.parts[number].samples
        row = sample - first
        of_row = slice(row, row + 1)
        views = [view.read(of_row, times)[0] for view in self._views(number)]
        return np.concatenate(views, axis=1, dtype=np.float32, casting="same_kind")

    def blocks(self) -> Iterator[tuple[FieldPart, int, Array]]:
        """Yield (part, first row in it, fields (n, T, C, H, W)) of all samples in order, about 64 MiB at a time."""
        size = max(1, VALUES_PER_BLOCK // int(np.prod(self.shape)))
        for number, part in enumerate(self.parts):
            for start in range(0, part.samples, size):
                samples = slice(start, start + size)
                views = [view.read(samples, slice(None)) for view in self._views(number)]
                # A number beyond float32 becomes infinity, which the caller refuses, naming the sample.
                with np.errstate(over="ignore"):
                    block = np.concatenate(views, axis=2, dtype=np.float32, casting="same_kind")
                yield part, start, block

    def _views(self, number: int) -> list[FieldView]:
        # Keyed by process: a forked worker must not read through its parent's HDF5 handles.
        key = (os.getpid(), number)
        if key not in self._open:
            self._open[key] = self.parts[number].open(self._cache)
        return self._open[key]


def join_files(task: str, files: Sequence[StoredFields], time_stride: int, cache_bytes: int) -> Fields:
    """Concatenate the samples of several files. Raises `UsageError` for headers or shapes that differ, or no pairs."""
    fields = Fields(tuple(stored.part for stored in files), cache_bytes)
    header = files[0].header
    for stored in files:
        shape = Fields((stored.part,)).shape
        if different := differences(stored.header, shape, header, fields.shape):
            raise UsageError(
                f"--data.path: {stored.part.file} has {different} in {files[0].part.file}. Files of one task must "
                "agree: keep those that do."
            )
    snapshots = fields.shape[0]
    if header.dt and snapshots == 1:
        raise UsageError(
            f"--data.path: {files[0].part.file} has 1 snapshot of task {task} and the attribute dt {header.dt:g}; 2 or "
            "more are required to make a pair, one time step apart: write more, or dt 0 for an equation without time."
        )
    if header.dt and snapshots <= time_stride:
        raise UsageError(
            f"--data.time_stride {time_stride}: {files[0].part.file} has {snapshots} snapshots of task {task}; more "
            f"than the stride are required to make a pair. Lower it to {snapshots - 1} or less."
        )
    return fields


def file_sizes(fields: Fields, channels: int) -> dict[Path, float]:
    """Compute the root mean square of the last `channels` channels of each file.

    It is taken over the first snapshot of each of the first 4 samples.
    """
    sizes: dict[Path, float] = {}
    start = 0
    for part in fields.parts:
        samples = range(start, start + min(4, part.samples))
        first = [fields.snapshots(sample, slice(0, 1)) for sample in samples]
        snapshots = [fields_of_sample[:, -channels:] for fields_of_sample in first]
        mean_square = np.mean(np.square(snapshots, dtype=np.float64))
        sizes[part.file] = float(np.sqrt(mean_square))
        start += part.samples
    return sizes
