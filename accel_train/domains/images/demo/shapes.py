"""Generated pictures of coloured shapes with captions, such as "a small red circle top left".

A picture is a function of (seed, index, size). Some pairs of colour and form occur in held-out pictures only: a model
drawing them right has combined colours and forms it learned separately. `shape_reading` reads the caption back from the
pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_train import rng

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "orange": (250, 140, 20),
    "yellow": (245, 225, 40),
    "green": (40, 160, 60),
    "cyan": (60, 205, 225),
    "blue": (35, 70, 210),
    "purple": (130, 50, 170),
    "pink": (250, 130, 190),
    "black": (30, 30, 30),
}
FORMS = ("circle", "square", "triangle", "cross", "ring")
RADII = {"small": 0.1, "large": 0.18}
"""Half the extent of a shape, as a share of the picture's side."""
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
CENTRES = (0.2, 0.5, 0.8)
"""Centres of the rows and of the columns, as a share of the picture's side."""
NUMBERS = ("a", "two", "three")
PLURALS = {form: f"{form}es" if form.endswith("s") else f"{form}s" for form in FORMS}
WHITE = 255
JITTER = 0.04
"""Largest offset of a shape from the centre of its place, as a share of the side."""
SINGLE_SHARE = 0.75
"""Share of pictures with one shape."""


@dataclass(frozen=True)
class Scene:
    """Content of a picture, as in its caption."""

    count: int
    size: str
    colour: str
    form: str
    place: int | None
    """Row times 3 plus column. None for several shapes, placed anywhere."""

    @property
    def caption(self) -> str:
        """Caption of the scene, always six words, so that the length gives nothing away."""
        words = f"{NUMBERS[self.count - 1]} {self.size} {self.colour}"
        if self.place is None:
            return f"{words} {PLURALS[self.form]} scattered about"
        return f"{words} {self.form} {ROWS[self.place // 3]} {COLUMNS[self.place % 3]}"

    @property
    def heldout(self) -> bool:
        """True for the pairs of colour and form absent from training pictures: one in nine."""
        return held_out(self.colour, self.form)


def held_out(colour: str, form: str) -> bool:
    """Return True for one colour of each form."""
    # Every form has a colour left out and no colour has two forms left out, so each is well known by itself.
    place = list(COLOURS).index(colour)
    return place == 2 * FORMS.index(form)


def pairs(heldout: bool) -> list[tuple[str, str]]:
    """List the (colour, form) of training pictures, or those of held-out ones."""
    return [(colour, form) for colour in COLOURS for form in FORMS if held_out(colour, form) == heldout]


def scenes(seed: int, count: int, heldout: bool = False) -> list[tuple[Scene, Tensor]]:
    """Draw scenes 0 to `count` - 1 of the training or the held-out pictures, with the centres (n, 2) of their shapes.

    Centres are (x, y) as shares of the side. The first scenes of a longer list are those of a shorter one.
    """
    stream = "shapes/heldout" if heldout else "shapes"
    keys = rng.sample_keys(seed, stream, 0, torch.arange(count))
    # The same number of draws for every picture, used or not, so that no scene shifts the draws of another.
    draws = rng.uniform(keys, (19,))
    found = pairs(heldout)
    return [_scene(row, found) for row in draws]


def _scene(draws: Tensor, found: list[tuple[str, str]]) -> tuple[Scene, Tensor]:
    """Turn the 19 draws of a picture into its scene: 4 for the content, 9 for the places, 6 for the offsets."""
    many, pair, size, number = draws[:4].tolist()
    colour, form = found[int(pair * len(found))]
    order = draws[4:13].argsort()
    signed = draws[13:19].view(3, 2) * 2 - 1  # from -1 to 1
    offsets = signed * JITTER  # (3, 2)
    centres = torch.tensor(CENTRES)
    if many < SINGLE_SHARE:
        place = int(order[0])
        sizes = list(RADII)
        scene = Scene(1, sizes[int(size * 2)], colour, form, place)
    else:
        count = 2 + int(number * 2)
        # Large ones would touch each other.
        scene = Scene(count, "small", colour, form, None)
    places = order[: scene.count]  # different ones, so shapes do not overlap
    x = centres[places % 3]
    y = centres[places // 3]
    grid = torch.stack((x, y), dim=-1)
    return scene, grid + offsets[: scene.count]


def draw(scene: Scene, centres: Tensor, size: int) -> Tensor:
    """Draw a picture (size, size, 3) uint8, smooth at the edges, on white."""
    coverage = torch.zeros(size, size)
    radius = torch.tensor([RADII[scene.size] * size])  # in pixels
    for centre in centres:
        covered = coverage_of(scene.form, centre[None] * size, radius, size)
        # Not a sum: where two edges meet, a pixel is not covered twice.
        coverage = torch.maximum(coverage, covered[0])
    colour = torch.tensor(COLOURS[scene.colour], dtype=torch.float32)
    picture = WHITE + coverage[..., None] * (colour - WHITE)
    return picture.round().to(torch.uint8)


def coverage_of(form: str, centres: Tensor, radii: Tensor, size: int) -> Tensor:
    """Return the share of each pixel covered by a shape: (N, size, size), for centres (N, 2) and radii (N,) in pixels.

    From the signed distance to the outline, exact along straight edges.
    """
    pixels = torch.arange(size) + 0.5
    x = pixels - centres[:, 0, None, None]  # (N, 1, W)
    y = pixels[:, None] - centres[:, 1, None, None]  # (N, H, 1)
    r = radii[:, None, None]
    if form == "circle":
        distance = torch.hypot(x, y) - r
    elif form == "ring":
        distance = (torch.hypot(x, y) - 0.7 * r).abs() - 0.3 * r
    elif form == "square":
        distance = torch.maximum(x.abs(), y.abs()) - 0.9 * r
    elif form == "triangle":
        distance = _triangle(x, y, r)
    else:
        upright = torch.maximum(x.abs() - 0.35 * r, y.abs() - r)
        level = torch.maximum(x.abs() - r, y.abs() - 0.35 * r)
        distance = torch.minimum(upright, level)
    # A pixel whose middle lies on the outline is half covered.
    return (0.5 - distance).clamp(0, 1)


def _triangle(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """Return the distance to an equilateral triangle with its point upwards, its centre of mass at the origin."""
    side = (math.sqrt(3) / 2) * x.abs() - y / 2
    return torch.maximum(side, y.expand_as(side)) - 0.6 * r


def pictures(seed: int, count: int, size: int, heldout: bool = False) -> tuple[list[str], Tensor]:
    """Draw captioned pictures: captions, and pixels (count, size, size, 3) uint8."""
    drawn = scenes(seed, count, heldout)
    captions = [scene.caption for scene, _ in drawn]
    pixels = [draw(scene, centres, size) for scene, centres in drawn]
    return captions, torch.stack(pixels)
