"""The scaffold recipe on a device with room for ROOM samples at once, from step ROOM_FROM until ROOM_UNTIL.

ROOM_IN says where a larger batch fails: ``forward``, ``backward`` (while it reduces gradients) or
``evaluation``. ROOM_RANK names the only process with so little room.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.runtime.exiting import run_main
from accel_train.training.accumulation import GradientWindow
from tests.distributed.launching import ROOT

RECIPE = ROOT / "recipes" / "scaffold" / "recipe.py"


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")


def patched() -> Any:
    spec = importlib.util.spec_from_file_location("recipe", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe: Any = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = recipe
    spec.loader.exec_module(recipe)
    room = int(os.environ["ROOM"])
    place = os.environ.get("ROOM_IN", "forward")
    first = int(os.environ.get("ROOM_FROM", "0"))
    end = int(os.environ.get("ROOM_UNTIL", str(1 << 30)))
    of_this_rank = os.environ.get("ROOM_RANK", os.environ.get("RANK", "0")) == os.environ.get("RANK", "0")
    step = [0]
    begin = GradientWindow.__init__
    metrics_of = recipe.metrics_of

    def remember_step(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        step[0] = self.step

    def limited(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        trains = torch.is_grad_enabled()
        is_there = trains == (place != "evaluation")
        if of_this_rank and is_there and first <= step[0] < end and len(batch["place"]) > room:
            if place != "backward":
                out_of_memory()
            # Its gradient comes last: those of the layers are on their way to the other process.
            batch["place"].requires_grad_().register_hook(out_of_memory)
        return metrics_of(model, batch)

    build_model = recipe.build_model

    def build_shardable(width: int) -> nn.Module:
        model = build_model(width)
        # FSDP2 shards a model by the classes that it names.
        model._no_split_modules = ["Linear"]
        return model

    GradientWindow.__init__ = remember_step
    recipe.build_model = build_shardable
    recipe.metrics_of = limited
    return recipe


if __name__ == "__main__":
    run_main(patched().main)
