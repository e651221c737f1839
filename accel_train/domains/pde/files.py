"""Fields on grids in HDF5 files: written in blocks, read sample by sample.

A file of our schema holds

    fields       (N, T, C, H, W) float32, contiguous; 1-D fields have H = 1
    parameters   (N, P) float32, what a model is told beside the fields
    attributes   schema, and those of `FieldHeader`; grid (H, W)

A contiguous dataset is memory-mapped: any size, shared by all processes of a host, opened by each process and worker
for itself. A chunked or compressed one is read into the memory of each process when it is first asked for.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError

SCHEMA = "accel_train/fields-1"
VALUES_PER_BLOCK = 2**24
Array = NDArray[np.float32]


def hdf5() -> Any:
    """The package h5py, or what to install."""
    try:
        import h5py
    except ImportError:
        raise UsageError(
            "--data.path: fields are kept in HDF5 files, and the package h5py, which reads them, is not installed; "
            "pip install 'accel-train[pde]'"
        ) from None
    return h5py


@dataclass(frozen=True)
class FieldHeader:
    """What the samples of a file have in common."""

    task: str
    parameters: tuple[str, ...]
    """Names of the P parameters."""
    input_channels: int
    """The first channels are given and, without time, the others sought."""
    dt: float
    """Time from one snapshot to the next, in which all channels advance; 0: no time, and T = 1."""
    boundary: str
    """periodic: points at j / W. Anything else: at the centres (j + 1/2) / W of cells."""
    conserved: bool
    """Whether the integral of every channel stays what it is."""


class FieldPart(NamedTuple):
    """Samples first to first + samples - 1 of one file. Channels are those of `datasets`, one after another."""

    file: Path
    datasets: tuple[str, ...]
    space: int
    """Axes of space of datasets (N, X[, Y]) or (N, T, X[, Y][, C]): 1 or 2. 0: they are (N, T, C, H, W) already."""
    first: int
    samples: int
    stride: int = 1
    """Every how many-th point is kept along each axis of more than one."""

    def views(self) -> list[NDArray[Any]]:
        """Each dataset as (samples, T, C, H, W); nothing is read of what is memory-mapped."""
        arrays = [_view(_open_array(self.file, name), self.space) for name in self.datasets]
        return [a[self.first : self.first + self.samples, ..., :: self.stride, :: self.stride] for a in arrays]


class StoredFields(NamedTuple):
    """All of one file."""

    header: FieldHeader
    part: FieldPart
    parameters: Array  # (N, P)

    def select(self, split: str, free: tuple[int, int], count: int, resolution: dict[int, int | None]) -> StoredFields:
        """The first `count` of the samples `free`, at the points asked for in 1 and 2 dimensions (None: all)."""
        if not 0 < count <= free[1] - free[0]:
            raise UsageError(
                f"--data.{split}_samples: {count} of {self.part.file} are needed for {split}, which has "
                f"{max(0, free[1] - free[0])} of its {len(self.parameters)} left for that, and 1 at least. Ask for "
                "another number, or bring more."
            )
        height, width = Fields((self.part,)).shape[2:]
        space = 1 if height == 1 else 2
        points = resolution[space] or width
        stride = max(1, width // points)
        if points * stride != width or (space == 2 and height % stride):
            raise UsageError(
                f"--data.resolution_{space}d {points}: {self.part.file} has {height} x {width} points, of which every "
                f"n-th can be taken. Choose a number that divides {width}."
            )
        part = self.part._replace(first=free[0], samples=count, stride=stride)
        return self._replace(part=part, parameters=self.parameters[free[0] : free[0] + count])


def write_fields(
    file: Path,
    header: FieldHeader,
    samples: int,
    blocks: Iterable[tuple[NDArray[Any], NDArray[Any]]],
    written: Callable[[int], None] = lambda _: None,
) -> None:
    """The first `samples` of `blocks` of fields (n, T, C, H, W) and parameters (n, P), one block in memory at a time.

    `written` is told how many more there are.
    """
    done = 0
    with hdf5().File(file, "w") as content:
        for fields, parameters in blocks:
            if not done:
                content.attrs.update({"schema": SCHEMA, "grid": fields.shape[-2:], **_attributes(header)})
                content.create_dataset("fields", (samples, *fields.shape[1:]), np.float32)
                content.create_dataset("parameters", (samples, *parameters.shape[1:]), np.float32)
            kept = slice(done, min(samples, done + len(fields)))
            content["fields"][kept] = fields[: samples - done]
            content["parameters"][kept] = parameters[: samples - done]
            written(kept.stop - done)
            done = kept.stop


def _attributes(header: FieldHeader) -> dict[str, Any]:
    return {**asdict(header), "parameters": np.array(header.parameters, dtype=hdf5().string_dtype())}


def read_stored(file: Path, content: Any) -> StoredFields:
    """What an open file of our schema says of itself; the fields stay on disk."""
    require(file, content, ("fields", "parameters"))
    attributes: dict[str, Any] = dict(content.attrs)
    names = ("schema", *FieldHeader.__dataclass_fields__)
    if (missing := [name for name in names if name not in attributes]) or attributes["schema"] != SCHEMA:
        problem = f"no attribute {missing[0]!r}" if missing else f"schema {attributes['schema']!r}"
        raise UsageError(f"--data.path: {file} has {problem}; {SCHEMA!r} with {', '.join(names)} is required.")
    shape, parameters = content["fields"].shape, content["parameters"][...]
    header = FieldHeader(
        str(attributes["task"]),
        tuple(str(name) for name in attributes["parameters"]),
        int(attributes["input_channels"]),
        float(attributes["dt"]),
        str(attributes["boundary"]),
        bool(attributes["conserved"]),
    )
    if len(shape) != 5 or parameters.shape != (shape[0], len(header.parameters)):
        raise UsageError(
            f"--data.path: {file} has fields {shape} and parameters {parameters.shape}; (N, T, C, H, W) and "
            f"(N, {len(header.parameters)}) are required. Write it again."
        )
    return StoredFields(header, FieldPart(file, ("fields",), 0, 0, shape[0]), parameters.astype(np.float32))


def require(file: Path, content: Any, names: Sequence[str]) -> None:
    """Refuse an open file without one of these datasets, naming it and those that are there."""
    if missing := [name for name in names if name not in content]:
        there = ", ".join(f"{name} {getattr(item, 'shape', '(a group)')}" for name, item in content.items())
        raise UsageError(
            f"--data.path: {file} has no dataset {missing[0]!r}; it holds {there or 'nothing'}. "
            f"{' and '.join(names)} are required: check what the file is."
        )


def _open_array(file: Path, dataset: str) -> NDArray[Any]:
    """Memory-mapped where it lies in one piece, else read as a whole."""
    with hdf5().File(file, "r") as content:
        stored = content[dataset]
        offset = stored.id.get_offset()
        if offset is None:
            return stored[...]
        return np.asarray(np.memmap(file, stored.dtype, "r", offset, stored.shape))


def _view(array: NDArray[Any], space: int) -> NDArray[Any]:
    if space == 0:
        return array
    if array.ndim == 1 + space:  # no time
        array = array[:, None]
    if array.ndim == 2 + space:  # no channels
        array = array[..., None]
    array = np.moveaxis(array, -1, 2)
    return array if space == 2 else array[:, :, :, None]


@dataclass(frozen=True)
class Fields:
    """N samples of shape (T, C, H, W) in physical units, read when asked for."""

    parts: tuple[FieldPart, ...]
    _open: dict[int, list[NDArray[Any]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ends: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(itertools.accumulate(part.samples for part in self.parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(T, C, H, W)"""
        first, *more = self._views(0)
        _, times, channels, height, width = first.shape
        return times, channels + sum(view.shape[2] for view in more), height, width

    def snapshots(self, sample: int, times: slice) -> Array:
        """(times, C, H, W), a copy."""
        number = bisect_right(self._ends, sample)
        row = sample - self._ends[number] + self.parts[number].samples
        views = [view[row, times] for view in self._views(number)]
        return np.concatenate(views, axis=1, dtype=np.float32, casting="same_kind")

    def blocks(self) -> Iterator[tuple[FieldPart, int, Array]]:
        """(part, first row in it, (n, T, C, H, W)) of all samples in order, some 64 MiB at a time."""
        size = max(1, VALUES_PER_BLOCK // int(np.prod(self.shape)))
        for number, part in enumerate(self.parts):
            for start in range(0, part.samples, size):
                views = [view[start : start + size] for view in self._views(number)]
                yield part, start, np.concatenate(views, axis=2, dtype=np.float32, casting="same_kind")

    def _views(self, number: int) -> list[NDArray[Any]]:
        if number not in self._open:
            self._open[number] = self.parts[number].views()
        return self._open[number]


class FieldFacts(NamedTuple):
    """What one pass over all samples tells: mean and standard deviation of each channel, hash of the contents."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str


def field_facts(data: Fields) -> FieldFacts:
    """Reads everything once; sums in float64. Refuses NaN and infinity with the sample's place."""
    digest = hashlib.sha256(f"{len(data)} {data.shape}".encode())
    total, squares, count = np.zeros(data.shape[1]), np.zeros(data.shape[1]), 0
    for part, start, block in data.blocks():
        if not np.isfinite(block).all():
            wrong = part.first + start + int((~np.isfinite(block)).any(axis=(1, 2, 3, 4)).argmax())
            raise UsageError(
                f"--data.path: sample {wrong} of {part.file} holds NaN or infinity in {' or '.join(part.datasets)}. "
                "Finite fields are required: write the file again, or leave the sample out."
            )
        digest.update(block.tobytes())
        values = block.astype(np.float64)
        total += values.sum((0, 1, 3, 4))
        squares += (values**2).sum((0, 1, 3, 4))
        count += block.size // data.shape[1]
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    return FieldFacts(tuple(mean.tolist()), tuple(std.tolist()), digest.hexdigest())


def join_files(task: str, files: Sequence[StoredFields], time_stride: int) -> Fields:
    """The samples of several files, which must be of one kind."""
    fields, header = Fields(tuple(stored.part for stored in files)), files[0].header
    for stored in files:
        shape = Fields((stored.part,)).shape
        if (stored.header, shape) != (header, fields.shape):
            raise UsageError(
                f"--data.path: {stored.part.file} holds {shape} of {stored.header}, but {files[0].part.file} holds "
                f"{fields.shape} of {header}. Files of one task must agree: keep those that do."
            )
    if header.dt and fields.shape[0] <= time_stride:
        raise UsageError(
            f"--data.time_stride {time_stride}: {files[0].part.file} has {fields.shape[0]} snapshots of task {task}; "
            "more than the stride are required to make a pair. Lower it."
        )
    return fields


def file_sizes(fields: Fields, channels: int) -> dict[Path, float]:
    """Root mean square of the last `channels` channels of each file: of the first snapshots of its first 4 samples."""
    found: dict[Path, float] = {}
    start = 0
    for part in fields.parts:
        samples = range(start, start + min(4, part.samples))
        read = [fields.snapshots(sample, slice(0, 1))[:, -channels:] for sample in samples]
        found[part.file] = float(np.sqrt(np.mean(np.square(read, dtype=np.float64))))
        start += part.samples
    return found
