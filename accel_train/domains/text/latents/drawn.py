"""Pictures sampled for captions, by a model whose latents are patches of pixels or of an autoencoder, as PNG files."""

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
"""What is printed of a picture without one."""


def picture_grid(shape: MultimodalMMDiTConfig, option: str) -> tuple[int, int]:
    """Return the rows and columns of patches. Raises ``UsageError`` for a model of other latents.

    ``option`` asks for pictures and is named in the message.
    """
    if shape.latent_grid is None:
        raise UsageError(
            f"{option}: this model has learned latents of texts and no pictures; give --text, or a run of "
            "recipes/mmdit.py with --pictures.latents pixels or vae"
        )
    return shape.latent_grid


def refuse_text_of_pictures(shape: MultimodalMMDiTConfig) -> None:
    """Raise ``UsageError`` for texts to encode, with a model of pictures: it has no encoder of them."""
    if shape.latent_grid is not None:
        raise UsageError(
            "text: this model has learned pictures and has no encoder of texts; give --prompt 'a red heart' to draw a "
            "picture of it (in Python, draw), or --picture heart.png to caption one (caption)"
        )


def about_use(
    shape: MultimodalMMDiTConfig, assets: DataAssets, conditions: Collection[str], path: str
) -> dict[str, str]:
    """Return what the card says of a model: what it was measured on, and its task and a call if they are not usual.

    ``conditions`` are those that it has learned, and ``path`` is ``data.path``.
    """
    if shape.latent_grid is not None:
        caption = 'print(pipeline.caption(["heart.png"]))'
        about = {"measured_on": f"held-out pictures of {path}", "pipeline_tag": "image-to-text", "usage": caption}
        if "text" in conditions:
            about |= {"pipeline_tag": "text-to-image", "usage": 'pipeline.draw(["a red heart"])[0].save("heart.png")'}
        return about
    about = {"measured_on": f"held-out texts of {path}"}
    # The usual call answers with texts, for which it encodes a text and has learned l2t.
    if assets.encoder is None or "latent" not in conditions:
        given = "print(pipeline(latents=latents).texts)  # latents: (B, L, D)"
        about["usage"] = 'print(pipeline("A text.").latents)' if "text" in conditions else given
    return about


def decoded(latents: Tensor, grid: tuple[int, int], reference: VaeReference | None, device: str) -> Tensor:
    """Return pictures (B, H, W, 3) uint8 of latents (B, L, D), in units of pixels from -1 to 1 or of an autoencoder.

    Raises ``UsageError`` if the autoencoder is gone, or is another one.
    """
    return find_patching(latents.shape[2], reference, device).pictures(latents, grid)


def cut_notices(assets: DataAssets, prompts: Sequence[str]) -> list[str]:
    """Return a line for each prompt of more tokens than the model reads, with the place where it is cut."""
    lines: list[str] = []
    for prompt in prompts:
        tokens = assets.tokenizer.tokenise([prompt], assets.max_length)
        if tokens.truncated:
            end = assets.tokenizer.decode(tokens.row(0))[-SHOWN_CHARACTERS:]
            lines.append(
                f"prompt {prompt[:SHOWN_CHARACTERS]!r}: cut behind {end!r}, as the model reads {assets.max_length} "
                "tokens; shorten it, or train with a larger --data.max_length"
            )
    return lines


def image(picture: Tensor) -> Image.Image:
    """Return a picture (H, W, 3) uint8 as an image of Pillow."""
    from PIL import Image

    return Image.fromarray(picture.numpy())


def write_pictures(pictures: Sequence[Image.Image], prompts: Sequence[str], seed: int, output: str | None) -> list[str]:
    """Write a PNG file for each of the pictures, and return lines about them.

    Files are named by prompt, seed and picture: only the same picture is written again. ``output`` None: the folder
    pictures.
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
    """Return the units of latents that are patches of pictures. Empty: they are those of texts."""
    if shape.latent_grid is None:
        return {}
    values = "RGB pixels from -1 to 1"
    if assets.vae is not None:
        values = "latents as the autoencoder gives them, without its scaling factor"
    return {"latents": f"{PATCHES}{values}{READ_BY_MODEL}"}
