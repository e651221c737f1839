"""Pictures of the same prompts and seeds at every evaluation, and a grid of some of them over the steps."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_train import rng
from accel_train.config import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UsageError,
    refuse_without_effect,
)
from accel_train.domains.images.demo.emoji import check_groups
from accel_train.domains.images.grids import CELL, evenly, opened_picture, wrapped
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipelines.drawing import draw_picture, refuse_side
from accel_train.domains.images.pipelines.family import Family
from accel_train.domains.images.pipelines.loading import Base
from accel_train.metrics import evaluation
from accel_train.store.names import STEP, files_of_steps

logger = logging.getLogger(__name__)
FOLDER = "pictures"
GRID = "pictures.png"
ROWS = 10
"""Evaluations in the grid: the first, the newest, and some between them."""
MARGIN = 4
"""Pixels between pictures."""
PROMPTS = "prompts"
"""Text in the file of a row: its prompts, as JSON."""
HEAD_LINES = 4
"""Most lines of a prompt above its column."""
SMALLEST_LETTERS = 11
"""Smallest size of a label, in pixels. In wide columns they are larger."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out losses, and pictures of prompts that stay the same."""

    every: NonNegativeInt = 0
    """Steps between evaluations. 0: only at the end."""
    samples: PositiveInt = 64
    """Held-out pictures for the losses, at most."""
    batch_size: PositiveInt | None = None
    """Pictures per process and forward. None: those of a micro-batch, and so no more memory than training takes."""
    prompts: tuple[str, ...] = ()
    """Prompts to draw at every evaluation, with the same noise each time. None given: no pictures."""
    steps: PositiveInt = 28
    """Denoising steps of a picture."""
    guidance: NonNegativeFloat | None = None
    """Scale of guidance. None: the pipeline's default."""
    side: PositiveInt | None = None
    """Height and width of a picture in pixels. None: the first of data.resolutions."""
    heldout_prompts: NonNegativeInt = 0
    """Different captions of held-out pictures to draw without the adapter and with it, side by side in
    before_after.png. 0: none. Each costs two pictures in every evaluation."""
    judge: str | None = None
    """Group of the bundled emoji, such as flags. A small classifier, trained on them first, says how many pictures of
    heldout_prompts belong to it."""

    def __post_init__(self) -> None:
        if self.heldout_prompts == 0:
            because = "without evaluation.heldout_prompts, whose pictures are judged"
            refuse_without_effect(self, "evaluation", ["judge"], because, "give --evaluation.heldout_prompts 70")
        if self.judge is not None:
            check_groups("--evaluation.judge", (self.judge,))
        empty = [prompt for prompt in self.prompts if not prompt.strip()]
        if empty:
            raise UsageError("evaluation.prompts: one of them is empty; give words, or leave it out")

    def pixels(self, data: PictureDataConfig) -> int:
        """Return the height and width of a drawn picture."""
        return self.side or data.resolutions[0]

    def refuse_without_heldout(self, data: PictureDataConfig) -> None:
        """Raise ``UsageError`` for options that draw captions of held-out pictures, if no picture is held out."""
        if data.heldout_path is None and not data.heldout_fraction:
            because = "with data.heldout_fraction: 0 and no data.heldout_path, because no picture is held out"
            names = ("heldout_prompts", "judge")
            refuse_without_effect(self, "evaluation", names, because, "give --data.heldout_fraction 0.05")

    def refuse_side(self, data: PictureDataConfig, pipeline: Any, base: Base) -> None:
        """Raise ``UsageError`` for a side that the base cannot draw, if there is anything to draw."""
        if not (self.prompts or self.heldout_prompts):
            return
        side, given = self.side, f"evaluation.side {self.side}"
        if side is None:
            side = data.resolutions[0]
            given = f"data.resolutions {list(data.resolutions)}: the first is used because evaluation.side is not given"
        refuse_side(given, side, pipeline, base)

    def due(self, done: int, max_steps: int) -> bool:
        """Return True if an evaluation is due after ``done`` steps."""
        return done == max_steps or (self.every > 0 and done % self.every == 0)


