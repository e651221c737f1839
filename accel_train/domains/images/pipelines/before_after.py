"""Pictures drawn for held-out captions without the adapter and with it, and the shares that show the subject."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from accel_train import rng
from accel_train.data.heldout import size_notices
from accel_train.domains.images.buckets import to_image
from accel_train.domains.images.demo.classifier import train_judge
from accel_train.domains.images.grids import Column, draw_grid
from accel_train.domains.images.pipelines import objective
from accel_train.domains.images.pipelines.drawing import draw_pictures
from accel_train.domains.images.pipelines.inputs import Inputs
from accel_train.domains.images.pipelines.validation import EvaluationConfig
from accel_train.domains.models.adapters import choose_adapter
from accel_train.metrics import evaluation
from accel_train.store.atomic_files import replace_file
from accel_train.store.exports.peft_layout import ADAPTER

logger = logging.getLogger(__name__)
FILE = "before_after.png"
ROWS = 10
"""Captions shown in the picture. The metrics count all."""
WITHOUT = "judged_without_adapter"
WITH = "judged_with_adapter"
JUDGE = ("judge_right_inside", "judge_right_outside")


@dataclass(frozen=True)
class BeforeAfter:
    """Pictures (N, H, W, 3) uint8 of one size, in the order of the captions."""

    captions: Sequence[str]
    true: Tensor
    without: Tensor
    adapted: Tensor


def draw(inputs: Inputs, model: nn.Module, options: EvaluationConfig, side: int, seed: int) -> BeforeAfter | None:
    """Draw the first captions of held-out pictures twice, from the same noise. Returns None if there are none to draw.

    Every process calls it, inside ``evaluating``. ``model`` is the denoiser in the pipeline of ``inputs``.
    """
    heldout = inputs.heldout.pictures
    chosen = first_of_each(heldout.captions(torch.arange(len(heldout))), options.heldout_prompts)
    if not chosen:
        return None
    captions = list(chosen)

    def pictures() -> Tensor:
        size = inputs.base.family.draws_at_once
        parts = [captions[start : start + size] for start in range(0, len(captions), size)]
        return torch.cat([_pictures(inputs, options, part, side, seed) for part in parts])

    # One model draws both in turn, so that the base is in memory once.
    choose_adapter(model, None)
    try:
        without = pictures()
    finally:
        # Also after an error, or training would continue without its adapter.
        choose_adapter(model, ADAPTER)
    true = [heldout.pixels(row, heldout.frame(row)) for row in chosen.values()]
    return BeforeAfter(captions, _as_squares(true, side), without, pictures())


def first_of_each(captions: Sequence[str], count: int) -> dict[str, int]:
    """Return the first ``count`` different captions, each with its first row.

    Equal captions, such as those of one picture in several resolutions, would be drawn as equal pictures.
    """
    rows: dict[str, int] = {}
    for row, caption in enumerate(captions):
        rows.setdefault(caption, row)
    return dict(list(rows.items())[:count])


def _pictures(inputs: Inputs, options: EvaluationConfig, captions: Sequence[str], side: int, seed: int) -> Tensor:
    """Draw captions in one call: (N, H, W, 3) uint8."""
    # A process of a sharded model that ended before the others would leave them waiting.
    evaluation.stopping_point()
    family = inputs.base.family
    prompts = [inputs.embeddings(caption) for caption in captions]
    together = {name: torch.cat([prompt[name] for prompt in prompts]) for name in prompts[0]}
    # Embeddings come from the cache, or from text encoders that are trained. Others may be gone by now.
    arguments = family.sample(together, family.empty(inputs.pipeline, inputs.embeddings("")))
    seeds = [_seed(seed, caption) for caption in captions]
    drawn = draw_pictures(inputs.pipeline, family, arguments, seeds, (side, side), options.steps, options.guidance)
    values = (drawn.permute(0, 2, 3, 1) + 1) * 127.5
    return values.round().clamp(0, 255).to(torch.uint8)


def _seed(seed: int, caption: str) -> int:
    """Return the seed of a caption's noise, independent of what else is drawn."""
    digest = hashlib.blake2b(caption.encode(), digest_size=4).digest()
    # Without the sign: a generator reports a negative seed as one beyond int64, where MMDiT's sampler reads it.
    return rng.key(seed, "lora/before_after", int.from_bytes(digest)) & (2**63 - 1)


def _as_squares(pictures: Sequence[Tensor], side: int) -> Tensor:
    """Scale pictures (3, H, W) to squares like the drawn ones: (N, H, W, 3) uint8."""
    import numpy as np

    images = [to_image(picture).resize((side, side)) for picture in pictures]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


def notices(options: EvaluationConfig, inputs: Inputs) -> list[str]:
    """Return a notice for each option that asks for more than the held-out pictures offer."""
    heldout = inputs.heldout.pictures
    if not len(heldout):
        return []
    captions = first_of_each(heldout.captions(torch.arange(len(heldout))), len(heldout))
    lines = size_notices({"evaluation.samples": options.samples}, len(heldout))
    if options.heldout_prompts > len(captions):
        lines.append(
            f"--evaluation.heldout_prompts {options.heldout_prompts:,}: held-out pictures have only {len(captions):,} "
            "different captions, and all of them are drawn"
        )
    return lines


def metric_names(options: EvaluationConfig, inputs: Inputs) -> tuple[str, ...]:
    """List the metrics of an evaluation: held-out losses, and those of the judge. Empty without held-out pictures."""
    if not len(inputs.heldout):
        return ()
    if options.judge is None:
        return objective.METRICS
    return (*objective.METRICS, WITHOUT, WITH, *JUDGE)


def judge(drawn: BeforeAfter | None, options: EvaluationConfig) -> dict[str, float]:
    """Return the shares of pictures recognised by the classifier of ``options.judge``, and its own accuracies.

    The first call trains it, in seconds. Call it on one process.
    """
    if drawn is None or options.judge is None:
        return {}
    trained = train_judge(options.judge)
    return {
        WITHOUT: float(trained.calls(drawn.without).float().mean()),
        WITH: float(trained.calls(drawn.adapted).float().mean()),
        JUDGE[0]: trained.right_inside,
        JUDGE[1]: trained.right_outside,
    }


def report(directory: Path, drawn: BeforeAfter | None) -> None:
    """Write ``before_after.png``, on the main process. A write error is logged as a warning."""
    if drawn is None:
        return
    columns = [
        Column("held out", drawn.true[:ROWS]),
        Column("without adapter", drawn.without[:ROWS]),
        Column("with adapter", drawn.adapted[:ROWS]),
    ]
    content = io.BytesIO()
    draw_grid(drawn.captions[:ROWS], columns).save(content, format="PNG")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / FILE, content.getvalue())
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", directory / FILE, error)


def summary(metrics: Mapping[str, float], options: EvaluationConfig) -> list[str]:
    """Return a log line about the classifier's shares. Empty without them."""
    if WITH not in metrics:
        return []
    inside, outside = (metrics[name] for name in JUDGE)
    return [
        f"pictures of at most {options.heldout_prompts} held-out captions that a classifier calls {options.judge}: "
        f"{metrics[WITHOUT]:.1%} without the adapter, {metrics[WITH]:.1%} with it (it is right on {inside:.1%} of "
        f"held-out {options.judge} and on {outside:.1%} of other emoji)"
    ]
