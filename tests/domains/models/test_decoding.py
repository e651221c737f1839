"""Files of every kind as upright RGB, against what was drawn; damaged and oversized ones with their reason."""

from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from accel_train.config import UsageError
from accel_train.domains.models.pictures import decoding
from accel_train.domains.models.pictures.decoding import PictureError, decode_picture, read_header
from tests.domains.images.drawn import bomb, drawn, encoded, sideways


def difference(one: Image.Image, other: Image.Image) -> float:
    assert one.size == other.size
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).mean())


@pytest.mark.fault("I47", injected="a JPEG turned by its EXIF", outcome="upright, equal to Pillow's exif_transpose")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture_upright(orientation: int) -> None:
    content = sideways(drawn(48, 32), orientation)
    decoded = decode_picture(content)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert difference(decoded, expected) == 0
    header = read_header(content)
    assert (header.width, header.height) == decoded.size
    assert decoded.size == ((32, 48) if orientation >= 5 else (48, 32))


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_the_opacity_is_turned_as_the_picture_is(orientation: int) -> None:
    image = drawn(48, 32)
    image.putalpha(drawn(48, 32).convert("L"))
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = orientation
    content = encoded(image, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).getchannel("A")
    found = decoding.decode_alpha(content)
    assert found is not None
    assert difference(found, expected) == 0


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_tiff_is_turned_once(orientation: int) -> None:
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = orientation
    content = encoded(drawn(48, 32), "TIFF", exif=exif)
    header = read_header(content)
    assert (header.width, header.height) == decode_picture(content).size
    assert header.width == (32 if orientation == 6 else 48)


@pytest.mark.fault("I47", injected="CMYK, palette, eight formats", outcome="RGB with the colours that were drawn")
@pytest.mark.parametrize(
    ("mode", "format", "tolerance"),
    [
        ("RGB", "PNG", 0),
        ("RGB", "BMP", 0),
        ("RGB", "PPM", 0),
        ("RGB", "TIFF", 0),
        ("RGB", "WEBP", 12),
        ("RGB", "AVIF", 12),
        ("RGB", "JPEG", 12),
        ("CMYK", "JPEG", 12),
        ("CMYK", "TIFF", 1),
        ("P", "PNG", 25),
        ("P", "GIF", 25),
    ],
)
def test_each_layout_gives_the_colours_that_were_drawn(mode: str, format: str, tolerance: float) -> None:
    image = drawn(48, 32)
    decoded = decode_picture(encoded(image.convert(mode), format))
    assert decoded.mode == "RGB"
    assert difference(decoded, image) <= tolerance


def test_grey_has_three_equal_channels() -> None:
    grey = drawn(48, 32, mode="L")
    decoded = np.asarray(decode_picture(encoded(grey)))
    assert (decoded == np.asarray(grey)[..., None]).all()
    black_and_white = np.asarray(decode_picture(encoded(grey.convert("1"))))
    assert set(np.unique(black_and_white)) == {0, 255}


@pytest.mark.fault("I47", injected="16 and 32 bits a channel", outcome="scaled to 8 bits, not cut")
def test_sixteen_bits_are_scaled_and_not_cut() -> None:
    ramp = np.linspace(0, 65535, 64 * 8).reshape(8, 64)
    expected = np.round(ramp / 257)
    for content in (
        encoded(Image.fromarray(ramp.astype(np.uint16))),
        encoded(Image.fromarray(ramp.astype(np.uint16)), "TIFF"),
        encoded(Image.fromarray(ramp.astype(np.int32)), "TIFF"),
        encoded(Image.fromarray((ramp / 65535).astype(np.float32)), "TIFF"),
    ):
        decoded = np.asarray(decode_picture(content)).astype(np.float64)
        assert np.abs(decoded - expected[..., None]).max() <= 1


@pytest.mark.parametrize("values", [[-1.0, 1.0], [0.0, 300.0], [0.0, float("nan")]])
def test_floats_without_a_known_white_are_refused(values: list[float]) -> None:
    content = encoded(Image.fromarray(np.full((8, 8), values[0], np.float32)), "TIFF")
    array = np.full((8, 8), values[0], np.float32)
    array[3, 3] = values[1]
    content = encoded(Image.fromarray(array), "TIFF")
    with pytest.raises(PictureError, match="0 to 1 is required"):
        decode_picture(content)


