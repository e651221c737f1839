"""Facts from one pass over all samples of a task: scales, hashes, and samples that are in both splits."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data.artifacts import cached_folder
from accel_train.domains.pde.data.assets import WIDE, FieldTask
from accel_train.domains.pde.data.files import Array, FieldPart, Fields, file_sizes
from accel_train.domains.pde.data.on_disk import source_files, state_of

FACTS_FORMAT = 4
DRIFT = 0.01
"""Largest drift of a conserved integral without a notice. Solver error and fields stored in few digits stay below."""
EDGE = 0.5
"""Largest relative size at a zero boundary without a notice. Cell centres lie off the boundary and are not quite 0."""
EDGE_POINTS = 8
"""Least points along an axis for that notice: with fewer, the outermost ones are too far from the boundary."""


class FieldFacts(NamedTuple):
    """Result of one pass over all samples: mean and standard deviation of each channel, and a hash of the contents."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str


class Measured(NamedTuple):
    """Measurements of each channel that show whether the fields have the properties their header states."""

    drift: tuple[float, ...]
    """Largest change of the integral over time, averaged over samples, relative to the mean absolute value."""
    edge: tuple[float, ...]
    """Root mean square at the boundary over the root mean square of all points."""


class TaskFacts(NamedTuple):
    """Result of one pass over both splits of a task."""

    of_split: dict[str, FieldFacts]
    shared: int
    """Number of held-out samples whose fields equal those of a training sample, value by value."""
    measured: Measured
    """Measurements on the training samples."""


def field_facts(data: Fields) -> tuple[FieldFacts, list[bytes], Measured]:
    """Read all samples once, with sums in float64. Also returns a hash of each sample, to find it in the other split.

    Refuses NaN and infinity, naming the sample.
    """
    # The bytes alone do not tell the shape.
    digest = hashlib.sha256(f"{len(data)} {data.shape}".encode())
    sums = _ChannelSums(data.shape[1])
    samples: list[bytes] = []
    for part, start, block in data.blocks():
        _refuse_not_finite(part, start, block)
        for sample in block:
            content = sample.tobytes()
            digest.update(content)
            samples.append(hashlib.blake2b(content, digest_size=16).digest())
        sums.add(block)
    mean, std = sums.mean_and_std()
    return FieldFacts(tuple(mean.tolist()), tuple(std.tolist()), digest.hexdigest()), samples, sums.measured()


