"""Contents of a checkpoint: its tensor collections, and the small JSON files beside them."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import __version__
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.config import UsageError
from accel_train.data.options import BatchScheduleConfig
from accel_train.precision import Precision
from accel_train.store import atomic_files, planning, weights
from accel_train.store.planning import Collection
from accel_train.store.strict_json import Json
from accel_train.training.ema import Ema, refuse_wide
from accel_train.training.shards import Shards
from accel_train.training.step_guard import read_loss_scale
from accel_train.wording import shortened


def saved_names(shards: Shards, run: Run) -> list[str]:
    """List the tensors in ``model.safetensors``: trained parameters and buffers, and frozen ones without a base.

    Raises ``UsageError`` for a module with other state (``get_extra_state``): it would be lost.
    """
    for path, module in shards.module.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UsageError(
                f"the model: {path or type(module).__name__} has state of its own (get_extra_state), and a checkpoint "
                "holds tensors only; keep that state in buffers"
            )
    names = [*shards.parameters, *shards.buffers]
    # With a base by reference, the frozen parameters are in the files that it names.
    if run.base is None:
        names += shards.frozen
    return names


def refuse_unsavable(shards: Shards, run: Run) -> None:
    """Raise ``UsageError`` for a model that a checkpoint cannot hold completely, and for a resume without ``restore``.

    Reads no tensor. Any rank.
    """
    # At the start, because retention would soon delete the checkpoint that is to be restored.
    if run.checkpoint is not None and not run.is_restored:
        raise UsageError(
            f"{run.checkpoint.path}: the run resumes from it, but its optimizer state and EMA are not restored, and "
            "would start anew; call restore(run, accelerator, shards, ema) after accelerator.prepare and before Saver"
        )
    _own_dtypes(shards, saved_names(shards, run))
    refuse_wide(shards.parameters)


def collections(
    shards: Shards, ema: Ema, config: CheckpointConfig, state: Mapping[str, Sequence[str]], saved: Sequence[str]
) -> list[Collection]:
    """List the collections to save: weights, EMA, optimizer state and exact copies of rounded tensors.

    ``state`` maps each key of the optimizer state to its parameters. ``saved`` are the names of ``saved_names``.
    """
    precision = config.save_precision
    trained = list(shards.parameters)

    def read_ema(name: str) -> Tensor:
        # Looked up at each save, because the average of a schedule-free optimizer is computed on demand.
        return ema.averages[name]

    found = [_weights(shards, precision, saved)]
    if ema.is_on:
        found.append(Collection("ema", read_ema, precision, names=trained))
    for key, names in state.items():
        found.append(_optimizer_state(shards, key, names))
    # Training resumes from the exact fp32 weights, never from the rounded ones.
    if precision != "fp32" and config.save_state:
        found.append(Collection("optimizer/master", shards.master, spread=True, names=trained))
        if ema.is_on:
            found.append(Collection("optimizer/master_ema", read_ema, spread=True, names=trained))
    return found


def plan(shards: Shards, collections: Sequence[Collection], saved: Sequence[str], world_size: int) -> planning.Plan:
    """Plan the files of a save and the place of each tensor in the buffers of the ranks. Reads no tensor."""
    elements = {name: shards.shape(name).numel() for name in saved}
    return planning.plan(collections, elements, world_size)


def plan_after_a_step(ema: Ema, config: CheckpointConfig, run: Run, world_size: int) -> planning.Plan:
    """Return the plan of a save once the optimizer has state."""
    shards = ema.shards
    keys = shards.state_names() if config.save_state else {}
    saved = saved_names(shards, run)
    return plan(shards, collections(shards, ema, config, keys, saved), saved, world_size)


def _weights(shards: Shards, precision: Precision, saved: Sequence[str]) -> Collection:
    """Return the collection of the weights. Buffers and frozen parameters have no exact copy, so they keep their dtype.

    Raises ``UsageError`` for a dtype no checkpoint can hold.
    """
    own_dtypes = _own_dtypes(shards, saved)

    def read(name: str) -> Tensor:
        # The masters, because under ZeRO in low precision the model's own parameters are rounded.
        return shards.fixed(name) if name in own_dtypes else shards.master(name)

    return Collection("model", read, precision, own_dtypes=own_dtypes, names=saved)


def _own_dtypes(shards: Shards, saved: Sequence[str]) -> dict[str, torch.dtype]:
    """Return the dtypes of buffers and frozen parameters. Raises ``UsageError`` for one that no checkpoint can hold."""
    found = {name: shards.fixed(name).dtype for name in saved if name not in shards.parameters}
    unknown = [name for name, dtype in found.items() if dtype not in weights.DTYPE_NAMES]
    if unknown:
        raise UsageError(
            f"the model: {shortened(unknown, 3)} has the dtype {found[unknown[0]]}, which a checkpoint cannot hold; "
            "make a buffer non-persistent if it can be computed, and load frozen weights from a base "
            "(checkpoints.base: reference)"
        )
    return found


def _optimizer_state(shards: Shards, key: str, names: Sequence[str]) -> Collection:
    # One function per key: closures made in a loop would all read the last key.
    def read(name: str) -> Tensor:
        return shards.state(name, key)

    # Spread over the ranks, which share the writing. Weights are not, so that any library can load a single file.
    return Collection(f"optimizer/{key}", read, spread=True, names=names)


def indices(planned: planning.Plan) -> Json:
    """Build the indexes of weights and EMA in the Hub's format, by file name. A single file needs none."""
    found: Json = {}
    for stem in ("model", "ema"):
        weight_map = planned.files(stem)
        files = set(weight_map.values())
        if len(files) > 1:
            total = sum(slot.bytes for slot in planned.tensors if slot.file in files)
            found[f"{stem}.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return found


def state_index(planned: planning.Plan, step: int, counts: Mapping[str, int], numbers: Mapping[str, Any]) -> Json:
    """Build the index of the optimizer state: tensor names to files, for each key of the state.

    ``step`` counts the optimizer's own steps. ``counts`` come from ``Shards.step_counts``, and the index has only
    those that differ from ``step``. ``numbers`` come from ``Shards.numbers``, empty for the built-in optimizers.
    """
    state: dict[str, dict[str, str]] = {}
    for slot in planned.tensors:
        stem = slot.file.removesuffix(".safetensors").split("-")[0]  # without "-00001-of-00002"
        key = stem.removeprefix("optimizer/")
        if key != stem and key not in state:
            state[key] = planned.files(stem)
    optional: Json = {"steps": {name: own for name, own in counts.items() if own != step}, "numbers": numbers}
    return {"step": step, "state": state} | {name: values for name, values in optional.items() if values}


def texts(
    accelerator: Accelerator,
    ema: Ema,
    config: CheckpointConfig,
    planned: planning.Plan,
    step: int,
    counts: Mapping[str, int],
    random_states: Sequence[Any],
) -> dict[str, str]:
    """Build the small JSON files by name. ``random_states`` has one entry per rank. May be a collective.

    ``counts`` come from ``Shards.step_counts``.
    """
    found = indices(planned)
    health = ema.guard.state()
    numbers: Mapping[str, Any] = {}
    if step > 0:  # without a step there is no state yet
        numbers = ema.shards.numbers()
    loss_scale = read_loss_scale(accelerator, ema.shards.model)
    if config.save_state:
        # The optimizer did not count the steps that were left out.
        left_out = int(health.get("skipped", 0)) + int(health.get("without_samples", 0))
        found["optimizer/index.json"] = state_index(planned, step - left_out, counts, numbers)
        trainer_state: Json = {"step": step, "random_state": random_states}
        if loss_scale is not None:
            trainer_state["loss_scale"] = loss_scale
        if health:
            trainer_state["health"] = health
        found["trainer_state.json"] = trainer_state
    return {name: atomic_files.to_json(value) for name, value in found.items()}


def _samples_seen(experiment: Mapping[str, Any], grown: Sequence[tuple[int, int]], step: int) -> int:
    """Return the number of samples in the first ``step`` steps."""
    changes, sizes = (tuple(experiment.get(f"batch_schedule.{name}", ())) for name in ("steps", "sizes"))
    schedule = BatchScheduleConfig(changes, sizes).grown(grown)
    return schedule.samples_before(int(experiment.get("global_batch_size", 0)), step)


def manifest(
    run: Run,
    config: CheckpointConfig,
    shards: Shards,
    step: int,
    epoch: float,
    layout: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Json:
    """Build the manifest of a save. Its files, seconds and hash are added at the commit."""
    experiment = dict(run.saved["experiment"])
    bases = {"base": run.base, "embedded_base": run.embedded_base, "hub_base": run.hub_base}
    optional: Json = {name: base for name, base in bases.items() if base is not None}
    if shards.buffers:
        # Unlike parameters, they may hold infinity, and an export has no model to tell them apart.
        optional["buffers"] = list(shards.buffers)
    if run.grown:
        optional["grown"] = list(run.grown)
    return optional | {
        "accel_train": __version__,
        # run_id, experiment and resolved are enough to rebuild a damaged run.json (`run_file.recall`).
        "run_id": run.run_id,
        "step": step,
        "samples_seen": _samples_seen(experiment, run.grown, step),
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
    """Drop metrics that are not finite, because JSON has no NaN and no infinity."""
    finite: dict[str, float] = {}
    for name, value in metrics.items():
        if math.isfinite(value):
            finite[name] = float(value)
    return finite


def random_state() -> Json:
    """Return the states of this rank's global generators, for recipe code that draws from them."""
    version, internal, gauss = random.getstate()
    state: Json = {
        "torch": _to_hex(torch.get_rng_state()),
        "python": [version, list(internal), gauss],
        # Arrays as lists: JSON has none, and a checkpoint holds no pickle.
        "numpy": json.loads(json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)),
    }
    if torch.cuda.is_available():
        state["cuda"] = _to_hex(torch.cuda.get_rng_state())
    return state


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()