def draw(
    pipeline: Any,
    family: Family,
    encoded: Callable[[str], Mapping[str, Tensor]],
    options: EvaluationConfig,
    side: int,
    seed: int,
) -> list[Tensor]:
    """Return a picture (3, H, W) from -1 to 1 for each prompt. Every process calls it, inside ``evaluating``.

    ``encoded`` returns the embeddings of a prompt. The noise is a function of the seed and the number of the prompt.
    """
    pictures: list[Tensor] = []
    empty = family.empty(pipeline, encoded(""))
    for number, prompt in enumerate(options.prompts):
        # A process of a sharded model that ended before the others would leave them waiting.
        evaluation.stopping_point()
        arguments = family.sample(encoded(prompt), empty)
        # Without the sign: a generator reports a negative seed as one beyond int64, where MMDiT's sampler reads it.
        picture_seed = rng.key(seed, "lora/validation", number) & (2**63 - 1)
        pictures.append(
            draw_picture(pipeline, family, arguments, picture_seed, (side, side), options.steps, options.guidance)
        )
    return pictures


def report(directory: Path, step: int, pictures: Sequence[Tensor], prompts: Sequence[str]) -> None:
    """Write the pictures of a step as one row, and ``ROWS`` of the rows so far as ``pictures.png``, with labels.

    ``pictures`` (3, S, S) are those of the ``prompts``. Call it on the main process. A write error, or an earlier row
    that cannot be read, is logged as a warning.
    """
    if not pictures:
        return
    from PIL.PngImagePlugin import PngInfo

    noted = PngInfo()
    noted.add_itxt(PROMPTS, json.dumps(prompts))
    try:
        folder = directory / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        _in_a_row(pictures).save(folder / f"{STEP}{step:08d}.png", pnginfo=noted)
        rows = [row for row in files_of_steps(folder, ".png").items() if row[0] <= step]
        _below_each_other(evenly(rows, ROWS), prompts, pictures[0].shape[-1]).save(directory / GRID)
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", directory / GRID, error)


def _below_each_other(rows: Sequence[tuple[int, Path]], prompts: Sequence[str], side: int) -> Any:
    """Stack rows of pictures of ``side`` pixels, each with its step, below their prompts.

    Only one of them is in memory at a time, beside the result. Small pictures are enlarged unsmoothed.
    """
    from PIL import Image, ImageDraw, ImageFont

    scale = max(1, round(CELL / side))
    column = (side + MARGIN) * scale
    font = ImageFont.load_default(size=max(SMALLEST_LETTERS, column // 30))
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    heads = [wrapped(prompt, int(column / font.getlength("n")), HEAD_LINES) for prompt in prompts]
    sizes: list[tuple[int, int]] = []
    names: list[str] = []
    for step, file in rows:
        with opened_picture(file) as row:
            sizes.append((row.width * scale, row.height * scale))
            # A resumed run may have other prompts than its earlier rows.
            is_same = row.info.get(PROMPTS) == json.dumps(prompts)
            names.append(f"step {step}" if is_same else f"step {step}\n(other prompts)")
    # Labels have a margin on both sides.
    left, top = (
        max(math.ceil(pen.multiline_textbbox((0, 0), text, font=font)[end]) for text in texts) + 2 * MARGIN
        for texts, end in ((names, 2), (heads, 3))
    )
    width, height = max(width for width, _ in sizes), sum(height + MARGIN for _, height in sizes) - MARGIN
    grid = Image.new("RGB", (left + width, top + height), "white")
    pen = ImageDraw.Draw(grid)
    for number, head in enumerate(heads):
        pen.multiline_text((left + number * column, MARGIN), head, fill="black", font=font)
    for (_, file), name, size in zip(rows, names, sizes, strict=True):
        pen.multiline_text((MARGIN, top), name, fill="black", font=font)
        with opened_picture(file) as row:
            grid.paste(row.convert("RGB").resize(size, Image.Resampling.NEAREST), (left, top))
        top += size[1] + MARGIN
    return grid


def _in_a_row(pictures: Sequence[Tensor]) -> Any:
    from PIL import Image

    from accel_train.domains.images.buckets import to_image

    images = [to_image(each) for each in pictures]
    width = sum(image.width + MARGIN for image in images) - MARGIN
    row = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        row.paste(image, (left, 0))
        left += image.width + MARGIN
    return row