class _ChannelSums:
    """Running statistics of each channel: sums, sums of squares, extremes, and the sums behind `Measured`."""

    def __init__(self, channels: int) -> None:
        self.total = np.zeros(channels)
        self.squares = np.zeros(channels)
        self.lowest = np.full(channels, np.inf)
        self.highest = np.full(channels, -np.inf)
        self.count = 0
        self.sizes = np.zeros(channels)
        self.drifts = np.zeros(channels)
        self.edges = np.zeros(channels)
        self.edge_count = 0

    def add(self, block: Array) -> None:
        """Add fields (n, T, C, H, W)."""
        axes = (0, 1, 3, 4)
        # In fp64: sums of squares of 10^9 values lose all digits of a small variance in fp32.
        values = block.astype(np.float64)
        self.total += values.sum(axes)
        self.squares += (values**2).sum(axes)
        self.lowest = np.minimum(self.lowest, values.min(axes))
        self.highest = np.maximum(self.highest, values.max(axes))
        self.count += block.size // len(self.total)
        self._measure(values)

    def _measure(self, values: NDArray[np.float64]) -> None:
        """Add to the sums of drift and boundary, of which the header makes statements."""
        self.sizes += np.abs(values).mean((1, 3, 4)).sum(0)
        integrals = values.mean((3, 4))  # (n, T, C)
        self.drifts += np.abs(integrals - integrals[:, :1]).max(1).sum(0)
        ends = [values[..., [0, -1]]]
        # The single row of a 1-D field is not a boundary.
        if values.shape[3] > 1:
            ends.append(values[..., [0, -1], :])
        for end in ends:
            self.edges += (end**2).sum((0, 1, 3, 4))
            self.edge_count += end.size // len(self.total)

    def measured(self) -> Measured:
        """Return the drift and the size at the boundary of each channel."""
        # Avoids 0 / 0 in a channel of zeros, which is refused later.
        least = np.finfo(np.float64).tiny
        drift = self.drifts / np.maximum(self.sizes, least)
        edge = self.edges / self.edge_count / np.maximum(self.squares / self.count, least)
        return Measured(tuple(drift.tolist()), tuple(np.sqrt(edge).tolist()))

    def mean_and_std(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        mean = self.total / self.count
        variance = self.squares / self.count - mean**2
        std = np.sqrt(np.maximum(variance, 0.0))
        # Rounding leaves the variance of a constant channel a little above or below 0.
        std[self.lowest == self.highest] = 0.0
        return mean, std


def _refuse_not_finite(part: FieldPart, start: int, block: Array) -> None:
    """Refuse NaN and infinity in the samples from row ``start`` of a part on."""
    finite = np.isfinite(block)
    if finite.all():
        return
    # A stored number beyond the range of float32 is read as infinity, so the message names it too.
    wrong_rows = (~finite).any(axis=(1, 2, 3, 4))
    # The sample's number in the file, where the user can look it up.
    wrong = part.first + start + int(wrong_rows.argmax())
    raise UsageError(
        f"--data.path: sample {wrong} of {part.file} contains NaN, infinity or a number beyond 3.4e38 (float32) in "
        f"{' or '.join(part.datasets)}. Finite fields are required: write the file again, or leave the sample out."
    )


def cached_facts(both: Mapping[str, Fields], cache: Path, rank: int, barrier: Callable[[], None]) -> TaskFacts:
    """Read the facts of both splits from the cache. Collective (two barriers): rank 0 computes missing ones."""
    write = partial(_write_facts, both)
    folder = cached_folder(cache / f"facts-{_identity(both)}", write, rank=rank, barrier=barrier)
    text = (folder / "facts.json").read_text("utf-8")
    saved: dict[str, Any] = json.loads(text)
    facts: dict[str, FieldFacts] = {}
    for split, (mean, std, sha256) in saved["of_split"].items():
        facts[split] = FieldFacts(tuple(mean), tuple(std), sha256)
    return TaskFacts(facts, saved["shared"], Measured(*map(tuple, saved["measured"])))


def _identity(both: Mapping[str, Fields]) -> str:
    """Hash the selected samples with the state of their files and of the sources of virtual datasets."""
    used = {part.file: part.datasets for fields in both.values() for part in fields.parts}
    sources = itertools.chain.from_iterable(source_files(*item) for item in used.items())
    # A hash of the contents would need the very pass that the cache saves.
    dates = [(str(file), *state_of(file)) for file in dict.fromkeys([*used, *sources])]
    parts = [[split, *map(str, fields.parts)] for split, fields in both.items()]
    text = json.dumps([FACTS_FORMAT, dates, parts])
    return hashlib.sha256(text.encode()).hexdigest()


def _write_facts(both: Mapping[str, Fields], directory: Path) -> None:
    facts: dict[str, FieldFacts] = {}
    samples: dict[str, list[bytes]] = {}
    measured: dict[str, Measured] = {}
    for split, fields in both.items():
        facts[split], samples[split], measured[split] = field_facts(fields)
    trained = set(samples["train"])
    shared = sum(sample in trained for sample in samples["heldout"])
    found = TaskFacts(facts, shared, measured["train"])
    (directory / "facts.json").write_text(json.dumps(found._asdict()), "utf-8")


def header_notices(task: FieldTask, measured: Measured, stride: int) -> Iterator[str]:
    """Yield notices about fields that contradict their header, each for the first channel that does.

    ``stride`` is the distance between the points read from the files.
    """
    if task.conserved and task.has_time:
        for channel, drift in enumerate(measured.drift):
            if drift > DRIFT:
                yield (
                    f"{task.name}: conserved is true, and the integral of channel {channel} of the training fields "
                    f"changes in time by {drift:.3g} of their mean size: objective.conservation_weight and test-time "
                    "conditioning would hold it constant. Leave both out, or set conserved to False in the files of "
                    "both splits (those of PDEBench have no such attribute)"
                )
                break
    # Of every n-th point, the last lies up to n - 1/2 cells from the edge.
    reaches_edge = stride == 1 and all(side == 1 or side >= EDGE_POINTS for side in task.grid)
    if task.boundary == "dirichlet" and reaches_edge:
        # Without time, the channels of the target come last.
        first = len(measured.edge) - task.target_channels
        for channel, edge in enumerate(measured.edge[first:], first):
            if edge > EDGE:
                yield (
                    f"{task.name}: boundary is dirichlet, 0 at the edge, and the root mean square of channel {channel} "
                    f"of the training fields there is {edge:.3g} of that of all points: objective.boundary_weight "
                    "would pull it to 0. Leave it out, or write the boundary that they have into the files of both "
                    "splits, such as periodic or neumann (those of PDEBench have no such attribute)"
                )
                break


def scale_notices(fields: Fields, task: FieldTask) -> Iterator[str]:
    """Yield notices about wide ranges: of parameters, between channels of one nRMSE, between files sharing a scale."""
    if any(task.logarithmic):
        names = ", ".join(compress(task.parameters, task.logarithmic))
        yield (
            f"{task.name}: {names} are read as logarithms: they differ by a factor of more than {WIDE:g} in the "
            "training files that set the scales"
        )
    deviations = task.target.std
    if max(deviations) > WIDE * min(deviations):
        first = fields.shape[1] - task.target_channels
        most, least = (first + deviations.index(pick(deviations)) for pick in (max, min))
        yield (
            f"{task.name}: channel {most} varies {max(deviations) / min(deviations):.3g} times as much as channel "
            f"{least}, and nRMSE covers all channels together: errors of channel {least} count in the loss, but hardly "
            f"in nRMSE. Look at {task.name}_nrmse_channel{least}, or write the channels in units in which they vary "
            "about equally"
        )
    yield from _offset_notices(fields, task)
    sizes = file_sizes(fields, task.target_channels)
    small = min(sizes, key=sizes.__getitem__)
    large = max(sizes, key=sizes.__getitem__)
    if sizes[large] > WIDE * sizes[small]:
        yield (
            f"{task.name}: fields of {large} are {sizes[large] / max(sizes[small], 1e-30):.3g} times as large as those "
            f"of {small}, and they share one scale: errors of the small ones hardly count. Train them separately, each "
            "with a --data.path of its own"
        )


def _offset_notices(fields: Fields, task: FieldTask) -> Iterator[str]:
    """Yield a notice for each channel that varies little about a large mean, such as a pressure in Pa."""
    first = fields.shape[1] - task.target_channels
    for channel, (mean, std) in enumerate(zip(task.target.mean, task.target.std, strict=True), first):
        ratio = abs(mean) / std
        if ratio > WIDE:
            # float32 has 24 bits.
            yield (
                f"{task.name}: channel {channel} varies by {std:.3g} about {mean:.4g}, and float32 rounds it by "
                f"{ratio / 2**24:.1g} of that: nRMSE, the error over the size of the field, says little about what "
                "varies. Subtract the mean from the field"
            )
