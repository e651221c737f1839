"""Reading of a generated scene back from its pixels, to compare it with the caption."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_train.domains.images.demo.shapes import (
    CENTRES,
    COLOURS,
    COLUMNS,
    FORMS,
    NUMBERS,
    PLURALS,
    RADII,
    ROWS,
    WHITE,
    Scene,
    coverage_of,
)

COVERED = 0.5
"""A pixel covered by more than this share belongs to a shape."""
MIN_PIXELS = 4
RADIUS_STEPS = 9


def read_caption(caption: str) -> Scene:
    """Return the scene described by a caption of `shapes`. Raises ``ValueError`` for another text."""
    number, size, colour, form, *place = caption.split()
    count = NUMBERS.index(number) + 1
    if count > 1:
        singular = next(name for name, plural in PLURALS.items() if plural == form)
        return Scene(count, size, colour, singular, None)
    row, column = place
    place = 3 * ROWS.index(row) + COLUMNS.index(column)
    return Scene(1, size, colour, form, place)


def read_picture(picture: Tensor) -> Scene | None:
    """Return the scene of a picture (S, S, 3) uint8. None if it shows nothing.

    The colour is the nearest of the palette to the mean of the pixels furthest from white. Shapes are the connected
    regions covered by it. Form and size come from the drawn shape with the best fit to the first region.
    """
    from scipy import ndimage

    size = picture.shape[0]
    ink = WHITE - picture.float()  # (S, S, 3)
    strength = ink.norm(dim=-1)  # (S, S)
    strongest = float(strength.max())
    # Fainter than the palest colour of the palette by far: a white picture with noise.
    if strongest < 40:
        return None
    strong_ink = ink[strength > 0.7 * strongest]  # (n, 3)
    colour = _colour(strong_ink.mean(0))
    own = WHITE - torch.tensor(COLOURS[colour], dtype=torch.float32)
    # The projection on the colour: a pixel half covered has half the ink.
    projected = (ink @ own) / own.square().sum()
    coverage = projected.clamp(0, 1)
    covered = (coverage > COVERED).numpy()
    # Pixels that touch at a corner belong together, or the arms of a thin cross would be shapes of their own.
    labels: Any = ndimage.label(covered, structure=np.ones((3, 3)))
    regions = torch.from_numpy(labels[0])
    areas = torch.bincount(regions.flatten())[1:]  # without the background, number 0
    large = [number + 1 for number, area in enumerate(areas.tolist()) if area >= MIN_PIXELS]
    if not large:
        return None
    first = coverage
    # Half covered pixels at the edge belong to the nearest region; a single shape has them all.
    if len(large) > 1:
        first = coverage * _around(regions == large[0])
    centre = _centre(first)
    form, radius = _best_fit(first, centre)
    small_or_large = min(RADII, key=lambda name: abs(RADII[name] * size - radius))
    if len(large) > 1:
        return Scene(min(len(large), 3), small_or_large, colour, form, None)
    return Scene(1, small_or_large, colour, form, _place(centre / size))


def _colour(ink: Tensor) -> str:
    def distance(name: str) -> float:
        own = WHITE - torch.tensor(COLOURS[name], dtype=torch.float32)
        return float((own - ink).norm())

    return min(COLOURS, key=distance)


def _around(region: Tensor) -> Tensor:
    """Return the region (S, S) grown by its neighbouring pixels."""
    picture = region.float()[None, None]  # (1, 1, S, S)
    grown = torch.nn.functional.max_pool2d(picture, 3, stride=1, padding=1)
    return grown[0, 0]


def _centre(coverage: Tensor) -> Tensor:
    """Return the centre of mass (x, y) in pixels."""
    pixels = torch.arange(len(coverage)) + 0.5
    total = coverage.sum()
    x = (coverage.sum(0) * pixels).sum() / total
    y = (coverage.sum(1) * pixels).sum() / total
    return torch.stack((x, y))


def _best_fit(coverage: Tensor, centre: Tensor) -> tuple[str, float]:
    """Return form and radius, in pixels, of the drawn shape with the smallest difference."""
    size = len(coverage)
    ends = 0.8 * RADII["small"] * size, 1.2 * RADII["large"] * size
    # A little beyond both sizes, so that a shape between them is read as the nearer one.
    radii = torch.linspace(*ends, 2 * RADIUS_STEPS + 1)
    best = ("", 0.0)
    smallest = float("inf")
    for form in FORMS:
        centres = centre.expand(len(radii), 2)
        drawn = coverage_of(form, centres, radii, size)
        difference = drawn - coverage  # (radii, S, S)
        errors = difference.square().sum((1, 2))
        error = float(errors.min())
        if error < smallest:
            smallest = error
            radius = float(radii[errors.argmin()])
            best = (form, radius)
    return best


def _place(centre: Tensor) -> int:
    """Return row times 3 plus column of a centre (x, y) in shares of the side."""
    distances = (centre[:, None] - torch.tensor(CENTRES)).abs()  # (2, 3)
    column, row = distances.argmin(1).tolist()
    return 3 * row + column
