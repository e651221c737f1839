"""What a checkpoint holds, the same under every strategy: plain names, fp32, safetensors and JSON.

Whole tensors are gathered one at a time and each belongs to one rank, which writes it: no rank ever holds the
whole optimizer. Reading is the reverse, tensor by tensor, cut to this rank's part.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_train import __version__
from accel_train.checkpoints import commit
from accel_train.checkpoints.commit import Checkpoint, CheckpointWriteError
from accel_train.checkpoints.run import Run
from accel_train.config import NonNegativeInt, UsageError
from accel_train.runtime.accelerator import strategy_of
from accel_train.training.ema import Ema
from accel_train.training.shards import Shards

logger = logging.getLogger(__name__)

SHARD_BYTES = 2_000_000_000
"""Largest file; above it a tensor collection is split, with an index beside it as the Hub expects."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When training state is saved and how many saves are kept."""

    save_every: NonNegativeInt = 0
    """Optimizer steps between saves; 0 saves only at the end."""
    keep_last: NonNegativeInt = 3
    """Newest checkpoints kept; older ones go after a newer one is committed. 0 keeps all."""


@dataclass(frozen=True)
class TensorFile:
    """One file of a split collection: its name, its owner and its tensors in order."""

    name: str
    owner: int
    tensors: tuple[str, ...]


