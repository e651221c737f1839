"""Measures of pictures against closed forms and other implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image, ImageFilter
from scipy import ndimage

from accel_train.domains.images.checking import quality
from accel_train.domains.images.checking.quality import Measures, measure, near_duplicates, perceptual_hash
from tests.domains.images.drawn import drawn


def scene(seed: int, width: int = 320, height: int = 240) -> Image.Image:
    """Smooth blobs with edges, different for each seed."""
    generator = np.random.default_rng(seed)
    noise = ndimage.gaussian_filter(generator.normal(size=(height, width, 3)), (12, 12, 0))
    levels = (noise - noise.min()) / (noise.max() - noise.min())
    return Image.fromarray((255 * (levels > 0.5) * 0.4 + 150 * levels).astype(np.uint8))


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    grey = np.random.default_rng(0).uniform(0, 255, (40, 50))
    expected = ndimage.laplace(grey)[1:-1, 1:-1].var()
    assert quality.laplacian_variance(grey) == pytest.approx(expected)
    assert quality.laplacian_variance(np.zeros((2, 9))) == 0
    # A checkerboard of a and b: 4 (b - a) and 4 (a - b).
    board = np.indices((20, 20)).sum(0) % 2 * 10.0
    assert quality.laplacian_variance(board) == pytest.approx(1600)


def test_blur_lowers_sharpness_whatever_the_size() -> None:
    picture = scene(1)
    sharp = measure(picture).sharpness
    assert measure(picture.filter(ImageFilter.GaussianBlur(4))).sharpness < sharp / 4
    larger = picture.resize((1280, 960), Image.Resampling.LANCZOS)
    # Four times the side: without one scale for all it would be near 1/50.
    assert sharp / 3 < measure(larger).sharpness < 3 * sharp


def test_brightness_and_contrast() -> None:
    half = Image.new("RGB", (20, 20), (0, 0, 0))
    half.paste((255, 255, 255), (0, 0, 10, 20))
    found = measure(half)
    assert (found.brightness, found.contrast) == pytest.approx((0.5, 127.5))
    assert measure(Image.new("RGB", (20, 20), (51, 51, 51)))[:3] == pytest.approx((0, 0.2, 0))


def test_the_hash_is_that_of_a_cosine_transform() -> None:
    picture = drawn(100, 60)
    small = np.asarray(picture.convert("L").resize((32, 32), Image.Resampling.LANCZOS), np.float64)
    places = np.arange(32)
    basis = np.cos(math.pi * (2 * places + 1)[None] * np.arange(8)[:, None] / 64)
    lowest = basis @ small @ basis.T
    bits = (lowest > np.median(lowest)).reshape(-1)
    assert perceptual_hash(picture) == int("".join("1" if bit else "0" for bit in bits), 2)


def test_alike_pictures_have_near_hashes_and_others_far_ones() -> None:
    hashes = [perceptual_hash(scene(seed)) for seed in range(12)]
    far = [(a ^ b).bit_count() for i, a in enumerate(hashes) for b in hashes[:i]]
    assert min(far) > 10
    picture = scene(0)
    small = picture.resize((160, 120), Image.Resampling.LANCZOS)
    brighter = picture.point(lambda value: min(255, value + 15))
    for other in (small, brighter, picture.filter(ImageFilter.GaussianBlur(1))):
        assert (perceptual_hash(other) ^ hashes[0]).bit_count() <= 4


@pytest.mark.parametrize("distance", [0, 1, 4, 7])
def test_groups_of_near_hashes_are_those_of_all_pairs(distance: int) -> None:
    generator = np.random.default_rng(distance)
    seeds = generator.integers(0, 2**63, 30, dtype=np.uint64)
    hashes: list[int] = []
    for value in seeds.tolist():
        hashes.append(value)
        for flips in (distance, distance + 1):
            changed = value
            for bit in generator.choice(64, flips, replace=False).tolist():
                changed ^= 1 << bit
            hashes.append(changed)
    edges = [(i, j) for i in range(90) for j in range(i) if (hashes[i] ^ hashes[j]).bit_count() <= distance]
    groups = list(range(90))
    for _ in range(90):
        for i, j in edges:
            groups[i] = groups[j] = min(groups[i], groups[j])
    expected = {frozenset(i for i in range(90) if groups[i] == g) for g in set(groups)}
    found = {frozenset(group) for group in near_duplicates(hashes, distance)}
    assert found == {group for group in expected if len(group) > 1}
    assert near_duplicates([], distance) == []


def test_scores_and_quality() -> None:
    good = Measures(sharpness=900, brightness=0.5, contrast=60, looks=0)
    found = quality.scores(good, 512 * 512, 512 * 512, words=10, max_words=60)
    assert found == {"sharpness": 0.9, "exposure": 1, "contrast": 1, "size": 1, "caption": 1}
    assert quality.quality(found) == pytest.approx(0.9**0.2)
    bad = Measures(sharpness=100, brightness=0.05, contrast=8, looks=0)
    found = quality.scores(bad, 256 * 256, 512 * 512, words=120, max_words=60)
    assert found == pytest.approx({"sharpness": 0.5, "exposure": 0.2, "contrast": 0.25, "size": 0.25, "caption": 0.5})
    assert quality.scores(good, 1, 1, words=0, max_words=60)["caption"] == 0
    assert quality.quality({"one": 1.0, "none": 0.0}) == 0
    assert quality.dataset_quality([0.5, 1.0], usable=0.8, duplicates=0.25) == pytest.approx(0.75 * 0.8 * 0.75)
    assert quality.dataset_quality([], 1, 0) == 0
