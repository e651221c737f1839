"""The bundled emoji: pictures of 32 or 64 pixels with captions from their Unicode names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.sources import Entry, Listing, Source
from accel_train.wording import did_you_mean, nearest

FOLDER = Path(__file__).parent
SIDE = 64
"""Pixels of a picture in the file."""
SIZES = (32, 64)
SKIN_TONES = "skin tones"
"""Stands for all emoji with a skin tone in a list of groups to leave out."""
PATH = "emoji"
"""Path that stands for the bundled emoji in place of a folder of pictures."""


class Emoji(NamedTuple):
    """One bundled emoji."""

    name: str
    """Unicode's name, in lower case. Emoji that differ only in skin tone share it."""
    tone: str
    """Skin tone, or empty."""
    group: str
    kind: str
    """Unicode's subgroup."""

    @property
    def caption(self) -> str:
        """Name, skin tone if there is one, and kind: ``waving hand sign, dark skin tone, hand fingers open``."""
        return ", ".join(part for part in (self.name, self.tone, self.kind) if part)

    def is_in(self, names: Sequence[str]) -> bool:
        """Return True if its group is among these names, or it has a skin tone and `SKIN_TONES` is."""
        return self.group in names or (bool(self.tone) and SKIN_TONES in names)

    def heldout(self, fraction: float) -> bool:
        """Return True for about this share of the names, by their hash. All skin tones of a name go together."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") < fraction * 2**64


def list_emoji() -> list[Emoji]:
    """List all bundled emoji in the order of their pictures."""
    lines = (FOLDER / "emoji.tsv").read_text("utf-8").splitlines()
    return [Emoji(*line.split("\t")) for line in lines]


@cache
def groups() -> tuple[str, ...]:
    """List the groups, such as ``flags``."""
    return tuple(dict.fromkeys(emoji.group for emoji in list_emoji()))


def check_groups(option: str, names: tuple[str, ...]) -> None:
    """Refuse names other than groups and `SKIN_TONES`. Raises ``UsageError``."""
    known = [*groups(), SKIN_TONES]
    for name in names:
        if name not in known:
            hint = did_you_mean(nearest(name, known))
            raise UsageError(f"{option} {name!r} is not a group of bundled emoji{hint}; there are {', '.join(known)}")


def load_pictures(size: int) -> Tensor:
    """Decode the pictures of all emoji: (N, size, size, 3) uint8, in the order of `list_emoji`.

    For size 32, each pixel is the mean of four pixels of size 64. Raises ``UsageError`` for any other size.
    """
    from PIL import Image

    if size not in SIZES:
        raise UsageError(f"size {size}: the bundled emoji have 32 or 64 pixels a side; choose one of them")
    with Image.open(FOLDER / "emoji.webp") as sheet:
        scaled = sheet.convert("RGB").reduce(SIDE // size)
    pixels = torch.from_numpy(np.array(scaled))
    cells = pixels.unflatten(0, (-1, size)).unflatten(2, (-1, size))  # (rows, size, columns, size, 3)
    return cells.transpose(1, 2).flatten(0, 1)[: len(list_emoji())].contiguous()


@dataclass(frozen=True)
class EmojiBytes:
    """The picture of one emoji as an uncompressed file."""

    row: int

    def read(self) -> bytes:
        """Return a PPM file of 64 x 64 pixels."""
        return f"P6 {SIDE} {SIDE} 255\n".encode() + _all_pictures()[self.row].numpy().tobytes()


@lru_cache(maxsize=1)
def _all_pictures() -> Tensor:
    return load_pictures(SIDE)


def is_meant(path: str) -> bool:
    """Return True for ``emoji`` and ``emoji:GROUP`` as the path of pictures."""
    return path == PATH or path.startswith(f"{PATH}:")


def list_source(source: Source) -> Listing:
    """List the bundled emoji, or those of one group, as a source of captioned pictures. Raises ``UsageError``."""
    group = source.path.removeprefix(PATH).removeprefix(":")
    if group:
        check_groups(f"{source.option} {PATH}:", (group,))
    chosen = [(row, one) for row, one in enumerate(list_emoji()) if not group or one.is_in((group,))]
    return Listing([Entry(f"{PATH} {row}", one.caption, EmojiBytes(row)) for row, one in chosen])


def file_hash() -> str:
    """Hash the bundled files with sha256."""
    content = (FOLDER / "emoji.webp").read_bytes() + (FOLDER / "emoji.tsv").read_bytes()
    return hashlib.sha256(content).hexdigest()
