"""Load checkpoints under any strategy: one whole tensor at a time, of which each rank keeps its shard."""

from __future__ import annotations

import logging
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn

from accel_train.checkpoints.run import Run
from accel_train.config import UsageError
from accel_train.pipeline import ADAPTER_DESCRIPTION
from accel_train.runtime.strategy import layout_of
from accel_train.store import manifest, pretrained_base, strict_json, weights
from accel_train.store.exports import peft_layout
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import DATA_FINGERPRINT
from accel_train.store.run_file import is_covered
from accel_train.store.strict_json import Json
from accel_train.training.ema import Ema
from accel_train.training.shards import Shards, persistent_buffers
from accel_train.training.step_guard import write_loss_scale
from accel_train.wording import shortened

logger = logging.getLogger(__name__)


def load_initial_weights(
    model: nn.Module,
    run: Run,
    base: Mapping[str, Any] | None = None,
    names: Mapping[str, str | None] | None = None,
) -> None:
    """Load weights before ``prepare``, from the checkpoint to resume or else from ``init_from``. Every rank.

    ``base`` refers to the files behind ``model``. A checkpoint without the frozen parameters must refer to the same.
    Raises ``UsageError`` otherwise. ``names`` maps each tensor of the model to its name in the weights of
    ``init_from``, or to None if it keeps its initial value. Names that the model lacks are refused, and tensors of
    those weights that are not in the map are left out.
    """
    if run.checkpoint is not None:
        with run.loading(last=False):
            _refuse_other_base(run.checkpoint, base)
            _load_into(model, run.checkpoint.path, run.checkpoint.manifest, base, persistent_buffers(model))
    elif run.initial_weights is not None:
        described: Mapping[str, Any] = {}
        folders = peft_layout.folders(run.initial_weights)
        parameters = peft_layout.by_key_of_peft({name: name for name, _ in model.named_parameters()})
        if folders and parameters:
            _load_adapter(model, run.initial_weights, folders, parameters, base)
            return
        if names is not None:
            _load_some(model, run.initial_weights, names)
            return
        # Another tool's directory may have a manifest.json of its own. Without ours, every parameter is required.
        if manifest.is_checkpoint(run.initial_weights):
            described = _read_manifest(run.initial_weights)
        _load_into(model, run.initial_weights, described, base)


def _load_adapter(
    model: nn.Module,
    directory: Path,
    folders: Mapping[str, Path],
    parameters: Mapping[str, str],
    base: Mapping[str, Any] | None,
) -> None:
    """Load the adapter of an export or of peft's ``folders``. ``parameters`` has the model's names by peft's keys."""
    description = directory / ADAPTER_DESCRIPTION
    recorded: Mapping[str, Any] = {}
    if description.is_file():
        recorded = strict_json.read_object(description).get("base", {})
    if "files" in recorded:
        pretrained_base.refuse_other_weights(recorded, base, directory)
    else:
        logger.warning("init_from: %s does not record the files of its base, so the base is not compared", directory)
    tensors: dict[str, weights.TensorInfo] = {}
    for prefix, folder in folders.items():
        found = weights.find_tensors(folder, peft_layout.WEIGHTS_STEM)
        tensors |= peft_layout.of_whole(found, prefix)
    by_name = {parameters.get(key, key): info for key, info in tensors.items()}
    weights.load_tensors(directory, by_name, model, required=parameters.values())


def _load_some(model: nn.Module, directory: Path, names: Mapping[str, str | None]) -> None:
    tensors = weights.find_tensors(directory, "model")
    found = {name: tensors[other] for name, other in names.items() if other in tensors}
    parameters = {name for name, _ in model.named_parameters()}
    required = {name for name, other in names.items() if other is not None and name in parameters}
    weights.load_tensors(directory, found, model, required=required)


def _read_manifest(directory: Path) -> Mapping[str, Any]:
    try:
        return manifest.read(directory)
    except ValueError as error:
        raise UsageError(f"init_from: {error}; restore it from a copy, or name another checkpoint") from None


