"""Scores of pictures and captions on pictures whose scores are known, and the grid of a report."""

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.domains.images.demo import shapes
from accel_train.domains.images.grids import CELL, GAP, HEADER, LABEL, report_pictures
from accel_train.domains.images.picture_scores import ERRORS, PictureScores, metric_names, rms_distance, shape_scores
from accel_train.domains.images.rows.picture_rows import CaptionedPictures
from accel_train.domains.models.patches import to_patches
from accel_train.domains.models.pictures.patching import Patching
from tests.domains.images.drawn import UNREADABLE

COUNT = 24


@pytest.fixture
def drawn():
    return shapes.pictures(2, COUNT, 24)


def test_true_pictures_score_one_and_others_less(drawn):
    captions, pictures = drawn
    right = shape_scores(pictures, captions)
    singles = right.pop("singles")
    assert singles.sum() == sum("scattered" not in caption for caption in captions)
    assert torch.equal(right.pop("shown_position"), singles)
    assert all(bool(values.all()) for values in right.values())
    blank = shape_scores(torch.full_like(pictures, 255), captions)
    assert all(not values.any() for name, values in blank.items() if name != "singles")
    wrong = shape_scores(pictures.roll(1, 0), captions)
    for name in ("colour", "position", "form"):
        expected = [_property(a, name) == _property(b, name) for a, b in zip(captions, _rolled(captions), strict=True)]
        if name == "position":
            expected = [same and "scattered" not in caption for same, caption in zip(expected, captions, strict=True)]
        assert wrong[f"shown_{name}"].bool().tolist() == expected


def _rolled(captions):
    return [captions[-1], *captions[:-1]]


def _property(caption, name):
    words = caption.split()
    if name == "colour":
        return words[2]
    if name == "form":
        return words[3].removesuffix("es") if words[3] == "crosses" else words[3].rstrip("s") or words[3]
    return words[4:]


def test_sums_are_weighted_and_divided(drawn, tmp_path):
    captions, pictures = drawn
    rows = CaptionedPictures(tmp_path, (6, 6), Patching(4), True, ())
    texts = dict(enumerate(captions))
    latents = to_patches(pictures, 4)
    searches = []

    def nearest(queries):
        """The training pictures are those drawn, each nearest to the one after it."""
        searches.append(len(queries))
        found = torch.cdist(queries.flatten(1), latents.flatten(1)).argmin(1)
        return latents[(found + 1) % COUNT]

    scores = PictureScores(rows, lambda x: x, lambda row: texts[int(row[0])], nearest)
    texts[COUNT] = "a large red cross top left"
    tokens = torch.arange(COUNT)[:, None]
    batch = {"latent": latents, "tokens": tokens, "weight": torch.ones(COUNT)}
    shuffled = {"latent": latents.roll(1, 0)}
    batch["weight"][-1] = 0
    errors = dict.fromkeys(ERRORS, torch.tensor(COUNT - 1.0))
    found = scores.metrics(errors | scores(batch, shuffled, latents, tokens))
    assert [found.pop(name) for name in ERRORS] == [1, 1, 1]
    assert set(found) | set(ERRORS) == set(metric_names(scores))
    assert found["t2l_distance"] == 0
    expected = rms_distance(pictures, pictures.roll(1, 0))[:-1].mean()
    assert found["t2l_distance_shuffled"] == pytest.approx(float(expected), rel=1e-5)
    neighbours = rms_distance(pictures, pictures.roll(-1, 0))[:-1].mean()
    assert found["nearest_distance"] == found["nearest_distance_true"] == pytest.approx(float(neighbours), rel=1e-5)
    # Every search reads all training latents.
    assert searches == [2 * COUNT]
    assert found["shown_colour"] == found["shown_position"] == found["caption_exact"] == found["caption_words"] == 1
    said = torch.full_like(tokens, COUNT)
    words = [sum(a == b for a, b in zip(texts[COUNT].split(), c.split(), strict=True)) / 6 for c in captions[:-1]]
    found = scores.metrics(errors | scores(batch, shuffled, latents, said))
    assert found["caption_words"] == pytest.approx(sum(words) / len(words))


def test_each_picture_is_compared_with_what_is_nearest_to_it(drawn, tmp_path):
    pictures = drawn[1][:4]
    rows = CaptionedPictures(tmp_path, (6, 6), Patching(4), False, ())
    latents = to_patches(pictures, 4)

    def nearest(queries):
        return latents[torch.cdist(queries.flatten(1), latents.flatten(1)).argmin(1)]

    scores = PictureScores(rows, lambda x: x, lambda row: "a dog", nearest)
    batch = {"latent": latents, "tokens": torch.zeros(4, 1, dtype=torch.int64), "weight": torch.ones(4)}
    # Training has the true pictures, and nothing like the sampled ones.
    negatives = to_patches(255 - pictures, 4)
    found = scores(batch, batch, negatives, batch["tokens"])
    assert found["nearest_distance_true"] == 0
    assert found["nearest_distance"] > 1


def test_an_empty_caption_is_right_only_if_nothing_was_said(drawn, tmp_path):
    pictures = drawn[1][:5]
    rows = CaptionedPictures(tmp_path, (6, 6), Patching(4), False, ())
    texts = ["", "a dog", "a cat", "a"]
    latents = to_patches(pictures, 4)
    scores = PictureScores(rows, lambda x: x, lambda row: texts[int(row[0])], lambda x: x)
    batch = {"latent": latents, "tokens": torch.tensor([[0], [0], [1], [1], [1]]), "weight": torch.ones(5)}
    found = scores(batch, batch, latents, torch.tensor([[0], [2], [2], [0], [3]]))
    # A word that was not said is as wrong as another one.
    assert found["caption_words"] == 1 + 0 + 0.5 + 0 + 0.5
    assert found["caption_exact"] == 1


@pytest.mark.parametrize("content", UNREADABLE)
def test_an_earlier_picture_that_cannot_be_read_is_named(content, drawn, tmp_path, caplog):
    captions, pictures = drawn
    earlier = tmp_path / "pictures" / "00000100.png"
    earlier.parent.mkdir()
    earlier.write_bytes(content())
    report_pictures(tmp_path, 200, captions[:2], pictures[:2], pictures[2:4], [])
    assert f"pictures.png could not be written ({earlier}: " in caplog.text
    assert (tmp_path / "pictures" / "00000200.png").exists()


def test_the_grid_shows_the_same_prompts_over_time(drawn, tmp_path):
    captions, pictures = drawn
    red = torch.zeros(2, 24, 24, 3, dtype=torch.uint8)
    red[..., 0] = 200
    report_pictures(tmp_path, 100, captions[:2], pictures[:2], red, [])
    report_pictures(tmp_path, 200, captions[:2], pictures[:2], pictures[2:4], [])
    # A later report of another run of this directory is not part of the past.
    report_pictures(tmp_path, 150, captions[:2], pictures[:2], pictures[4:6], [])
    grid = np.array(Image.open(tmp_path / "pictures.png"))
    assert grid.shape[1] == LABEL + 3 * (CELL + GAP)  # held out, step 100, step 150
    middle = HEADER + CELL // 2
    assert grid[middle, LABEL + CELL + GAP + CELL // 2].tolist() == [200, 0, 0]
    top_left = grid[HEADER, LABEL + 2 * (CELL + GAP)]
    assert top_left.tolist() == pictures[4, 0, 0].tolist()
