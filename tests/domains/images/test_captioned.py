"""Captioned pictures as rows of latents: patches, files, the user's own pictures, refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.images.captioned import PictureConfig, prepare_pictures
from accel_train.domains.images.demo import emoji, shapes
from accel_train.domains.models.patches import from_patches, to_patches
from accel_train.domains.text.dataset import load_assets
from accel_train.domains.text.latents.drawn import decoded
from accel_train.domains.text.options import DataConfig
from accel_train.domains.text.prepare import prepare_data
from tests.domains.images import tiny_pipelines as tiny

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
    for number in range(12):
        # Twice as wide as high, with the colour in the middle square.
        pixels = np.zeros((20, 40, 3), np.uint8)
        pixels[:, 10:30] = (20 * number, 200, 50)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        if number < 11:
            (folder / f"{number}.txt").write_text(f"picture number {number}")
    data = DataConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), vocab_size=300, heldout_fraction=0.4)
    pictures = prepare_pictures(PictureConfig(latents="pixels", size=8, patch=4), data)
    assert pictures is not None
    assert any("1 left out, picture without a caption: 11.png" in notice for notice in pictures.notices)
    prepared = prepare_data(pictures.rows(data))
    texts = [*prepared.train.texts, *prepared.heldout.texts]
    assert sorted(texts) == sorted(f"picture number {number}" for number in range(11))
    first = int(prepared.train.texts[0].split()[-1])
    shown = pictures.pixels(prepared.assets.denormalise(prepared.train.batch([0])["latent"]))
    # Beside its edges, which the filter sharpens.
    assert (shown[0, :, 3:5].int() - torch.tensor([20 * first, 200, 50])).abs().max() <= 3


def save_vae(folder, *, in_pipeline=False):
    """A tiny autoencoder of 4 channels that halves the sides, with random weights."""
    torch.manual_seed(0)
    vae = tiny.vae(4)
    vae.save_pretrained(folder / "vae" if in_pipeline else folder)
    return vae.eval()


def vae_config(folder, **options):
    return PictureConfig(latents="vae", vae=str(folder), size=16, patch=2, samples=20, **options)


def test_latents_are_the_means_of_the_autoencoder(tmp_path):
    vae = save_vae(tmp_path / "vae")
    data = DataConfig(path="shapes", cache_dir=str(tmp_path / "cache"), vocab_size=300, max_length=40)
    pictures = prepare_pictures(vae_config(tmp_path / "vae", vae_batch_size=3), data)
    assert pictures is not None
    assert pictures.grid == (4, 4)
    assert any("4 channels, 1 for 2 x 2 pixels" in notice for notice in pictures.notices)
    prepared = prepare_data(pictures.rows(data), pictures=pictures)
    _, pixels = shapes.pictures(0, 20, 16)
    values = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        mean = vae.encode(values).latent_dist.mean  # (20, 4, 8, 8)
        shown = vae.decode(mean[:2]).sample
    latents = prepared.assets.denormalise(prepared.train.batch(list(range(20)))["latent"])
    assert latents.shape == (20, 16, 16)
    # A token holds 2 x 2 latents of 4 channels, the channels last.
    token = latents[3, 6].view(2, 2, 4)
    assert torch.allclose(token, mean[3, :, 2:4, 4:6].permute(1, 2, 0), atol=2e-3)
    levels = (shown.permute(0, 2, 3, 1).clamp(-1, 1) + 1) * 127.5
    assert (pictures.pixels(latents[:2]).float() - levels).abs().max() < 1.5
    prepared.assets.save(tmp_path / "assets")
    reference = load_assets(tmp_path / "assets").vae
    assert reference == pictures.vae
    assert reference is not None
    assert (reference.source, reference.channels, reference.reduction) == (str(tmp_path / "vae"), 4, 2)
    drawn_again = decoded(latents[:2], (4, 4), reference, "cpu")
    assert torch.equal(drawn_again, pictures.pixels(latents[:2]))


def test_the_rows_of_an_autoencoder_are_the_same_data_on_any_machine(tmp_path):
    """Its last bits differ there, which must not look like other data."""
    save_vae(tmp_path / "vae", in_pipeline=True)
    fingerprints = []
    for name in ("here", "there"):
        data = DataConfig(path="shapes", cache_dir=str(tmp_path / name), vocab_size=300, max_length=40)
        pictures = prepare_pictures(vae_config(tmp_path / "vae"), data)
        assert pictures is not None
        if name == "there":
            for shard in pictures.folder.glob("*.npy"):
                np.save(shard, np.load(shard) * np.float16(1.001))
        fingerprints.append(prepare_data(pictures.rows(data)).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    torch.manual_seed(1)
    tiny.vae(4).save_pretrained(tmp_path / "vae" / "vae")
    data = DataConfig(path="shapes", cache_dir=str(tmp_path / "here"), vocab_size=300, max_length=40)
    pictures = prepare_pictures(vae_config(tmp_path / "vae"), data)
    assert pictures is not None
    assert prepare_data(pictures.rows(data)).fingerprint != fingerprints[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vae": None}, "vae needs an autoencoder, and none is given"),
        ({"size": 18}, "size 18 with --pictures.patch 2: a multiple of 4 is required.* Set size 16"),
        ({"vae": "nothing"}, r"--pictures.vae 'nothing' cannot be loaded .*diffusers autoencoder"),
        ({"vae_revision": "main"}, "is a folder and has no revision 'main'"),
        ({"latents": "pixels"}, "pictures.vae: .* has no effect with pictures.latents: pixels"),
    ],
)
def test_autoencoders_that_cannot_be_used(options, message, tmp_path):
    save_vae(tmp_path / "vae")
    given = {"latents": "vae", "vae": str(tmp_path / "vae"), "size": 16, "patch": 2} | options
    with pytest.raises(UsageError, match=message):
        prepare_pictures(PictureConfig(**given), DataConfig(path="shapes", cache_dir=str(tmp_path)))


def test_an_autoencoder_of_videos_and_another_one_are_refused(tmp_path):
    from diffusers import AutoencoderKLQwenImage

    from accel_train.domains.models.vae import load_vae

    folder = tmp_path / "video"
    made = AutoencoderKLQwenImage(base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False])
    made.save_pretrained(folder)
    with pytest.raises(UsageError, match="a AutoencoderKLQwenImage cannot encode a picture of 64 x 64"):
        load_vae(str(folder), None, "--pictures.vae")
    save_vae(tmp_path / "vae")
    recorded = load_vae(str(tmp_path / "vae"), None, "the autoencoder").reference
    for change in ({"sha256": "123456"}, {"config": "123456"}):
        with pytest.raises(UsageError, match="the model was trained on latents of 123456"):
            load_vae(str(tmp_path / "vae"), None, "the autoencoder", replace(recorded, **change))


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
        ({"size": 48}, "size: 48: has no effect with pictures.latents: none"),
        ({"latents": "pixels", "size": 30}, "multiple of the patch is required. Set size 32"),
        ({"latents": "pixels", "leave_out": ("flag",)}, "not a group of bundled emoji"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        PictureConfig(**options)


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"leave_out": ("flags",)}, "shapes", "leave_out: .* has no effect with data.path: shapes"),
        ({"samples": 5}, "emoji", "samples: 5: has no effect with data.path: emoji"),
        ({"size": 48}, "emoji", "32 or 64 pixels"),
    ],
)
def test_a_source_refuses_what_it_does_not_read(options, path, message, tmp_path):
    config = PictureConfig(latents="pixels", **options)
    with pytest.raises(UsageError, match=message):
        prepare_pictures(config, DataConfig(path=path, cache_dir=str(tmp_path)))


def test_a_heldout_path_is_refused(tmp_path):
    data = DataConfig(path="shapes", heldout_path="x", heldout_fraction=0.0, cache_dir=str(tmp_path))
    with pytest.raises(UsageError, match="heldout_path: x: has no effect"):
        prepare_pictures(SHAPES, data)
