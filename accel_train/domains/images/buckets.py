"""Buckets: target sizes for scaling and cropping, and the geometry of each picture in its bucket.

A bucket of resolution r has at most r * r pixels, with sides in multiples of a step, as in NovelAI's aspect-ratio
bucketing and kohya's sd-scripts. Sizes are (height, width).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel_train.config import UsageError

if TYPE_CHECKING:
    from PIL import Image

Size = tuple[int, int]
"""(height, width) in pixels."""
CENTRE = (0.5, 0.5)
MUCH_CROPPED = 0.7
"""A sample with a smaller kept share counts as much cropped in a notice."""


class Frame(NamedTuple):
    """Scaling and crop of a picture. Three of the fields are SDXL's conditioning values."""

    original_size: Size
    """Size of the upright picture."""
    scaled_size: Size
    """Size of the whole picture after scaling. It covers the target."""
    crop_top_left: Size
    """First row and column of the target in the scaled picture, after any flip."""
    target_size: Size
    """The bucket."""
    flipped: bool = False
    """Mirrored left to right."""

    @property
    def kept(self) -> float:
        """Share of the picture's area inside the crop."""
        return math.prod(self.target_size) / math.prod(self.scaled_size)

    @property
    def enlargement(self) -> float:
        """Pixels of the target per pixel of the picture, along a side."""
        return self.scaled_size[0] / self.original_size[0]


@dataclass(frozen=True)
class Buckets:
    """Sizes for each resolution, and the choice among them."""

    resolutions: Sequence[int]
    """Square roots of the largest areas, in pixels."""
    step: int = 64
    """Sides are multiples of it: 8 for a VAE that reduces by 8, 16 with patches of 2, 64 for UNets."""
    max_aspect: float = 2.0
    """Largest ratio of the longer side to the shorter one. 1: squares alone."""

    def __post_init__(self) -> None:
        small = [resolution for resolution in self.resolutions if resolution < self.step]
        if not self.resolutions or small or self.step < 1:
            raise UsageError(
                f"resolutions {list(self.resolutions)}, bucket_step {self.step}: each resolution must be at least "
                "bucket_step, because sides are multiples of it. Raise the resolution, or lower bucket_step."
            )
        if not self.max_aspect >= 1:
            raise UsageError(f"max_aspect {self.max_aspect:g}: 1 or more is required. 1 allows squares only.")

    def sizes(self, resolution: int) -> list[Size]:
        """Return the buckets of a resolution, from the tallest to the widest.

        Each width has the largest height within the area, and vice versa.
        """
        return list(_sizes(resolution, self.step, self.max_aspect))

    def choose(self, original: Size, resolution: int) -> Size:
        """Return the bucket of `resolution` with the least cropping. The larger one wins a tie."""

        wanted_aspect = math.log(original[1] / original[0])

        def order(size: Size) -> tuple[float, int]:
            aspect = math.log(size[1] / size[0])
            # A picture scaled to cover a bucket keeps exp(-|difference|) of its area.
            loss = abs(wanted_aspect - aspect)
            # Rounded, or the last bit of a logarithm would decide between a bucket and its mirror image.
            return round(loss, 9), -math.prod(size)

        return min(self.sizes(resolution), key=order)

    def largest_filled(self, original: Size) -> int:
        """Return the highest resolution reached without enlarging the picture, else the lowest one."""
        filled: list[int] = []
        for resolution in self.resolutions:
            bucket = self.choose(original, resolution)
            if frame(original, bucket).enlargement <= 1:
                filled.append(resolution)
        return max(filled, default=min(self.resolutions))


