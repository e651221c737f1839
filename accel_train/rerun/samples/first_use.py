"""Find the first step that uses any of the given samples, inside a recipe's process: only it knows the order."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.data.sampler import Sampler
from accel_train.metrics.records import write_json

if TYPE_CHECKING:
    from accel_train.data.datasets import MapDataset
    from accel_train.loop import Training
    from accel_train.train_state import TrainState


@dataclass(frozen=True)
class Request:
    """Samples to look for, and where to write the result."""

    samples: Sequence[int]
    last: int
    """Last step to search."""
    path: str


@contextmanager
def finding(request: Request, training: Training, _: TrainState, dataset: MapDataset) -> Generator[None]:
    """Write the first step with one of the samples, counted from 1, and train nothing."""
    training.steps = iter(())
    found = first_use(training.order, request.samples, request.last)
    write_json(Path(request.path), {"first_use": found, "dataset_size": len(dataset)})
    yield


def first_use(order: Sampler, samples: Sequence[int], last: int) -> int | None:
    """Return the first of the steps 1 to ``last`` with one of ``samples``, or None."""
    wanted = frozenset(samples)
    for step in range(last):
        # The order is a function of the step, so nothing is read. A sample that is left out already has no weight.
        if any(draw.weight > 0 and draw.sample in wanted for draw in order.draws(step)):
            return step + 1
    return None
