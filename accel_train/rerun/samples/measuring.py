"""Measure every sample of one optimizer step by itself, inside the process of a recipe.

It is entered through ``loop.observed``. Up to the step the run trains as recorded. There the loop gets the whole batch,
each of its samples alone, and the batch without the suspects. Each result is recorded, and no weight moves. The
recipe's own lines compute them: the same weights, and the same noise, because draws are keyed by sample and step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel_train.config import UsageError
from accel_train.data.loader import StepBatches
from accel_train.metrics.records import write_json
from accel_train.rerun.samples.suspects import distances

if TYPE_CHECKING:
    from accel_train.data.datasets import Batch, MapDataset
    from accel_train.loop import Training
    from accel_train.train_state import TrainState
    from accel_train.training.step_guard import StepResult


@dataclass(frozen=True)
class Request:
    """Step to measure, and where to write the results."""

    step: int
    """Step as in log lines, counted from 1."""
    limit: float
    """Distance above which a sample is a suspect (``suspects.distances``)."""
    path: str


@contextmanager
def measuring(request: Request, training: Training, prepared: TrainState, _: MapDataset) -> Generator[None]:
    """Train up to the step, measure it, and end the loop there."""
    processes = prepared.accelerator.num_processes
    if processes > 1:
        # A backward of one sample would need every process to make it, with weight 0 on all but one.
        raise UsageError(
            f"{processes} processes: samples are measured in one process; start it without a launcher's variables"
        )
    training.steps = _steps(training.steps, training, request)
    yield


def _steps(steps: Iterator[StepBatches], training: Training, request: Request) -> Iterator[StepBatches]:
    for batches in steps:
        if batches.done == request.step:
            yield from _measured(batches, training, request)
            return
        yield batches


def _measured(batches: StepBatches, training: Training, request: Request) -> Iterator[StepBatches]:
    """Yield the step in parts, and write their results."""
    results: list[StepResult] = []
    # From here on nothing moves, so every pass finds the same weights.
    training.measure = results.append
    yield batches
    whole = results.pop().fields()
    samples: list[dict[str, object]] = []
    norms: list[float] = []
    for sample in _one_by_one(batches):
        yield StepBatches(batches.step, [sample], 0.0)
        values = results.pop().fields()
        norms.append(values["grad_norm"])
        samples.append({"sample": int(sample["sample"]), "position": int(sample["position"]), "values": values})
    apart = distances(norms)
    suspects: set[int] = set()
    # Weights that are not finite make losses so, whatever the samples are.
    finite_weights = all(bool(parameter.isfinite().all()) for parameter in training.prepared.model.parameters())
    for sample, distance in zip(samples, apart, strict=True):
        sample["distance"] = distance
        if finite_weights and distance > request.limit:
            suspects.add(int(str(sample["sample"])))
    without: Mapping[str, float] | None = None
    # The step without all of its samples would be 0 / 0.
    if 0 < len(suspects) < len(samples):
        yield StepBatches(batches.step, _without(batches.micro_batches, sorted(suspects)), 0.0)
        without = results.pop().fields()
    content = {"whole": whole, "samples": samples, "suspects": sorted(suspects), "without_suspects": without}
    write_json(Path(request.path), content | {"finite_weights": finite_weights})


def _one_by_one(batches: StepBatches) -> Iterator[Batch]:
    """Yield the samples in the order of the batch, without those of weight 0."""
    for batch in batches.micro_batches:
        for row, weight in enumerate(batch["weight"].tolist()):
            if weight > 0:
                # A slice, not an index: every field keeps its first dimension.
                yield {name: value[row : row + 1] for name, value in batch.items()}


def _without(micro_batches: Sequence[Batch], samples: Sequence[int]) -> list[Batch]:
    """Return the same micro-batches without these samples, whose places have weight 0."""
    kept: list[Batch] = []
    for batch in micro_batches:
        numbers = batch["sample"]
        left_out = torch.tensor(samples, device=numbers.device)
        out = torch.isin(numbers, left_out)
        rows = torch.arange(len(out), device=out.device)
        # As in training (``data/leaving_out.py``): 0 times a loss that is not finite would not be finite.
        if not bool(out.all()):
            rows = torch.where(out, rows[~out][0], rows)
        read = {name: value[rows] for name, value in batch.items()}
        kept.append(read | {"weight": batch["weight"].masked_fill(out, 0.0)})
    return kept
