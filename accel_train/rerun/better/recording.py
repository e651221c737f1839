"""Write the held-out sums of every sample, inside the process of a recipe."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accel_train.metrics import evaluation
from accel_train.metrics.records import write_json


@dataclass(frozen=True)
class Request:
    """Destination of the record."""

    path: str


@contextmanager
def recording(request: Request) -> Generator[None]:
    """Record the body, an evaluation of a recipe up to its exit, and write the values of its samples."""
    with evaluation.recorded_by_sample() as calls:
        try:
            yield
        finally:
            # Also after SystemExit, with which a recipe ends. Nobody reads it if the recipe failed.
            write_json(Path(request.path), {"calls": calls})