def _refuse_other_base(checkpoint: Checkpoint, base: Mapping[str, Any] | None) -> None:
    """Raise ``UsageError`` if the frozen weights differ, or the configs and other files that define their use."""
    if "base" in checkpoint.manifest:
        pretrained_base.refuse_other_base(checkpoint.manifest["base"], base, checkpoint.path)
    # The weights themselves are in the checkpoint.
    embedded = checkpoint.manifest.get("embedded_base")
    if embedded is not None and base is not None:
        pretrained_base.refuse_other_definition(embedded, base, checkpoint.path)


def _load_into(
    model: nn.Module,
    directory: Path,
    described: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    buffers: Sequence[str] = (),
) -> None:
    elsewhere: set[str] = set()
    if "base" in described:
        # The definition of the base is not compared: a new run may change it.
        pretrained_base.refuse_other_weights(described["base"], base, directory)
        # They came with the base, which was just compared by its hashes.
        elsewhere = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    required = {name for name, _ in model.named_parameters()} - elsewhere
    weights.load_weights(directory, "model", model, required=required.union(buffers))


def restore(
    run: Run,
    accelerator: Accelerator,
    shards: Shards,
    ema: Ema | None,
    free_to_change: Sequence[str] = (),
    *,
    has_other_data: bool = False,
) -> int:
    """Restore fp32 masters, optimizer and EMA after ``prepare``. Returns the number of steps done. All ranks.

    ``free_to_change`` names options, or groups of them, without effect on the trajectory: the notice of differences
    leaves them out. ``has_other_data`` says that the data have changed since the checkpoint, although the run keeps the
    fingerprint of its original data. Does nothing for a fresh start. Call ``load_initial_weights`` before ``prepare``.
    """
    checkpoint = run.checkpoint
    if checkpoint is None:
        return 0
    with run.loading(last=True):
        _restore(checkpoint, accelerator, shards, ema)
    run.is_restored = True
    # The load has succeeded, under whatever layout. Only notices are left.
    experiment: Json = dict(run.saved["experiment"])
    if has_other_data:
        experiment[DATA_FINGERPRINT] = None
    _compare_layouts(checkpoint, accelerator, experiment, free_to_change)
    return checkpoint.step


def _restore(checkpoint: Checkpoint, accelerator: Accelerator, shards: Shards, ema: Ema | None) -> None:
    has_state = checkpoint.manifest.get("state", True)
    index: Json = {"step": checkpoint.step, "state": {}}
    if has_state:  # a run cannot go on without it, but can still be evaluated
        index = checkpoint.json("optimizer/index.json")
    state: dict[str, dict[str, str]] = index["state"]
    # Copies of the weights lie among the optimizer's files, but are no state of the optimizer.
    exact = state.pop("master", None)
    exact_ema = state.pop("master_ema", None)
    _restore_masters(checkpoint, shards, exact)
    numbers: Mapping[str, Any] = index.get("numbers", {})
    if state or numbers:
        _restore_optimizer(checkpoint, shards, index)
    if numbers:
        # After `set_step`: an optimizer of the user's own has its step counts among its numbers.
        shards.set_numbers(numbers)
    if ema is not None and ema.averages:
        _restore_ema(checkpoint, shards, ema, exact=exact, exact_ema=exact_ema)
    if has_state:
        trainer_state = checkpoint.json("trainer_state.json")
        if ema is not None:
            ema.guard.load(trainer_state.get("health", {}))
        if "loss_scale" in trainer_state:
            write_loss_scale(accelerator, shards.model, trainer_state["loss_scale"])
        # Last, because building an iterator draws from these generators.
        _restore_random_state(trainer_state["random_state"], accelerator)


def _restore_masters(checkpoint: Checkpoint, shards: Shards, exact: Mapping[str, str] | None) -> None:
    """Set the fp32 masters from their ``exact`` copies, if the weights were saved in low precision."""
    # Set again although the weights were loaded before `prepare`: ZeRO builds its masters from rounded weights.
    for name, whole in _read_tensors(checkpoint, exact or _weight_map(checkpoint, "model", shards)):
        shards.master(name).copy_(shards.shard_of(name, whole))
    if exact:
        # Before `prepare` the model got the rounded weights, and ZeRO's forward does not read its masters.
        shards.show({name: shards.master(name) for name in shards.parameters})


