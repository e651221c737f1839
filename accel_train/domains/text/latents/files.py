"""Ready-made latents: JSONL rows {text, shard, idx} beside `.npy` or safetensors shards."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.domains.models.vae import IDENTITY_FILE
from accel_train.domains.text.latents.cache import LatentTable
from accel_train.pipeline import numbers

SUFFIXES = (".npy", ".safetensors")


def read_latents(folder: Path, references: Sequence[tuple[str | int, int]]) -> LatentTable:
    """Memory-map the shards with the rows that `references`, a (shard, row) of each text, point to.

    A shard is a file name in `folder`, or a number n for shard_n with n padded to 1, 4, 5 or 6 digits. Shards hold
    floats (rows, Dz) or (rows, L, Dz), all with the same Dz and L.
    """
    names = list(dict.fromkeys(shard for shard, _ in references))
    files = tuple(_shard_file(folder, name) for name in names)
    position = {name: index for index, name in enumerate(names)}
    shards = [_open_checked(file) for file in files]
    _check_shapes(files, shards)
    shard_of: list[int] = []
    row_of: list[int] = []
    for sample, (name, row) in enumerate(references):
        shard = position[name]
        rows = len(shards[shard])
        if row >= rows:
            raise UsageError(
                f"--data.latents: sample {sample} asks for row {row} of {files[shard]}, which has {rows}. The JSONL "
                "and the shards must come from the same export."
            )
        shard_of.append(shard)
        row_of.append(row)
    known_by = folder / IDENTITY_FILE
    identity = known_by.read_text() if known_by.is_file() else ""
    return LatentTable(files, torch.tensor(shard_of), torch.tensor(row_of), open_latents, identity)


def _shard_file(folder: Path, shard: str | int) -> Path:
    if isinstance(shard, str):
        if Path(shard).name != shard or Path(shard).suffix not in SUFFIXES:
            raise UsageError(
                f"--data.latents: shard {shard!r}; a number, or the bare name of a {' or '.join(SUFFIXES)} file "
                f"in {folder}, is required. Correct the JSONL."
            )
        found = [folder / shard]
    else:
        widths = (4, 5, 6, 1)
        names = [f"shard_{shard:0{width}d}{suffix}" for suffix in SUFFIXES for width in widths]
        # Several widths give the same name for a large number.
        candidates = [folder / name for name in dict.fromkeys(names)]
        found = [file for file in candidates if file.is_file()]
    if len(found) != 1 or not found[0].is_file():
        count = sum(file.is_file() for file in found)
        raise UsageError(
            f"--data.latents: {count or 'no'} files for shard {shard!r} in {folder}; one is required, such as "
            "shard_0000.npy. Check the folder against the JSONL."
        )
    return found[0]


def open_latents(file: Path) -> Tensor:
    """Memory-map a file as (rows, L, Dz), with L = 1 for a file of (rows, Dz). Raises `ValueError` for other shapes."""
    if file.suffix == ".npy":
        # Copy-on-write: nothing reaches the file, and torch does not warn, as it does about read-only arrays.
        array: NDArray[np.floating] = np.load(file, mmap_mode="c", allow_pickle=False)
        latents = torch.from_numpy(array)
    else:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as shard:
            names = list(shard.keys())
            if len(names) != 1 and "latents" not in names:
                raise ValueError(f"tensors {names}; one tensor, or one named 'latents', is required")
            name = "latents" if "latents" in names else names[0]
            latents = shard.get_tensor(name)
    if not latents.is_floating_point() or latents.ndim not in (2, 3):
        raise ValueError(f"{latents.dtype} of shape {tuple(latents.shape)}; floats (rows[, L], Dz) are required")
    if 0 in latents.shape[1:]:
        raise ValueError(f"shape {tuple(latents.shape)}; at least one value in each row is required")
    if latents.ndim == 2:
        latents = latents.unsqueeze(1)
    return latents


def _open_checked(file: Path) -> Tensor:
    from safetensors import SafetensorError

    try:
        return open_latents(file)
    # EOFError: an empty file.
    except (OSError, EOFError, ValueError, TypeError, SafetensorError) as error:
        raise UsageError(
            f"--data.latents: {file} cannot be read ({error}). A plain {' or '.join(SUFFIXES)} array is required "
            "(pickled objects are refused); write it again."
        ) from None


def _check_shapes(files: Sequence[Path], shards: Sequence[Tensor]) -> None:
    for file, shard in zip(files, shards, strict=True):
        if shard.shape[1:] != shards[0].shape[1:]:
            raise UsageError(
                f"--data.latents: {file} contains latents of shape {tuple(shard.shape[1:])}, {files[0]} of "
                f"{tuple(shards[0].shape[1:])}. All shards must have the same shape (L, Dz): write them again."
            )


def write_latents(
    folder: Path, texts: Sequence[str], latents: NDArray[np.float32], rows_per_shard: int = 100_000
) -> Path:
    """Write data.jsonl and shard_0000.npy, ... for `read_latents` into `folder`. Returns the path of the JSONL.

    `latents` are (N, Dz) or (N, L, Dz). Raises `UsageError` unless there is one latent per text.
    """
    if len(latents) != len(texts):
        raise UsageError(
            f"write_latents: {len(texts)} texts and {len(latents)} latents; one latent for each text is required, in "
            "the same order."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(texts), rows_per_shard)):
        np.save(folder / f"shard_{number:04d}.npy", latents[start : start + rows_per_shard])
    lines: list[str] = []
    for index, text in enumerate(texts):
        row = {"text": text, "shard": index // rows_per_shard, "idx": index % rows_per_shard}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    path = folder / "data.jsonl"
    path.write_text("".join(lines), "utf-8")
    return path


def read_given(file: str) -> Tensor:
    """Read the tensor ``latents`` of a safetensors file, or its only tensor. Raises ``UsageError`` for other files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = expand_path(file)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"latents {file}: cannot be read ({error}); a .safetensors file is required") from None
    if len(tensors) != 1 and "latents" not in tensors:
        raise UsageError(
            f"latents {file}: contains {', '.join(sorted(tensors)[:6]) or 'nothing'}; one tensor, or one named "
            "latents, is required"
        )
    return tensors.get("latents", next(iter(tensors.values())))


def checked(latents: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return latents of ``shape`` (L, Dz) as (B, L, Dz) fp32 on the CPU. (B, Dz) is accepted if L is 1.

    Raises ``UsageError`` for other shapes, and for NaN or infinity.
    """
    length, width = shape
    found = numbers("latents", latents).detach().float().cpu()
    given = tuple(found.shape)
    if found.dim() == 2 and length == 1:
        found = found[:, None]
    if found.dim() != 3 or found.shape[1:] != (length, width) or len(found) == 0:
        single = f", or (B, {width})" if length == 1 else ""
        raise UsageError(
            f"latents of shape {given}: this model reads (B, {length}, {width}){single}, as its encoder gives them"
        )
    if not found.isfinite().all():
        raise UsageError("latents: NaN or infinity among them; finite numbers are required")
    return found.contiguous()
