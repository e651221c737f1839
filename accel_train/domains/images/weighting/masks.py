"""Masks of the loss: the learned parts of a picture, from its alpha channel or from a file beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.buckets import Frame, render
from accel_train.domains.images.folders import SUFFIXES, is_mask
from accel_train.domains.images.options import MaskConfig
from accel_train.domains.images.scanning import Picture
from accel_train.domains.images.sources import FileBytes, read_regular
from accel_train.domains.models.pictures.decoding import MAX_PIXELS, PictureError, decode_alpha, decode_picture

if TYPE_CHECKING:
    from PIL import Image

BLACK = (0, 0, 0)
MASK = "mask"
"""Field of a batch: weight of each latent's error, (B, 1, h, w)."""


class Masks:
    """Weights of the error by position: 1 where a mask is white or a picture opaque, ``outside`` at the other extreme.

    Weights of fixed frames are kept once computed.
    """

    def __init__(self, files: Mapping[str, tuple[Path, str]], config: MaskConfig, reduction: int) -> None:
        self.files = files
        """Mask file and its sha256, by the content of the picture."""
        self.config = config
        self.reduction = reduction
        """Pixels along a side of a latent."""
        self._kept: dict[tuple[str, Frame], Tensor] = {}

    def read(self, picture: Picture, seen: Frame, *, keep: bool) -> Tensor:
        """Return the weights (1, h, w) fp32 of a frame. Raises ``RuntimeError`` if the mask's file has changed."""
        key = (picture.content, seen)
        if key in self._kept:
            return self._kept[key]
        mask = self._mask(picture)
        height, width = (side // self.reduction for side in seen.target_size)
        if mask is None:
            # A picture without a mask counts everywhere.
            shares = torch.ones(1, height, width)
        else:
            # Cropped and flipped as its picture is. `render` gives -1 to 1.
            pixels = render(mask.convert("RGB"), seen)[:1].add(1).div(2)
            # The share of a latent's pixels that are inside.
            shares = F.adaptive_avg_pool2d(pixels, (height, width))
        # Linear between the two, so that soft edges of a mask stay soft.
        weights = self.config.outside + (1 - self.config.outside) * shares
        if keep:
            self._kept[key] = weights
        return weights

    @property
    def fingerprint(self) -> str:
        """Hash of the masks' files."""
        rows = sorted((content, digest) for content, (_, digest) in self.files.items())
        return hashlib.sha256(str(rows).encode()).hexdigest()

    def _mask(self, picture: Picture) -> Image.Image | None:
        if self.config.source == "alpha":
            return decode_alpha(picture.bytes.read(), max_pixels=_pixels(picture))
        if picture.content not in self.files:
            return None
        path, digest = self.files[picture.content]
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise RuntimeError(f"{path} has changed since the run began. Start the run again, or put the file back")
        # White counts, and transparent parts do not.
        return decode_picture(content, background=BLACK, max_pixels=_pixels(picture))


def find_masks(config: MaskConfig, pictures: Sequence[Picture], reduction: int) -> Masks | None:
    """Find the masks of all pictures of a run. None if the run has no masks. Reads and decodes each file once.

    Raises ``UsageError`` for pictures that are no files, for a mask of another size, for copies of a picture with
    different masks, and if no picture has one.
    """
    if config.source == "none":
        return None
    files: dict[str, tuple[Path, str]] = {}
    if config.source == "files":
        # By content, as latents and the split are: copies of a picture are one picture.
        found: dict[str, tuple[Picture, tuple[Path, str] | None]] = {}
        for picture in pictures:
            path = _file_beside(picture)
            mask = None if path is None else (path, _checked(path, picture))
            first, other = found.setdefault(picture.content, (picture, mask))
            if (mask and mask[1]) != (other and other[1]):
                raise _different_masks((first, other), (picture, mask))
            if mask is not None:
                files[picture.content] = mask
        if not files:
            raise UsageError(
                "data.mask.source files: no picture has a mask; NAME.mask.png beside NAME.png is required, or leave it "
                "out"
            )
    return Masks(files, config, reduction)


def describe_masks(masks: Masks | None, pictures: Sequence[Picture]) -> list[str]:
    """Return a notice of the masks, or an empty list without masks."""
    if masks is None:
        return []
    outside = f"{masks.config.outside:g} outside"
    if masks.config.source == "alpha":
        return [f"the loss counts where a picture is opaque, {outside}"]
    contents = {picture.content for picture in pictures}
    return [f"the loss counts inside {len(masks.files):,} masks, {outside}; {len(contents):,} pictures in all"]


def _pixels(picture: Picture) -> int:
    """Return the most pixels of a mask: `data.max_pixels` may have allowed its picture more than the default."""
    return max(MAX_PIXELS, picture.width * picture.height)


def _file_beside(picture: Picture) -> Path | None:
    if not isinstance(picture.bytes, FileBytes):
        raise UsageError(
            f"data.mask.source files: {picture.name} is a row of a table, and masks are files beside pictures; use "
            "alpha, or a folder"
        )
    path = picture.bytes.path
    found = [path.with_name(f"{path.stem}.mask{suffix}") for suffix in SUFFIXES]
    # A mask may be of another format than its picture: JPEG has no sharp edges.
    return next((file for file in found if is_mask(file) and file.exists()), None)


def _different_masks(*copies: tuple[Picture, tuple[Path, str] | None]) -> UsageError:
    masks = ["none" if mask is None else mask[0].name for _, mask in copies]
    names = [picture.name for picture, _ in copies]
    return UsageError(
        f"data.mask.source files: {names[0]} and {names[1]} are the same picture, byte for byte, with different masks "
        f"({masks[0]}; {masks[1]}), but a picture has only one mask. Save one of the two again, in another format or "
        "with another compression, so that the files differ; or give both the same mask, or delete one picture."
    )


def _checked(path: Path, picture: Picture) -> str:
    """Return the sha256 of a mask. Raises ``UsageError`` if it is unreadable, or not of the size of its picture."""
    try:
        content = read_regular(path)
        width, height = decode_picture(content, max_pixels=_pixels(picture)).size
    except (OSError, PictureError) as error:
        raise UsageError(f"{path}: the mask of {picture.name} cannot be used: {error}. Write it again") from None
    if (width, height) != (picture.width, picture.height):
        raise UsageError(
            f"{path}: {width}x{height} pixels, and {picture.name} has {picture.width}x{picture.height}; a mask of the "
            "same size is required"
        )
    return hashlib.sha256(content).hexdigest()
