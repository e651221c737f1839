"""Pictures sampled for captions, by a model whose latents are patches of pixels, as PNG files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.domains.models.mmdit import MultimodalMMDiTConfig
from accel_train.domains.models.patches import from_patches

FOLDER = "pictures"
CHANNELS = 3


def picture_grid(shape: MultimodalMMDiTConfig) -> tuple[int, int]:
    """Return the rows and columns of patches. Raises ``UsageError`` for a model of other latents."""
    if shape.latent_grid is None:
        raise UsageError(
            "prompt: this model has learned latents of texts and no pictures; give --text, or a run of "
            "recipes/mmdit.py with --pictures.latents pixels"
        )
    return shape.latent_grid


def write_pictures(
    latents: Tensor, grid: tuple[int, int], prompts: Sequence[str], seed: int, output: str | None
) -> list[str]:
    """Write a PNG file for each of the latents (B, L, D), in units of pixels from -1 to 1, and return lines about them.

    Files are named by prompt and seed, so that the same ones are written again. ``output`` None: the folder pictures.
    """
    from PIL import Image

    # A latent token is a square patch: D = patch * patch * channels.
    patch = round((latents.shape[2] / CHANNELS) ** 0.5)
    folder = expand_path(output or FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for prompt, picture in zip(prompts, from_patches(latents, grid, patch), strict=True):
        name = hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()
        file = folder / f"{name}-{seed}.png"
        Image.fromarray(picture.numpy()).save(file)
        lines.append(f"{file}: {prompt}")
    return lines
