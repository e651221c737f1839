"""Pictures to caption, turned into squares and latents as training does with its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.domains.models.pictures.decoding import PictureError, decode_picture, upright_rgb
from accel_train.domains.models.pictures.patching import MIN_SIDE, Patching, find_patching, square
from accel_train.domains.models.vae import VaeReference

if TYPE_CHECKING:
    from PIL import Image

    Given = Image.Image | Path | str
    """A Pillow image, or the path of a file."""


def read_pictures(
    pictures: Given | Iterable[Given], rows: int, width: int, reference: VaeReference | None, device: str
) -> tuple[Tensor, Tensor]:
    """Return the pixels (B, H, W, 3) uint8 and the latents (B, L, D) of pictures, as training makes them.

    The latents have ``rows`` rows of tokens with ``width`` values each. Raises ``UsageError`` for a picture that cannot
    be used, and if the autoencoder of ``reference`` is missing.
    """
    images = decode_given(pictures)
    # The autoencoder is loaded last, because that may take a minute.
    patching = find_patching(width, reference, device)
    pixels = torch.stack([square(image, rows * patching.side) for image in images])
    return pixels, encode_squares(pixels, patching)


def decode_given(pictures: Given | Iterable[Given]) -> list[Image.Image]:
    """Decode one picture or several as training does.

    Raises ``UsageError`` if there is none, or naming one that cannot be used.
    """
    # Strings and bytes are iterable as well, but each is one (possibly wrong) picture.
    if isinstance(pictures, (str, bytes)) or not isinstance(pictures, Iterable):
        pictures = [pictures]
    decoded = [_decoded(picture, number) for number, picture in enumerate(pictures, 1)]
    if not decoded:
        raise UsageError("picture: none given; at least one is required")
    return decoded


def encode_squares(pixels: Tensor, patching: Patching) -> Tensor:
    """Return the latents (B, L, D) of squares (B, H, W, 3) uint8 as training stores them, in fp32 on the CPU."""
    # One at a time: an autoencoder may round differently in a batch, and a caption must depend on its picture only.
    return torch.cat([patching.tokens(one).float() for one in pixels.split(1)])


def _decoded(picture: object, number: int) -> Image.Image:
    # Imported here, because most models that import this module read no pictures.
    from PIL import Image

    named = f"picture {number}"
    if not isinstance(picture, (str, Path, Image.Image)):
        raise UsageError(
            f"{named}: {type(picture).__name__} is not accepted; a path or a Pillow image is required, such as "
            "Image.fromarray makes from an array (H, W, 3) of bytes"
        )
    try:
        if isinstance(picture, (str, Path)):
            named = f"picture {picture}"
            image = decode_picture(expand_path(picture).read_bytes())
        else:
            image = upright_rgb(picture)
    except OSError as error:
        raise UsageError(f"{named}: cannot be read ({error.strerror}); the path of a picture is required") from None
    except PictureError as error:
        raise UsageError(f"{named}: {error}; a picture that can be decoded is required") from None
    width, height = image.size
    if min(image.size) < MIN_SIDE:
        raise UsageError(f"{named}: {width}x{height} pixels; at least {MIN_SIDE} on each side are required")
    return image
