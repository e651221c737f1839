"""Pictures of the class, drawn by the base before training if the folder of the prior has too few.

As in diffusers' DreamBooth script, from one caption. The noise of a picture depends only on its number, the processes
share the numbers, and existing pictures are kept: a killed run continues with the next one, and runs of several counts
share a folder.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import UsageError, expand_path
from accel_train.data.progress import Progress
from accel_train.domains.images.buckets import to_image
from accel_train.domains.images.folders import METADATA_FILES, picture_files
from accel_train.domains.images.latent_cache import EncodeTexts, Filling
from accel_train.domains.images.options import PictureDataConfig, PriorConfig
from accel_train.domains.images.pipelines.drawing import draw_picture, refuse_side
from accel_train.domains.images.pipelines.family import text_encoders
from accel_train.domains.images.pipelines.loading import Base
from accel_train.precision import Precision
from accel_train.store import strict_json
from accel_train.store.atomic_files import replace_file, replace_json

STEM = "drawn_"
RECORD = "drawn.json"
"""File with base, caption, steps and side of the drawn pictures. Pictures with others are not added to them."""
STREAM = "lora/prior"


def draw_missing(
    config: PictureDataConfig, base: Base, pipeline: Any, encode: EncodeTexts, filling: Filling
) -> list[str]:
    """Draw pictures of ``data.prior.caption`` until there are ``data.prior.count``, and return notices. Collective.

    ``pipeline`` is the base's, without the denoiser, on the device, and ``encode`` its text encoders. The denoiser is
    loaded only for drawing, in bf16 on a GPU. Your own pictures in the folder count too. Raises ``UsageError`` for a
    folder with pictures drawn from something else, or not shared by all processes.
    """
    prior = config.prior
    if prior.path is None or prior.count == 0:
        return []
    folder = expand_path(prior.path)
    # Rounded down to a multiple of the step, like the sides of buckets.
    side = config.resolutions[0] // config.bucket_step * config.bucket_step
    given = (
        f"data.resolutions {list(config.resolutions)}, data.bucket_step {config.bucket_step}: "
        f"data.prior.count {prior.count} draws pictures of {side}x{side}"
    )
    refuse_side(given, side, pipeline, base)
    drawn_from = {"base": base.location, "caption": prior.caption, "steps": prior.steps, "side": side}
    files = _asked_for(folder, prior.count)
    missing = [number for number, file in enumerate(files) if not file.is_file()]
    _refuse_others(folder, drawn_from, is_added_to=bool(missing))
    # A process that looks after another has begun to write sees fewer missing, and would divide them otherwise.
    filling.barrier()
    if missing and filling.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(folder / RECORD, drawn_from)
    # The others write into the folder, which has to exist.
    filling.barrier()
    own = {number: files[number] for number in missing[filling.rank :: filling.world_size]}
    if own:
        texts = encode([prior.caption or "", ""])
        _draw(own, config, base, pipeline, texts, side, shown=filling.progress and filling.rank == 0)
    filling.barrier()
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UsageError(
            f"data.prior.path {prior.path!r}: {len(absent)} pictures that other processes drew are missing, such as "
            f"{absent[0]}; give a folder that all machines share, or draw them on one machine first"
        )
    if not missing:
        return []
    return [f"the base has drawn {len(missing)} pictures of {prior.caption!r} into {folder}"]


def drawn_beyond(prior: PriorConfig) -> set[str]:
    """Return the names of drawn pictures in the folder that ``data.prior.count`` does not ask for.

    They belong to other runs with a larger count. Read as well, they would change the data of this one.
    """
    if prior.path is None or prior.count == 0:
        return set()
    folder = expand_path(prior.path)
    drawn = {file for file in picture_files(folder) if _is_drawn(file, folder)}
    return {file.name for file in drawn.difference(_asked_for(folder, prior.count))}


def _asked_for(folder: Path, count: int) -> list[Path]:
    """Return the files of the drawn pictures that make up ``count``, together with the pictures of your own."""
    own = 0
    if folder.is_dir():
        own = sum(not _is_drawn(file, folder) for file in picture_files(folder))
    return [folder / f"{STEM}{number:05d}.png" for number in range(count - own)]


def _is_drawn(file: Path, folder: Path) -> bool:
    # A picture of your own may begin with the same word.
    return file.parent == folder and re.fullmatch(rf"{STEM}\d{{5,}}\.png", file.name) is not None


def _refuse_others(folder: Path, drawn_from: Mapping[str, Any], is_added_to: bool) -> None:
    """Raise ``UsageError`` for a place unfit for drawn pictures, and for pictures drawn from something else."""
    option = f"data.prior.path {str(folder)!r}"
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option}: is a file, and data.prior.count draws into a folder; give a folder")
    rows = [name for name in METADATA_FILES if (folder / name).is_file()]
    if is_added_to and rows:
        raise UsageError(
            f"{option}: its captions are in {rows[0]}, but drawn pictures have theirs in text files; give "
            "an empty folder, or leave data.prior.count out"
        )
    record = folder / RECORD
    if not record.is_file():
        return
    try:
        before = strict_json.read_object(record)
    except ValueError as error:
        raise UsageError(
            f"{option}: {record} cannot be read ({error}); it records how the {STEM}*.png beside it were drawn. "
            "Restore it, or delete it and them"
        ) from None
    if before != drawn_from:
        others = [f"{name} {before.get(name)!r}, now {value!r}" for name, value in drawn_from.items()]
        changed = [line for line, name in zip(others, drawn_from, strict=True) if before.get(name) != drawn_from[name]]
        raise UsageError(
            f"{option}: its pictures {STEM}*.png were drawn with {'; '.join(changed)}; delete them and {RECORD}, or "
            "give another folder"
        )


@torch.no_grad()
def _draw(
    files: Mapping[int, Path],
    config: PictureDataConfig,
    base: Base,
    pipeline: Any,
    texts: Mapping[str, Tensor],
    side: int,
    shown: bool,
) -> None:
    """Draw the picture of each number into its file, with its caption beside it.

    ``texts`` are the embeddings of the caption and of an empty one.
    """
    prior = config.prior
    assert prior.caption is not None, "checked with the options"
    family = base.family
    device = pipeline.vae.device
    on_device = {name: value.to(device) for name, value in texts.items()}
    prompt = {name: value[:1] for name, value in on_device.items()}
    empty = {name: value[1:2] for name, value in on_device.items()}
    # The blocks of offloaded encoders are in host memory, and must stay there.
    encoders = {} if base.config.offload_encoders else text_encoders(pipeline)
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    # A base that just fits into the memory of the device leaves no room for its text encoders.
    for encoder in encoders.values():
        encoder.to("cpu")
    setattr(pipeline, family.denoiser, base.denoiser(precision).to(device).eval())
    try:
        arguments = family.sample(prompt, family.empty(pipeline, empty))
        with Progress("pictures of the class", len(files), shown) as progress:
            for number, file in files.items():
                # Without the sign: a generator reports a negative seed as one beyond int64, and MMDiT's sampler
                # reads it back into int64.
                seed = rng.key(0, STREAM, number) & (2**63 - 1)
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                    drawn = draw_picture(pipeline, family, arguments, seed, (side, side), prior.steps, None)
                _write(drawn, file, file.with_suffix(config.caption_extension), prior.caption)
                progress.update(1)
    finally:
        setattr(pipeline, family.denoiser, None)
        for encoder in encoders.values():
            encoder.to(device)


def _write(picture: Tensor, file: Path, caption_file: Path, caption: str) -> None:
    stream = io.BytesIO()
    to_image(picture).save(stream, format="PNG")
    # The caption first, so that a picture never exists without one.
    replace_file(caption_file, f"{caption}\n".encode())
    replace_file(file, stream.getvalue())