def _never_stepped(shards: Shards, state: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """Return 0 for each trained parameter without any state in the checkpoint."""
    saved = {name for names in state.values() for name in names}
    return {name: 0 for name in shards.parameters if name not in saved}


def _restore_optimizer(checkpoint: Checkpoint, shards: Shards, index: Json) -> None:
    state: Mapping[str, Mapping[str, str]] = index["state"]
    # torch's optimizers allocate their state in the first step, so there is nothing to copy into yet.
    shards.create_state()
    ours = shards.state_names()
    _refuse_foreign_state(checkpoint, state, ours)
    _warn_about_missing_state(checkpoint, state, ours)
    for key, weight_map in state.items():
        for name, whole in _read_tensors(checkpoint, weight_map):
            shards.set_state(name, key, shards.shard_of(name, whole))
    apart = _never_stepped(shards, state) | index.get("steps", {})
    # After `create_state`, whose step without effect has counted as one.
    shards.set_step(int(index["step"]), apart)


def _restore_ema(
    checkpoint: Checkpoint,
    shards: Shards,
    ema: Ema,
    *,
    exact: Mapping[str, str] | None,
    exact_ema: Mapping[str, str] | None,
) -> None:
    """Restore the EMA. It starts from the weights if the checkpoint has none."""
    has_ema = any(name.startswith("ema") for name in checkpoint.manifest["files"])
    weight_map = exact_ema
    # The exact weights stand in only if no EMA was saved at all. A rounded EMA is closer to it than they are.
    if not weight_map and not has_ema:
        weight_map = exact
    if not weight_map:
        weight_map = _weight_map(checkpoint, "ema" if has_ema else "model", shards)
    for name, whole in _read_tensors(checkpoint, weight_map):
        ema.averages[name].copy_(shards.shard_of(name, whole))


def _refuse_foreign_state(
    checkpoint: Checkpoint, saved: Mapping[str, Mapping[str, str]], ours: Mapping[str, Sequence[str]]
) -> None:
    """Raise ``UsageError`` for state of another kind of optimizer."""
    foreign: list[str] = []
    for key, names in saved.items():
        foreign += [f"{key} of {name}" for name in names if name not in ours.get(key, ())]
    if foreign:
        raise UsageError(
            f"{checkpoint.path}: its optimizer state ({shortened(foreign, 1)}) has no place in this "
            f"optimizer, which keeps {sorted(ours)}; go back to the optimizer that wrote it, or start a new run from "
            f"its weights with --init_from {shlex.quote(str(checkpoint.path))}"
        )


def _warn_about_missing_state(
    checkpoint: Checkpoint, saved: Mapping[str, Mapping[str, str]], ours: Mapping[str, Sequence[str]]
) -> None:
    """Warn about trained parameters whose state starts over. One without a gradient so far has no saved state."""
    missing: list[str] = []
    for key, names in ours.items():
        missing += [f"{key} of {name}" for name in names if name not in saved.get(key, ())]
    if missing:
        logger.warning(
            "%s: optimizer state is missing (%s) and starts afresh; this is right for parameters that have had no "
            "gradient so far, otherwise another model or optimizer wrote the checkpoint",
            checkpoint.path,
            shortened(missing, 3),
        )


ORDER = (
    "micro_batch_size",
    "model.loss_chunk",
    "sync",
    "attention",
    "compile.mode",
    "compile.optimize",
    "compile.dynamic",
    "loader.bucket_by_length",
    "loader.bucket_shapes",
    "distributed.bucket_cap_mb",
)
"""Options free to change on resume, although they affect the order of floating-point sums."""


def _compare_layouts(
    checkpoint: Checkpoint, accelerator: Accelerator, experiment: Mapping[str, Any], free: Sequence[str]
) -> None:
    """Log whether the continuation can be bit-exact, and if not, the differences. Collective."""
    saved_experiment: Mapping[str, Any] = checkpoint.manifest.get("experiment", {})
    saved: Json = dict(checkpoint.manifest.get("layout", {}))
    current = layout_of(accelerator)
    for key in ORDER:
        saved[key] = saved_experiment.get(key)
        current[key] = experiment.get(key)
    names = [key for key in dict.fromkeys([*current, *saved]) if saved.get(key) != current.get(key)]
    changed = [_describe_change(key, saved.get(key), current.get(key), accelerator.num_processes) for key in names]
    rest = _other_options(saved_experiment, experiment, [*ORDER, *free])
    if changed:
        logger.info("not bit-exact: the order of floating-point reductions differs (%s)", ", ".join(changed))
    elif accelerator.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        logger.info(
            "the same layout as when it was saved: bit-exact except for kernels that sum in no fixed order, which "
            "--deterministic excludes%s",
            rest,
        )
    else:
        logger.info("bit-exact: the same layout as when it was saved%s", rest)


def _describe_change(name: str, before: Any, now: Any, processes: int) -> str:
    """Describe a change of the layout. A list has one value per process."""
    lists = [each if isinstance(each, list) else [each] * processes for each in (before, now)]
    if list not in (type(before), type(now)) or any(len(each) != processes for each in lists):
        return f"{name} {before} -> {now}"
    pairs = enumerate(zip(*lists, strict=True))
    return f"{name} " + shortened([f"{old} -> {new} (process {rank})" for rank, (old, new) in pairs if old != new], 3)


def _other_options(saved: Mapping[str, Any], current: Mapping[str, Any], free: Sequence[str]) -> str:
    """Name the options changed since the save, without those in ``free``."""
    # An option that the recipe no longer has does not count as changed.
    others: list[str] = []
    for key, value in saved.items():
        if current.get(key, value) != value and not is_covered(key, free):
            others.append(key)
    if not others:
        return ""
    return f"; from here on with another {', '.join(others)}"


def _weight_map(checkpoint: Checkpoint, stem: str, shards: Shards) -> Mapping[str, str]:
    if f"{stem}.safetensors.index.json" in checkpoint.manifest["files"]:
        weight_map = checkpoint.json(f"{stem}.safetensors.index.json")["weight_map"]
        # Buffers and frozen parameters beside them were loaded before `prepare`.
        return {name: file for name, file in weight_map.items() if name in shards.parameters}
    return dict.fromkeys(shards.parameters, f"{stem}.safetensors")


def _read_tensors(checkpoint: Checkpoint, weight_map: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a collection, and open each file once."""
    for file in dict.fromkeys(weight_map.values()):
        with safe_open(_listed_file(checkpoint, file), framework="pt") as opened:
            for name, where in weight_map.items():
                if where == file:
                    yield name, opened.get_tensor(name)


def _listed_file(checkpoint: Checkpoint, file: str) -> Path:
    """Return the path of a file. Only files listed in the manifest were verified, so no other is read."""
    if file not in checkpoint.manifest["files"]:
        raise RuntimeError(f"{checkpoint.path}: an index names {file!r}, which is not a file of this checkpoint")
    return checkpoint.file(file)


def _restore_random_state(states: Sequence[Any], accelerator: Accelerator) -> None:
    if len(states) != accelerator.num_processes:
        return  # another world size; training itself draws from none of these generators
    mine = states[accelerator.process_index]
    torch.set_rng_state(_from_hex(mine["torch"]))
    version, internal, gauss = mine["python"]
    # `setstate` insists on the tuple that JSON made a list.
    random.setstate((version, tuple(internal), gauss))
    _restore_numpy(mine["numpy"])
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(mine["cuda"]))


def _restore_numpy(saved: dict[str, Any]) -> None:
    ours = np.random.get_state(legacy=False)["bit_generator"]
    theirs = saved["bit_generator"]
    # A program may choose another one at any time, by `np.random.set_bit_generator`.
    if theirs == ours:
        np.random.set_state(saved)
        return
    logger.warning(
        "numpy's global generator is %s and was %s when the checkpoint was saved, so its draws do not continue; "
        "if the run draws from it, call np.random.set_bit_generator(np.random.%s()) before the checkpoint is restored",
        ours,
        theirs,
        theirs,
    )


def _from_hex(text: str) -> Tensor:
    # A bytearray, because torch warns about tensors over read-only bytes.
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
