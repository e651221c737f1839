"""Normalised rows of input and target built from stored fields, with the normalisation constants."""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.datasets import Batch
from accel_train.data.tables.ledger import Ledger
from accel_train.domains.pde.data.assets import WIDE, FieldAssets, FieldTask
from accel_train.domains.pde.data.facts import FieldFacts, cached_facts, header_notices, scale_notices
from accel_train.domains.pde.data.files import (
    DEFAULT_CACHE_MIB,
    Array,
    Fields,
    StoredFields,
    join_files,
)
from accel_train.domains.pde.data.header import differences
from accel_train.domains.pde.data.scales import Origins, TrainedScales
from accel_train.domains.pde.fields import Scale

RANGE = (1e-35, 1e35)
"""Allowed standard deviations of a channel. They leave room within fp32, whose normal range is 1.2e-38 to 3.4e38."""


class Trajectory(NamedTuple):
    """One normalised sample over all times."""

    fields: Tensor  # (T, C, H, W)
    parameters: Tensor  # (P,)


# No generated __eq__: it would take the truth value of a tensor comparison, which raises.
@dataclass(frozen=True, eq=False)
class FieldRows:
    """Map-style dataset: all pairs of snapshots `time_stride` apart, or one row per sample without time.

    The first N rows cover all N samples, and all times if there are at least as many samples as pairs of one sample.
    """

    task: FieldTask
    data: Fields
    parameters: Tensor  # (N, P) float32, normalised
    time_stride: int

    def __len__(self) -> int:
        return len(self.data) * self.pairs

    @property
    def samples(self) -> int:
        """Number N of trajectories, or of problems without time."""
        return len(self.data)

    @property
    def pairs(self) -> int:
        """Rows of one sample."""
        return self.data.shape[0] - self.time_stride if self.task.has_time else 1

    def __getitem__(self, index: int) -> Batch:
        """Return input (C, H, W), target (C', H, W) and parameters (P,), float32 and normalised, and dt ()."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = self.batch([index])
        return {name: values[0] for name, values in batch.items()}

    def batch(self, indices: list[int]) -> Batch:
        """Stack rows, with leading dimension B."""
        samples: list[int] = []
        snapshots: list[Array] = []
        for index in indices:
            # Row i belongs to sample i % N, and neighbouring rows differ in time.
            number, sample = divmod(index, len(self.data))
            samples.append(sample)
            snapshots.append(self.data.snapshots(sample, self._times(number + sample)))
        values = torch.from_numpy(np.stack(snapshots))  # (B, T, C, H, W)
        if self.task.has_time:
            input, target = values.unbind(1)
        else:
            channels = [self.task.input_channels, self.task.target_channels]
            input, target = values[:, 0].split(channels, dim=1)
        return {
            "input": self.task.input.normalise(input),
            "target": self.task.target.normalise(target),
            "parameters": self.parameters[samples],
            "dt": torch.full((len(indices),), self.task.dt, dtype=torch.float32),
        }

    def _times(self, number: int) -> slice:
        if not self.task.has_time:
            return slice(0, 1)
        start = number % self.pairs
        return slice(start, start + self.time_stride + 1, self.time_stride)

    def trajectory(self, sample: int) -> Trajectory:
        """Return every `time_stride`-th snapshot of a sample with time, the reference of a rollout."""
        if not self.task.has_time:
            raise ValueError(f"task {self.task.name} has no time, so there is no trajectory")
        values = self.data.snapshots(sample, slice(None, None, self.time_stride))
        fields = self.task.input.normalise(torch.from_numpy(values))
        return Trajectory(fields, self.parameters[sample])


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """Map-style dataset of the rows of all tasks, one task after another."""

    parts: tuple[FieldRows, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each task, for `TaskSampler`."""
        return tuple(len(part) for part in self.parts)

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> Batch:
        part, row = self._place(index)
        return self.parts[part][row]

    def batch(self, indices: list[int]) -> Batch:
        """Stack rows of one task. Rows of different tasks have different shapes and are refused."""
        parts, rows = zip(*map(self._place, indices), strict=True)
        # Grids of different tasks have different shapes.
        if len(set(parts)) > 1:
            raise ValueError(f"rows {indices[:8]} are of several tasks, which a batch cannot mix: use TaskSampler")
        return self.parts[parts[0]].batch(list(rows))

    def _place(self, index: int) -> tuple[int, int]:
        # Indices run through all tasks one after another, in the order of `TaskSampler`.
        ends = list(itertools.accumulate(self.sizes))
        if not 0 <= index < ends[-1]:
            raise IndexError(index)
        part = bisect_right(ends, index)
        return part, index - ends[part] + self.sizes[part]