def layout_of(accelerator: Accelerator) -> dict[str, Any]:
    """What a run must share with the one that saved for its continuation to be the same bit for bit."""
    return {
        "strategy": strategy_of(accelerator),
        "world_size": accelerator.num_processes,
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def plan_files(stem: str, sizes: Mapping[str, int], world_size: int, spread: bool = False) -> list[TensorFile]:
    """Split a collection into files of at most ``SHARD_BYTES``, owned by the ranks in turn.

    ``spread`` makes at least one file a rank, so that the writing is shared even where one file would hold all.
    """
    limit = SHARD_BYTES
    if spread:
        limit = min(limit, max(1, -(-sum(sizes.values()) // world_size)))
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return [TensorFile(f"{stem}.safetensors", 0, tuple(parts[0]))]
    return [
        TensorFile(f"{stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors", i % world_size, tuple(part))
        for i, part in enumerate(parts)
    ]


@dataclass(frozen=True)
class Saver:
    """Saves one run. Built on every rank; ``write_extras`` is called on the main process with the new directory and
    writes what sampling needs (``config.json``, ``assets/``)."""

    accelerator: Accelerator
    run: Run
    shards: Shards
    ema: Ema
    config: CheckpointConfig
    write_extras: Callable[[Path], None]

    def due(self, step: int, max_steps: int) -> bool:
        """Whether to save after ``step`` steps: a function of the step, so the same on every rank."""
        return step == max_steps or (self.config.save_every > 0 and step % self.config.save_every == 0)

    def save(self, step: int) -> Checkpoint:
        """Write and commit the state after ``step`` steps, then let old checkpoints go. All ranks, same step."""
        experiment = dict(self.run.saved["experiment"])
        facts = {
            "run_id": self.run.run_id,
            "samples_seen": step * int(experiment.get("global_batch_size", 0)),
            "layout": layout_of(self.accelerator),
            "experiment": experiment,
        }
        average = self.ema if self.ema.config.decay > 0 else None
        directory = self.run.checkpoints
        saved = save_checkpoint(self.accelerator, directory, step, self.shards, average, facts, self.write_extras)
        if self.accelerator.is_main_process:
            try:
                commit.retain(directory, self.config.keep_last, step)
            except OSError as error:  # the new checkpoint is committed; what could not go now goes next time
                logger.warning("an old checkpoint in %s could not be deleted: %s", directory, error)
        return saved


def save_checkpoint(
    accelerator: Accelerator,
    directory: Path,
    step: int,
    shards: Shards,
    ema: Ema | None,
    facts: Mapping[str, Any],
    write_extras: Callable[[Path], None],
) -> Checkpoint:
    """Write, hash and commit ``directory/checkpoint_<step>``. All ranks must call it, at the same step.

    ``facts`` go into the manifest. Returns when it is committed. Raises ``CheckpointWriteError`` on every rank if
    any rank could not write its part.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    temporary = directory / str(_agree(accelerator, commit.temporary_name(step, commit.new_nonce())))
    written: dict[str, dict[str, Any]] = {}
    error: str | None = None
    try:
        if rank == 0:
            (temporary / "optimizer").mkdir(parents=True)
            (temporary / "assets").mkdir()
            write_extras(temporary)
    except Exception as caught:  # the recipe's own code: whatever it raises, the other ranks must hear of it
        error = commit.describe_write_error(caught, directory, _bytes_needed(shards))
    _raise_together(accelerator, error, temporary)

    error = None
    for file, tensors in _gather_files(shards, ema, step, rank, world_size):
        if error is not None:  # the other ranks still need this rank in their gathers
            continue
        try:
            path = temporary / file.name
            save_file(tensors, path, metadata={"format": "pt"})
            written[file.name] = commit.seal_file(path)
        except Exception as caught:  # safetensors raises a type of its own; the others wait for this rank's word
            error = commit.describe_write_error(caught, directory, _bytes_needed(shards))
    random_state = _random_state(accelerator)
    try:
        if rank == 0 and error is None:
            _write_small_files(temporary, step, shards, ema, world_size, random_state)
            small = [
                p
                for p in temporary.rglob("*")
                if (p.is_file() and p.suffix != ".safetensors") or _is_extra(p, temporary)
            ]
            written |= {p.relative_to(temporary).as_posix(): commit.seal_file(p) for p in small}
    except Exception as caught:
        error = commit.describe_write_error(caught, directory, _bytes_needed(shards))
    _raise_together(accelerator, error, temporary)

    files = {k: v for part in _exchange(accelerator, written) for k, v in part.items()}
    manifest = {
        "schema": commit.SCHEMA,
        "accel_train": __version__,
        "step": step,
        "world_size": world_size,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **facts,
        "files": dict(sorted(files.items())),
    }
    final = directory / commit.checkpoint_name(step)
    try:
        if rank == 0:
            commit.commit(temporary, final, manifest)
    except OSError as caught:
        error = commit.describe_write_error(caught, directory, commit.total_size(files.values()))
    _raise_together(accelerator, error, temporary)
    return Checkpoint(final, step, manifest)


def _is_extra(path: Path, temporary: Path) -> bool:
    """Files that ``write_extras`` put into subdirectories, tensors among them."""
    return path.is_file() and path.parent.relative_to(temporary).parts[:1] == ("assets",)


def _gather_files(
    shards: Shards, ema: Ema | None, step: int, rank: int, world_size: int
) -> Iterator[tuple[TensorFile, dict[str, Tensor]]]:
    """Gather every collection file by file; yields those that this rank owns. A collective throughout."""
    sizes = {name: shards.shape(name).numel() * 4 for name in shards.parameters}
    collections: list[tuple[list[TensorFile], Callable[[str], Tensor]]] = [
        (plan_files("model", sizes, world_size), lambda n: shards.full(n, shards.master(n)))
    ]
    if ema is not None:
        collections.append((plan_files("ema", sizes, world_size), lambda n: shards.full(n, ema.shards[n])))
    for key in shards.state_keys() if step > 0 else []:
        read = _state_reader(shards, key)
        collections.append((plan_files(f"optimizer/{key}", sizes, world_size, spread=True), read))
    for files, read in collections:
        for file in files:
            kept: dict[str, Tensor] = {}
            for name in file.tensors:
                whole = read(name)
                if file.owner == rank:
                    kept[name] = whole.detach().to("cpu", torch.float32, copy=True).contiguous()
            if file.owner == rank:
                yield file, kept


def _state_reader(shards: Shards, key: str) -> Callable[[str], Tensor]:
    return lambda name: shards.full(name, shards.state(name, key))


def _write_small_files(
    temporary: Path, step: int, shards: Shards, ema: Ema | None, world_size: int, random_state: Sequence[Any]
) -> None:
    sizes = {name: shards.shape(name).numel() * 4 for name in shards.parameters}
    stems = {"model": "model", "ema": "ema"} if ema is not None else {"model": "model"}
    for stem in stems:
        files = plan_files(stem, sizes, world_size)
        if len(files) > 1:  # the Hub's own index format
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": _weight_map(files)}
            commit.write_json(temporary / f"{stem}.safetensors.index.json", index)
    keys = shards.state_keys() if step > 0 else []
    state = {key: _weight_map(plan_files(f"optimizer/{key}", sizes, world_size, spread=True)) for key in keys}
    commit.write_json(temporary / "optimizer" / "index.json", {"step": step, "state": state})
    commit.write_json(temporary / "trainer_state.json", {"step": step, "random_state": list(random_state)})


def _weight_map(files: Sequence[TensorFile]) -> dict[str, str]:
    return {name: file.name for file in files for name in file.tensors}


def load_initial_weights(model: nn.Module, run: Run) -> None:
    """Weights before ``prepare``: of the checkpoint to resume, else of ``init_from``, else those it has. Every rank."""
    if (directory := run.checkpoint.path if run.checkpoint is not None else run.initial_weights) is not None:
        load_weights_from(directory, "model", model)


def load_weights_from(directory: Path, stem: str, model: nn.Module) -> None:
    """Load ``stem.safetensors`` (or its indexed shards) of ``directory``; raises ``UsageError`` on a mismatch."""
    index = directory / f"{stem}.safetensors.index.json"
    names = [f"{stem}.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if any(Path(name).name != name for name in names):
        raise UsageError(f"{index}: names files outside its directory; it was not written by accel_train")
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (directory / name).is_file():
            raise UsageError(f"{directory}: {name} is not there; give a directory that holds {stem}.safetensors")
        weights |= load_file(directory / name)
    _refuse_misfit({n: tuple(p.shape) for n, p in model.named_parameters()}, weights, directory)
    model.load_state_dict(weights)


def _refuse_misfit(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor], directory: Path) -> None:
    found = {name: tuple(t.shape) for name, t in weights.items()}
    differences = [
        f"{name}: {found.get(name)} in the file, {expected.get(name)} in the model"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UsageError(
            f"{directory}: the weights do not fit this model: {'; '.join(differences[:3])}{more}; give the model "
            "options and the data that they were trained with"
        )


def _has_index(checkpoint: Checkpoint, stem: str) -> bool:
    return checkpoint.file(f"{stem}.safetensors.index.json").exists()


def restore(checkpoint: Checkpoint, accelerator: Accelerator, shards: Shards, ema: Ema | None) -> int:
    """Restore masters, optimizer and average after ``prepare``; returns the number of steps done. All ranks.

    The weights themselves must be in the model before ``prepare`` (``load_initial_weights``); the fp32 masters are set
    again here because ZeRO makes its own from already rounded weights. Random states come last.
    """
    for name, whole in _whole_tensors(checkpoint, "model", shards):
        shards.master(name).copy_(shards.cut(name, whole))
    index = checkpoint.json("optimizer/index.json")
    if index["state"]:
        shards.create_state()
        for key, weight_map in index["state"].items():
            for name, whole in _read(checkpoint, weight_map):
                state = shards.state(name, key)
                state.copy_(shards.cut(name, whole))
        shards.set_step(int(index["step"]))
    if ema is not None:
        stem = "ema" if checkpoint.file("ema.safetensors").exists() or _has_index(checkpoint, "ema") else "model"
        for name, whole in _whole_tensors(checkpoint, stem, shards):
            ema.shards[name].copy_(shards.cut(name, whole))
    _restore_random_state(checkpoint.json("trainer_state.json")["random_state"], accelerator)
    saved, now = checkpoint.manifest.get("layout", {}), layout_of(accelerator)
    changed = [f"{key} {saved.get(key)} -> {now[key]}" for key in now if saved.get(key) != now[key]]
    if changed:
        logger.info("not bit-exact: the order of floating-point reductions differs (%s)", ", ".join(changed))
    else:
        logger.info("bit-exact: the same layout as when it was saved")
    return checkpoint.step


def _whole_tensors(checkpoint: Checkpoint, stem: str, shards: Shards) -> Iterator[tuple[str, Tensor]]:
    if _has_index(checkpoint, stem):
        return _read(checkpoint, checkpoint.json(f"{stem}.safetensors.index.json")["weight_map"])
    return _read(checkpoint, dict.fromkeys(shards.parameters, f"{stem}.safetensors"))


def _read(checkpoint: Checkpoint, weight_map: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a collection, one at a time, each file opened once."""
    for file in dict.fromkeys(weight_map.values()):
        with safe_open(checkpoint.file(file), framework="pt") as opened:
            for name in (n for n, f in weight_map.items() if f == file):
                yield name, opened.get_tensor(name)


def _random_state(accelerator: Accelerator) -> list[Any]:
    """torch's and Python's generators of every rank, as JSON. Training itself draws from neither."""
    version, internal, gauss = random.getstate()
    mine = {"torch": torch.get_rng_state().numpy().tobytes().hex(), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return _exchange(accelerator, mine)


def _restore_random_state(states: Sequence[Any], accelerator: Accelerator) -> None:
    if len(states) != accelerator.num_processes:
        return  # another number of processes: there is no state to give back, and the loop draws from none
    mine = states[accelerator.process_index]
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["torch"]), dtype=torch.uint8))
    version, internal, gauss = mine["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["cuda"]), dtype=torch.uint8))


def _agree(accelerator: Accelerator, value: Any) -> Any:
    """The main process's value, on every rank."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def _exchange(accelerator: Accelerator, value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    return gather_object([value]) if accelerator.num_processes > 1 else [value]


def _raise_together(accelerator: Accelerator, error: str | None, temporary: Path) -> None:
    """If any rank failed, all raise the same error, and nothing unfinished stays."""
    errors = _exchange(accelerator, error)
    if not any(errors):
        return
    if accelerator.is_main_process:
        import shutil

        shutil.rmtree(temporary, ignore_errors=True)
    raise CheckpointWriteError("; ".join(f"rank {rank}: {e}" for rank, e in enumerate(errors) if e))


def _bytes_needed(shards: Shards) -> int:
    return 4 * 4 * sum(shards.shape(name).numel() for name in shards.parameters)
