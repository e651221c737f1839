"""Pictures of a run: split, buckets, items, order, and what is refused."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from accel_train.config import UsageError
from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.domains.images.buckets import to_image
from accel_train.domains.images.checking.check import CheckConfig
from accel_train.domains.images.dataset import PictureData, prepare_pictures, split_heldout
from accel_train.domains.images.options import PictureDataConfig, PriorConfig
from accel_train.domains.images.weighting.prior import prepare_prior
from tests.domains.images.drawn import drawn, encoded, folder_of

SIZES = [(48, 32), (32, 48), (40, 40), (64, 33), (33, 64), (100, 80)] * 5


def prepared(folder: Path, cache: Path, **options: Any) -> PictureData:
    given = {"resolutions": (32,), "bucket_step": 8, "heldout_fraction": 0.2, "cache_dir": str(cache)} | options
    return prepare_pictures(PictureDataConfig(str(folder), **given))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "data", *SIZES)


def test_items_and_captions(folder: Path, tmp_path: Path) -> None:
    data = prepared(folder, tmp_path / "cache")
    assert len(data.train) + len(data.heldout) == 30
    for index, sample in enumerate(data.train.samples):
        item = data.train[index]
        height, width = data.train.sample_shape(index)
        assert height * width <= 32 * 32
        assert item["pixels"].shape == (3, height, width)
        assert item["target_size"].tolist() == [height, width]
        assert item["original_size"].tolist() == [sample.picture.height, sample.picture.width]
    first = data.train.samples[0]
    assert data.train.captions(torch.tensor([0])) == [(folder / first.picture.name).with_suffix(".txt").read_text()]
    assert any(re.match(r"[2-9] buckets \(width x height\): ", notice) for notice in data.notices)
    one = prepared(folder_of(tmp_path / "one", (64, 64), (64, 64)), tmp_path / "cache", heldout_fraction=0)
    assert "1 bucket (width x height): 32x32: 2" in one.notices


def test_pixels_of_an_item_are_those_of_its_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (64, 64), (64, 64))
    data = prepared(folder, tmp_path / "cache", heldout_fraction=0)
    for index, sample in enumerate(data.train.samples):
        image = Image.open(folder / sample.picture.name)
        expected = image.resize((32, 32), Image.Resampling.LANCZOS)
        assert (np.asarray(to_image(data.train[index]["pixels"])) == np.asarray(expected)).all()


def test_transparent_pixels_show_the_background_of_the_options(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(4):
        clear = Image.new("RGBA", (40, 40), (0, 10 * number, 255, 0))
        (tmp_path / "data" / f"{number}.png").write_bytes(encoded(clear))
        (tmp_path / "data" / f"{number}.txt").write_text("clear")
    data = prepared(tmp_path / "data", tmp_path / "cache", background="red", heldout_fraction=0.5)
    for split in (data.train, data.heldout):
        for index in range(len(split)):
            assert split[index]["pixels"].amin((1, 2)).tolist() == [1, -1, -1]
            assert split[index]["pixels"].amax((1, 2)).tolist() == [1, -1, -1]


def test_the_split_depends_on_each_file_alone(folder: Path, tmp_path: Path) -> None:
    before = prepared(folder, tmp_path / "cache")
    held = {sample.picture.content for sample in before.heldout.samples}
    assert 1 <= len(held) < 15
    assert not held & {sample.picture.content for sample in before.train.samples}
    for number in range(20):
        (folder / f"new{number}.png").write_bytes(encoded(drawn(40 + number, 40, 99)))
        (folder / f"new{number}.txt").write_text("new")
    (folder / "000.png").rename(folder / "renamed.png")
    (folder / "000.txt").rename(folder / "renamed.txt")
    after = prepared(folder, tmp_path / "cache")
    assert held <= {sample.picture.content for sample in after.heldout.samples}
    assert not held & {sample.picture.content for sample in after.train.samples}


def test_the_default_folder_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Any question to the Hub would import it.
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"--data\.path 'pictures': the default, but there is no such folder here"):
        prepare_pictures(PictureDataConfig(cache_dir=str(tmp_path / "cache")))


def test_few_pictures_have_one_held_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48), (40, 40))
    data = prepared(folder, tmp_path / "cache", heldout_fraction=1e-9)
    assert (len(data.train), len(data.heldout)) == (2, 1)
    assert any("few pictures are held out, 1 of 3: a hash of each file decides" in line for line in data.notices)
    none = prepared(folder, tmp_path / "cache", heldout_fraction=0)
    assert len(none.heldout) == 0
    assert not any("few pictures" in line for line in none.notices)
    assert split_heldout(data.heldout.samples, 0.5) == (data.heldout.samples, [])


def test_held_out_pictures_of_their_own(folder: Path, tmp_path: Path) -> None:
    other = folder_of(tmp_path / "other", (48, 32), (50, 50))
    data = prepared(folder, tmp_path / "cache", heldout_path=str(other), heldout_fraction=0)
    # The first of them is a training picture too.
    assert (len(data.train), len(data.heldout)) == (29, 2)


def test_columns_of_one_source_beside_a_folder_without(folder: Path, tmp_path: Path) -> None:
    listed = folder_of(tmp_path / "listed", (48, 32), (50, 50), (33, 64))
    names = sorted(path.name for path in listed.glob("*.png"))
    rows = [json.dumps({"file_name": name, "prompt": f"prompt of {name}"}) for name in names]
    (listed / "metadata.jsonl").write_text("\n".join(rows))
    options: dict[str, Any] = {"caption_column": "prompt", "heldout_fraction": 0}
    data = prepared(listed, tmp_path / "cache", heldout_path=str(folder), **options)
    assert all(sample.caption.startswith("prompt of ") for sample in data.train.samples)
    assert not any(sample.caption.startswith("prompt of ") for sample in data.heldout.samples)
    data = prepared(folder, tmp_path / "cache", heldout_path=str(listed), **options)
    assert all(sample.caption.startswith("prompt of ") for sample in data.heldout.samples)
    with pytest.raises(UsageError, match=r"caption_column 'prompt' has no effect with --data\.path"):
        prepared(folder, tmp_path / "cache", **options)


def test_the_fingerprint_is_that_of_files_captions_and_sizes(folder: Path, tmp_path: Path) -> None:
    def fingerprint(**options: Any) -> str:
        return prepared(folder, tmp_path / "cache", **options).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    assert len({first, *(fingerprint(**o) for o in ({"flip": True}, {"group_size": 2}, {"resolutions": (40,)}))}) == 4
    (folder / "003.txt").write_text("another caption")
    second = fingerprint()
    assert second != first
    (folder / "003.png").write_bytes(encoded(drawn(64, 33, 77)))
    assert fingerprint() not in (first, second)


def test_crops_and_flips_are_drawn_from_the_global_generator(folder: Path, tmp_path: Path) -> None:
    data = prepared(folder, tmp_path / "cache", crop="random", flip=True)
    index = next(i for i, s in enumerate(data.train.samples) if s.picture.width == 64)

    def drawn_frames(dataset: Any) -> list[Any]:
        random.seed(3)
        return [dataset.draw_frame(index) for _ in range(40)]

    frames = drawn_frames(data.train)
    assert frames == drawn_frames(data.train)
    assert len({frame.flipped for frame in frames}) == 2
    assert len({frame.crop_top_left for frame in frames}) > 1
    # One option does not change what is drawn for the other.
    flips = drawn_frames(prepared(folder, tmp_path / "cache", flip=True).train)
    assert [frame.flipped for frame in flips] == [frame.flipped for frame in frames]
    assert {frame.crop_top_left for frame in flips} == {data.train.frame(index).crop_top_left}
    random.seed(3)
    mirrored = next(frame for frame in frames if frame.flipped)
    plain = data.train.pixels(index, mirrored._replace(flipped=False, crop_top_left=(0, 0)))
    flipped = data.train.pixels(index, mirrored._replace(crop_top_left=(0, 0)))
    whole = ImageOps.mirror(to_image(flipped))
    assert plain.shape == flipped.shape
    assert np.asarray(whole).shape == np.asarray(to_image(plain)).shape
    still = data.heldout.draw_frame(0)
    assert not still.flipped


def test_several_resolutions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (20, 20), (40, 40), (70, 70), (200, 200))
    options = {"resolutions": (32, 64), "heldout_fraction": 0}
    largest = prepared(folder, tmp_path / "cache", **options)
    assert [sample.target_size for sample in largest.train.samples] == [(32, 32), (32, 32), (64, 64), (64, 64)]
    each = prepared(folder, tmp_path / "cache", resolution_choice="each", **options)
    assert len(each.train) == 6
    kept = prepared(folder, tmp_path / "cache", enlarge=False, max_left_out=0.5, **options)
    assert len(kept.train) == 3
    assert any("smaller than its bucket" in notice for notice in kept.notices)
    assert any("1 samples are enlarged" in notice for notice in largest.notices)


def test_pictures_without_captions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48), (40, 40))
    (folder / "000.txt").unlink()
    (folder / "001.txt").write_text(" ")
    says = r"2 of 3 pictures.*max_left_out 0\.1.*picture without a caption: 000\.png.*each class has a folder"
    with pytest.raises(UsageError, match=says):
        prepared(folder, tmp_path / "cache")
    left = prepared(folder, tmp_path / "cache", max_left_out=1.0, heldout_fraction=0)
    assert len(left.train) == 1
    assert "1 left out, its caption is empty: 001.png (give --data.default_caption to use it)" in left.notices
    filled = prepared(folder, tmp_path / "cache", default_caption="a dog", heldout_fraction=0)
    assert filled.train.captions(torch.arange(3)) == ["a dog", "a dog", "picture number 2"]
    assert prepared(folder, tmp_path / "cache", default_caption="").notices


def test_a_prefix_is_before_every_caption_and_not_those_of_the_prior(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48), (40, 40))
    options: dict[str, Any] = {"heldout_fraction": 0.3, "caption_prefix": "sks, ", "prior": PriorConfig(str(folder))}
    data = prepared(folder, tmp_path / "cache", **options)
    found = sorted(caption for part in (data.train, data.heldout) for caption in part.captions(torch.arange(len(part))))
    assert found == [f"sks, picture number {number}" for number in range(3)]
    assert prepared(folder, tmp_path / "cache", heldout_fraction=0.3).fingerprint != data.fingerprint
    given = PictureDataConfig(
        str(folder), resolutions=(32,), bucket_step=8, cache_dir=str(tmp_path / "cache"), **options
    )
    found_prior = prepare_prior(given, data.train)
    assert found_prior is not None
    beside = found_prior[0].captions(torch.arange(len(found_prior[0])))
    assert set(beside) <= {f"picture number {number}" for number in range(3)}


def test_a_prior_has_captions_of_its_own(tmp_path: Path) -> None:
    """That of the training pictures may name their subject, which the class would then learn."""
    folder = folder_of(tmp_path / "class", (32, 32))
    (folder / "000.txt").unlink()
    options: dict[str, Any] = {"default_caption": "sks dog", "heldout_fraction": 0}
    data = prepared(folder_of(tmp_path / "data", (32, 32)), tmp_path / "cache", **options)

    def of_prior(caption: str | None) -> list[str]:
        cache = str(tmp_path / "cache")
        asked = PriorConfig(str(folder), caption=caption)
        given = PictureDataConfig(resolutions=(32,), bucket_step=8, cache_dir=cache, prior=asked, **options)
        found = prepare_prior(given, data.train)
        assert found is not None
        return found[0].captions(torch.arange(len(found[0])))

    with pytest.raises(UsageError, match=r"^--data.prior.path .*000.png \(give --data.prior.caption to use it\)"):
        of_prior(None)
    assert of_prior("a dog") == ["a dog"]
    assert of_prior("") == [""]


def test_a_default_caption_takes_the_place_of_no_caption_that_is_not_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    (folder / "000.txt").rename(folder / "000.caption")
    with pytest.raises(UsageError, match=r"such as 000\.caption for 000\.png; --data\.caption_extension is \.txt"):
        prepared(folder, tmp_path / "cache", default_caption="a dog")


def test_an_edit_during_the_run_is_an_error(folder: Path, tmp_path: Path) -> None:
    data = prepared(folder, tmp_path / "cache")
    sample = data.train.samples[0]
    (folder / sample.picture.name).write_bytes(encoded(drawn(48, 32, 1234)))
    with pytest.raises(RuntimeError, match=f"{sample.picture.name} has changed since the run began"):
        data.train[0]


@pytest.mark.fault(
    "D1",
    injected="buckets of fewer pictures than a micro-batch",
    outcome="smaller micro-batches; no picture is dropped",
)
@pytest.mark.parametrize("group_size", [1, 4])
def test_buckets_with_fewer_pictures_than_a_micro_batch(tmp_path: Path, group_size: int) -> None:
    folder = folder_of(tmp_path / "data", *[(40, 40)] * 9, (64, 33), (33, 64))
    data = prepared(folder, tmp_path / "cache", heldout_fraction=0, group_size=group_size)
    order = StepSampler(11, 4, seed=0, blocks=data.train.order)
    seen: list[int] = []
    config = LoaderConfig(num_workers=0)
    for step in iterate_steps(
        data.train, order, BatchShard(0, 1, 4), start_step=0, max_steps=11, device=torch.device("cpu"), config=config
    ):
        for batch in step.micro_batches:
            assert batch["pixels"].shape[2:] == tuple(batch["target_size"][0].tolist())
            assert bool((batch["target_size"] == batch["target_size"][0]).all())
            seen += batch["sample"].tolist()
    # Four epochs: none is dropped and none is repeated, not even those alone in their bucket.
    assert sorted(seen) == sorted(list(range(11)) * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolutions": (4,)}, "each resolution must be at least bucket_step"),
        ({"resolutions": (32, 32)}, "each may be given only once"),
        ({"resolution_choice": "each"}, "has no effect with one resolution"),
        ({"caption_extension": "txt"}, "a dot and one word are required"),
        ({"caption_extension": ".en.txt"}, "'.en.txt': a dot and one word"),
        ({"caption_extension": "."}, "a dot and one word"),
        ({"background": "wite"}, "background 'wite'"),
        ({"max_aspect": 0.5}, "max_aspect 0.5"),
    ],
)
def test_options_that_cannot_be_obeyed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PictureDataConfig("data", **({"resolutions": (32,), "bucket_step": 8} | options))


def test_a_check_refuses_the_same_extensions() -> None:
    with pytest.raises(UsageError, match=r"^--caption_extension 'txt': a dot and one word are required"):
        CheckConfig(caption_extension="txt")
