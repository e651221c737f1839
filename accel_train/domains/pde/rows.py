"""From stored fields to normalised rows of input and target, and the constants that normalised them."""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.artifacts import cached_folder
from accel_train.domains.pde.files import FieldFacts, Fields, StoredFields, field_facts, file_sizes, join_files

ASSETS_FORMAT = 1
WIDE = 20.0
"""Numbers of one kind that differ by more than this factor are called wide apart."""


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each channel, in the training split."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, values: Tensor, trailing: int = 2) -> Tensor:
        """(..., C, H, W), or with another number of axes after C, in physical units -> mean 0, deviation 1."""
        mean, std = self._shaped(values, trailing)
        return (values - mean) / std

    def denormalise(self, values: Tensor, trailing: int = 2) -> Tensor:
        """The reverse."""
        mean, std = self._shaped(values, trailing)
        return values * std + mean

    def _shaped(self, values: Tensor, trailing: int) -> tuple[Tensor, Tensor]:
        shape, place = (-1, *[1] * trailing), (values.device, values.dtype)
        return _constant(self.mean, *place).view(shape), _constant(self.std, *place).view(shape)


@lru_cache(maxsize=256)
def _constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers on the device, without the wait of copying them there in every step."""
    with torch.inference_mode(False):  # whoever asks first
        return torch.tensor(numbers, device=device, dtype=dtype)


@dataclass(frozen=True)
class FieldTask:
    """One mapping between fields that a model learns."""

    name: str
    input_channels: int
    target_channels: int
    grid: tuple[int, int]
    """(H, W); 1-D fields have H = 1."""
    parameters: tuple[str, ...]
    """Names of its own parameters, the first columns of a row's."""
    boundary: str
    """periodic: points at j / W. dirichlet: 0 on the boundary, points at the centres (j + 1/2) / W of cells."""
    conserved: bool
    """Whether the integral of each channel is the same in input and target."""
    has_time: bool
    """Whether the target is the input's own channels later on, so that the output can be the next input."""
    dt: float
    """Time from input to target; 0 without time."""
    input: Scale
    target: Scale
    """The same as `input` in a task with time."""
    parameter: Scale
    """Of the parameters, or of the logarithms of those of `logarithmic`."""
    logarithmic: tuple[bool, ...] = ()
    """Of each parameter, whether it is read by its logarithm: positive ones that range over more than `WIDE`."""


@dataclass(frozen=True)
class FieldAssets:
    """All that is needed to feed a model and to read its output in another process."""

    tasks: tuple[FieldTask, ...]

    @property
    def parameter_count(self) -> int:
        """P: the most that any task has, at least 1."""
        return max(1, *(len(task.parameters) for task in self.tasks))

    def task(self, name: str) -> FieldTask:
        return next(task for task in self.tasks if task.name == name)

    def normalise_input(self, task: str, values: Tensor) -> Tensor:
        """(..., C, H, W) in physical units."""
        return self.task(task).input.normalise(values)

    def denormalise_input(self, task: str, values: Tensor) -> Tensor:
        return self.task(task).input.denormalise(values)

    def normalise_target(self, task: str, values: Tensor) -> Tensor:
        return self.task(task).target.normalise(values)

    def denormalise_target(self, task: str, values: Tensor) -> Tensor:
        """(..., C, H, W) normalised -> physical units."""
        return self.task(task).target.denormalise(values)

    def normalise_parameters(self, task: str, values: Tensor) -> Tensor:
        """(..., its own parameters) -> (..., P), filled with 0."""
        own = self.task(task)
        if any(own.logarithmic):
            chosen = torch.tensor(own.logarithmic, device=values.device)
            if (values[..., chosen] <= 0).any():
                raise UsageError(
                    f"task {task}: parameters {', '.join(compress(own.parameters, own.logarithmic))} are read by their "
                    f"logarithm and go down to {float(values[..., chosen].min()):g}; above 0 is required, as in the "
                    "training split"
                )
            values = torch.where(chosen, values.log(), values)
        scaled = own.parameter.normalise(values, trailing=0)
        return torch.nn.functional.pad(scaled, (0, self.parameter_count - values.shape[-1]))

    def save(self, directory: Path) -> None:
        """fields.json, into a folder that is made."""
        directory.mkdir(parents=True, exist_ok=True)
        facts = {"format": ASSETS_FORMAT, **asdict(self)}
        (directory / "fields.json").write_text(json.dumps(facts, indent=1), "utf-8")