@pytest.mark.fault("I47", injected="transparent pixels", outcome="drawn on the background of the option")
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "GIF"])
@pytest.mark.parametrize("background", [(255, 255, 255), (10, 200, 30)])
def test_transparent_pixels_show_the_background(format: str, background: tuple[int, int, int]) -> None:
    layer = Image.new("RGBA", (16, 16), (255, 0, 0, 255))
    layer.paste((0, 0, 0, 0), (0, 0, 8, 16))
    options = {"lossless": True} if format == "WEBP" else {}
    decoded = decode_picture(encoded(layer, format, **options), background=background)
    assert decoded.getpixel((3, 8)) == background
    assert decoded.getpixel((12, 8)) == (255, 0, 0)


def test_half_transparency_is_mixed() -> None:
    decoded = decode_picture(encoded(Image.new("LA", (4, 4), (0, 128))), background=(255, 255, 255))
    assert decoded.getpixel((0, 0)) == pytest.approx((127, 127, 127), abs=1)


def test_a_palette_with_transparency() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    image.paste(0, (0, 0, 4, 8))
    decoded = decode_picture(encoded(image, "PNG", transparency=0), background=(1, 2, 3))
    assert decoded.getpixel((1, 1)) == (1, 2, 3)
    assert decoded.getpixel((6, 6)) == (200, 100, 50)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    content = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert read_header(content).frames == 3
    assert decode_picture(content).getpixel((4, 4)) == (255, 0, 0)


def test_an_embedded_profile_is_converted_to_srgb() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    image = drawn(16, 16)
    assert difference(decode_picture(encoded(image, icc_profile=srgb.tobytes())), image) == 0
    # A profile of another layout than the pixels, and a damaged one, are left out of account.
    assert difference(decode_picture(encoded(image, icc_profile=lab.tobytes())), image) == 0
    assert difference(decode_picture(encoded(image, icc_profile=b"no profile")), image) == 0


def _with_red_for_green() -> bytes:
    """An sRGB profile whose red and green primaries are exchanged."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = int.from_bytes(profile[128:132], "big")
    entries = {bytes(profile[132 + 12 * i : 136 + 12 * i]): 132 + 12 * i for i in range(count)}
    red = entries[b"rXYZ"]
    green = entries[b"gXYZ"]
    profile[red + 4 : red + 12], profile[green + 4 : green + 12] = (
        profile[green + 4 : green + 12],
        profile[red + 4 : red + 12],
    )
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be")).replace(b"sRGB", b"test")


def test_colours_of_another_profile_change() -> None:
    image = Image.new("RGB", (4, 4), (255, 0, 0))
    decoded = decode_picture(encoded(image, icc_profile=_with_red_for_green()))
    assert decoded.getpixel((0, 0)) == pytest.approx((0, 255, 0), abs=2)


@pytest.mark.fault("I47", injected="decompression bombs", outcome="refused by the header; no pixel decoded")
def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    content = bomb(20_000)
    assert len(content) < 100_000
    # What the first call of a process imports is no part of what is measured.
    with pytest.raises(PictureError):
        decode_picture(content)
    tracemalloc.start()
    with pytest.raises(PictureError, match=r"Pillow refuses|400,000,000 pixels"):
        read_header(content)
    with pytest.raises(PictureError, match=r"Pillow refuses|400,000,000 pixels"):
        decode_picture(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(content)
    with pytest.raises(PictureError, match=r"12000x12000 are 144,000,000 pixels; at most 89,478,485"):
        decode_picture(bomb(12_000))
    with pytest.raises(PictureError, match="at most 100 are decoded"):
        decode_picture(encoded(drawn(48, 32)), max_pixels=100)
    assert decode_picture(encoded(drawn(48, 32)), max_pixels=48 * 32).size == (48, 32)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF", "BMP"])
def test_a_cut_file_is_refused(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    content = encoded(Image.fromarray(noise), format)
    with pytest.raises(PictureError, match=r"damaged|not a picture"):
        decode_picture(content[: len(content) * 2 // 3])


@pytest.mark.fault("I47", injected="bytes flipped at random", outcome="a picture or a reason, no other error")
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF"])
def test_damaged_bytes_are_a_reason_and_never_another_error(format: str) -> None:
    content = encoded(drawn(64, 48), format)
    generator = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in generator.integers(0, len(content), 12):
            damaged[place] ^= int(generator.integers(1, 256))
        try:
            decode_picture(bytes(damaged), max_pixels=10_000)
        except PictureError:
            refused += 1
    assert refused > 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (b"not a picture at all", "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
        (b"RIFF\x24\x00\x00\x00WEBPVP8 " + bytes(24), "not a picture|damaged"),
    ],
)
def test_other_contents_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(PictureError, match=reason):
        decode_picture(content)


def test_names_of_colours() -> None:
    assert decoding.colour("white") == (255, 255, 255)
    assert decoding.colour("#0a141e") == (10, 20, 30)
    with pytest.raises(UsageError, match="background 'wite'"):
        decoding.colour("wite")
