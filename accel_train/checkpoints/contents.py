"""Contents of a checkpoint: its tensor collections, and the small JSON files beside them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_train import __version__
from accel_train.checkpoints import snapshot
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.checkpoints.snapshot import Collection
from accel_train.store import atomic_files
from accel_train.training.ema import Ema
from accel_train.training.shards import Shards


def collections(
    shards: Shards, ema: Ema, config: CheckpointConfig, state: Mapping[str, Sequence[str]]
) -> list[Collection]:
    """List the collections to save: weights, EMA, optimizer state and exact copies of rounded tensors.

    ``state`` maps each key of the optimizer state to its parameters.
    """
    precision = config.save_precision
    has_ema = ema.config.decay > 0
    # The masters, because under ZeRO in low precision the model's own parameters are rounded.
    found = [Collection("model", shards.master, precision)]
    if has_ema:
        found.append(Collection("ema", ema.shards.__getitem__, precision))
    for key, names in state.items():
        found.append(_optimizer_state(shards, key, names))
    # Training resumes from the exact fp32 weights, never from the rounded ones.
    if precision != "fp32" and config.save_state:
        found.append(Collection("optimizer/master", shards.master, spread=True))
        if has_ema:
            found.append(Collection("optimizer/master_ema", ema.shards.__getitem__, spread=True))
    return found


def _optimizer_state(shards: Shards, key: str, names: Sequence[str]) -> Collection:
    # A function of its own for each key: closures made in a loop would all read the last one.
    def read(name: str) -> Tensor:
        return shards.state(name, key)

    return Collection(f"optimizer/{key}", read, spread=True, names=names)


def indices(planned: snapshot.Plan) -> dict[str, Any]:
    """Build the indexes of weights and EMA in the Hub's format, by file name. A single file needs none."""
    found: dict[str, Any] = {}
    for stem in ("model", "ema"):
        weight_map = planned.files(stem)
        files = set(weight_map.values())
        if len(files) > 1:
            total = sum(slot.bytes for slot in planned.tensors if slot.file in files)
            found[f"{stem}.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return found


def state_index(planned: snapshot.Plan, step: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Build the index of the optimizer state: tensor names to files, for each key of the state.

    ``numbers`` are those of ``Shards.numbers``, empty for the built-in optimizers.
    """
    state: dict[str, dict[str, str]] = {}
    for slot in planned.tensors:
        stem = slot.file.removesuffix(".safetensors").split("-")[0]  # without "-00001-of-00002"
        key = stem.removeprefix("optimizer/")
        if key != stem and key not in state:
            state[key] = planned.files(stem)
    index: dict[str, Any] = {"step": step, "state": state}
    return index | {"numbers": numbers} if numbers else index


def texts(planned: snapshot.Plan, step: int, random_states: Sequence[Any] | None, shards: Shards) -> dict[str, str]:
    """Build the small JSON files by name. ``random_states`` of all ranks are None for a save without state."""
    found = indices(planned)
    if random_states is not None:
        numbers = shards.numbers() if step > 0 else {}  # without a step there is no state yet
        found["optimizer/index.json"] = state_index(planned, step, numbers)
        found["trainer_state.json"] = {"step": step, "random_state": random_states}
    return {name: atomic_files.to_json(value) for name, value in found.items()}


def manifest(
    run: Run, config: CheckpointConfig, step: int, epoch: float, layout: Mapping[str, Any], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Build the manifest of a save. Its files, seconds and hash are added at the commit."""
    experiment = dict(run.saved["experiment"])
    return {
        "accel_train": __version__,
        # run_id, experiment and resolved are enough to rebuild a damaged run.json (`run_file.recall`).
        "run_id": run.run_id,
        "step": step,
        "samples_seen": step * int(experiment.get("global_batch_size", 0)),
        "epoch": epoch,
        "state": config.save_state,
        "world_size": layout["world_size"],
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layout": layout,
        "experiment": experiment,
        "resolved": dict(run.saved.get("resolved", {})),
        "metrics": finite_metrics(metrics),
    }


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Filter the finite metrics. JSON has no NaN and no infinity."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def random_state() -> dict[str, Any]:
    """Return the states of this rank's global generators, for code of a recipe that draws from them."""
    version, internal, gauss = random.getstate()
    state = {"torch": _to_hex(torch.get_rng_state()), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available():
        state["cuda"] = _to_hex(torch.cuda.get_rng_state())
    return state


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()
