"""Captioned pictures of your own in recipes/mmdit.py: their split, their sources, and what is refused of them."""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from pyarrow import Table, parquet

from accel_train.config import UsageError
from accel_train.data.tables import text_sources
from accel_train.domains.images import folders
from accel_train.domains.images.captioned import PictureConfig, prepare_pictures
from accel_train.domains.text.corpus import Corpus, read_corpus, split_heldout
from accel_train.domains.text.dataset import PreparedData
from accel_train.domains.text.options import DataConfig
from accel_train.domains.text.prepare import prepare_data


def drawn(number: int) -> Image.Image:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, :4] = (number % 256, 40, 200)
    pixels[2:6, 2:6] = (90, (7 * number) % 256, 10)
    return Image.fromarray(pixels)


def encoded(number: int) -> bytes:
    file = io.BytesIO()
    drawn(number).save(file, "PNG")
    return file.getvalue()


def rows_folder(folder: Path, captions: list[tuple[int, str]], column: str = "text") -> Path:
    """Write pictures with captions in a metadata.jsonl: (number of the picture, caption) each."""
    folder.mkdir(parents=True)
    for number in {number for number, _ in captions}:
        (folder / f"{number}.png").write_bytes(encoded(number))
    rows = [{"file_name": f"{number}.png", column: caption} for number, caption in captions]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table(file: Path, numbers: range, **columns: list[str]) -> Path:
    parquet.write_table(Table.from_pydict({"image": [encoded(number) for number in numbers], **columns}), file)
    return file


def prepare(path: Path, tmp_path: Path, options: dict[str, Any] | None = None, **data: Any) -> PreparedData:
    config = DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), vocab_size=300, **data)
    pictures = prepare_pictures(PictureConfig(latents="pixels", size=8, patch=4, **(options or {})), config)
    assert pictures is not None
    return prepare_data(pictures.rows(config), pictures=pictures)


def sides(prepared: PreparedData) -> tuple[set[bytes], set[bytes]]:
    """The latents of either side. Neighbours in colour have other ones."""

    def of(data: Any) -> set[bytes]:
        return {data[index]["latent"].numpy().tobytes() for index in range(len(data))}

    return of(prepared.train), of(prepared.heldout)


def test_a_picture_of_several_captions_is_on_one_side(tmp_path: Path) -> None:
    words = ["a photo of", "there is", "we see", "look at", "picture showing"]
    captions = [(number, f"{start} thing {number}") for number in range(40) for start in words]
    # A copy of a file under another name is the same picture.
    folder = rows_folder(tmp_path / "mine", [*captions, (40, "its copy")])
    (folder / "40.png").write_bytes(encoded(3))
    prepared = prepare(folder, tmp_path, heldout_fraction=0.2)
    assert len(prepared.train) + len(prepared.heldout) == 201
    train, heldout = sides(prepared)
    assert len(train) + len(heldout) == 40  # none is on both
    # The fraction is that of the pictures: the smallest of five hashes would hold out 27 of them.
    assert 2 <= len(heldout) <= 15
    shards = [np.load(file) for file in (tmp_path / "cache" / "pictures").glob("*/*.npy")]
    assert sum(map(len, shards)) == 40  # each is stored once


def test_one_caption_of_several_pictures_is_on_one_side_too(tmp_path: Path) -> None:
    captions = [(number, caption) for number in range(60) for caption in (f"own {number}", f"Pair, {number // 2}!")]
    prepared = prepare(rows_folder(tmp_path / "mine", captions), tmp_path, heldout_fraction=0.3)
    train, heldout = sides(prepared)
    assert len(train) + len(heldout) == 60
    words = [
        {text.rpartition(" ")[2] for text in data.texts if "Pair" in text}
        for data in (prepared.train, prepared.heldout)
    ]
    assert words[0]
    assert words[1]
    assert not words[0] & words[1]


def test_each_folder_is_listed_once_in_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, heldout = (
        rows_folder(tmp_path / side / "a", [(n, f"thing {n}") for n in range(first, first + 4)])
        for side, first in (("train", 0), ("heldout", 4))
    )
    listed: list[Path] = []
    listdir = os.listdir

    def counted(folder: Path) -> list[str]:
        listed.append(Path(folder))
        return listdir(folder)

    monkeypatch.setattr(folders.os, "listdir", counted)
    config = DataConfig(path=str(train.parent), heldout_path=str(heldout.parent), cache_dir=str(tmp_path / "cache"))
    prepare_pictures(PictureConfig(latents="pixels", size=8, patch=4), config)
    # Besides the cache.
    of_sources = Counter(folder for folder in listed if not folder.is_relative_to(tmp_path / "cache"))
    assert of_sources == dict.fromkeys((train, train.parent, heldout, heldout.parent), 1)


