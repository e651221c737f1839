"""A recipe whose loop is watched for what it reads from the device. Started like a recipe, with its name first; prints
one JSON line."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accel_train import loop, preparation, rng
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.runtime.exiting import run_main
from benchmarks.reads import HostReads

OF_STEPS: dict[str, Counter[str]] = {}
"""Reads by place, of each step, and of the loader, whose tensors are on the host before they are copied."""
ON_THE_HOST: tuple[tuple[Any, str], ...] = ((rng, "host_choice"), (TaskSampler, "task_of_step"))
"""What decides on the host, by tensors that are made there and never leave it: mode and task of a step."""


def unwatched(function: Callable[..., Any], reads: HostReads) -> Callable[..., Any]:
    """The same, its reads not counted."""

    def call(*given: Any) -> Any:
        with reads.paused():
            return function(*given)

    return call


def watched(steps: Iterator[Any], reads: HostReads) -> Iterator[Any]:
    """The steps, and what was read from the moment each was handed out to the wish for the next."""
    while True:
        before = reads.places.copy()
        batches = next(steps, None)
        OF_STEPS["loader"] = OF_STEPS.get("loader", Counter()) + (reads.places - before)
        if batches is None:
            return
        before = reads.places.copy()
        yield batches
        OF_STEPS[str(batches.step + 1)] = reads.places - before


class Training(loop.Training):
    """The loop alone, with its steps watched."""

    def __iter__(self) -> Iterator[Any]:
        with HostReads() as reads:
            for owner, name in ON_THE_HOST:
                setattr(owner, name, unwatched(getattr(owner, name), reads))
            yield from watched(super().__iter__(), reads)


def main(argv: Sequence[str]) -> int:
    recipe: Any = importlib.import_module(f"recipes.{argv[0]}")
    vars(loop).update(Training=Training)
    resolve = preparation.resolve_step_guard

    def on_the_device(accelerator: Any, optimizer: Any, health: Any, **_: Any) -> Any:
        """As on a GPU."""
        return resolve(accelerator, optimizer, health, on_cpu=True)

    vars(preparation).update(resolve_step_guard=on_the_device)
    code = recipe.main(argv[1:])
    print(f"RESULT {json.dumps(OF_STEPS)}", file=sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    run_main(main)
