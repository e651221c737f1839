"""A recipe in which one process differs from the others, as the environment says.

RECIPE: ``mmdit``, or the small one of tests/faults/evaluator.py. FAULT: ``flip`` and ``flip_ema`` change one bit of a
weight or of its EMA after step AT; ``data`` and ``forward`` make it slower by 50 ms.
ON: the process concerned.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accel_train.runtime.exiting import run_main
from accel_train.training.ema import Ema
from tests.faults import evaluator

SECONDS = 0.05


def is_concerned() -> bool:
    return os.environ["RANK"] == os.environ.get("ON", "1")


def flip_after(at: int, of_ema: bool) -> None:
    update = Ema.update

    def flipping(ema: Ema, step: int) -> None:
        update(ema, step)
        if step + 1 == at and is_concerned():
            name, parameter = list(ema.shards.parameters.items())[-1]
            local = ema.averages[name] if of_ema else parameter
            local = getattr(local, "_local_tensor", local)
            bits = local.data.view(-1)[:1].view({4: torch.int32, 2: torch.int16}[local.element_size()])
            # Not the last: the next update may round it away, which depends on the processor.
            bits ^= 8

    setattr(Ema, "update", flipping)  # noqa: B010


def slower(method: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any, **named: Any) -> Any:
        if is_concerned():
            time.sleep(SECONDS)
        return method(*arguments, **named)

    return slow


def main(argv: Sequence[str]) -> int:
    fault = os.environ.get("FAULT", "")
    if fault.startswith("flip"):
        flip_after(int(os.environ["AT"]), fault == "flip_ema")
    elif fault == "data":
        setattr(evaluator.Numbers, "__getitem__", slower(evaluator.Numbers.__getitem__))  # noqa: B010
    elif fault == "forward":
        setattr(nn.Linear, "forward", slower(nn.Linear.forward))  # noqa: B010
    recipe: Any = evaluator
    if "RECIPE" in os.environ:
        recipe = importlib.import_module(f"recipes.{os.environ['RECIPE']}")
    return recipe.main(argv)


if __name__ == "__main__":
    run_main(main)
