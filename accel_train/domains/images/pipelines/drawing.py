"""Pictures of a diffusers pipeline or of our own, the same on any device."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.buckets import Size
from accel_train.domains.images.pipelines.family import Family, text_encoders
from accel_train.domains.models.input_dtypes import cast_floats
from accel_train.domains.models.pictures.captions import on_one_line

if TYPE_CHECKING:
    from accel_train.domains.images.pipelines.loading import Base

SIDE = 512
STEPS = 28
"""Default side in pixels, and default denoising steps, of a base alone. Adapters have those of their training."""


def reduction(pipeline: Any) -> int:
    """Return the number of pixels along a side of one latent."""
    return int(pipeline.vae_scale_factor)


class Drawing(TypedDict, total=False):
    """Options of a picture in a call. Absent or None: those of the evaluation in training."""

    steps: int | None
    guidance: float | None
    side: int | None
    """Height and width in pixels."""
    height: int | None
    width: int | None


class Drawn(NamedTuple):
    """Options of a picture with all values. ``guidance`` None is the default of the family."""

    steps: int
    guidance: float | None
    size: Size
    """Height and width in pixels."""


def resolve_drawing(
    recorded: Mapping[str, Any],
    *,
    steps: int | None = None,
    guidance: float | None = None,
    side: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> Drawn:
    """Return the options of a picture, those not given from ``recorded``, the sampler's of the training.

    Raises ``UsageError`` for values out of range, and for ``side`` beside ``height`` or ``width``.
    """
    refuse_both(side, height, width)
    are_counts = all(map(_is_count, (steps, side, height, width)))
    is_scale = guidance is None or (_is_number(guidance, Real) and 0 <= guidance < float("inf"))
    if not (are_counts and is_scale):
        raise UsageError(
            f"steps {steps!r}, guidance {guidance!r}, side {side!r}, height {height!r}, width {width!r}: whole numbers "
            "of steps and pixels, 1 or more, and a finite guidance of 0 or more are required; None takes the value of "
            "the evaluation in training"
        )
    square = side or int(recorded.get("side", SIDE))
    strength = recorded.get("guidance") if guidance is None else guidance
    return Drawn(steps or int(recorded.get("steps", STEPS)), strength, (height or square, width or square))


def _is_count(value: object) -> bool:
    return value is None or (_is_number(value, Integral) and cast(int, value) >= 1)


def _is_number(value: object, kind: type) -> bool:
    # True is a whole number to Python.
    return isinstance(value, kind) and not isinstance(value, bool)


def refuse_both(side: int | None, height: int | None, width: int | None) -> None:
    """Raise ``UsageError`` for a side beside a height or a width."""
    beside = {name: value for name, value in (("height", height), ("width", width)) if value is not None}
    if side is not None and beside:
        named = " and ".join(f"{name} {value}" for name, value in beside.items())
        raise UsageError(f"side {side} with {named}: side is both height and width; give height and width alone")


def refuse_size(size: Size, pipeline: Any, base: Base) -> None:
    """Raise ``UsageError`` for a height and a width that ``base`` cannot draw."""
    height, width = size
    if height == width:
        refuse_side(f"side {height}", height, pipeline, base)
        return
    rows, columns = base.largest or size
    refuse_side(f"height {height}", height, pipeline, base, rows)
    refuse_side(f"width {width}", width, pipeline, base, columns)


def refuse_side(given: str, side: int, pipeline: Any, base: Base, longest: int | None = None) -> None:
    """Raise ``UsageError`` for a side, in pixels, that ``base`` cannot draw. ``given`` is its option with the value.

    ``longest`` is the limit of this side, by default that of a square. Some pipelines end with an error of their own,
    and others draw a smaller picture.
    """
    family = base.family
    needed = math.lcm(reduction(pipeline) * family.patch, family.drawn_step)
    largest = base.largest
    if largest is not None and side > (longest or min(largest)):
        raise UsageError(
            f"{given}: {base.source} draws at most {largest[1]}x{largest[0]}; give "
            f"{(longest or min(largest)) // needed * needed} or less, a multiple of {needed}"
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
    size: Size,
    steps: int,
    guidance: float | None,
) -> Tensor:
    """Return one picture of a pipeline, (3, H, W) from -1 to 1, of ``size`` (H, W).

    Its noise is the same on any device.
    """
    return draw_pictures(pipeline, family, prompt, [seed], size, steps, guidance)[0]


def draw_pictures(
    pipeline: Any,
    family: Family,
    prompts: Mapping[str, Any],
    seeds: Sequence[int],
    size: Size,
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
            height=size[0],
            width=size[1],
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