def test_each_caption_is_hashed_once_in_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its side before pictures are encoded, and for the split of the rows."""
    captions = [(number, f"{start} {number // 2}") for number in range(40) for start in ("thing", "look, a thing")]
    folder = rows_folder(tmp_path / "mine", captions)
    hashed: list[str] = []
    content_key = text_sources.content_key

    def counted(text: str) -> bytes:
        hashed.append(text)
        return content_key(text)

    monkeypatch.setattr(text_sources, "content_key", counted)
    prepared = prepare(folder, tmp_path, heldout_fraction=0.3)
    assert sorted(hashed) == sorted({caption for _, caption in captions})
    unaided = split_heldout(read_corpus_of(tmp_path), 0.3)
    assert [len(prepared.train), len(prepared.heldout)] == [len(side) for side in unaided]
    assert all(unaided)


def read_corpus_of(tmp_path: Path) -> Corpus:
    """The rows in the cache."""
    (rows,) = (tmp_path / "cache" / "pictures").glob("*/train.jsonl")
    return read_corpus(str(rows), split="train", text_column="text", max_bad_rows=0, with_references=True)


def test_pictures_of_one_caption_are_split_by_its_words_alone(tmp_path: Path) -> None:
    captions = [f"thing {number}" for number in range(50)]
    prepared = prepare(rows_folder(tmp_path / "mine", list(enumerate(captions))), tmp_path, heldout_fraction=0.2)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(captions))
    config = DataConfig(
        path=str(texts), cache_dir=str(tmp_path / "cache"), vocab_size=300, latent_dim=4, heldout_fraction=0.2
    )
    alone = prepare_data(config)
    assert list(prepared.heldout.texts) == list(alone.heldout.texts)
    assert list(prepared.train.texts) == list(alone.train.texts)


def test_held_out_pictures_of_their_own(tmp_path: Path) -> None:
    """Captions may be classes, which are on both sides; a picture is not."""
    classes = ["red", "green", "blue"]
    train = rows_folder(tmp_path / "train", [(number, classes[number % 3]) for number in range(20)])
    heldout = rows_folder(tmp_path / "heldout", [(number, classes[number % 3]) for number in range(18, 30)])
    prepared = prepare(train, tmp_path, heldout_path=str(heldout))
    assert (len(prepared.train), len(prepared.heldout)) == (18, 12)
    assert set(prepared.train.texts) == set(prepared.heldout.texts) == set(classes)
    assert not set.intersection(*sides(prepared))
    with pytest.raises(
        UsageError, match=r"0 held-out captions.* leaves 3 groups .*Give separate held-out .*--data\.heldout_path"
    ):
        prepare(train, tmp_path, heldout_fraction=0.001)
    with pytest.raises(UsageError, match="0 training and 20 held-out captions"):
        prepare(train, tmp_path, heldout_path=str(train))
    with pytest.raises(UsageError, match=r"--data\.heldout_path 'split=test': .* has no splits"):
        prepare(train, tmp_path, heldout_path="split=test")


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    def split(first: int) -> datasets.Dataset:
        numbers = range(first, first + 20)
        images = [{"bytes": encoded(number), "path": None} for number in numbers]
        columns = {"image": images, "text": [f"thing {number}" for number in numbers]}
        features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
        return datasets.Dataset.from_dict(columns, features=features)

    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": split(0), "other": split(20)}).save_to_disk(str(folder))
    prepared = prepare(folder, tmp_path, split="other", heldout_fraction=0.3)
    texts = {*prepared.train.texts, *prepared.heldout.texts}
    assert texts == {f"thing {number}" for number in range(20, 40)}
    prepared = prepare(folder, tmp_path, heldout_path="split=other")
    assert (len(prepared.train), len(prepared.heldout)) == (20, 20)
    assert set(prepared.heldout.texts) == texts


def test_columns_are_named(tmp_path: Path) -> None:
    numbers = range(30)
    french, other = ([f"{word} {number}" for number in numbers] for word in ("chose", "text"))
    file = table(tmp_path / "two.parquet", numbers, text=other, french=french)
    prepared = prepare(file, tmp_path, text_column="french", heldout_fraction=0.3)
    assert sorted([*prepared.train.texts, *prepared.heldout.texts]) == sorted(french)
    folder = rows_folder(tmp_path / "mine", list(enumerate(french)), "description")
    prepared = prepare(folder, tmp_path, text_column="description", heldout_fraction=0.3)
    assert sorted([*prepared.train.texts, *prepared.heldout.texts]) == sorted(french)
    rows = {"image": [encoded(number) for number in numbers], "mask": [encoded(99) for _ in numbers], "text": french}
    parquet.write_table(Table.from_pydict(rows), tmp_path / "masks.parquet")
    with pytest.raises(UsageError, match=r"2 columns of pictures.*Name it with --pictures\.image_column"):
        prepare(tmp_path / "masks.parquet", tmp_path)
    prepared = prepare(tmp_path / "masks.parquet", tmp_path, {"image_column": "image"}, heldout_fraction=0.3)
    assert len(set.union(*sides(prepared))) == 30


@pytest.mark.parametrize(
    ("options", "data", "says"),
    [
        ({}, {"latents": "elsewhere"}, r"data\.latents: elsewhere: has no effect with pictures\.latents: pixels"),
        ({}, {"normalise": False}, r"data\.normalise: false: has no effect with pictures\.latents: pixels"),
        ({}, {"shuffle_blocks": 4}, r"data\.shuffle_blocks: 4: has no effect with pictures\.latents: pixels"),
        ({}, {"split": "test"}, r"--data\.split 'test' has no effect with --data\.path '.*mine'"),
        ({}, {"text_column": "words"}, r"--data\.text_column 'words': metadata\.jsonl:1 has the fields"),
        ({"image_column": "jpg"}, {}, r"--pictures\.image_column 'jpg' has no effect with --data\.path '.*mine'"),
        ({}, {"min_words": 9}, r"--data\.path '.*mine', .*0 training and 0 held-out captions"),
    ],
)
def test_messages_name_what_was_given(options: dict[str, Any], data: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = rows_folder(tmp_path / "mine", [(number, f"thing {number}") for number in range(20)])
    with pytest.raises(UsageError, match=says) as refused:
        prepare(folder, tmp_path, options, **data)
    assert "train.jsonl" not in str(refused.value)


@pytest.mark.parametrize("path", ["emoji", "shapes"])
@pytest.mark.parametrize("option", [{"split": "test"}, {"text_column": "words"}])
def test_bundled_pictures_have_no_columns_and_splits(path: str, option: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"has no effect with data.path: {path}"):
        prepare(Path(path), tmp_path, **option)


def test_many_pictures_that_cannot_be_used_are_an_error(tmp_path: Path) -> None:
    folder = rows_folder(tmp_path / "mine", [(number, f"thing {number}") for number in range(30)])
    for number in range(4):
        (folder / f"{number}.png").write_bytes(b"damaged")
    says = r"mine': 4 of 30 pictures and captions cannot be used; at most --pictures\.max_left_out 0\.1 .*: 4 left out"
    with pytest.raises(UsageError, match=says):
        prepare(folder, tmp_path, heldout_fraction=0.3)
    prepared = prepare(folder, tmp_path, {"max_left_out": 0.2}, heldout_fraction=0.3)
    assert len(prepared.train) + len(prepared.heldout) == 26


def test_pictures_without_any_caption_ask_for_their_column(tmp_path: Path) -> None:
    folder = rows_folder(tmp_path / "mine", [(number, f"thing {number}") for number in range(9)], "description")
    with pytest.raises(UsageError, match=re.escape("none of 9 pictures has a caption. Write captions in .txt files")):
        prepare(folder, tmp_path)


def of_sizes(folder: Path, *sizes: tuple[int, int]) -> Path:
    """A picture of each width and height."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        drawn(number).resize(size).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}")
    return folder


