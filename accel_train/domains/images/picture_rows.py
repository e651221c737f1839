"""Pictures as rows of latents beside captions: files in the cache, in the layout of ready-made latents.

A row of `train.jsonl` and `heldout.jsonl` is {text, shard, idx}; shard n holds latents (rows, L, D) in fp16, which
keeps the 256 values of a pixel apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from accel_train.domains.models.patches import from_patches, to_patches

ROWS_PER_SHARD = 2048
D = TypeVar("D")


class Captioned(NamedTuple):
    """Captions and pictures of one part of the data."""

    captions: Sequence[str]
    pictures: Tensor
    """(N, size, size, 3) uint8"""


Parts = Iterable[tuple[str, Captioned]]
"""Pieces of train and heldout, in order."""


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
        options: dict[str, Any] = {"path": str(self.folder / "train.jsonl"), "latents": str(self.folder)}
        heldout = self.folder / "heldout.jsonl"
        if heldout.exists():
            # Other pictures have no held-out part of their own: their captions are split as texts are.
            options |= {"heldout_path": str(heldout), "heldout_fraction": 0.0}
        return replace(cast(Any, data), **options)

    def pixels(self, latents: Tensor) -> Tensor:
        """Return pictures (B, H, W, 3) uint8 on the CPU, from latents (B, L, D) in [-1, 1]."""
        return from_patches(latents.cpu(), self.grid, self.patch)


def write_rows(directory: Path, parts: Parts, patch: int) -> None:
    """Write the rows of each part, and the latents of every ROWS_PER_SHARD pictures into a shard."""
    shard = 0
    for part, piece in parts:
        with (directory / f"{part}.jsonl").open("a", encoding="utf-8") as rows:
            for start in range(0, len(piece.captions), ROWS_PER_SHARD):
                stop = start + ROWS_PER_SHARD
                latents = to_patches(piece.pictures[start:stop], patch)
                np.save(directory / f"shard_{shard:04d}.npy", latents.to(torch.float16).numpy())
                rows.writelines(_lines(piece.captions[start:stop], shard))
                shard += 1


def _lines(captions: Sequence[str], shard: int) -> Iterator[str]:
    for index, caption in enumerate(captions):
        row = {"text": caption, "shard": shard, "idx": index}
        yield json.dumps(row, ensure_ascii=False) + "\n"
