"""Generated shapes: what a caption says is what the pixels show, and held-out pairs stay held out."""

import pytest
import torch

from accel_train.domains.images.demo import shapes
from accel_train.domains.images.demo.shape_reading import read_caption, read_picture


@pytest.mark.parametrize("size", [24, 32])
def test_every_scene_is_read_back_from_its_pixels(size):
    drawn = [*shapes.scenes(3, 40), *shapes.scenes(3, 20, heldout=True)]
    for scene, centres in drawn:
        assert read_picture(shapes.draw(scene, centres, size)) == scene


def test_every_caption_is_read_back_and_has_six_words():
    for scene, _ in shapes.scenes(1, 200):
        assert read_caption(scene.caption) == scene
        assert len(scene.caption.split()) == 6


def test_a_wrong_picture_is_not_taken_for_a_right_one():
    scene = read_caption("a large red square top left")
    centres = torch.tensor([[0.2, 0.2]])
    picture = shapes.draw(scene, centres, 24)
    assert read_picture(picture) == scene
    for flipped, word in ((picture.flip(0), "bottom"), (picture.flip(1), "right")):
        shown = read_picture(flipped)
        assert shown is not None
        assert word in shown.caption
    shown = read_picture(picture.flip(2))
    assert shown is not None
    assert shown.colour == "blue"
    assert read_picture(torch.full((24, 24, 3), 255, dtype=torch.uint8)) is None


def test_held_out_pairs_occur_in_no_training_picture():
    trained = {(scene.colour, scene.form) for scene, _ in shapes.scenes(0, 1000)}
    heldout = {(scene.colour, scene.form) for scene, _ in shapes.scenes(0, 200, heldout=True)}
    assert len(heldout) == len(shapes.FORMS)
    assert not trained & heldout
    # Apart, every colour of a held-out pair and every form have been seen.
    assert {colour for colour, _ in heldout} <= {colour for colour, _ in trained}
    assert len(trained) == len(shapes.COLOURS) * len(shapes.FORMS) - len(heldout)


def test_a_picture_is_a_function_of_seed_and_index():
    captions, pictures = shapes.pictures(5, 8, 24)
    more_captions, more = shapes.pictures(5, 12, 24)
    assert more_captions[:8] == captions
    assert torch.equal(more[:8], pictures)
    assert shapes.pictures(6, 8, 24)[0] != captions
