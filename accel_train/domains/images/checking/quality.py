"""Measures of one picture and its caption: sharpness, exposure, contrast, size, and a hash of how it looks.

Formulas and their scales: docs/images.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

MEASURED_SIDE = 256
"""Larger pictures are reduced to this shorter side: sharpness depends on the scale."""
USUAL_SHARPNESS = 100.0
"""A picture with a lower variance of the Laplacian is commonly called blurred."""
USUAL_CONTRAST = 32.0
"""Standard deviation of grey levels for the full score: more is not better."""
HASH_SIDE = 32
HASH_BITS = 8
Grey = NDArray[np.float64]


class Measures(NamedTuple):
    """Measurements of a picture's pixels."""

    sharpness: float
    """Variance of the Laplacian of the grey levels 0 to 255."""
    brightness: float
    """Mean grey level, 0 to 1."""
    contrast: float
    """Standard deviation of the grey levels 0 to 255."""
    looks: int
    """`perceptual_hash`."""


def measure(image: Image.Image) -> Measures:
    """Measure an upright RGB picture."""
    from PIL.Image import Resampling

    # Of the whole picture, before it is reduced: the hash has a scale of its own.
    looks = perceptual_hash(image)
    shorter = min(image.size)
    if shorter > MEASURED_SIDE:
        scale = MEASURED_SIDE / shorter
        width, height = image.size
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        image = image.resize(size, Resampling.LANCZOS)
    grey: Grey = np.asarray(image.convert("L"), np.float64)
    sharpness = laplacian_variance(grey)
    brightness = float(grey.mean()) / 255
    contrast = float(grey.std())
    return Measures(sharpness, brightness, contrast, looks)


def laplacian_variance(grey: Grey) -> float:
    """Return the variance of 4 neighbours less 4 times the middle, over the inner pixels of (H, W)."""
    # Such a picture has no inner pixel.
    if min(grey.shape) < 3:
        return 0.0
    middle = grey[1:-1, 1:-1]  # (H - 2, W - 2)
    above = grey[:-2, 1:-1]
    below = grey[2:, 1:-1]
    left = grey[1:-1, :-2]
    right = grey[1:-1, 2:]
    laplacian = above + below + left + right - 4 * middle
    return float(laplacian.var())


def perceptual_hash(image: Image.Image) -> int:
    """Return a 64-bit hash with few differing bits between similar pictures.

    The 8 x 8 lowest frequencies of the cosine transform of a grey picture of 32 x 32; a bit tells if a coefficient is
    above their median. Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions (2010).
    """
    from PIL.Image import Resampling
    from scipy.fft import dctn

    small = image.convert("L").resize((HASH_SIDE, HASH_SIDE), Resampling.LANCZOS)
    transformed: Any = dctn(np.asarray(small, np.float64), type=2)
    lowest: Grey = transformed[:HASH_BITS, :HASH_BITS].reshape(-1)
    bits = lowest > np.median(lowest)
    packed = np.packbits(bits)
    return int.from_bytes(packed.tobytes(), "big")


def near_duplicates(hashes: Sequence[int], distance: int) -> list[list[int]]:
    """Return groups of indices, each with a hash within `distance` bits of another one of the group.

    The 64 bits are cut into `distance` + 1 bands. Two such hashes are equal in at least one of them, so only pictures
    with an equal band are compared.
    """
    values = np.array(hashes, np.uint64)
    parent = list(range(len(values)))

    def root(index: int) -> int:
        while parent[index] != index:
            # Halves the path for the next search (union-find).
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    bounds = [64 * band // (distance + 1) for band in range(distance + 2)]
    for start, stop in itertools.pairwise(bounds):
        mask = np.uint64((1 << (stop - start)) - 1)
        bands = (values >> np.uint64(start)) & mask
        order = np.argsort(bands, kind="stable")
        changes = np.diff(bands[order])
        first_of_next = np.flatnonzero(changes) + 1
        for members in np.split(order, first_of_next):
            # All pairs of a band, but a band has few members unless many pictures are copies.
            for place, index in enumerate(members[:-1]):
                later = members[place + 1 :]
                different_bits = np.bitwise_count(values[later] ^ values[index])
                near = different_bits <= distance
                for other in later[near].tolist():
                    parent[root(other)] = root(int(index))
    groups: dict[int, list[int]] = {}
    for index in range(len(values)):
        groups.setdefault(root(index), []).append(index)
    return [group for group in groups.values() if len(group) > 1]


# -------------------------------------------------------------------------------------------------------------- scores
def scores(measures: Measures, pixels: int, wanted_pixels: int, words: int, max_words: int) -> dict[str, float]:
    """Return the five scores of a picture, each from 0 to 1. `pixels` of the picture, `wanted_pixels` of its bucket."""
    return {
        "sharpness": measures.sharpness / (measures.sharpness + USUAL_SHARPNESS),
        # Full from a quarter to three quarters, and 0 at black and at white.
        "exposure": min(1.0, 4 * min(measures.brightness, 1 - measures.brightness)),
        "contrast": min(1.0, measures.contrast / USUAL_CONTRAST),
        "size": min(1.0, pixels / wanted_pixels),
        "caption": min(1.0, words / 3, max_words / max(1, words)),
    }


def quality(found: Mapping[str, float]) -> float:
    """Return the quality of a picture: the geometric mean of its scores, 0 if one of them is 0."""
    # Geometric, so that one bad property is not made up for by good ones.
    return math.prod(found.values()) ** (1 / len(found))


def dataset_quality(qualities: Sequence[float], usable: float, duplicates: float) -> float:
    """Return the mean quality of the pictures, times the usable share, times the share of non-duplicates."""
    if not qualities:
        return 0.0
    return sum(qualities) / len(qualities) * usable * (1 - duplicates)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return minimum, median and maximum."""
    ordered = np.sort(np.asarray(values, np.float64))
    middle = float(np.median(ordered))
    return {"min": float(ordered[0]), "median": middle, "max": float(ordered[-1])}