def load_field_assets(directory: Path) -> FieldAssets:
    """What `FieldAssets.save` wrote."""
    try:
        facts: dict[str, Any] = json.loads((directory / "fields.json").read_text("utf-8"))
        if facts["format"] != ASSETS_FORMAT:
            raise ValueError(f"format {facts['format']}, this version reads {ASSETS_FORMAT}")
        return FieldAssets(tuple(_task(task) for task in facts["tasks"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory}: no usable data assets ({type(error).__name__}: {error}). The folder `assets` of a "
            "checkpoint, written by this version, is required."
        ) from None


def _task(facts: dict[str, Any]) -> FieldTask:
    scales = {name: Scale(*map(tuple, facts[name].values())) for name in ("input", "target", "parameter")}
    lists = {name: tuple(facts.get(name, ())) for name in ("grid", "parameters", "logarithmic")}
    values: dict[str, Any] = {**facts, **lists, **scales}
    return FieldTask(**values)


class Trajectory(NamedTuple):
    """One sample through time, normalised."""

    fields: Tensor  # (T, C, H, W)
    parameters: Tensor  # (P,)


@dataclass(frozen=True, eq=False)
class FieldRows:
    """Map-style. With time: all pairs of snapshots `time_stride` apart; without: one row for each sample.

    The first N rows come from all N samples and from all times, so that a part of a held-out set is fair.
    """

    task: FieldTask
    data: Fields
    parameters: Tensor  # (N, P) float32, normalised
    time_stride: int

    def __len__(self) -> int:
        return len(self.data) * self.pairs

    @property
    def samples(self) -> int:
        """N: trajectories, or problems without time."""
        return len(self.data)

    @property
    def pairs(self) -> int:
        """Rows of one sample."""
        return self.data.shape[0] - self.time_stride if self.task.has_time else 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """input (C, H, W), target (C', H, W), parameters (P,), all float32 and normalised, and dt ()."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: values[0] for name, values in self.batch([index]).items()}

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """These rows, each field with leading dimension B."""
        samples = [index % len(self.data) for index in indices]
        rows = zip(indices, samples, strict=True)
        read = [self.data.snapshots(sample, self._times(index // len(self.data) + sample)) for index, sample in rows]
        values = torch.from_numpy(np.stack(read))  # (B, T, C, H, W)
        if self.task.has_time:
            given, sought = values.unbind(1)
        else:
            given, sought = values[:, 0].split([self.task.input_channels, self.task.target_channels], dim=1)
        return {
            "input": self.task.input.normalise(given),
            "target": self.task.target.normalise(sought),
            "parameters": self.parameters[samples],
            "dt": torch.full((len(indices),), self.task.dt, dtype=torch.float32),
        }

    def _times(self, number: int) -> slice:
        start = number % self.pairs
        return slice(start, start + self.time_stride + 1, self.time_stride) if self.task.has_time else slice(0, 1)

    def trajectory(self, sample: int) -> Trajectory:
        """Every `time_stride`-th snapshot of a sample with time, from its first: what a rollout is compared with."""
        if not self.task.has_time:
            raise ValueError(f"task {self.task.name} has no time, so there is no trajectory")
        values = self.data.snapshots(sample, slice(None, None, self.time_stride))
        return Trajectory(self.task.input.normalise(torch.from_numpy(values)), self.parameters[sample])


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """Map-style: the rows of all tasks, one task after another."""

    parts: tuple[FieldRows, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each task, for `TaskSampler`."""
        return tuple(len(part) for part in self.parts)

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part, row = self._place(index)
        return self.parts[part][row]

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """Rows of one task: those of several have shapes of their own."""
        parts, rows = zip(*map(self._place, indices), strict=True)
        if len(set(parts)) > 1:
            raise ValueError(f"rows {indices[:8]} are of several tasks, which no batch can hold: use TaskSampler")
        return self.parts[parts[0]].batch(list(rows))

    def _place(self, index: int) -> tuple[int, int]:
        ends = list(itertools.accumulate(self.sizes))
        if not 0 <= index < ends[-1]:
            raise IndexError(index)
        part = bisect_right(ends, index)
        return part, index - ends[part] + self.sizes[part]


@dataclass(frozen=True, eq=False)
class FieldData:
    """What a run trains on and is measured by."""

    train: JoinedRows
    """Of all tasks, in the order of `tasks`."""
    training: dict[str, FieldRows]
    """The same by task."""
    heldout: dict[str, FieldRows]
    assets: FieldAssets
    """Normalisation: what a checkpoint stores (`assets.save(directory)`)."""
    fingerprint: str
    """sha256 of both splits' contents and of all preprocessing."""
    notices: tuple[str, ...]
    """What a person should know. For the main process to print."""

    @property
    def tasks(self) -> tuple[FieldTask, ...]:
        return self.assets.tasks


Splits = Mapping[str, Sequence[StoredFields]]
"""train and heldout -> files."""


def build_field_data(
    stored: Mapping[str, Splits], time_stride: int, cache: Path, *, rank: int, barrier: Callable[[], None]
) -> FieldData:
    """Rows of every task in `stored`. Every rank calls it (two barriers a task).

    Rank 0 finds mean, deviation and hash of all contents in one pass; they are kept in `cache` for as long as the
    files keep their size and date.
    """
    data = {
        name: {split: join_files(name, files, time_stride) for split, files in s.items()} for name, s in stored.items()
    }
    facts: dict[str, dict[str, FieldFacts]] = {}
    for name, both in data.items():
        folder = cached_folder(
            cache / f"facts-{_identity(both)}", partial(_write_facts, both), rank=rank, barrier=barrier
        )
        read: dict[str, list[Any]] = json.loads((folder / "facts.json").read_text("utf-8"))
        facts[name] = {split: FieldFacts(tuple(v[0]), tuple(v[1]), v[2]) for split, v in read.items()}
    assets = FieldAssets(
        tuple(_describe(s, data[name]["train"], facts[name]["train"], time_stride) for name, s in stored.items())
    )
    described = asdict(assets)
    for task in described["tasks"]:
        if not task["logarithmic"]:
            del task["logarithmic"]  # it came later: what has none is the same data as before
    digest = hashlib.sha256(json.dumps([facts, described, time_stride]).encode())
    rows: dict[str, dict[str, FieldRows]] = {"train": {}, "heldout": {}}
    for task in assets.tasks:
        for split, fields in data[task.name].items():
            values = np.concatenate([files.parameters for files in stored[task.name][split]])
            digest.update(values.tobytes())
            parameters = assets.normalise_parameters(task.name, torch.from_numpy(values))
            rows[split][task.name] = FieldRows(task, fields, parameters, time_stride)
    train, heldout = rows["train"], rows["heldout"]
    notices = [_sizes(train[name], heldout[name]) for name in stored]
    notices += [words for name in stored for words in _uneven(data[name]["train"], assets.task(name))]
    return FieldData(JoinedRows(tuple(train.values())), train, heldout, assets, digest.hexdigest(), tuple(notices))


def _sizes(train: FieldRows, heldout: FieldRows) -> str:
    """A line on both splits of a task."""
    times = f" of {train.data.shape[0]} snapshots, {len(train):,} pairs" if train.task.has_time else ""
    return f"{train.task.name}: {train.samples:,} training samples{times}; {heldout.samples:,} held out"


def _uneven(fields: Fields, task: FieldTask) -> Iterator[str]:
    """What the files of one task say by their sizes: all share one scale, and the loss is of normalised fields."""
    if any(task.logarithmic):
        names = ", ".join(compress(task.parameters, task.logarithmic))
        yield f"{task.name}: {names} differ by more than {WIDE:g} times: read by their logarithms"
    sizes = file_sizes(fields, task.target_channels)
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[large] > WIDE * sizes[small]:
        yield (
            f"{task.name}: fields of {large} are {sizes[large] / max(sizes[small], 1e-30):.3g} times as large as those "
            f"of {small}, and one scale is shared: errors of the small ones hardly count. Train them apart, each with "
            "a --data.path of its own"
        )


def _identity(both: Mapping[str, Fields]) -> str:
    files = {part.file: part.file.stat() for fields in both.values() for part in fields.parts}
    dates = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in files.items()]
    parts = [[split, *map(str, fields.parts)] for split, fields in both.items()]
    return hashlib.sha256(json.dumps([ASSETS_FORMAT, dates, parts]).encode()).hexdigest()


