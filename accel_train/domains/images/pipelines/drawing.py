"""Pictures of a diffusers pipeline or of our own, the same on any device."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.pipelines.family import Family
from accel_train.domains.images.pipelines.loading import text_encoders
from accel_train.domains.models.input_dtypes import cast_floats
from accel_train.domains.models.pictures.captions import on_one_line

if TYPE_CHECKING:
    from accel_train.domains.images.pipelines.loading import Base


def reduction(pipeline: Any) -> int:
    """Return the number of pixels along a side of one latent."""
    return int(pipeline.vae_scale_factor)


def refuse_side(given: str, side: int, pipeline: Any, base: Base) -> None:
    """Raise ``UsageError`` for a side, in pixels, that ``base`` cannot draw. ``given`` is its option with the value.

    Some pipelines end with an error of their own, and others draw a smaller picture.
    """
    family = base.family
    needed = math.lcm(reduction(pipeline) * family.patch, family.drawn_step)
    largest = base.largest
    if largest is not None and side > min(largest):
        raise UsageError(
            f"{given}: {base.source} draws at most {largest[1]}x{largest[0]}, and drawn pictures are square; give "
            f"{min(largest) // needed * needed} or less, a multiple of {needed}"
        )
    if side % needed == 0:
        return
    lower = side // needed * needed
    nearest = [str(each) for each in (lower, lower + needed) if each > 0]
    raise UsageError(
        f"{given}: {family.name} draws sides that are multiples of {needed} (its VAE reduces by "
        f"{reduction(pipeline)}); give {' or '.join(nearest)}"
    )


def prompt_arguments(
    pipeline: Any, base: Base, prompt: str, negative: str | None, guidance: float | None
) -> dict[str, Any]:
    """Return the arguments of a pipeline's call for one prompt. ``guidance`` None is the default of the family.

    Spaces and line breaks become single spaces, as in training captions. Raises ``UsageError`` for a ``negative``
    prompt that has no effect.
    """
    family = base.family
    with torch.no_grad():
        given = family.encode(pipeline, [on_one_line(prompt)], base.prompt_tokens)
        away = family.encode(pipeline, [on_one_line(negative or "")], base.prompt_tokens)
    if negative is None:
        return family.sample(given, family.empty(pipeline, away))
    arguments = family.sample(given, away)
    scale = family.guidance_scale if guidance is None else guidance
    if scale <= family.unguided or not any(name.startswith("negative_") for name in arguments):
        raise UsageError(
            f"negative_prompt {negative!r}: has no effect with guidance {scale:g} of {family.name}; leave it out, or "
            f"give a base without distilled guidance and --guidance above {family.unguided:g}"
        )
    return arguments


def draw_picture(
    pipeline: Any,
    family: Family,
    prompt: Mapping[str, Any],
    seed: int,
    side: int,
    steps: int,
    guidance: float | None,
) -> Tensor:
    """Return one picture of a pipeline, (3, H, W) from -1 to 1. Its noise is the same on any device."""
    return draw_pictures(pipeline, family, prompt, [seed], side, steps, guidance)[0]


def draw_pictures(
    pipeline: Any,
    family: Family,
    prompts: Mapping[str, Any],
    seeds: Sequence[int],
    side: int,
    steps: int,
    guidance: float | None,
) -> Tensor:
    """Return a picture for each seed, (N, 3, H, W) from -1 to 1. ``prompts`` are arguments with as many rows.

    Embeddings are cast to fp32, because pipelines draw the noise in their dtype.
    """
    scale = family.guidance_scale if guidance is None else guidance
    given = cast_floats(dict(prompts), torch.float32)
    arguments = {**(family.call or {}), **given, family.guidance_argument: scale}
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with _without_rounding_encoders(pipeline):
        images = pipeline(
            height=side,
            width=side,
            num_inference_steps=steps,
            generator=generators if len(seeds) > 1 else generators[0],
            output_type="np",
            **arguments,
        ).images
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() * 2 - 1


@contextmanager
def _without_rounding_encoders(pipeline: Any) -> Generator[None]:
    """Take text encoders that are not fp32 out of a pipeline in the body: it would cast embeddings to their dtype."""
    encoders = text_encoders(pipeline)
    rounding = {
        name: encoder
        for name, encoder in encoders.items()
        if any(weight.dtype != torch.float32 for weight in encoder.parameters())
    }
    pipeline.register_modules(**dict.fromkeys(rounding))
    try:
        yield
    finally:
        pipeline.register_modules(**rounding)
