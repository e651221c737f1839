"""A recipe of one loss term, NaN on the last process in some steps: ``bad_step_worker.py 2,5 causal_lm PRESET``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from accel_train.runtime.exiting import run_main
from accel_train.training.accumulation import GradientWindow


def main(argv: Sequence[str]) -> int:
    bad = [int(step) for step in argv[0].split(",") if step]
    backward = GradientWindow.backward

    def spoiled(window: GradientWindow, sums: Any) -> None:
        accelerator = window.accelerator
        if window.step in bad and accelerator.process_index == accelerator.num_processes - 1:
            backward(window, sums * float("nan"))
        else:
            backward(window, sums)

    setattr(GradientWindow, "backward", spoiled)  # noqa: B010
    recipe: Any = importlib.import_module(f"recipes.{argv[1]}")
    return recipe.main(argv[2:])


if __name__ == "__main__":
    run_main(main)
