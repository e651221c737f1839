"""``accel-train checkpoints export``: the weights of a checkpoint as a directory that every tool reads.

Also how any collection of tensors is written: streamed, one output file in memory at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accel_train.checkpoints import snapshot
from accel_train.checkpoints.snapshot import SavePrecision
from accel_train.commands import diff, places
from accel_train.config import UsageError, expand_path
from accel_train.store import commit, weights
from accel_train.store.commit import Checkpoint
from accel_train.store.weights import FLOATS, WHOLE, TensorInfo, TensorReader

Source = Literal["model", "ema"]


def export(checkpoint: str, destination: str, *, precision: SavePrecision = "fp32", source: Source = "model") -> int:
    """Write the weights, or their average (``ema``), as ``destination/model.safetensors`` with config.json, assets and
    the experiment's options (experiment.json): objective and samplers, without which weights say little.

    Above 2 GB in shards with an index. Of a run, its newest checkpoint that verifies. Takes the exact fp32 tensors
    where the checkpoint has them beside a lower ``save_precision``. Raises ``UsageError`` for a destination in use, a
    checkpoint that does not verify, NaN, and values that ``precision`` cannot hold.
    """
    found, passed_over = places.newest_at(checkpoint)
    target = _unused(destination)
    tensors = _exact(found, source)
    temporary = target.with_name(f".tmp-export-{target.name}-{os.getpid()}")
    with building(temporary):
        write_collection(temporary, "model", tensors, precision)
        _copy_extras(found, temporary)
        facts = {name: found.manifest.get(name) for name in ("run_id", "step")}
        options = found.manifest.get("experiment") or {}
        commit.write_json(temporary / "experiment.json", {**facts, "weights": source, "options": options})
        for file in [file for file in temporary.rglob("*") if file.is_file()]:
            commit.seal_file(file)
        for folder in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
            commit.fsync_directory(folder)
        os.rename(temporary, target)  # onto an empty directory, or none
        commit.fsync_directory(target.parent)
    for reason in passed_over:
        print(f"passed over: {reason}")
    held = sorted({info.dtype for info in tensors.values() if info.dtype in FLOATS} - {"F32"})
    if precision == "fp32" and held:
        print(f"note: the checkpoint has these weights in {', '.join(held)}; fp32 adds no digits to them")
    what, size = "weights" if source == "model" else "averaged weights", places.readable_size(places.disk_bytes(target))
    print(f"{target}: {what} of {found.path} (step {found.step}) in {precision}, {size}")
    return 0


def _unused(destination: str) -> Path:
    path = expand_path(destination)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        held = f"holds {places.contents(path)}" if path.is_dir() else "is a file"
        raise UsageError(f"{path}: {held}; give a directory that does not exist or is empty")
    return path


def _exact(checkpoint: Checkpoint, source: Source) -> dict[str, TensorInfo]:
    """Where the best copy of the weights is: exact ones beside the optimizer state, else those of the collection."""
    if source not in diff.stems_in(checkpoint.path):
        raise UsageError(
            f"{checkpoint.path}: has no {source}.safetensors, so there are no averaged weights (ema.decay was 0); "
            "export --weights model"
        )
    if (checkpoint.path / "optimizer" / "index.json").is_file():
        exact = diff.optimizer_state(checkpoint.path, ["master" if source == "model" else "master_ema"])
        for tensors in exact.values():
            return tensors
    return weights.find_tensors(checkpoint.path, source)


def _copy_extras(checkpoint: Checkpoint, directory: Path) -> None:
    """What the manifest lists of config.json and assets, which were verified with the rest."""
    for name in checkpoint.manifest["files"]:
        parts = PurePosixPath(name).parts
        if parts == ("config.json",) or (parts[:1] == ("assets",) and ".." not in parts):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.file(name), directory / name)


@contextmanager
def building(temporary: Path) -> Generator[None]:
    """Make a directory to build in; nothing of it stays after an error. What the disk refuses is a ``UsageError``."""
    try:
        temporary.mkdir(parents=True)
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UsageError(f"{temporary.parent}: cannot be written ({error}); free space or write elsewhere") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_collection(directory: Path, stem: str, tensors: Mapping[str, TensorInfo], precision: SavePrecision) -> None:
    """Write ``stem.safetensors``, or shards of at most 2 GB and their index, in ``precision``; not flushed.

    Whole numbers stay what they are. Holds one output file in memory. Raises ``UsageError`` for NaN, for infinity and
    for what ``precision`` cannot hold.
    """
    for name, info in tensors.items():
        if info.dtype not in FLOATS | WHOLE:
            raise UsageError(
                f"{info.file}: {name} has the type {info.dtype}, which means nothing without what belongs to it in the "
                "tool that made it; save it there in fp32, bf16 or fp16"
            )
    width = snapshot.DTYPES[precision][0].itemsize
    split = split_state_dict_into_shards_factory(
        {n: i.elements * (width if i.dtype in FLOATS else WHOLE[i.dtype].itemsize) for n, i in tensors.items()},
        get_storage_size=lambda size: size,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=snapshot.SHARD_BYTES,
    )
    with TensorReader(tensors) as reader:
        for file, names in split.filename_to_tensors.items():
            part = {name: _converted(name, reader.read(name), precision, tensors[name].file) for name in names}
            save_file(part, directory / file, metadata={"format": "pt"})
            del part  # before the next is made
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        commit.write_json(directory / f"{stem}.safetensors.index.json", index)


def _converted(name: str, tensor: Tensor, precision: SavePrecision, file: Path) -> Tensor:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor.to(snapshot.DTYPES[precision][0]) if tensor.is_floating_point() else tensor
    weights.refuse_not_finite(name, tensor, file)
    converted = tensor.to(snapshot.DTYPES[precision][0])
    if not torch.stack(torch.aminmax(converted)).isfinite().all():
        raise UsageError(
            f"{file}: {name} has values beyond {torch.finfo(converted.dtype).max:.6g}, the most that {precision} "
            "holds; use another precision"
        )
    return converted
