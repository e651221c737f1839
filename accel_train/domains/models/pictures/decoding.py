"""Picture files as upright 8-bit sRGB. A file is refused by its header before its pixels are decoded.

Handled: EXIF orientation, transparency, palettes, greyscale, CMYK, 16 bits per channel, embedded colour profiles. Of
several frames the first is taken.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from accel_train.config import UsageError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""Accepted formats. Pillow's others start programs (EPS) or are seldom pictures to learn from."""
MAX_PIXELS = 89_478_485
"""Pillow's own limit: 256 MiB with 3 bytes a pixel."""
WHITE = (255, 255, 255)
ORIENTATION = 0x0112
"""EXIF tag."""
SIDEWAYS = (5, 6, 7, 8)
"""Orientations with width and height exchanged."""

T = TypeVar("T")
_filters = threading.Lock()
Colour = tuple[int, int, int]


class PictureError(ValueError):
    """An unusable picture. The text is the reason, without the file name."""


class PictureHeader(NamedTuple):
    """Header of a picture file, read before decoding."""

    width: int
    height: int
    """Width and height are those of the upright picture, in pixels."""
    format: str
    mode: str
    """Pillow's name of the layout: RGB, RGBA, CMYK, P, I;16, ..."""
    frames: int


def read_header(content: bytes, *, max_pixels: int = MAX_PIXELS) -> PictureHeader:
    """Read size and layout of a picture file. Decodes no pixel. Raises ``PictureError``."""

    def read() -> PictureHeader:
        with _open(content, max_pixels) as image:
            width, height = image.size
            if _orientation(image) in SIDEWAYS:
                width, height = height, width
            return PictureHeader(width, height, image.format or "", image.mode, _frames(image))

    return _as_picture_error(read)


def decode_picture(content: bytes, *, background: Colour = WHITE, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a picture file as an upright RGB image. Transparent pixels show `background`.

    Colours with an embedded profile are converted to sRGB. Raises ``PictureError`` for a damaged, truncated or unknown
    file, and for one of more than `max_pixels` before any pixel is decoded.
    """

    def decode() -> Image.Image:
        with _open(content, max_pixels) as image:
            return _as_rgb(image, background)

    return _as_picture_error(decode)


def upright_rgb(image: Image.Image, *, background: Colour = WHITE) -> Image.Image:
    """Convert a Pillow image as ``decode_picture`` converts a file. Of several frames, the current one is taken.

    Raises ``PictureError`` for a file that Pillow has opened and cannot decode.
    """
    return _as_picture_error(lambda: _as_rgb(image, background))


def decode_alpha(content: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image | None:
    """Decode the opacity of a picture file as an upright image of mode L, None for one without transparency.

    Raises ``PictureError`` in the same cases as ``decode_picture``.
    """

    def decode() -> Image.Image | None:
        with _open(content, max_pixels) as image:
            orientation = _orientation(image)
            image.load()
            if not image.has_transparency_data:
                return None
            return _upright(image.convert("RGBA").getchannel("A"), orientation)

    return _as_picture_error(decode)


def colour(text: str) -> Colour:
    """Read ``#rrggbb`` or the name of a colour, as in CSS. Raises ``UsageError``."""
    from PIL import ImageColor

    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        raise UsageError(f"background {text!r}: a colour such as white, black or #7f7f7f is required.") from None
    return red, green, blue


def _as_rgb(image: Image.Image, background: Colour) -> Image.Image:
    # Read before the pixels are decoded, because decoding may drop or add metadata.
    orientation = _orientation(image)
    profile: bytes | None = image.info.get("icc_profile")
    image.load()
    rgb = _to_srgb(_without_alpha(_eight_bits(image), background), profile)
    return _upright(rgb, orientation)


def _as_picture_error(act: Callable[[], T]) -> T:
    """Turn whatever a decoder raises into a ``PictureError``."""
    try:
        return act()
    except (PictureError, UsageError):
        raise
    except Exception as error:
        # Decoders of damaged files raise OSError, SyntaxError, EOFError, struct.error, zlib.error and others.
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise PictureError(f"damaged: {reason}") from None


def _open(content: bytes, max_pixels: int) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise PictureError("the file is empty (0 bytes)")
    # Registers all formats. Otherwise naming a format that has not been used yet is an error.
    Image.init()
    try:
        # The filters belong to the whole process, and pictures are read in several threads.
        with _filters, warnings.catch_warnings():
            # Pillow warns above its own limit. The check of max_pixels below applies instead.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise PictureError(f"not a picture, or its beginning is damaged; known formats: {known}") from None
    except Image.DecompressionBombError:
        raise PictureError(f"more than {2 * MAX_PIXELS:,} pixels, which Pillow refuses") from None
    width, height = image.size
    if width * height > max_pixels:
        raise PictureError(f"{width}x{height} are {width * height:,} pixels; at most {max_pixels:,} are decoded")
    return image


def _frames(image: Any) -> int:
    # The second picture of a phone's JPEG (MPO) is a preview, no frame.
    return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)


def _orientation(image: Image.Image) -> int:
    from PIL import Image

    # Pillow rotates a TIFF itself. `getexif` would decode a PNG to look for metadata after its pixels.
    data: bytes | None = image.info.get("exif")
    if image.format == "TIFF" or not data:
        return 1
    exif = Image.Exif()
    try:
        exif.load(data)
        return int(exif.get(ORIENTATION, 1))
    except Exception:  # as many types as damaged files; the pixels may be sound
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(orientation)
    return image if turn is None else image.transpose(turn)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale an image of 16 or 32 bits to greyscale of 8 bits. Others are returned as they are."""
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image).astype(np.float64)
    white = 1.0 if image.mode == "F" else 65535.0
    low = float(values.min())
    high = float(values.max())
    # Not `low < 0 or high > white`, which NaN would pass.
    if not (low >= 0 and high <= white):
        raise PictureError(f"greyscale from {low:g} to {high:g}; 0 to {white:g} is required to know what is white")
    return Image.fromarray(np.round(values * (255 / white)).astype(np.uint8))


def _without_alpha(image: Image.Image, background: Colour) -> Image.Image:
    """Lay a picture with transparency over the background."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    canvas = Image.new("RGBA", layer.size, (*background, 255))
    return Image.alpha_composite(canvas, layer).convert("RGB")


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    from PIL import ImageCms

    if profile and image.mode in ("RGB", "CMYK", "L"):
        try:
            source = ImageCms.getOpenProfile(io.BytesIO(profile))
            # The usual profile is sRGB itself.
            is_srgb = image.mode == "RGB" and "sRGB" in ImageCms.getProfileDescription(source)
            if not is_srgb:
                target = ImageCms.createProfile("sRGB")
                return cast("Image.Image", ImageCms.profileToProfile(image, source, target, outputMode="RGB"))
        except (ImageCms.PyCMSError, OSError):
            pass  # a damaged profile, or one of another layout
    return image.convert("RGB")
