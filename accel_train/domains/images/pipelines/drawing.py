"""Pictures of a pipeline of diffusers or of our own, the same on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_train.domains.images.pipelines.family import Family


def draw_picture(
    pipeline: Any,
    family: Family,
    prompt: Mapping[str, Any],
    seed: int,
    side: int,
    steps: int,
    guidance: float | None,
) -> Tensor:
    """Return one picture of a pipeline, (3, H, W) from -1 to 1. Its noise is drawn on the CPU, alike for any device."""
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
    """Return a picture for each seed, (N, 3, H, W) from -1 to 1. ``prompts`` are arguments with as many rows."""
    scale = family.guidance_scale if guidance is None else guidance
    arguments = {**(family.call or {}), **prompts, family.guidance_argument: scale}
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    images = pipeline(
        height=side,
        width=side,
        num_inference_steps=steps,
        generator=generators if len(seeds) > 1 else generators[0],
        output_type="np",
        **arguments,
    ).images
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() * 2 - 1
