"""Steps of a recipe and its evaluation, counted by torch's own allocator. Started like a recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from accel_train import loop
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.metrics import evaluation
from tests.simulation.machine import every_event

EVALUATION = "an evaluation"


def peaks(profiler: Any) -> dict[str, int]:
    """Return the most bytes held within evaluations and outside of them, beyond those held before the first step."""
    bindings: Any = torch._C
    kinds = bindings._profiler._EventType
    events = list(every_event(profiler.profiler.kineto_results.experimental_event_tree()))
    windows = [(event.start_time_ns, event.end_time_ns) for event in events if event.name == EVALUATION]
    most = {"training": 0, "evaluation": 0}
    held = 0
    for event in events:
        if event.typed[0] != kinds.Allocation:
            continue
        held += event.typed[1].alloc_size
        within = any(start <= event.start_time_ns <= end for start, end in windows)
        part = "evaluation" if within else "training"
        most[part] = max(most[part], held)
    return most


def main(argv: Sequence[str]) -> None:
    module = import_recipe(find_recipe(argv[0]))
    plain, unwatched = evaluation.evaluating, loop.training
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @contextmanager
    def named(*arguments: Any) -> Generator[None]:
        with record_function(EVALUATION), plain(*arguments):
            yield

    @contextmanager
    def watched(*arguments: Any) -> Generator[Any]:
        with unwatched(*arguments) as training, profiler:
            yield training

    with mock.patch.object(evaluation, "evaluating", named), mock.patch.object(loop, "training", watched):
        assert module.main(argv[1:]) == 0
    print("RESULT " + json.dumps(peaks(profiler)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
