"""Counts a step of a recipe on real tensors, in real processes. Started like a recipe: ``real.py RECIPE [flags]``.

With LIMIT_BYTES, the bytes of a device in blocks of its allocator, the step ends with an error as soon as its tensors
need more.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.simulated import simulating
from accel_train.simulation import step as steps
from accel_train.simulation.ledger import BLOCK, HOST, Event, Ledger
from accel_train.simulation.step import FakeStep, StepCounted
from tests.simulation.gloo import without_its_own_memory


class LimitedEvents(list[Event]):
    """Raise the error of a device's allocator at the event that would need more than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._held = 0

    def append(self, event: Event, /) -> None:
        super().append(event)
        if event.record.category != HOST:
            self._held += -(-event.after // BLOCK) * BLOCK - -(-event.before // BLOCK) * BLOCK
        if self._held > self._limit and event.after > event.before:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory (planted): {self._held:,} of {self._limit:,} bytes in {event.place}"
            )


class LimitedLedger(Ledger):
    """A ledger of a device with so much memory as LIMIT_BYTES says."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events = LimitedEvents(int(os.environ["LIMIT_BYTES"]))


def main(argv: Sequence[str]) -> None:
    module = import_recipe(find_recipe(argv[0]))
    limited = mock.patch.object(steps, "Ledger", LimitedLedger) if "LIMIT_BYTES" in os.environ else nullcontext()
    found: dict[str, Any]
    try:
        with simulating(FakeStep(real=True)), limited, without_its_own_memory():
            module.main(argv[1:])
        raise AssertionError("no step was counted")
    except StepCounted as counted:
        found = dataclasses.asdict(counted.counted)
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": str(error)}
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