# Hashable by identity: `baseline_metrics` caches its result by this object.
@dataclass(frozen=True, eq=False)
class FieldData:
    """Training and held-out rows of a run."""

    train: JoinedRows
    """Training rows of all tasks, in the order of `tasks`."""
    training: dict[str, FieldRows]
    """Training rows by task: those of ``train``."""
    heldout: dict[str, FieldRows]
    assets: FieldAssets
    """Normalisation, as stored in a checkpoint (`assets.save(directory)`)."""
    fingerprint: str
    """sha256 of both splits' contents and of all preprocessing."""
    notices: tuple[str, ...]
    """Lines for the main process to log."""
    ledger: Ledger = ()
    """Record of the data that the resumed run has used before, if data.changed allows changes."""
    generated: bool = False
    """True: samples are drawn independently. False: those of files may be ordered, for example by a parameter."""
    origins: Origins | None = None
    """Where the modules of the start come from. None without weights that name their tasks."""

    @property
    def strides(self) -> dict[str, int]:
        """Largest distance between the points read from each task's training files, 1 if all points are read."""
        return {name: rows.data.stride for name, rows in self.training.items()}

    @property
    def tasks(self) -> tuple[FieldTask, ...]:
        return self.assets.tasks


Splits = Mapping[str, Sequence[StoredFields]]
"""Files of each split: keys are train and heldout."""


def build_field_data(
    stored: Mapping[str, Splits],
    time_stride: int,
    cache: Path,
    *,
    rank: int,
    barrier: Callable[[], None],
    cache_bytes: int = DEFAULT_CACHE_MIB * 2**20,
    ledger: Ledger = (),
    trained: TrainedScales | None = None,
) -> FieldData:
    """Build the rows of every task in `stored`. Collective: every rank calls it (two barriers per task).

    Rank 0 computes mean, deviation and hash of all contents in one pass and caches them in `cache`, until a file is
    changed. `cache_bytes` limits the decoded chunks of each split in each process and worker. The normalisation of
    `trained` replaces that of the data. Raises `UsageError` for tasks that do not match its checkpoint.
    """
    # Mismatched files of any task are refused before the first pass over the contents.
    data: dict[str, dict[str, Fields]] = {}
    for name, splits in stored.items():
        data[name] = {}
        for split, files in splits.items():
            data[name][split] = join_files(name, files, time_stride, cache_bytes)
    # The only pass over all contents. Later starts read its result.
    of_tasks = {name: cached_facts(both, cache, rank, barrier) for name, both in data.items()}
    facts = {name: found.of_split for name, found in of_tasks.items()}
    tasks: list[FieldTask] = []
    of_scales: list[str] = []
    for name, splits in stored.items():
        task = _describe(splits, data[name]["train"], facts[name]["train"], time_stride)
        _refuse_zeros(splits["heldout"][0].part.file, task, facts[name]["heldout"])
        tasks.append(task)
    origins: Origins | None = None
    if trained is not None:
        origins = trained.origins(tasks)
        for origin, task in zip(origins.of_tasks, tasks, strict=True):
            of_scales += trained.notices(origin, task)
        # The weights were trained with these scales. Other data would give others.
        tasks = [trained.task_for(task, origin) for task, origin in zip(tasks, origins.of_tasks, strict=True)]
    assets = FieldAssets(tuple(tasks))
    described = json.dumps([facts, _fingerprinted(assets), time_stride])
    digest = hashlib.sha256(described.encode())
    rows: dict[str, dict[str, FieldRows]] = {"train": {}, "heldout": {}}
    for task in assets.tasks:
        for split, fields in data[task.name].items():
            values = _parameters(stored[task.name][split])
            # Parameters are inputs of the model as well.
            digest.update(values.tobytes())
            parameters = assets.normalise_parameters(task.name, torch.from_numpy(values))
            rows[split][task.name] = FieldRows(task, fields, parameters, time_stride)
    train = rows["train"]
    heldout = rows["heldout"]
    notices = [*(_describe_sizes(train[name], heldout[name]) for name in stored), *of_scales]
    for name in stored:
        notices += _shared_notices(name, of_tasks[name].shared, heldout[name].samples)
        notices += header_notices(assets.task(name), of_tasks[name].measured, data[name]["train"].stride)
        notices += scale_notices(data[name]["train"], assets.task(name))
    joined = JoinedRows(tuple(train.values()))
    return FieldData(joined, train, heldout, assets, digest.hexdigest(), tuple(notices), ledger, origins=origins)


def _parameters(files: Sequence[StoredFields]) -> Array:
    """Concatenate the parameters of several files: (N, P)."""
    return np.concatenate([stored.parameters for stored in files])


def _fingerprinted(assets: FieldAssets) -> dict[str, Any]:
    """Return the assets in the form that the fingerprint hashes."""
    described = asdict(assets)
    for task in described["tasks"]:
        # Without logarithmic parameters, the fingerprint is the same as before this field was added.
        if not task["logarithmic"]:
            del task["logarithmic"]
    return described