def _write_facts(both: Mapping[str, Fields], directory: Path) -> None:
    facts = {split: field_facts(fields) for split, fields in both.items()}
    (directory / "facts.json").write_text(json.dumps(facts), "utf-8")


def _describe(splits: Splits, train: Fields, facts: FieldFacts, time_stride: int) -> FieldTask:
    stored, (_, channels, height, width) = splits["train"][0], train.shape
    header = stored.header
    other = splits["heldout"][0]
    if (other.header, Fields((other.part,)).shape[1:]) != (header, train.shape[1:]):
        raise UsageError(
            f"--data.path: {other.part.file} holds {Fields((other.part,)).shape} of {other.header}, but "
            f"{stored.part.file} {train.shape} of {header}. Both splits must be of one kind: correct the folder."
        )
    if 0.0 in facts.std:
        raise UsageError(
            f"--data.path: channel {facts.std.index(0.0)} of {stored.part.file} is the same number everywhere, so "
            "there is nothing to learn from it. Leave the channel out."
        )
    given, timed = header.input_channels, header.dt > 0
    values = np.concatenate([files.parameters for files in splits["train"]]).astype(np.float64)
    wide = (values.min(0) > 0) & (values.max(0) > WIDE * values.min(0))
    values = np.where(wide, np.log(np.where(wide, values, 1.0)), values)
    deviation = values.std(0)
    return FieldTask(
        name=header.task,
        input_channels=channels if timed else given,
        target_channels=channels if timed else channels - given,
        grid=(height, width),
        parameters=header.parameters,
        boundary=header.boundary,
        conserved=header.conserved,
        has_time=timed,
        dt=header.dt * time_stride,
        input=Scale(facts.mean, facts.std) if timed else Scale(facts.mean[:given], facts.std[:given]),
        target=Scale(facts.mean, facts.std) if timed else Scale(facts.mean[given:], facts.std[given:]),
        parameter=Scale(tuple(values.mean(0).tolist()), tuple(np.where(deviation > 0, deviation, 1.0).tolist())),
        logarithmic=tuple(wide.tolist()) if wide.any() else (),
    )
