"""Sizes of buckets against published tables, frames against resizing and cropping by Pillow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from accel_train.config import UsageError
from accel_train.domains.images.buckets import Buckets, conditioning, frame, render, to_image, to_tensor
from tests.domains.images.drawn import drawn

SDXL = [(1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344)]
"""Sizes that SDXL was trained on, of aspect ratio up to 2 (Podell et al. 2023, appendix I)."""


def test_the_sizes_of_sdxl_are_among_those_of_1024() -> None:
    sizes = Buckets((1024,), 64, 2.0).sizes(1024)
    assert set(SDXL) <= set(sizes)
    assert sizes == sorted(sizes, key=lambda size: size[1] / size[0])
    assert (640, 1536) in Buckets((1024,), 64, 2.4).sizes(1024)


@settings(max_examples=150, deadline=None)
@given(st.integers(16, 1200), st.sampled_from([1, 8, 16, 64]), st.floats(1, 4))
def test_sizes_keep_area_step_and_aspect(resolution, step, max_aspect):
    if resolution < step:
        return
    sizes = Buckets((resolution,), step, max_aspect).sizes(resolution)
    square = resolution // step * step
    assert any(min(size) >= square for size in sizes)
    assert len(set(sizes)) == len(sizes)
    for height, width in sizes:
        assert height * width <= resolution**2
        assert height % step == width % step == 0
        assert max(height, width) <= max_aspect * min(height, width)
        assert (width, height) in sizes


def test_the_bucket_of_a_picture_keeps_most_of_it() -> None:
    buckets = Buckets((512,), 64, 2.0)
    sizes = buckets.sizes(512)
    for original in [(500, 500), (480, 640), (640, 480), (100, 900), (333, 500), (1, 1)]:
        chosen = buckets.choose(original, 512)
        kept = {size: min(original[0] / size[0], original[1] / size[1]) ** 2 * math.prod(size) for size in sizes}
        assert kept[chosen] == pytest.approx(max(kept.values()))


def test_a_picture_comes_in_the_highest_resolution_that_it_fills() -> None:
    buckets = Buckets((512, 768, 1024), 64)
    found = [buckets.largest_filled((side, side)) for side in (100, 512, 767, 768, 1023, 1024, 5000)]
    assert found == [512, 512, 512, 768, 768, 1024, 1024]


@pytest.mark.parametrize(("resolutions", "step", "aspect"), [((32,), 64, 2.0), ((), 8, 2.0), ((512,), 64, 0.5)])
def test_buckets_that_cannot_be(resolutions: tuple[int, ...], step: int, aspect: float) -> None:
    with pytest.raises(UsageError, match=r"resolutions|max_aspect"):
        Buckets(resolutions, step, aspect)


# ----------------------------------------------------------------------------------------------------------- frames
@settings(max_examples=200, deadline=None)
@given(st.tuples(st.integers(1, 900), st.integers(1, 900)), st.floats(0, 1), st.floats(0, 1))
def test_a_frame_lies_in_the_picture_and_fills_its_target(original, down, across):
    target = Buckets((256,), 64).choose(original, 256)
    seen = frame(original, target, place=(down, across))
    for side in range(2):
        assert seen.scaled_size[side] >= target[side]
        assert 0 <= seen.crop_top_left[side] <= seen.scaled_size[side] - target[side]
    # One side is not cut, but for rounding.
    assert min(seen.scaled_size[side] - target[side] for side in range(2)) <= 1
    assert 0 < seen.kept <= 1


@pytest.mark.parametrize("size", [(97, 61), (61, 97), (200, 50), (30, 30)])
@pytest.mark.parametrize("flipped", [False, True])
def test_rendering_equals_resizing_and_cropping(size: tuple[int, int], flipped: bool) -> None:
    # Without black and white: Pillow cuts overshoot off between its two passes, whose order it chooses.
    image = drawn(*size).point(lambda value: 64 + value // 2)
    original = image.size[::-1]
    seen = frame(original, (48, 64), place=(0.3, 0.8), flipped=flipped)
    whole = ImageOps.mirror(image) if flipped else image
    scaled = whole.resize(seen.scaled_size[::-1], Image.Resampling.LANCZOS)
    top, left = seen.crop_top_left
    expected = to_tensor(scaled.crop((left, top, left + 64, top + 48)))
    found = render(image, seen)
    assert found.shape == (3, 48, 64)
    assert float((found - expected).abs().max()) <= 2.5 / 127.5  # one level of rounding in each pass


def test_conditioning_has_the_meaning_of_sdxl() -> None:
    image = Image.new("RGB", (200, 100), (0, 0, 0))
    image.paste((255, 255, 255), (100, 0, 200, 100))
    seen = frame((100, 200), (64, 64), place=(0.0, 1.0))
    values = {name: tensor.tolist() for name, tensor in conditioning(seen).items()}
    assert values == {"original_size": [100, 200], "crop_top_left": [0, 64], "target_size": [64, 64]}
    assert float(render(image, seen).mean()) > 0.95
    # Mirrored, the white half is on the left, and the values tell the place in the mirrored picture.
    mirrored = frame((100, 200), (64, 64), place=(0.0, 1.0), flipped=True)
    assert mirrored.crop_top_left == (0, 64)
    assert float(render(image, mirrored).mean()) < -0.95


def test_pixels_are_from_minus_one_to_one_and_back() -> None:
    image = drawn(20, 10)
    pixels = to_tensor(image)
    assert pixels.dtype == torch.float32
    assert pixels.shape == (3, 10, 20)
    assert (float(pixels.min()), float(pixels.max())) == (-1, 1)
    assert (np.asarray(to_image(pixels)) == np.asarray(image)).all()
    assert to_image(torch.full((3, 2, 2), 7.0)).getpixel((0, 0)) == (255, 255, 255)


def test_a_frame_of_another_picture_is_an_error() -> None:
    with pytest.raises(ValueError, match="frame for"):
        render(drawn(20, 10), frame((20, 10), (8, 8)))