@lru_cache(maxsize=64)
def _sizes(resolution: int, step: int, max_aspect: float) -> tuple[Size, ...]:
    area = resolution * resolution
    # At the largest ratio and the full area, the longer side is the root of both.
    longest = int(resolution * math.sqrt(max_aspect))
    candidates: set[Size] = set()
    for side in range(step, longest + 1, step):
        longest_other = int(min(area // side, side * max_aspect))
        other = longest_other // step * step
        if other and side <= max_aspect * other:
            candidates |= {(side, other), (other, side)}
    # Drops each size that is no wider than a taller one.
    largest: list[Size] = []
    for size in sorted(candidates, reverse=True):
        if not largest or size[1] > largest[-1][1]:
            largest.append(size)
    return tuple(largest)


def frame(original: Size, target: Size, *, place: tuple[float, float] = CENTRE, flipped: bool = False) -> Frame:
    """Scale a picture to cover the target, and crop the rest.

    `place` in [0, 1] tells where the target lies in the scaled picture, from top to bottom and from left to right.
    """
    # The larger of the two, because the picture has to cover the target.
    scale = max(target[0] / original[0], target[1] / original[1])
    # Rounding may fall a pixel short of the target.
    height = max(target[0], round(original[0] * scale))
    width = max(target[1], round(original[1] * scale))
    top = round(place[0] * (height - target[0]))
    left = round(place[1] * (width - target[1]))
    return Frame(original, (height, width), (top, left), target, flipped)


def frame_notices(frames: Iterable[Frame], *, enlarged_to: str, cropped_by: str) -> list[str]:
    """Return lines on how many samples are enlarged or much cropped, and by which options."""
    frames = list(frames)
    enlarged = sum(seen.enlargement > 1 for seen in frames)
    cropped = sum(seen.kept < MUCH_CROPPED for seen in frames)
    notices: list[str] = []
    if enlarged:
        notices.append(f"{enlarged:,} samples are enlarged to {enlarged_to}")
    if cropped:
        notices.append(f"{cropped:,} samples lose more than {1 - MUCH_CROPPED:.0%} of their picture ({cropped_by})")
    return notices


def render(image: Image.Image, seen: Frame) -> Tensor:
    """Return the pixels of a frame, (3, H, W) float32 from -1 to 1. `image` is upright, RGB, of the original size.

    Scaled with a Lanczos filter. Only the visible part is computed.
    """
    from PIL.Image import Resampling, Transpose

    if image.size != seen.original_size[::-1]:
        raise ValueError(f"a picture of {image.size[::-1]} with a frame for {seen.original_size}")
    if seen.flipped:
        image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
    height, width = seen.target_size
    top, left = seen.crop_top_left
    down = seen.original_size[0] / seen.scaled_size[0]
    across = seen.original_size[1] / seen.scaled_size[1]
    # The corners in pixels of the picture. Rounding must not lead beyond its edges.
    right = min((left + width) * across, float(image.size[0]))
    bottom = min((top + height) * down, float(image.size[1]))
    corners = (left * across, top * down, right, bottom)
    part = image.resize((width, height), Resampling.LANCZOS, box=corners)
    return to_tensor(part)


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image as (3, H, W) float32 from -1 to 1."""
    pixels = torch.from_numpy(np.array(image, np.uint8))  # (H, W, 3)
    # 0 and 255 are -1 and 1 exactly, as VAEs are trained.
    return pixels.permute(2, 0, 1).float().div_(127.5).sub_(1.0).contiguous()


def to_image(pixels: Tensor) -> Image.Image:
    """Return (3, H, W) from -1 to 1 as an RGB image. Values beyond are clamped."""
    from PIL import Image

    scaled = pixels.detach().float().add(1.0).mul(127.5)
    levels = scaled.round().clamp(0, 255).byte()
    return Image.fromarray(levels.permute(1, 2, 0).cpu().numpy())


def conditioning(seen: Frame) -> dict[str, Tensor]:
    """Return SDXL's size and crop values, each (2,) int64, rows before columns."""
    return {
        "original_size": torch.tensor(seen.original_size),
        "crop_top_left": torch.tensor(seen.crop_top_left),
        "target_size": torch.tensor(seen.target_size),
    }
