"""Pictures to caption, as the squares and latents that training makes of its own."""

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
    """An image of Pillow, or the path of a file."""


def read_pictures(
    pictures: Given | Iterable[Given], rows: int, width: int, reference: VaeReference | None, device: str
) -> tuple[Tensor, Tensor]:
    """Return the pixels (B, H, W, 3) uint8 and the latents (B, L, D) of pictures, as training makes them.

    They have ``rows`` rows of tokens of ``width`` values. Raises ``UsageError`` for a picture that cannot be used, and
    without the autoencoder of ``reference``.
    """
    images = decode_given(pictures)
    # Loaded last, because it may take a minute.
    patching = find_patching(width, reference, device)
    pixels = torch.stack([square(image, rows * patching.side) for image in images])
    return pixels, encode_squares(pixels, patching)


def decode_given(pictures: Given | Iterable[Given]) -> list[Image.Image]:
    """Decode one picture or several as training does.

    Raises ``UsageError`` with the name of one that cannot be used, and for none.
    """
    # A path is iterable too, of letters, and bytes are of numbers.
    if isinstance(pictures, (str, bytes)) or not isinstance(pictures, Iterable):
        pictures = [pictures]
    decoded = [_decoded(picture, number) for number, picture in enumerate(pictures, 1)]
    if not decoded:
        raise UsageError("picture: none given; at least one is required")
    return decoded


def encode_squares(pixels: Tensor, patching: Patching) -> Tensor:
    """Return the latents (B, L, D) of squares (B, H, W, 3) uint8 as training stores them, in fp32 on the CPU."""
    # One at a time: an autoencoder may round otherwise in another batch, and a caption depends on its picture alone.
    return torch.cat([patching.tokens(one).float() for one in pixels.split(1)])


def _decoded(picture: object, number: int) -> Image.Image:
    # Here, because most models that import this read no picture.
    from PIL import Image

    named = f"picture {number}"
    if not isinstance(picture, (str, Path, Image.Image)):
        raise UsageError(
            f"{named}: {type(picture).__name__} is refused; a path or an image of Pillow is required, such as "
            "Image.fromarray makes of an array (H, W, 3) of bytes"
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
