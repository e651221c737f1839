"""Collections of tensors written to safetensors files, in a directory that appears as a whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accel_train.commands import places
from accel_train.config import UsageError, disk_error, expand_path
from accel_train.precision import Precision, dtype_of
from accel_train.store import atomic_files, commit, planning, weights
from accel_train.store.atomic_files import fsync_directory
from accel_train.store.weights import FLOATS, INTEGERS, TensorInfo, TensorReader


@contextmanager
def temporary_directory(temporary: Path) -> Generator[None]:
    """Create a directory and delete it after an error. Errors of the disk become ``UsageError``.

    An error about a file elsewhere is one of reading: a run in training may have deleted the old checkpoint.
    """
    try:
        temporary.mkdir(parents=True)
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if _is_of_reading(error, temporary):
            raise UsageError(
                f"{error.filename}: cannot be read ({error.strerror}), so nothing was written; if its run continues "
                "and has deleted this checkpoint, use a newer one"
            ) from None
        raise disk_error(error)(
            f"{temporary.parent}: cannot be written ({error}); free space or write elsewhere"
        ) from None
    # Ctrl-C as well: gigabytes under a hidden name would stay behind.
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def new_directory(target: Path) -> Generator[Path]:
    """Yield a temporary directory that becomes ``target``, unused until then, at the end of the body.

    After an error nothing is left behind. Errors of the disk become ``UsageError``.
    """
    # Beside the target, because a rename must not cross file systems.
    temporary = target.with_name(f".tmp-export-{target.name}-{os.getpid()}")
    with temporary_directory(temporary):
        yield temporary
        _flush(temporary)
        os.rename(temporary, target)  # also replaces an empty directory
        fsync_directory(target.parent)


def unused_directory(destination: str) -> Path:
    """Return the path of a directory to write. Raises ``UsageError`` for one in use, a file and a mount point."""
    path = expand_path(destination)
    if path.is_symlink():
        # The link's target is replaced, because a rename cannot replace a link.
        path = path.resolve()
    requirement = "give a directory that does not exist or is empty"
    if path.is_mount():
        raise UsageError(f"{path}: is a mount point, which cannot be replaced; give a directory in it")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path}: contains {places.contents(path)}; {requirement}")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file; {requirement}")
    return path


def _flush(directory: Path) -> None:
    """Flush every file and directory, so that the rename cannot become durable before them."""
    paths = list(directory.rglob("*"))
    for path in paths:
        if path.is_file():
            commit.seal_file(path)
    fsync_directory(directory)
    for path in paths:
        if path.is_dir():
            fsync_directory(path)


def _is_of_reading(error: OSError | SafetensorError, temporary: Path) -> TypeGuard[OSError]:
    if not isinstance(error, OSError) or not isinstance(error.filename, str | os.PathLike):
        return False
    path = Path(error.filename)
    # If a copy fails on a full disk, the error names its source.
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return not is_full and path != temporary.parent and temporary not in (path, *path.parents)


def write_collection(
    directory: Path,
    stem: str,
    tensors: Mapping[str, TensorInfo],
    precision: Precision,
    buffers: Collection[str] = (),
) -> None:
    """Write ``stem.safetensors``, or shards of at most 2 GB and their index, in ``precision``; not flushed.

    Integers keep their type. Holds one output file in memory. Raises ``UsageError`` for NaN, infinity and values out
    of the range of ``precision``. Only ``buffers`` may hold infinity, such as a mask of attention.
    """
    sizes: dict[str, int] = {}
    for name, info in tensors.items():
        if info.dtype in FLOATS:
            sizes[name] = info.elements * dtype_of(precision).itemsize
        elif info.dtype in INTEGERS:
            sizes[name] = info.elements * INTEGERS[info.dtype].itemsize
        else:
            raise UsageError(
                f"{info.file}: {name} has the type {info.dtype}, which only the tool that made it can decode; save it "
                "there in fp32, bf16 or fp16"
            )
    split = split_state_dict_into_shards_factory(
        sizes,
        # Sizes take the place of tensors, so that shards are planned before anything is read.
        get_storage_size=lambda size: size,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=planning.SHARD_BYTES,
    )
    with TensorReader(tensors) as reader:
        for file, names in split.filename_to_tensors.items():
            part = _read_part(reader, {name: tensors[name].file for name in names}, precision, buffers)
            save_file(part, directory / file, metadata={"format": "pt"})
            del part  # frees this file's tensors before the next are read
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        atomic_files.write_json_in_place(directory / f"{stem}.safetensors.index.json", index)


def _read_part(
    reader: TensorReader, files: Mapping[str, Path], precision: Precision, buffers: Collection[str]
) -> dict[str, Tensor]:
    """Read the tensors of one output file, from ``files`` by name."""
    part: dict[str, Tensor] = {}
    for name, file in files.items():
        part[name] = _converted(name, reader.read(name), precision, file, name in buffers)
    return part


def _converted(name: str, tensor: Tensor, precision: Precision, file: Path, is_buffer: bool) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype_of(precision))
    if tensor.numel() == 0:  # has no minimum and maximum
        return converted
    if is_buffer and tensor.isnan().any():
        raise UsageError(
            f"{file}: the buffer {name} contains NaN, as a batch norm's does after one batch that was not finite; "
            "use an earlier checkpoint"
        )
    if not is_buffer:
        weights.refuse_nonfinite(name, tensor, file)
    # After the conversion: a finite fp32 value may overflow fp16.
    if not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise UsageError(
            f"{file}: {name} has values beyond {torch.finfo(converted.dtype).max:.6g}, the largest value of "
            f"{precision}; use another precision"
        )
    return converted
