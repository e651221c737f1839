"""Grids of sampled pictures: a row for each prompt, a column for each evaluation."""

from __future__ import annotations

import io
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from accel_train.store.atomic_files import replace_file

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_EVALUATIONS = 6
"""Columns of earlier evaluations: the first, the last, and some between them."""
CELL = 96
"""Smallest width of a picture in the grid, in pixels."""
LABEL = 190
"""Width of the prompts' column."""
HEADER = 18
GAP = 4


class Column(NamedTuple):
    """Pictures of all prompts under one heading."""

    title: str
    pictures: Tensor
    """(N, H, W, 3) uint8"""


def report_pictures(
    directory: Path, step: int, prompts: Sequence[str], true: Tensor, sampled: Tensor, more: Sequence[Column]
) -> None:
    """Write ``pictures.png``: the held-out picture of each prompt, those sampled for it over time, and `more`.

    The pictures of each evaluation are stacked in ``pictures/STEP.png``. Call it only on the main process. A write
    error is logged as a warning.
    """
    folder = directory / "pictures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{step:08d}.png", _png(_stacked(sampled)))
        columns = [Column("held out", true), *_over_time(folder, step, sampled), *more]
        replace_file(directory / "pictures.png", _png(draw_grid(prompts, columns)))
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", directory / "pictures.png", error)


def _over_time(folder: Path, step: int, sampled: Tensor) -> list[Column]:
    """Return the evaluations up to `step`, of the same prompts and size."""
    steps = sorted(int(file.stem) for file in folder.glob("[0-9]*.png"))
    past = [number for number in steps if number <= step]
    columns: list[Column] = []
    for number in evenly(past, MOST_EVALUATIONS):
        with opened_picture(folder / f"{number:08d}.png") as strip:
            pixels = torch.from_numpy(np.array(strip.convert("RGB")))
        # A run that was resumed with other options may have left pictures of another size.
        if pixels.numel() == sampled.numel():
            columns.append(Column(f"step {number}", pixels.view_as(sampled)))
    return columns


@contextmanager
def opened_picture(file: Path) -> Generator[Image.Image]:
    """Open a picture that an earlier evaluation has written. Pixels are read at the first use.

    Raises ``OSError`` for a damaged one, and for one of more pixels than Pillow reads.
    """
    from PIL import Image

    try:
        with Image.open(file) as picture:
            yield picture
    except (SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise OSError(f"{file}: {error}") from None


def evenly(values: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return values
    places = torch.linspace(0, len(values) - 1, most).round().int().tolist()
    return [values[place] for place in places]


def draw_grid(prompts: Sequence[str], columns: Sequence[Column]) -> Image.Image:
    """Draw a grid with prompts on the left and the columns' titles above. Small pictures are enlarged unsmoothed."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = columns[0].pictures.shape[1:3]
    # Whole multiples, so that every pixel has the same size.
    scale = max(1, round(CELL / width))
    cell = (width * scale, height * scale)
    grid_width = LABEL + len(columns) * (cell[0] + GAP)
    grid_height = HEADER + len(prompts) * (cell[1] + GAP)
    grid = Image.new("RGB", (grid_width, grid_height), (235, 235, 235))
    pen = ImageDraw.Draw(grid)
    font = ImageFont.load_default(size=11)
    for row, prompt in enumerate(prompts):
        top = HEADER + row * (cell[1] + GAP)
        pen.multiline_text((GAP, top + GAP), wrapped(prompt), fill="black", font=font)
    for number, column in enumerate(columns):
        left = LABEL + number * (cell[0] + GAP)
        pen.text((left, 2), column.title, fill="black", font=font)
        for row, picture in enumerate(column.pictures):
            # Pixels of a small picture are what the model drew. Smoothing would invent detail.
            enlarged = Image.fromarray(picture.numpy()).resize(cell, Image.Resampling.NEAREST)
            grid.paste(enlarged, (left, HEADER + row * (cell[1] + GAP)))
    return grid


def wrapped(text: str, width: int = 30, lines: int = 5) -> str:
    """Return the text in at most ``lines`` lines of ``width`` letters. Dots stand for what is cut off."""
    import textwrap

    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder="..."))


def _stacked(pictures: Tensor) -> Image.Image:
    from PIL import Image

    return Image.fromarray(pictures.flatten(0, 1).numpy())


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="PNG")
    return content.getvalue()
