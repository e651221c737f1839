"""Loading: the reverse of ``state``, tensor by tensor, cut to this rank's part, under any strategy."""

from __future__ import annotations

import logging
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn

from accel_train.checkpoints.run import Run
from accel_train.config import UsageError
from accel_train.runtime.accelerator import strategy_of
from accel_train.store import weights
from accel_train.store.commit import Checkpoint
from accel_train.training.ema import Ema
from accel_train.training.shards import Shards
from accel_train.wording import shortened

logger = logging.getLogger(__name__)


def layout_of(accelerator: Accelerator) -> dict[str, Any]:
    """What a run must share with the one that saved for its continuation to be the same bit for bit."""
    return {
        "strategy": strategy_of(accelerator),
        "world_size": accelerator.num_processes,
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def load_initial_weights(model: nn.Module, run: Run) -> None:
    """Weights before ``prepare``: of the checkpoint to resume, else of ``init_from``, else those it has. Every rank."""
    if run.checkpoint is not None:
        with run.loading(last=False):
            weights.load_weights(run.checkpoint.path, "model", model)
    elif run.initial_weights is not None:
        weights.load_weights(run.initial_weights, "model", model)


def restore(run: Run, accelerator: Accelerator, shards: Shards, ema: Ema | None) -> int:
    """Restore masters, optimizer and average after ``prepare``; returns the number of steps done. All ranks.

    Does nothing for a fresh start. The weights themselves must be in the model before ``prepare``
    (``load_initial_weights``); the fp32 masters are set again here because ZeRO makes its own from already rounded
    weights. Random states come last, because building an iterator draws from them.
    """
    if (checkpoint := run.checkpoint) is None:
        return 0
    with run.loading(last=True):
        _restore(checkpoint, accelerator, shards, ema)
    _compare_layouts(checkpoint, accelerator, run.saved["experiment"])
    return checkpoint.step


def _restore(checkpoint: Checkpoint, accelerator: Accelerator, shards: Shards, ema: Ema | None) -> None:
    index: dict[str, Any] = {"step": checkpoint.step, "state": {}}
    if checkpoint.manifest.get("state", True):  # without it a run cannot go on, but can be evaluated
        index = checkpoint.json("optimizer/index.json")
    state: dict[str, dict[str, str]] = index["state"]
    exact, exact_average = state.pop("master", None), state.pop("master_ema", None)
    for name, whole in _read(checkpoint, exact or _weight_map(checkpoint, "model", shards)):
        shards.master(name).copy_(shards.cut(name, whole))
    if exact:  # before `prepare` the model got the rounded ones, and ZeRO's forward reads others than its masters
        shards.show({name: shards.master(name) for name in shards.parameters})
    if state:
        shards.create_state()
        _refuse_foreign_state(checkpoint, state, shards.state_names())
        for key, weight_map in state.items():
            for name, whole in _read(checkpoint, weight_map):
                shards.set_state(name, key, shards.cut(name, whole))
        shards.set_step(int(index["step"]))
    if ema is not None and ema.shards:
        stem = "ema" if any(name.startswith("ema") for name in checkpoint.manifest["files"]) else "model"
        fallback = exact_average or (exact if stem == "model" else None)
        for name, whole in _read(checkpoint, fallback or _weight_map(checkpoint, stem, shards)):
            ema.shards[name].copy_(shards.cut(name, whole))
    if checkpoint.manifest.get("state", True):
        _restore_random_state(checkpoint.json("trainer_state.json")["random_state"], accelerator)


def _refuse_foreign_state(
    checkpoint: Checkpoint, saved: Mapping[str, Mapping[str, str]], ours: Mapping[str, Sequence[str]]
) -> None:
    """State of an optimizer of another kind has no place in this one."""
    foreign = [f"{key} of {name}" for key, names in saved.items() for name in names if name not in ours.get(key, ())]
    if foreign:
        raise UsageError(
            f"{checkpoint.path}: its optimizer state ({shortened(foreign, 1)}) has no place in this "
            f"optimizer, which keeps {sorted(ours)}; go back to the optimizer that wrote it, or start a new run from "
            f"its weights with --init_from {shlex.quote(str(checkpoint.path))}"
        )


ORDER = (
    "micro_batch_size",
    "sync",
    "attention",
    "compile.mode",
    "compile.optimize",
    "compile.dynamic",
    "loader.bucket_by_length",
    "loader.bucket_shapes",
    "distributed.bucket_cap_mb",
)
"""Options that may change between two starts and decide in which order numbers are summed."""


def _compare_layouts(checkpoint: Checkpoint, accelerator: Accelerator, experiment: Mapping[str, Any]) -> None:
    """Say whether the continuation can be the same bit for bit, and if not, what differs."""
    there: Mapping[str, Any] = checkpoint.manifest.get("experiment", {})
    saved = dict(checkpoint.manifest.get("layout", {})) | {key: there.get(key) for key in ORDER}
    now = layout_of(accelerator) | {key: experiment.get(key) for key in ORDER}
    changed = [f"{key} {saved.get(key)} -> {now[key]}" for key in now if saved.get(key) != now[key]]
    if changed:
        logger.info("not bit-exact: the order of floating-point reductions differs (%s)", ", ".join(changed))
    elif accelerator.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        logger.info("the same layout as when it was saved: bit-exact but for kernels that sum in no fixed order")
    else:
        logger.info("bit-exact: the same layout as when it was saved")


def _weight_map(checkpoint: Checkpoint, stem: str, shards: Shards) -> Mapping[str, str]:
    if f"{stem}.safetensors.index.json" in checkpoint.manifest["files"]:
        return checkpoint.json(f"{stem}.safetensors.index.json")["weight_map"]
    return dict.fromkeys(shards.parameters, f"{stem}.safetensors")


def _read(checkpoint: Checkpoint, weight_map: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a collection, one at a time, each file opened once."""
    for file in dict.fromkeys(weight_map.values()):
        with safe_open(_inside(checkpoint, file), framework="pt") as opened:
            for name in (n for n, f in weight_map.items() if f == file):
                yield name, opened.get_tensor(name)


def _inside(checkpoint: Checkpoint, file: str) -> Path:
    """Only files that the manifest lists, and so has verified, are read."""
    if file not in checkpoint.manifest["files"]:
        raise RuntimeError(f"{checkpoint.path}: an index names {file!r}, which is not a file of this checkpoint")
    return checkpoint.file(file)


def _restore_random_state(states: Sequence[Any], accelerator: Accelerator) -> None:
    if len(states) != accelerator.num_processes:
        return  # another number of processes: there is no state to give back, and the loop draws from none
    mine = states[accelerator.process_index]
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["torch"]), dtype=torch.uint8))
    version, internal, gauss = mine["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["cuda"]), dtype=torch.uint8))
