"""Pictures sampled for captions, by a model whose latents are patches of pixels or of an autoencoder's latents."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.domains.models.mmdit import MultimodalMMDiTConfig
from accel_train.domains.models.pictures.patching import find_patching
from accel_train.domains.models.vae import VaeReference
from accel_train.pipeline import file_stem

if TYPE_CHECKING:
    from PIL import Image

    from accel_train.domains.text.dataset import DataAssets

FOLDER = "pictures"
READ_BY_MODEL = "; the model reads (latents - mean) / std"
PATCHES = "patches row by row, in each its rows, columns and then channels; "
SHOWN_CHARACTERS = 40
NO_CAPTION = "no caption"
"""Printed in place of the caption of a picture that has none."""


def picture_grid(shape: MultimodalMMDiTConfig, option: str) -> tuple[int, int]:
    """Return the rows and columns of patches. Raises ``UsageError`` for a model that has not learned pictures.

    ``option`` is the one that asks for pictures, for the message.
    """
    if shape.latent_grid is None:
        raise UsageError(
            f"{option}: this model has learned latents of texts, not pictures; give --text, or a run of "
            "recipes/mmdit.py with --pictures.latents pixels or vae"
        )
    return shape.latent_grid


def refuse_text_of_pictures(shape: MultimodalMMDiTConfig) -> None:
    """Raise ``UsageError`` for a model of pictures, which has no encoder for texts."""
    if shape.latent_grid is not None:
        raise UsageError(
            "text: this model has learned pictures and has no text encoder; give --prompt 'a red heart' to draw a "
            "picture of it (in Python, draw), or --picture heart.png to caption one (caption)"
        )


def about_use(
    shape: MultimodalMMDiTConfig, assets: DataAssets, conditions: Collection[str], path: str
) -> dict[str, str]:
    """Return entries of the model card: what the model was measured on, and tag and usage if they are not the usual.

    ``conditions`` are those that the model has learned, and ``path`` is ``data.path``.
    """
    if shape.latent_grid is not None:
        caption = 'print(pipeline.caption(["heart.png"]))'
        about = {"measured_on": f"held-out pictures of {path}", "pipeline_tag": "image-to-text", "usage": caption}
        if "text" in conditions:
            about |= {"pipeline_tag": "text-to-image", "usage": 'pipeline.draw(["a red heart"])[0].save("heart.png")'}
        return about
    about = {"measured_on": f"held-out texts of {path}"}
    # The usual call returns texts, for which the model needs an encoder and must have learned l2t.
    if assets.encoder is None or "latent" not in conditions:
        given = "print(pipeline(latents=latents).texts)  # latents: (B, L, D)"
        about["usage"] = 'print(pipeline("A text.").latents)' if "text" in conditions else given
    return about


def decoded(latents: Tensor, grid: tuple[int, int], reference: VaeReference | None, device: str) -> Tensor:
    """Decode latents (B, L, D), patches of pixels from -1 to 1 or of an autoencoder, to pictures (B, H, W, 3) uint8.

    Raises ``UsageError`` if the autoencoder is missing or is not the one of training.
    """
    return find_patching(latents.shape[2], reference, device).pictures(latents, grid)


def cut_notices(assets: DataAssets, prompts: Sequence[str]) -> list[str]:
    """Return a line for each prompt with more tokens than the model reads, which shows where it is cut."""
    lines: list[str] = []
    for prompt in prompts:
        tokens = assets.tokenizer.tokenise([prompt], assets.max_length)
        if tokens.truncated:
            end = assets.tokenizer.decode(tokens.row(0))[-SHOWN_CHARACTERS:]
            lines.append(
                f"prompt {prompt[:SHOWN_CHARACTERS]!r}: cut after {end!r}, because the model reads {assets.max_length} "
                "tokens; shorten it, or train with a larger --data.max_length"
            )
    return lines


def image(picture: Tensor) -> Image.Image:
    """Return a picture (H, W, 3) uint8 as a Pillow image."""
    from PIL import Image

    return Image.fromarray(picture.numpy())


def write_pictures(pictures: Sequence[Image.Image], prompts: Sequence[str], seed: int, output: str | None) -> list[str]:
    """Write each picture to a PNG file, and return a line about each.

    A file is named by prompt, seed and content, so that only the same picture overwrites it. ``output`` is the folder,
    None for ``FOLDER``.
    """
    folder = expand_path(output or FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for prompt, picture in zip(prompts, pictures, strict=True):
        file = folder / f"{file_stem(prompt, seed, picture.tobytes())}.png"
        picture.save(file)
        lines.append(f"{file}: {prompt or NO_CAPTION}")
    return lines


def units_of_pictures(shape: MultimodalMMDiTConfig, assets: DataAssets) -> dict[str, str]:
    """Describe the units of latents that are patches of pictures. Empty for latents of texts."""
    if shape.latent_grid is None:
        return {}
    values = "RGB pixels from -1 to 1"
    if assets.vae is not None:
        values = "latents as the autoencoder gives them, without its scaling factor"
    return {"latents": f"{PATCHES}{values}{READ_BY_MODEL}"}
