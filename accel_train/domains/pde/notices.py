"""What a person should know of the fields that are trained on: how many, and where one scale fits them badly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from accel_train.domains.pde.files import Fields

if TYPE_CHECKING:
    from accel_train.domains.pde.rows import FieldRows, FieldTask

WIDE = 20.0
"""Numbers of one kind that differ by more than this factor are called wide apart."""


def sizes(train: FieldRows, heldout: FieldRows) -> str:
    """A line on both splits of a task."""
    times = f" of {train.data.shape[0]} snapshots, {len(train):,} pairs" if train.task.has_time else ""
    return f"{train.task.name}: {train.samples:,} training samples{times}; {heldout.samples:,} held out"


def uneven(fields: Fields, task: FieldTask) -> Iterator[str]:
    """What the files of one task say by their sizes: all share one scale, and the loss is of normalised fields."""
    if any(task.logarithmic):
        names = ", ".join(itertools.compress(task.parameters, task.logarithmic))
        yield f"{task.name}: {names} differ by more than {WIDE:g} times: read by their logarithms"
    starts = itertools.accumulate((part.samples for part in fields.parts), initial=0)
    sizes = {
        str(part.file): _size(fields, range(start, start + min(4, part.samples)), task)
        for part, start in zip(fields.parts, starts, strict=False)
    }
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[large] > WIDE * sizes[small]:
        yield (
            f"{task.name}: fields of {large} are {sizes[large] / max(sizes[small], 1e-30):.3g} times as large as those "
            f"of {small}, and one scale is shared: errors of the small ones hardly count. Train them apart, each with "
            "a --data.path of its own"
        )


def _size(fields: Fields, samples: range, task: FieldTask) -> float:
    """Root mean square of these samples' first targets."""
    read = [fields.snapshots(sample, slice(0, 1))[:, -task.target_channels :] for sample in samples]
    return float(np.sqrt(np.mean(np.square(read, dtype=np.float64))))
