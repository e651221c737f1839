"""Counts a step of a recipe on real tensors, in real processes. Started like a recipe: ``real.py RECIPE [flags]``."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from torch import nn

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.simulated import simulating
from accel_train.simulation.step import FakeStep, StepCounted
from tests.simulation.gloo import without_its_own_memory


class RealStep(FakeStep):
    """Notes the memory of the process before the model is built."""

    resident = 0

    def build_model(self, accelerator: Any, build: Callable[[], nn.Module]) -> nn.Module:
        self.resident = psutil.Process().memory_info().rss
        return super().build_model(accelerator, build)


def main(argv: Sequence[str]) -> None:
    module = import_recipe(find_recipe(argv[0]))
    step = RealStep(real=True)
    try:
        with simulating(step), without_its_own_memory():
            module.main(argv[1:])
    except StepCounted as found:
        counted = dataclasses.asdict(found.counted)
        counted["resident_growth"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - step.resident
        if os.environ.get("RANK", "0") == "0":
            print("RESULT " + json.dumps(counted), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
