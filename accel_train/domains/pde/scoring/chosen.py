"""Choice of the held-out rows and trajectories that an evaluation scores, the same for the model and the baselines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_train import rng
from accel_train.data.datasets import Batch

if TYPE_CHECKING:
    from accel_train.domains.pde.data.rows import FieldData, FieldRows
    from accel_train.domains.pde.options import EvaluationConfig


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Map-style dataset of some rows of a held-out set."""

    rows: FieldRows
    chosen: Tensor
    """Numbers of the rows (n,), int64."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[int(self.chosen[index])]

    def batch(self, indices: list[int]) -> Batch:
        """Stack rows, with leading dimension B."""
        return self.rows.batch(self.chosen[indices].tolist())


def scored_rows(data: FieldData, task: str, wanted: int) -> ScoredRows:
    """Choose ``wanted`` held-out rows of a task, or all if there are fewer.

    The numbers of rows per sample differ by at most one. Samples with one row more are spread over the held-out samples
    as in ``scored_samples``.
    """
    rows = data.heldout[task]
    # Row i is of sample i % N.
    rounds, rest = divmod(min(wanted, len(rows)), rows.samples)
    first = rounds * rows.samples
    more = first + _choose(rows.samples, rest, data.generated)
    return ScoredRows(rows, torch.cat((torch.arange(first), more)))


def scored_samples(data: FieldData, task: str, wanted: int) -> Tensor:
    """Choose ``wanted`` held-out samples of a task, or all if there are fewer: ascending numbers (n,), int64.

    From files, it takes one sample from each of ``wanted`` equal runs of all samples, since the first ones may share a
    parameter. From generated data, it takes the first ones. The choice depends only on the two counts.
    """
    samples = data.heldout[task].samples
    return _choose(samples, min(wanted, samples), data.generated)


def _choose(samples: int, count: int, generated: bool) -> Tensor:
    # Generated samples are drawn independently, so the first ones are representative.
    if generated or count in (0, samples):
        return torch.arange(count)
    edges = torch.arange(count + 1) * samples // count
    # At a random place in its run: if a file cycles through parameters, every n-th sample may have the same one.
    keys = rng.sample_keys(0, "scored", 0, torch.arange(count))
    # In fp64, so that a draw below 1 cannot round up to the end of the run.
    place = rng.uniform(keys).double() * edges.diff()
    return edges[:-1] + place.long()


def notices(data: FieldData, evaluation: EvaluationConfig) -> Iterator[str]:
    """Yield a notice for each task with held-out samples that are not scored or not rolled out."""
    samples, trajectories = evaluation.samples, evaluation.trajectories
    for task in data.tasks:
        held_out = data.heldout[task.name].samples
        parts: list[str] = []
        if samples < held_out:
            parts.append(f"{samples:,} are scored (evaluation.samples)")
        if task.has_time and trajectories < held_out:
            parts.append(f"{trajectories:,} are rolled out (evaluation.trajectories)")
        if parts:
            which = "the first" if data.generated else "spread evenly over them"
            yield f"{task.name}: of {held_out:,} held-out samples {' and '.join(parts)}, {which}"
