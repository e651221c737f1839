"""Pictures as rows of latents beside captions: files in the cache, in the layout of ready-made latents.

A row of `train.jsonl` and `heldout.jsonl` is {text, shard, idx}; shard n holds latents (rows, L, D) in fp16, which
keeps the 256 values of a pixel apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from accel_train.config import PositiveInt, UsageError
from accel_train.data.artifacts import cache_directory, cached_folder
from accel_train.domains.images.demo import emoji, shapes
from accel_train.domains.images.patches import from_patches, to_patches

FORMAT = "pictures-1"
ROWS_PER_SHARD = 2048
SHAPES_SEED = 0
HELDOUT_SHAPES = 1024
EMOJI = ("emoji", "demo")
SHAPES = "shapes"


@dataclass(frozen=True)
class PictureConfig:
    """Pictures in place of latents of text."""

    latents: Literal["none", "pixels"] = "none"
    """none: data.path holds texts. pixels: it holds captioned pictures, and their patches are the latents: 'emoji'
    (bundled), 'shapes' (generated)."""
    size: PositiveInt = 32
    """Pixels of a side, a multiple of patch. Bundled emoji have 32 or 64."""
    patch: PositiveInt = 4
    """Pixels of a patch's side. A picture has (size / patch)^2 tokens of 3 patch^2 values: half the patch is four times
    the compute."""
    samples: PositiveInt = 8192
    """data.path shapes: training pictures to draw."""
    leave_out: tuple[str, ...] = ()
    """data.path emoji: groups to leave out, such as flags."""

    def __post_init__(self) -> None:
        if self.latents == "none":
            self._refuse(("size", "patch", "samples", "leave_out"), "--pictures.latents none")
        if self.size % self.patch:
            nearest = max(1, round(self.size / self.patch)) * self.patch
            raise UsageError(
                f"--pictures.size {self.size} with --pictures.patch {self.patch}: a multiple of the patch is required. "
                f"Set size {nearest}, or another patch."
            )
        emoji.check_groups("--pictures.leave_out", self.leave_out)

    def check_path(self, path: str) -> None:
        """Refuse options that this source of pictures does not read. Raises ``UsageError``."""
        if path not in EMOJI:
            self._refuse(("leave_out",), f"--data.path {path}")
        if path != SHAPES:
            self._refuse(("samples",), f"--data.path {path}")

    def _refuse(self, names: Sequence[str], because: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise UsageError(
                    f"--pictures.{name} {getattr(self, name)!r} has no effect with {because}. Leave it at its default "
                    f"{defaults[name]!r}, or change the other option."
                )


D = TypeVar("D", bound="DataOptions")


class DataOptions(Protocol):
    """The options of the `data` group that are read for pictures."""

    @property
    def path(self) -> str: ...
    @property
    def heldout_path(self) -> str | None: ...
    @property
    def heldout_fraction(self) -> float: ...
    @property
    def cache_dir(self) -> str | None: ...


class Captioned(NamedTuple):
    """Captions and pictures of one part of the data."""

    captions: Sequence[str]
    pictures: Tensor
    """(N, size, size, 3) uint8"""


@dataclass(frozen=True)
class CaptionedPictures:
    """Where the rows lie, and how their latents become pictures again."""

    folder: Path
    grid: tuple[int, int]
    """Rows and columns of patches."""
    patch: int
    exact: bool
    """The captions can be read back from the pixels (generated shapes)."""
    notices: tuple[str, ...]

    def rows(self, data: D) -> D:
        """Return the options of a `data` group that read these rows as ready-made latents."""
        return replace(
            cast(Any, data),
            path=str(self.folder / "train.jsonl"),
            heldout_path=str(self.folder / "heldout.jsonl"),
            heldout_fraction=0.0,
            latents=str(self.folder),
        )

    def pixels(self, latents: Tensor) -> Tensor:
        """Return pictures (B, H, W, 3) uint8 on the CPU, from latents (B, L, D) in [-1, 1]."""
        return from_patches(latents.cpu(), self.grid, self.patch)


def prepare_pictures(
    config: PictureConfig,
    data: DataOptions,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> CaptionedPictures | None:
    """Write the rows of `data.path` into the cache unless they are there. Every rank calls it (two barriers).

    About `heldout_fraction` of the emoji's names are held out; of shapes it is the pairs of colour and form that no
    training picture shows. Returns None where the data are texts. Raises ``UsageError``.
    """
    if config.latents == "none":
        return None
    path = data.path
    config.check_path(path)
    if data.heldout_path is not None:
        raise UsageError(
            f"--data.heldout_path {data.heldout_path!r} has no effect with --data.path {path}, whose pictures have a "
            "held-out part of their own. Leave it out."
        )
    key = _key(config, path, data.heldout_fraction)

    def write(directory: Path) -> None:
        parts = _shapes(config) if path == SHAPES else _emoji(config, data.heldout_fraction)
        write_rows(directory, parts, config.patch)

    cache = cache_directory(data.cache_dir)
    folder = cached_folder(cache / "pictures" / key, write, rank=rank, barrier=barrier)
    side = config.size // config.patch
    notices = (f"pictures of {config.size} x {config.size} pixels in {side} x {side} patches ({path})",)
    return CaptionedPictures(folder, (side, side), config.patch, path == SHAPES, notices)


def _key(config: PictureConfig, path: str, heldout_fraction: float) -> str:
    if path == SHAPES:
        facts: tuple[Any, ...] = (SHAPES, SHAPES_SEED, config.samples, HELDOUT_SHAPES)
    elif path in EMOJI:
        facts = ("emoji", emoji.file_hash(), heldout_fraction, *config.leave_out)
    else:
        raise UsageError(
            f"--data.path {path!r} with --pictures.latents pixels: 'emoji' or 'shapes' is required. For texts, set "
            "--pictures.latents none."
        )
    described = f"{FORMAT} {config.size} {config.patch} {facts}"
    return hashlib.sha256(described.encode()).hexdigest()


def _shapes(config: PictureConfig) -> dict[str, Captioned]:
    train = shapes.pictures(SHAPES_SEED, config.samples, config.size)
    heldout = shapes.pictures(SHAPES_SEED, HELDOUT_SHAPES, config.size, heldout=True)
    return {"train": Captioned(*train), "heldout": Captioned(*heldout)}


def _emoji(config: PictureConfig, heldout_fraction: float) -> dict[str, Captioned]:
    listed = emoji.list_emoji()
    pictures = emoji.load_pictures(config.size)
    used = [index for index, one in enumerate(listed) if one.group not in config.leave_out]
    parts: dict[str, Captioned] = {}
    for part in ("train", "heldout"):
        rows = [index for index in used if listed[index].heldout(heldout_fraction) == (part == "heldout")]
        parts[part] = Captioned([listed[index].caption for index in rows], pictures[rows])
    return parts


def write_rows(directory: Path, parts: dict[str, Captioned], patch: int) -> None:
    """Write each part's rows, and the latents of all into numbered shards."""
    shard = 0
    for part, captioned in parts.items():
        lines: list[str] = []
        for start in range(0, len(captioned.captions), ROWS_PER_SHARD):
            rows = slice(start, start + ROWS_PER_SHARD)
            latents = to_patches(captioned.pictures[rows], patch)
            np.save(directory / f"shard_{shard:04d}.npy", latents.to(torch.float16).numpy())
            lines += _lines(captioned.captions[rows], shard)
            shard += 1
        (directory / f"{part}.jsonl").write_text("".join(lines), "utf-8")


def _lines(captions: Sequence[str], shard: int) -> Iterator[str]:
    for index, caption in enumerate(captions):
        row = {"text": caption, "shard": shard, "idx": index}
        yield json.dumps(row, ensure_ascii=False) + "\n"