def _describe_sizes(train: FieldRows, heldout: FieldRows) -> str:
    """Describe the sizes of both splits of a task in one line."""
    times = ""
    if train.task.has_time:
        # data.time_stride counts snapshots. The line shows the time that one step of the model covers.
        times = f" of {train.data.shape[0]} snapshots, {len(train):,} pairs {train.task.dt:g} apart"
    return f"{train.task.name}: {train.samples:,} training samples{times}; {heldout.samples:,} held out"


def _shared_notices(task: str, shared: int, samples: int) -> Iterator[str]:
    """Yield a notice if training samples are held out as well: their errors only show memorisation."""
    if shared:
        yield (
            f"{task}: {shared:,} of {samples:,} held-out samples are training samples too, value by value: their "
            "errors say nothing about new ones. Hold out others, or leave them out of the training files"
        )


def _describe(splits: Splits, train: Fields, facts: FieldFacts, time_stride: int) -> FieldTask:
    _, channels, height, width = train.shape
    stored = splits["train"][0]
    header = stored.header
    _refuse_other_kind(stored, train, splits["heldout"][0])
    if 0.0 in facts.std:
        raise UsageError(
            f"--data.path: channel {facts.std.index(0.0)} of {stored.part.file} is the same number everywhere, so "
            "there is nothing to learn from it. Leave the channel out."
        )
    _refuse_out_of_range(stored.part.file, facts)
    has_time = header.dt > 0
    input_channels = target_channels = channels
    # With time, input and target are the same fields, so that a step must map one scale to itself.
    input = target = Scale(facts.mean, facts.std)
    if not has_time:  # the channels hold the input and then the target, each with a scale of its own
        input_channels = header.input_channels
        target_channels = channels - input_channels
        input = Scale(facts.mean[:input_channels], facts.std[:input_channels])
        target = Scale(facts.mean[input_channels:], facts.std[input_channels:])
    parameter, logarithmic = _parameter_scale(splits["train"])
    return FieldTask(
        name=header.task,
        input_channels=input_channels,
        target_channels=target_channels,
        grid=(height, width),
        parameters=header.parameters,
        boundary=header.boundary,
        conserved=header.conserved,
        has_time=has_time,
        dt=header.dt * time_stride,
        input=input,
        target=target,
        parameter=parameter,
        logarithmic=logarithmic,
    )


def _refuse_out_of_range(file: Path, facts: FieldFacts) -> None:
    """Refuse channels whose normalisation in fp32 would lose digits or overflow."""
    smallest, largest = RANGE
    for channel, (mean, std) in enumerate(zip(facts.mean, facts.std, strict=True)):
        if not smallest <= std <= largest or abs(mean) > largest:
            raise UsageError(
                f"--data.path: channel {channel} of {file} has mean {mean:.3g} and standard deviation {std:.3g}; "
                f"a deviation of {smallest:g} to {largest:g} and a mean of at most {largest:g} are required, "
                "to fit the range of fp32. Write the fields in another unit."
            )


def _refuse_zeros(file: Path, task: FieldTask, heldout: FieldFacts) -> None:
    """Refuse held-out targets that are 0 everywhere: their relative errors have no size to be relative to."""
    targets = slice(-task.target_channels, None)
    if not any(heldout.mean[targets]) and not any(heldout.std[targets]):
        raise UsageError(
            f"--data.path: the held-out fields of {file} are 0 everywhere, and nRMSE, the error over the size of the "
            "fields, is not defined; write held-out fields of the kind that is trained on."
        )


def _refuse_other_kind(stored: StoredFields, train: Fields, heldout: StoredFields) -> None:
    """Refuse held-out fields whose header or shape differs from the training fields'. Snapshot counts may differ."""
    shape = Fields((heldout.part,)).shape
    if different := differences(heldout.header, shape[1:], stored.header, train.shape[1:]):
        raise UsageError(
            f"--data.path: {heldout.part.file} has {different} in {stored.part.file}. Both splits must be of one kind: "
            "correct the file that is wrong."
        )


def _parameter_scale(train: Sequence[StoredFields]) -> tuple[Scale, tuple[bool, ...]]:
    """Compute the scale of the parameters, and whether each is logarithmic. The flags are empty if none is."""
    values = _parameters(train).astype(np.float64)
    # Wide ranges become logarithmic: on a linear scale their small values would be hard to tell apart.
    smallest = values.min(0)
    wide = (smallest > 0) & (values.max(0) > WIDE * smallest)
    positive = np.where(wide, values, 1.0)
    values = np.where(wide, np.log(positive), values)
    deviation = values.std(0)
    deviation = np.where(deviation > 0, deviation, 1.0)  # a constant parameter
    logarithmic = tuple(wide.tolist()) if wide.any() else ()
    mean = tuple(values.mean(0).tolist())
    return Scale(mean, tuple(deviation.tolist())), logarithmic
