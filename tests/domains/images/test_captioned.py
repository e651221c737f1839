"""Captioned pictures as rows of latents: patches, files, the user's own pictures, refusals."""

import json

import numpy as np
import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.images.captioned import PictureConfig, prepare_pictures
from accel_train.domains.images.demo import emoji, shapes
from accel_train.domains.models.patches import from_patches, to_patches
from accel_train.domains.text.options import DataConfig
from accel_train.domains.text.prepare import prepare_data

SHAPES = PictureConfig(latents="pixels", size=16, patch=4, samples=20)


def test_patches_are_rows_of_the_picture_and_come_back_exactly():
    pictures = torch.randint(0, 256, (3, 8, 12, 3), dtype=torch.uint8)
    patches = to_patches(pictures, 4)
    assert patches.shape == (3, 6, 48)
    assert torch.equal(patches[1, 4].view(4, 4, 3), pictures[1, 4:8, 4:8].float() / 127.5 - 1)
    assert torch.equal(from_patches(patches, (2, 3), 4), pictures)
    assert torch.equal(from_patches(patches.half(), (2, 3), 4), pictures)


def test_shapes_reach_the_run_with_their_captions(tmp_path):
    data = DataConfig(path="shapes", cache_dir=str(tmp_path), vocab_size=300, max_length=40)
    pictures = prepare_pictures(SHAPES, data)
    assert pictures is not None
    prepared = prepare_data(pictures.rows(data))
    captions, pixels = shapes.pictures(0, 20, 16)
    assert list(prepared.train.texts) == captions
    rows = prepared.train.batch(list(range(20)))
    shown = pictures.pixels(prepared.assets.denormalise(rows["latent"]))
    # Normalised in fp32: a value may round to its neighbour.
    assert (shown.int() - pixels.int()).abs().max() <= 1
    pairs = {" ".join(text.split()[2:4]).rstrip("s") for text in prepared.heldout.texts}
    assert pairs
    assert not pairs & {" ".join(text.split()[2:4]).rstrip("s") for text in captions}


def test_a_folder_of_pictures_of_your_own(tmp_path):
    from PIL import Image

    folder = tmp_path / "mine"
    folder.mkdir()
    for number in range(8):
        # Twice as wide as high, with the colour in the middle square.
        pixels = np.zeros((20, 40, 3), np.uint8)
        pixels[:, 10:30] = (30 * number, 200, 50)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        if number < 7:
            (folder / f"{number}.txt").write_text(f"picture number {number}")
    data = DataConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), vocab_size=300, heldout_fraction=0.4)
    pictures = prepare_pictures(PictureConfig(latents="pixels", size=8, patch=4), data)
    assert pictures is not None
    assert any("1 pictures without a caption" in notice for notice in pictures.notices)
    prepared = prepare_data(pictures.rows(data))
    texts = [*prepared.train.texts, *prepared.heldout.texts]
    assert sorted(texts) == [f"picture number {number}" for number in range(7)]
    first = int(prepared.train.texts[0].split()[-1])
    shown = pictures.pixels(prepared.assets.denormalise(prepared.train.batch([0])["latent"]))
    # Beside its edges, which the filter sharpens.
    assert (shown[0, :, 3:5].int() - torch.tensor([30 * first, 200, 50])).abs().max() <= 3


def test_flags_can_be_left_out(tmp_path):
    data = DataConfig(path="emoji", cache_dir=str(tmp_path))
    pictures = prepare_pictures(PictureConfig(latents="pixels", patch=8, leave_out=("flags",)), data)
    assert pictures is not None
    content = "".join((pictures.folder / f"{part}.jsonl").read_text("utf-8") for part in ("train", "heldout"))
    captions = [json.loads(line)["text"] for line in content.splitlines()]
    assert len(captions) == 3526 - 270
    assert not any("country flag" in caption for caption in captions)


def test_people_stay_in_yellow_without_the_skin_tones(tmp_path):
    data = DataConfig(path="emoji", cache_dir=str(tmp_path))
    pictures = prepare_pictures(PictureConfig(latents="pixels", patch=8, leave_out=("flags", "skin tones")), data)
    assert pictures is not None
    content = "".join((pictures.folder / f"{part}.jsonl").read_text("utf-8") for part in ("train", "heldout"))
    captions = [json.loads(line)["text"] for line in content.splitlines()]
    whole = [one for one in emoji.list_emoji() if one.group != "flags"]
    assert sorted(captions) == sorted(one.caption for one in whole if not one.tone)
    assert "waving hand sign, hand fingers open" in captions
    assert not any("dark skin tone" in caption for caption in captions if "component" not in caption)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 48}, "size 48 has no effect with --pictures.latents none"),
        ({"latents": "pixels", "size": 30}, "multiple of the patch is required. Set size 32"),
        ({"latents": "pixels", "leave_out": ("flag",)}, "no group of the bundled emoji"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        PictureConfig(**options)


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"leave_out": ("flags",)}, "shapes", "leave_out .* has no effect with --data.path shapes"),
        ({"samples": 5}, "emoji", "samples 5 has no effect with --data.path emoji"),
        ({"size": 48}, "emoji", "32 or 64 pixels"),
    ],
)
def test_a_source_refuses_what_it_does_not_read(options, path, message, tmp_path):
    config = PictureConfig(latents="pixels", **options)
    with pytest.raises(UsageError, match=message):
        prepare_pictures(config, DataConfig(path=path, cache_dir=str(tmp_path)))


def test_a_heldout_path_is_refused(tmp_path):
    data = DataConfig(path="shapes", heldout_path="x", heldout_fraction=0.0, cache_dir=str(tmp_path))
    with pytest.raises(UsageError, match="heldout_path 'x' has no effect"):
        prepare_pictures(SHAPES, data)
