"""Pictures as rows of latents beside captions: files in the cache, in the layout of ready-made latents.

A row of `train.jsonl` and `heldout.jsonl` is {text, shard, idx}, with content_sha256 for pictures from files. Shard n
holds latents (rows, L, D) in fp16, fine enough to keep the 256 values of a pixel apart. A picture with several captions
has a row for each, and one latent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from torch import Tensor

from accel_train.data.progress import Progress
from accel_train.data.tables.sides import CONTENT_FIELD
from accel_train.domains.models.pictures.patching import Patching
from accel_train.domains.models.vae import VaeReference

ROWS_PER_SHARD = 2048
D = TypeVar("D")


class Captioned(NamedTuple):
    """Captions and pictures of one part of the data."""

    captions: Sequence[Sequence[str]]
    """Captions of each picture."""
    pictures: Tensor
    """(N, size, size, 3) uint8"""
    contents: Sequence[str] = ()
    """Hash of the file of each picture. Empty if the pictures are not from files."""


Parts = Iterable[tuple[str, Captioned]]
"""Pieces of train and heldout, in order."""


@dataclass(frozen=True)
class CaptionedPictures:
    """Location of the rows, and the conversion of their latents back to pictures."""

    folder: Path
    grid: tuple[int, int]
    """Rows and columns of patches."""
    patching: Patching
    exact: bool
    """True if the captions can be read back from the pixels (generated shapes)."""
    notices: tuple[str, ...]
    split_keys: Mapping[str, int] = field(default_factory=dict[str, int])
    """`split_key` of captions, as far as they are known."""

    def rows(self, data: D) -> D:
        """Return the options of a `data` group to read these rows as ready-made latents."""
        options: dict[str, Any] = {"path": str(self.folder / "train.jsonl"), "latents": str(self.folder)}
        # In place of those of the source, which has been read already.
        options |= {"split": "train", "text_column": "text"}
        heldout = self.folder / "heldout.jsonl"
        if heldout.exists():
            # Without held-out pictures of their own, their captions are split as texts are.
            options |= {"heldout_path": str(heldout), "heldout_fraction": 0.0}
        return replace(cast(Any, data), **options)

    def pixels(self, latents: Tensor) -> Tensor:
        """Return pictures (B, H, W, 3) uint8 on the CPU, from latents (B, L, D) as stored in the rows."""
        return self.patching.pictures(latents, self.grid)

    @property
    def vae(self) -> VaeReference | None:
        """Autoencoder for a checkpoint to name. None if the latents are patches of pixels."""
        vae = self.patching.vae
        return None if vae is None else vae.reference


def write_rows(directory: Path, parts: Parts, patching: Patching, total: int = 0) -> None:
    """Write the rows of each part, and the latents of every ROWS_PER_SHARD pictures into a shard.

    With a ``total`` and an autoencoder it shows the progress.
    """
    with Progress("pictures", total, enabled=total > 0 and patching.vae is not None) as progress:
        _write_shards(directory, parts, patching, progress)


def _write_shards(directory: Path, parts: Parts, patching: Patching, progress: Progress) -> None:
    shard = 0
    for part, piece in parts:
        # Appended, because a part comes in several pieces.
        with (directory / f"{part}.jsonl").open("a", encoding="utf-8") as rows:
            for start in range(0, len(piece.captions), ROWS_PER_SHARD):
                stop = start + ROWS_PER_SHARD
                latents = patching.tokens(piece.pictures[start:stop])
                np.save(directory / f"shard_{shard:04d}.npy", latents.numpy())
                rows.writelines(_row_lines(piece.captions[start:stop], piece.contents[start:stop], shard))
                shard += 1
                progress.update(len(latents))


def _row_lines(captions: Sequence[Sequence[str]], contents: Sequence[str], shard: int) -> Iterator[str]:
    for index, of_picture in enumerate(captions):
        place: dict[str, Any] = {"shard": shard, "idx": index}
        if contents:
            place[CONTENT_FIELD] = contents[index]
        for caption in of_picture:
            yield json.dumps({"text": caption, **place}, ensure_ascii=False) + "\n"
