"""One picture of a pipeline of diffusers, the same on any device."""

from __future__ import annotations

from collections.abc import Mapping
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
    scale = family.guidance_scale if guidance is None else guidance
    arguments = {**(family.call or {}), **prompt, family.guidance_argument: scale}
    images = pipeline(
        height=side,
        width=side,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **arguments,
    ).images
    return torch.from_numpy(images[0]).permute(2, 0, 1).float() * 2 - 1
