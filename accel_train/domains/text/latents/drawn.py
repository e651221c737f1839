"""Pictures sampled for captions, by a model whose latents are patches of pixels or of an autoencoder, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.domains.models.mmdit import MultimodalMMDiTConfig
from accel_train.domains.models.patches import as_grid, from_patches, from_values, joined
from accel_train.domains.models.vae import VaeReference, load_vae
from accel_train.pipeline import file_stem

FOLDER = "pictures"
CHANNELS = 3
BATCH = 8
"""Pictures that an autoencoder decodes at once."""


def picture_grid(shape: MultimodalMMDiTConfig) -> tuple[int, int]:
    """Return the rows and columns of patches. Raises ``UsageError`` for a model of other latents."""
    if shape.latent_grid is None:
        raise UsageError(
            "prompt: this model has learned latents of texts and no pictures; give --text, or a run of "
            "recipes/mmdit.py with --pictures.latents pixels or vae"
        )
    return shape.latent_grid


def decoded(latents: Tensor, grid: tuple[int, int], reference: VaeReference | None, device: str) -> Tensor:
    """Return pictures (B, H, W, 3) uint8 of latents (B, L, D), in units of pixels from -1 to 1 or of an autoencoder.

    Raises ``UsageError`` if the autoencoder is gone, or is another one.
    """
    channels = CHANNELS if reference is None else reference.channels
    # A latent token is a square patch: D = patch * patch * channels.
    patch = round((latents.shape[2] / channels) ** 0.5)
    if reference is None:
        return from_patches(latents, grid, patch)
    vae = load_vae(reference.source, reference.revision, "the autoencoder of this model,", reference).to(device)
    return from_values(vae.decode_all(joined(as_grid(latents, grid), patch), BATCH))


def write_pictures(pictures: Tensor, prompts: Sequence[str], seed: int, output: str | None) -> list[str]:
    """Write a PNG file for each of the pictures (B, H, W, 3) uint8, and return lines about them.

    Files are named by prompt, seed and picture: only the same picture is written again. ``output`` None: the folder
    pictures.
    """
    from PIL import Image

    folder = expand_path(output or FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for prompt, picture in zip(prompts, pictures, strict=True):
        image = Image.fromarray(picture.numpy())
        file = folder / f"{file_stem(prompt, seed, image.tobytes())}.png"
        image.save(file)
        lines.append(f"{file}: {prompt}")
    return lines
