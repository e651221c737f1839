"""Pictures that tests draw: tiny, and different from each other."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def drawn(width: int, height: int, number: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture with a gradient and a square whose place depends on `number`. Its corners have different colours."""
    across = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    down = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    blue = np.full((height, width), float(37 * number % 256))
    pixels = np.stack([across, down, blue], -1).astype(np.uint8)
    left = (7 * number) % max(1, width - 3)
    pixels[: max(1, height // 3), left : left + 3] = (255, 255, 255)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=format, **options)
    return stream.getvalue()


def sideways(image: Image.Image, orientation: int) -> bytes:
    """A JPEG of `image` that says in its EXIF how it must be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "JPEG", quality=95, exif=exif.tobytes())


def bomb(side: int) -> bytes:
    """A PNG of side x side black pixels, one bit each. Its file is about a thousandth of that."""
    row = bytes(1 + (side + 7) // 8)
    compressor = zlib.compressobj(9)
    data = b"".join(compressor.compress(row) for _ in range(side)) + compressor.flush()

    def chunk(name: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def with_torn_header() -> bytes:
    """A PNG with a header of 12 bytes in place of 13, which Pillow reports as a ``ValueError``."""
    content = bytearray(encoded(drawn(8, 8)))
    content[11] = 12
    return bytes(content)


def beyond_pillow() -> bytes:
    """A PNG of more pixels than Pillow opens."""
    return bomb(14_000)


UNREADABLE = (with_torn_header, beyond_pillow)


def folder_of(folder: Path, *sizes: tuple[int, int]) -> Path:
    """A folder with a picture and a caption for each (width, height)."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(sizes):
        (folder / f"{number:03d}.png").write_bytes(encoded(drawn(width, height, number)))
        (folder / f"{number:03d}.txt").write_text(f"picture number {number}")
    return folder