def test_small_and_long_pictures_are_counted_and_the_smallest_left_out(tmp_path: Path) -> None:
    """As by recipes/lora.py."""
    folder = of_sizes(tmp_path / "mine", *[(40, 40)] * 8, (20, 20), (60, 32), (10, 40))
    config = DataConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), heldout_fraction=0.5)
    pictures = prepare_pictures(PictureConfig(latents="pixels", size=32, patch=4), config)
    assert pictures is not None
    assert pictures.notices[:3] == (
        "1 left out, a side is shorter than 16 pixels: 10.png (10x40)",
        "1 samples are enlarged to --pictures.size 32",
        "1 samples lose more than 30% of their picture (squares are cut at the centre)",
    )


def test_pictures_of_the_size_of_the_run_are_never_too_small(tmp_path: Path) -> None:
    folder = of_sizes(tmp_path / "mine", *[(8, 8)] * 8)
    config = DataConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), heldout_fraction=0.5)
    pictures = prepare_pictures(PictureConfig(latents="pixels", size=8, patch=4), config)
    assert pictures is not None
    assert len(pictures.notices) == 1  # their size and source


def test_the_notice_of_sizes_counts_captions(tmp_path: Path) -> None:
    train = rows_folder(tmp_path / "train", [(number, f"thing {number % 3}") for number in range(20)])
    heldout = rows_folder(tmp_path / "heldout", [(number, f"thing {number % 2}") for number in range(20, 30)])
    prepared = prepare(train, tmp_path, heldout_path=str(heldout))
    assert prepared.notices[0] == "20 training samples (3 captions), 10 held out (2 captions)"


def test_a_fraction_that_would_work_is_named(tmp_path: Path) -> None:
    train = rows_folder(tmp_path / "train", [(number, f"thing {number}") for number in range(20)])
    with pytest.raises(UsageError, match=r"0 held-out captions.* set --data\.heldout_fraction 0\.\d+, or") as refused:
        prepare(train, tmp_path, heldout_fraction=0.0001)
    fraction = re.search(r"set --data\.heldout_fraction ([\d.]+)", str(refused.value))
    assert fraction is not None
    assert len(prepare(train, tmp_path, heldout_fraction=float(fraction[1])).heldout) >= 2
    one = rows_folder(tmp_path / "one", [(number, "one caption") for number in range(20)])
    with pytest.raises(UsageError, match=r"1 groups .* --data\.heldout_path, or add more pictures"):
        prepare(one, tmp_path, heldout_fraction=0.1)
