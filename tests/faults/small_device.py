"""The scaffold recipe on a device with room for ROOM samples at once, from step ROOM_FROM until ROOM_UNTIL.

ROOM_IN says where a larger batch fails: ``forward``, ``backward`` (while it reduces gradients) or
``evaluation``. A ``save`` fails whatever the batch, in the middle of its copy of the state, and a ``host_save`` where
the host has no memory for that copy. In a ``window``, of any RECIPE, the losses of a larger batch fail. ROOM_RANK names
the only process with so little room.

EVALUATE_EVERY replaces the steps between evaluations, and with STOP_IN_EVALUATION the first one asks the run to stop.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.checkpoints import background
from accel_train.checkpoints.snapshot import Snapshot
from accel_train.runtime.exiting import run_main
from accel_train.store.planning import TensorSlot
from accel_train.training.accumulation import GradientWindow
from tests.distributed.launching import ROOT

RECIPE = ROOT / "recipes" / os.environ.get("RECIPE", "scaffold/recipe.py")


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")


def loaded() -> Any:
    """The recipe as a module, evaluated every EVALUATE_EVERY steps."""
    spec = importlib.util.spec_from_file_location("recipe", RECIPE)
    assert spec is not None
    recipe: Any = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = recipe
    text = RECIPE.read_text()
    if "EVALUATE_EVERY" in os.environ:
        assert text.count("% 100 == 0") == 1
        text = text.replace("% 100 == 0", f"% {int(os.environ['EVALUATE_EVERY'])} == 0")
    exec(compile(text, RECIPE, "exec"), recipe.__dict__)
    return recipe


def patched() -> Any:
    recipe = loaded()
    room = int(os.environ["ROOM"])
    place = os.environ.get("ROOM_IN", "forward")
    first = int(os.environ.get("ROOM_FROM", "0"))
    end = int(os.environ.get("ROOM_UNTIL", str(1 << 30)))
    of_this_rank = os.environ.get("ROOM_RANK", os.environ.get("RANK", "0")) == os.environ.get("RANK", "0")
    step = [0]
    begin, backward = GradientWindow.__init__, GradientWindow.backward
    shard, allocate = Snapshot._shard, background._allocate

    def fails_in(*places: str) -> bool:
        return of_this_rank and place in places and first <= step[0] < end

    def remember_step(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        step[0] = self.step

    def limited_window(self: Any, sums: Any) -> None:
        losses = sums if isinstance(sums, Tensor) else next(iter(sums.values()))
        if fails_in("window") and len(losses) > room:
            out_of_memory()
        backward(self, sums)

    def limited(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            fails = fails_in("forward", "backward")
        else:
            fails = fails_in("evaluation")
            if os.environ.pop("STOP_IN_EVALUATION", None):
                os.kill(os.getpid(), signal.SIGTERM)
        if fails and len(batch["place"]) > room:
            if place != "backward":
                out_of_memory()
            # Its gradient comes last: those of the layers are on their way to the other process.
            batch["place"].requires_grad_().register_hook(out_of_memory)
        return metrics_of(model, batch)

    def limited_shard(self: Snapshot, slot: TensorSlot) -> Tensor:
        # Not the first, so that other processes already wait for what this one would send.
        if fails_in("save") and slot != self._plan.tensors[0]:
            out_of_memory()
        return shard(self, slot)

    def limited_host(memory: int, size: int) -> None:
        if fails_in("host_save"):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        allocate(memory, size)

    GradientWindow.__init__ = remember_step
    GradientWindow.backward = limited_window
    Snapshot._shard = limited_shard
    background._allocate = limited_host
    if RECIPE.stem != "recipe":
        return recipe
    metrics_of, build_model = recipe.metrics_of, recipe.build_model

    def build_shardable(width: int) -> nn.Module:
        model = build_model(width)
        # FSDP2 shards a model by the classes that it names.
        model._no_split_modules = ["Linear"]
        return model

    recipe.build_model = build_shardable
    recipe.metrics_of = limited
    return recipe


if __name__ == "__main__":
    run_main(patched().main)
