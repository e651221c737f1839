"""Sources of pictures: which pictures and captions are found, and what is left out for which reason."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shutil
import tarfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.domains.images import scanning
from accel_train.domains.images.scanning import Pictures, read_pictures
from accel_train.domains.images.sources import Source
from tests.domains.images.drawn import bomb, drawn, encoded, folder_of, sideways


def read(path: Path | str, cache: Path, min_side: int = 2, **columns: Any) -> Pictures:
    return read_pictures(Source(str(path), **columns), cache, min_side=min_side)


def captions(found: Pictures) -> dict[str, str | None]:
    return {picture.name: picture.caption for picture in found.pictures}


def reasons(found: Pictures) -> Mapping[str, str]:
    return {item.name: item.reason for item in found.left_out}


def test_a_folder_with_text_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    below = folder_of(folder / "more", (20, 20))
    (below / "000.txt").write_bytes(b"\xef\xbb\xbf  two\r\n lines \n")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / "notes.md").write_text("no picture")
    (folder / "001.png").rename(folder / "001.PNG")
    found = read(folder, tmp_path / "cache")
    assert captions(found) == {
        "000.png": "picture number 0",
        "001.PNG": "picture number 1",
        "more/000.png": "two lines",
    }
    assert [(p.width, p.height) for p in found.pictures] == [(48, 32), (32, 48), (20, 20)]
    assert not found.left_out
    assert not found.notices


def as_run(folder: Path) -> Path:
    """Give a folder what the directory of a run has."""
    (folder / "report" / "pictures").mkdir(parents=True)
    for name in ("curves.png", "pictures/step_00000010.png"):
        (folder / "report" / name).write_bytes(encoded(drawn(32, 32, 7)))
    (folder / "report" / "samples.txt").write_text("no caption")
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text("max_steps: 3")
    return folder


def test_captions_in_any_case(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    (folder / "000.png").rename(folder / "000.PNG")
    (folder / "000.txt").rename(folder / "000.TXT")
    (folder / "001.TXT").write_text("another")
    expected = {"000.PNG": "picture number 0", "001.png": "picture number 1"}
    assert captions(read(folder, tmp_path / "cache")) == expected
    assert captions(read(folder, tmp_path / "cache", caption_extension=".TXT"))["001.png"] == "another"


@pytest.mark.parametrize("path", ["~/no such photos", "$HOME/photos", "./photos", "a/b/c"])
def test_a_folder_that_is_not_there_is_no_id_of_the_hub(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--data\.path '{re.escape(path)}': there is no /.+; a folder of"):
        read(path, tmp_path / "cache")


def test_runs_and_the_cache_below_are_no_pictures(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    cache = folder / "cache"
    before = read(folder, cache)
    as_run(folder / "runs" / "one")
    (folder / "linked").symlink_to(as_run(tmp_path / "two"))
    (cache / "other").mkdir()
    (cache / "other" / "a.png").write_bytes(encoded(drawn(32, 32, 8)))
    found = read(folder, cache)
    assert captions(found) == captions(before)
    assert not found.left_out
    assert found.notices == [
        "2 run directories are left out, with their curves and pictures: runs/one, linked",
        "cache is left out with its pictures, because it is the cache (data.cache_dir)",
    ]


def test_pictures_in_the_directory_of_their_own_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    before = captions(read(folder, tmp_path / "cache"))
    found = read(as_run(folder), tmp_path / "cache")
    assert captions(found) == before
    assert not found.left_out


def test_a_content_hash_is_that_of_the_file(tmp_path: Path) -> None:
    first = read(folder_of(tmp_path / "one", (48, 32), (32, 32)), tmp_path / "cache")
    second = read(folder_of(tmp_path / "two", (48, 32), (32, 32)), tmp_path / "cache")
    assert [p.content for p in first.pictures] == [p.content for p in second.pictures]
    (tmp_path / "two" / "000.png").write_bytes(encoded(drawn(48, 32, 99)))
    edited = read(tmp_path / "two", tmp_path / "cache")
    assert edited.pictures[0].content != first.pictures[0].content
    assert edited.pictures[1].content == first.pictures[1].content


def test_an_edit_that_keeps_size_and_date_is_seen(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (8, 8))
    file = folder / "000.png"
    file.write_bytes(encoded(drawn(8, 8, 1), "BMP"))
    before = file.stat()
    first = read(folder, tmp_path / "cache").pictures[0]
    file.write_bytes(encoded(drawn(8, 8, 2), "BMP"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert read(folder, tmp_path / "cache").pictures[0].content != first.content


@pytest.mark.fault("I47", injected="empty, cut and unknown picture files", outcome="skipped; counted, with reasons")
@pytest.mark.fault("D2", injected="a caption without a picture", outcome="skipped; counted, with its name")
@pytest.mark.fault("D3", injected="a 1x1 picture", outcome="skipped; counted, with its size")
@pytest.mark.fault("D4", injected="a PNG of 20,000 x 20,000 in under 100 KB", outcome="skipped; never decoded")
@pytest.mark.fault("D5", injected="a corrupt WebP", outcome="skipped; counted, with the reason")
@pytest.mark.fault("D6", injected="two pictures of one name", outcome="both skipped; the message says to rename one")
def test_everything_that_is_left_out_is_counted_with_its_reason(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    (folder / "alone.txt").write_text("no picture")
    for suffix in ("jpg", "png"):
        (folder / f"twice.{suffix}").write_bytes(encoded(drawn(16, 16), "PNG"))
    (folder / "twice.txt").write_text("whose?")
    damaged = {
        "dot.png": encoded(drawn(1, 1)),
        "empty.png": b"",
        "bomb.png": bomb(20_000),
        "cut.png": encoded(drawn(64, 64))[:-60],
        "broken.webp": b"RIFF\x24\x00\x00\x00WEBPVP8 " + bytes(24),
        "text.jpg": b"this is no picture",
        "photo.heic": b"",
        "latin.png": encoded(drawn(16, 16)),
    }
    for name, content in damaged.items():
        (folder / name).write_bytes(content)
        (folder / name).with_suffix(".txt").write_text("a caption")
    (folder / "latin.txt").write_bytes("ein Büchlein".encode("latin-1"))
    found = read(folder, tmp_path / "cache")
    assert sorted(captions(found)) == ["000.png", "001.png"]
    known = reasons(found)
    assert known == {
        "alone.txt": "caption without a picture",
        "twice.jpg": "pictures of one name",
        "twice.png": "pictures of one name",
        "dot.png": "a side is shorter than 2 pixels",
        "empty.png": "the file is empty (0 bytes)",
        "bomb.png": "more than 178,956,970 pixels, which Pillow refuses",
        "cut.png": "the picture is damaged",
        "broken.webp": known["broken.webp"],
        "text.jpg": known["text.jpg"],
        "photo.heic": ".heic is not read (convert it to PNG or JPEG)",
        "photo.txt": "caption without a picture",
        "latin.txt": "caption is not readable text",
    }
    assert "not a picture" in known["text.jpg"]
    counted = sum(int(notice.split()[0]) for notice in found.notices)
    assert counted == len(found.left_out) == 12
    assert "2 left out, caption without a picture: alone.txt, photo.txt" in found.notices


def test_pictures_without_a_caption_stay(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    (folder / "000.txt").unlink()
    (folder / "001.txt").write_text("  \n")
    assert captions(read(folder, tmp_path / "cache")) == {"000.png": None, "001.png": ""}


def test_other_extensions_of_captions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32))
    (folder / "000.caption").write_text("of kohya")
    found = read(folder, tmp_path / "cache", caption_extension=".caption")
    assert captions(found) == {"000.png": "of kohya"}


def test_names_with_dots_keep_their_captions(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    for name in ("v1.0", "v1.1"):
        (folder / f"{name}.png").write_bytes(encoded(drawn(16, 16)))
        (folder / f"{name}.txt").write_text(name)
    assert captions(read(folder, tmp_path / "cache")) == {"v1.0.png": "v1.0", "v1.1.png": "v1.1"}


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32))
    (folder / "again").symlink_to(folder)
    (folder / "gone.png").symlink_to(folder / "no such file")
    found = read(folder, tmp_path / "cache")
    assert "000.png" in captions(found)
    assert reasons(found)["gone.png"] == "cannot be read"
    assert len(found) <= 2


def test_sideways_and_animated_pictures_are_used(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32))
    (folder / "turned.jpg").write_bytes(sideways(drawn(48, 32), 6))
    frames = [drawn(16, 16, number) for number in range(3)]
    (folder / "moving.gif").write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    found = read(folder, tmp_path / "cache")
    sizes = {p.name: (p.width, p.height) for p in found.pictures}
    assert sizes == {"000.png": (48, 32), "moving.gif": (16, 16), "turned.jpg": (32, 48)}
    assert found.notices == ["only the first frame is used of 1 pictures with several"]


# -------------------------------------------------------------------------------------------------- metadata.jsonl
def metadata(folder: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def without_texts(folder: Path) -> Path:
    for text in folder.glob("*.txt"):
        text.unlink()
    return folder


def test_metadata_jsonl(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48), (16, 16))
    metadata(
        folder,
        {"file_name": "000.png", "text": "a caption"},
        "",
        {"file_name": "./001.png", "caption": "another"},
        {"file_name": "gone.png", "text": "x"},
        {"file_name": "../data/002.png", "text": "outside"},
        {"file_name": "/etc/passwd", "text": "outside"},
        "{broken",
        "[1]",
        '{"file_name": "002.png", "text": "first", "text": "second"}',
    )
    found = read(folder, tmp_path / "cache")
    assert captions(found) == {"000.png": "a caption", "001.png": "another"}
    assert reasons(found) == {
        "metadata.jsonl:4": "caption without a picture",
        "metadata.jsonl:5": "file_name leaves the folder",
        "metadata.jsonl:6": "file_name leaves the folder",
        "metadata.jsonl:7": "not JSON",
        "metadata.jsonl:8": "not a JSON object",
        "metadata.jsonl:9": "a key given twice",
        "002.png": "not named in metadata.jsonl",
    }


def test_an_accent_is_one_character_or_two(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    (folder / "000.png").rename(folder / "cafe\u0301.png")  # as macOS writes it
    (folder / "001.png").rename(folder / "th\u00e9.png")
    metadata(folder, {"file_name": "caf\u00e9.png", "text": "one"}, {"file_name": "the\u0301.png", "text": "two"})
    found = read(folder, tmp_path / "cache")
    assert captions(found) == {"cafe\u0301.png": "one", "th\u00e9.png": "two"}
    assert not found.left_out


def test_metadata_equals_the_image_folder_of_datasets(tmp_path: Path) -> None:
    import datasets

    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    metadata(folder, *({"file_name": f"{n:03d}.png", "text": f"row {n}"} for n in range(2)))
    theirs = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "hf"))
    ours = read(folder, tmp_path / "cache")
    expected = {Path(row["image"].filename).name: row["text"] for row in theirs}
    assert captions(ours) == expected


def test_columns_of_metadata(tmp_path: Path) -> None:
    folder = metadata(folder_of(tmp_path / "data", (48, 32)), {"file_name": "000.png", "text": "a", "prompt": "b"})
    assert captions(read(folder, tmp_path / "cache", caption_column="prompt")) == {"000.png": "b"}
    with pytest.raises(UsageError, match=r"caption_column 'promt'.*did you mean 'prompt'"):
        read(folder, tmp_path / "cache", caption_column="promt")
    with pytest.raises(UsageError, match=r"no text in 'file_name'.*\['image'\]"):
        read(metadata(folder, {"image": "000.png"}), tmp_path / "cache")


def metadata_csv(folder: Path, *lines: str) -> Path:
    (folder / "metadata.csv").write_text("\n".join(lines))
    return without_texts(folder)


def test_metadata_csv_equals_the_image_folder_of_datasets(tmp_path: Path) -> None:
    import datasets

    folder = metadata_csv(folder_of(tmp_path / "data", (48, 32), (32, 48)), "file_name,text", '000.png,"one, two"')
    (folder / "001.png").unlink()
    with warnings.catch_warnings():
        # datasets leaves the file open, and whichever test collects it would be told so.
        warnings.simplefilter("ignore", ResourceWarning)
        cache = str(tmp_path / "hf")
        theirs = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=cache)
        gc.collect()
    expected = {Path(row["image"].filename).name: row["text"] for row in theirs}
    assert captions(read(folder, tmp_path / "cache")) == expected == {"000.png": "one, two"}


def test_pictures_that_no_row_names_are_listed_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the folders, each with its rows and a picture without one: twice the reads and comparisons of paths."""
    reads = 0
    parents, equal = PurePath.parents.fget, PurePath.__eq__
    assert parents is not None

    def counted_parents(path: PurePath) -> Any:
        nonlocal reads
        reads += 1
        return parents(path)

    def counted_equal(path: PurePath, other: object) -> bool:
        nonlocal reads
        reads += 1
        return equal(path, other)

    monkeypatch.setattr(PurePath, "parents", property(counted_parents))
    monkeypatch.setattr(PurePath, "__eq__", counted_equal)
    counts: list[int] = []
    for folders in (20, 40):
        root = tmp_path / f"of {folders}"
        for number in range(folders):
            (root / f"{number}").mkdir(parents=True)
            for name in ("a.png", "b.png"):
                (root / f"{number}" / name).touch()
            (root / f"{number}" / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}')
        reads = 0
        listed = scanning.list_pictures(Source(str(root)), tmp_path / "cache")
        counts.append(reads)
        reasons = {item.name: item.reason for item in listed.left_out}
        assert reasons == {f"{number}/b.png": "not named in metadata.jsonl" for number in range(folders)}
    assert counts[1] < 2.2 * counts[0]


def test_the_nearest_file_of_rows_is_said_to_lack_a_picture(tmp_path: Path) -> None:
    inner = folder_of(folder_of(tmp_path / "data", (48, 32)) / "inner", (32, 48))
    deeper = folder_of(inner / "deeper", (20, 20))
    metadata_csv(inner, "file_name,text")
    (tmp_path / "data" / "metadata.jsonl").write_text('{"file_name": "000.png", "text": "x"}')
    found = read(tmp_path / "data", tmp_path / "cache")
    expected = {
        f"{file.relative_to(tmp_path / 'data')}": "not named in metadata.csv"
        for file in (inner / "000.png", deeper / "000.png")
    }
    assert reasons(found) == expected


def test_rows_of_metadata_csv(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48), (16, 16))
    rows = ("file_name,text,prompt", "000.png,a,b", "001.png,", "gone.png,x,y", "", '002.png,"c",')
    found = read(metadata_csv(folder, *rows), tmp_path / "cache")
    assert captions(found) == {"000.png": "a", "002.png": "c"}
    assert reasons(found) == {
        "metadata.csv:3": "not as many values as columns",
        "metadata.csv:4": "caption without a picture",
        "001.png": "not named in metadata.csv",
    }
    assert captions(read(folder, tmp_path / "cache", caption_column="prompt")) == {"000.png": "b", "002.png": ""}
    for line, says in (("file_name;text", "no text in 'file_name'"), ("text,text", "two columns have the same name")):
        with pytest.raises(UsageError, match=says):
            read(metadata_csv(folder, line, "000.png" + line[4:5]), tmp_path / "cache")


def test_rows_of_folders_below_name_pictures_there(tmp_path: Path) -> None:
    """As in the ImageFolder of ``datasets`` with splits."""
    data = tmp_path / "data"
    train = without_texts(folder_of(data / "train", (48, 32), (32, 48)))
    metadata(train, {"file_name": "000.png", "text": "a"}, {"file_name": "001.png", "text": "b"})
    found = read(data, tmp_path / "cache")
    assert captions(found) == {"train/000.png": "a", "train/001.png": "b"}
    assert not found.notices
    metadata_csv(folder_of(data / "test", (16, 16)), "file_name,text", "000.png,c", "gone.png,d")
    folder_of(data / "more", (20, 20))
    found = read(data, tmp_path / "cache")
    expected = {"test/000.png": "c", "train/000.png": "a", "train/001.png": "b", "more/000.png": "picture number 0"}
    assert captions(found) == expected
    assert reasons(found) == {"test/metadata.csv:3": "caption without a picture"}
    assert found.notices[-1] == (
        "captions of test/metadata.csv, train/metadata.jsonl and of other folders are read together; to read only "
        f"one, give its path: {train}"
    )
    # The outermost file that names a picture is read.
    metadata(data, {"file_name": "train/001.png", "text": "outer"})
    found = read(data, tmp_path / "cache")
    assert captions(found) == {"train/001.png": "outer", "test/000.png": "c", "train/000.png": "a"}
    assert any("1 rows name pictures that a file in a folder above also names" in notice for notice in found.notices)


def test_repeats_in_the_names_of_folders_are_not_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("10_sks dog", "2_cat", "2024_01_31", "3d_dog"):
        folder_of(data / name, (48, 32))
    found = read(data, tmp_path / "cache")
    assert len(found) == 4
    (notice,) = found.notices
    assert ": 10_sks dog, 2_cat. Each picture counts once per epoch" in notice
    (alone,) = read(data / "2_cat", tmp_path / "cache").notices
    assert ": 2_cat. Each" in alone
    # What the notice advises.
    for suffix in (".png", ".txt"):
        (data / "2_cat" / f"again{suffix}").write_bytes((data / "2_cat" / f"000{suffix}").read_bytes())
    assert len(read(data / "2_cat", tmp_path / "cache")) == 2
    cat = metadata(without_texts(data / "2_cat"), *[{"file_name": "000.png", "text": "a"}] * 3)
    (cat / "again.png").unlink()
    assert [picture.caption for picture in read(cat, tmp_path / "cache").pictures] == ["a"] * 3


# ------------------------------------------------------------------------------------------- captions that are not read
def renamed(folder: Path, number: int, suffix: str) -> None:
    (folder / f"{number:03d}.txt").rename(folder / f"{number:03d}{suffix}")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, r"--data\.caption_extension is \.txt. Give --data\.caption_extension \.caption, or rename"),
        (
            {"options": {"caption_extension": "--caption_extension"}},
            r"--caption_extension is \.txt. Give --caption_extension \.caption, or rename",
        ),
        ({"options": {}}, r"captions are read from \.txt files\. Rename them"),
    ],
)
def test_captions_of_another_extension_are_refused(columns: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48), (16, 16))
    for number in (1, 2):
        renamed(folder, number, ".caption")
    with pytest.raises(UsageError, match=rf"2 of 3 pictures .* such as 001\.caption for 001\.png; {says}"):
        read(folder, tmp_path / "cache", **columns)


def test_captions_that_are_not_read_are_said_where_there_are_others(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    (folder / "000.caption").write_text("another")
    found = read(folder, tmp_path / "cache")
    assert captions(found)["000.png"] == "picture number 0"
    assert found.notices == [
        "captions in .caption files are not read, because their 1 pictures have other captions: 000.caption"
    ]


def test_captions_beside_rows_are_not_read(tmp_path: Path) -> None:
    folder = metadata(folder_of(tmp_path / "data", (48, 32)), {"file_name": "000.png", "text": "a"})
    (folder / "metadata.csv").write_text("file_name,text\n000.png,b")
    found = read(folder, tmp_path / "cache")
    assert captions(found) == {"000.png": "a"}
    assert found.notices == [
        "captions in .txt files are not read, because their 1 pictures have other captions: 000.txt"
    ]
    metadata(folder, {"file_name": "000.png"})
    with pytest.raises(UsageError, match=r"such as 000\.txt for 000\.png; captions come from metadata\.jsonl there"):
        read(folder, tmp_path / "cache")
    (folder / "000.txt").unlink()
    with pytest.raises(UsageError, match=r"such as metadata\.csv for 000\.png"):
        read(folder, tmp_path / "cache")


# ---------------------------------------------------------------------------------------------------------- tables
def table_of(folder: Path, rows: int, **more: Any) -> Path:
    from pyarrow import Table, parquet

    content = [encoded(drawn(16 + 4 * row, 16, row)) for row in range(rows)]
    columns = {
        "image": [{"bytes": data, "path": None} for data in content],
        "text": [f"row {row}" for row in range(rows)],
    }
    folder.mkdir(parents=True)
    parquet.write_table(Table.from_pydict(columns | more), folder / "part-0.parquet", row_group_size=2)
    return folder


def test_parquet_as_datasets_writes_it(tmp_path: Path) -> None:
    folder = table_of(tmp_path / "data", 5)
    for path in (folder, folder / "part-0.parquet", f"{folder}/*.parquet"):
        found = read(path, tmp_path / "cache")
        assert list(captions(found).values()) == [f"row {row}" for row in range(5)]
        assert [p.width for p in found.pictures] == [16, 20, 24, 28, 32]
        assert found.pictures[3].bytes.read() == encoded(drawn(28, 16, 3))


def test_parquet_with_plain_bytes_and_faults(tmp_path: Path) -> None:
    content = [encoded(drawn(16, 16)), None, b"no picture", encoded(drawn(24, 16))]
    folder = table_of(tmp_path / "data", 4, jpg=content, prompt=["a", "b", "c", None])
    with pytest.raises(UsageError, match=r"2 columns of pictures.*Name it with --data\.image_column"):
        read(folder, tmp_path / "cache")
    # A recipe without such an option.
    with pytest.raises(UsageError, match=r"2 columns of pictures.*Give a table with one\.$"):
        read(folder, tmp_path / "cache", options={})
    found = read(folder, tmp_path / "cache", image_column="jpg", caption_column="prompt")
    assert list(captions(found).values()) == ["a", None]
    assert [item.reason.split(";")[0] for item in found.left_out] == [
        "cannot be read",
        "not a picture, or its beginning is damaged",
    ]


def test_a_path_in_a_table_stays_in_its_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(encoded(drawn(16, 16)))
    paths = ["../secret.png", str(secret), "inside.png"]
    folder = table_of(tmp_path / "data", 3, image=[{"bytes": None, "path": path} for path in paths])
    (folder / "inside.png").write_bytes(encoded(drawn(16, 16)))
    found = read(folder, tmp_path / "cache")
    assert list(captions(found).values()) == ["row 2"]
    assert [item.reason for item in found.left_out] == ["cannot be read"] * 2
    assert all("points outside the folder" in item.detail for item in found.left_out)


def test_a_path_in_a_table_is_below_its_own_folder(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        folder = table_of(tmp_path / "data" / name, 1, image=[{"bytes": None, "path": "0.png"}])
        (folder / "0.png").write_bytes(encoded(drawn(16 + 8 * number, 16)))
    found = read(f"{tmp_path}/data/*/*.parquet", tmp_path / "cache")
    assert [picture.width for picture in found.pictures] == [16, 24]


def test_a_saved_dataset(tmp_path: Path) -> None:
    import datasets

    folder = folder_of(tmp_path / "pictures", (48, 32), (32, 48))
    (folder / "000.png").write_bytes(sideways(drawn(48, 32), 6))
    files = [str(folder / f"{number:03d}.png") for number in range(2)]
    made = datasets.Dataset.from_dict({"image": files, "caption": ["one", "two"]})
    made.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    found = read(tmp_path / "saved", tmp_path / "cache")
    assert captions(found) == {"row 0": "one", "row 1": "two"}
    assert (found.pictures[0].width, found.pictures[0].height) == (32, 48)
    assert found.pictures[0].bytes.read() == (folder / "000.png").read_bytes()
    datasets.DatasetDict({"test": made.cast_column("image", datasets.Image())}).save_to_disk(str(tmp_path / "dict"))
    assert len(read(tmp_path / "dict", tmp_path / "cache", split="test")) == 2
    with pytest.raises(UsageError, match=r"split 'train' is not among \['test'\]"):
        read(tmp_path / "dict", tmp_path / "cache")


def test_names_of_classes_are_captions(tmp_path: Path) -> None:
    """As the Hub has MNIST, CIFAR-10 and ImageNet: saved, in parquet and in Arrow."""
    import datasets

    pictures = [{"bytes": encoded(drawn(16 + number, 16)), "path": None} for number in range(3)]

    def made(*names: str) -> datasets.Dataset:
        features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
        return datasets.Dataset.from_dict({"img": pictures, "label": [1, 0, -1]}, features)

    animals = made("cat", "sea horse")
    animals.save_to_disk(str(tmp_path / "saved"))
    for name in ("parquet", "arrow", "mixed"):
        (tmp_path / name).mkdir()
    animals.to_parquet(tmp_path / "parquet" / "0.parquet")
    shutil.copy(next((tmp_path / "saved").glob("*.arrow")), tmp_path / "arrow" / "0.arrow")
    for source in ("saved", "parquet", "arrow"):
        found = read(tmp_path / source, tmp_path / "cache", caption_column="label")
        assert [picture.caption for picture in found.pictures] == ["sea horse", "cat", None], source
        assert [picture.caption for picture in read(tmp_path / source, tmp_path / "cache").pictures] == [None] * 3
    animals.to_parquet(tmp_path / "mixed" / "0.parquet")
    made("cat", "dog").to_parquet(tmp_path / "mixed" / "1.parquet")
    with pytest.raises(UsageError, match=r"classes of 'label' are cat, sea horse in .*0\.parquet and cat, dog in "):
        read(tmp_path / "mixed", tmp_path / "cache", caption_column="label")


def test_metadata_of_other_columns_may_be_unknown_or_damaged(tmp_path: Path) -> None:
    import datasets
    from pyarrow import parquet

    features = datasets.Features({"label": datasets.ClassLabel(names=["cat", "dog"]), "text": datasets.Value("string")})
    rows = {"label": [1], "text": ["a horse"]}
    written = datasets.Dataset.from_dict(rows, features).data.table
    written = written.append_column("img", [[encoded(drawn(16, 16))]])
    described = features.to_dict() | {"img": {"_type": "Hologram"}}
    later = {"info": {"features": described}}
    unknown = {"info": {"features": described | {"label": {"_type": "Hologram"}}}}
    # A class whose names cannot be read is a number, and no caption.
    for content, classes in ((json.dumps(later), ["dog"]), (json.dumps(unknown), []), ("{not json", [])):
        parquet.write_table(written.replace_schema_metadata({"huggingface": content}), tmp_path / "0.parquet")
        for column, expected in (("text", ["a horse"]), ("label", classes)):
            found = read(tmp_path / "0.parquet", tmp_path / "cache", caption_column=column)
            assert [picture.caption for picture in found.pictures] == expected, (content, column)


# ---------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.fault("I52", injected="a tar with ../ names and links", outcome="exit 2; nothing is unpacked")
def test_archives_are_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "inside" / "shards.tar"
    archive.parent.mkdir()
    with tarfile.open(archive, "w") as made:
        for name in ("../outside.png", "/tmp/absolute.png", "good.png"):
            member = tarfile.TarInfo(name)
            content = encoded(drawn(16, 16))
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        made.addfile(link)
    with pytest.raises(UsageError, match="Unpack an archive first"):
        read(archive, tmp_path / "cache")
    # A folder with an archive in it has no pictures either.
    with pytest.raises(UsageError, match=r"no pictures in this folder; its files end in .tar"):
        read(archive.parent, tmp_path / "cache")
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == []


def test_what_is_no_source_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no pictures in this folder; it has no files\. A folder with files"):
        read(tmp_path / "empty", tmp_path / "cache")
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(UsageError, match="Unpack an archive first"):
        read(tmp_path / "a.tar", tmp_path / "cache")
    # A folder that was deleted has a name that an id may have as well.
    for place in ("no/such", "photos"):
        says = (
            rf"^--data.path '{place}', split 'train': no such file or folder, and the hub .*Give a folder of pictures"
        )
        with pytest.raises(UsageError, match=says):
            read(place, tmp_path / "cache")
    with pytest.raises(UsageError, match=r"image_column 'jpg' has no effect"):
        read(folder_of(tmp_path / "data", (9, 9)), tmp_path / "cache", image_column="jpg")


def test_a_second_start_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48), (16, 16))
    first = read(folder, tmp_path / "cache")
    decoded = Counter[int]()
    decode = scanning.decoding.decode_picture

    def counting(content: bytes, **options: Any) -> Any:
        decoded[len(content)] += 1
        return decode(content, **options)

    monkeypatch.setattr(scanning.decoding, "decode_picture", counting)
    assert captions(read(folder, tmp_path / "cache")) == captions(first)
    assert not decoded
    (folder / "001.png").write_bytes(encoded(drawn(40, 48, 7)))
    again = read(folder, tmp_path / "cache")
    assert sum(decoded.values()) == 1
    assert again.pictures[1].width == 40


# ------------------------------------------------------------------------------------- captions of other types, pipes
def test_what_was_decoded_need_not_be_remembered(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "pictures").write_text("")  # no folder, and so as one without permission
    assert len(read(folder, tmp_path / "cache")) == 1


def test_captions_that_are_no_text_are_left_out_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", *[(16 + 4 * number, 16) for number in range(8)])
    values = ["ok", None, 5, ["a", "b"], {"x": 1}, True, float("nan"), 0.5]
    metadata(
        without_texts(folder),
        *({"file_name": f"{number:03d}.png", "text": value} for number, value in enumerate(values)),
    )
    found = read(folder, tmp_path / "cache")
    # NaN is a missing text in the tables of pandas.
    assert captions(found) == {"000.png": "ok", "001.png": None, "006.png": None}
    assert {item.reason for item in found.left_out} == {"its caption is not text"}
    assert {item.name: item.detail for item in found.left_out} == {
        "metadata.jsonl:3": "'text' is a number; text is required",
        "metadata.jsonl:4": "'text' is a list; text is required",
        "metadata.jsonl:5": "'text' is an object; text is required",
        "metadata.jsonl:6": "'text' is true or false; text is required",
        "metadata.jsonl:8": "'text' is a number; text is required",
    }


@pytest.mark.parametrize(("values", "kind"), [([1, 2, 3], "a number"), ([["a", "b"]] * 3, "a list")])
def test_columns_of_a_table_that_are_no_text_are_left_out_by_name(tmp_path: Path, values: Any, kind: str) -> None:
    found = read(table_of(tmp_path / "data", 3, text=values), tmp_path / "cache")
    assert not found.pictures
    assert all(item.detail == f"'text' is {kind}; text is required" for item in found.left_out)
    # Two row groups.
    assert [item.name.rpartition(" ")[2] for item in found.left_out] == ["0", "1", "0"]


def test_other_pictures_of_a_saved_dataset_are_not_decoded(tmp_path: Path) -> None:
    import datasets

    content = {"bytes": encoded(drawn(48, 32)), "path": None}
    rows = {"image": [content], "mask": [{"bytes": b"no picture", "path": None}], "caption": ["one"]}
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    made.cast_column("mask", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    found = read(tmp_path / "saved", tmp_path / "cache", image_column="image")
    assert captions(found) == {"row 0": "one"}
    with pytest.raises(UsageError, match=r"caption_column 'captoin': .*has the columns .*did you mean 'caption'"):
        read(tmp_path / "saved", tmp_path / "cache", image_column="image", caption_column="captoin")


def test_half_a_character_is_no_caption(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    metadata(
        folder, {"file_name": "000.png", "text": "half \ud83d"}, {"file_name": "001.png", "text": "whole \U0001f600"}
    )
    found = read(folder, tmp_path / "cache")
    assert captions(found) == {"001.png": "whole \U0001f600"}
    assert [tuple(item) for item in found.left_out] == [
        ("metadata.jsonl:1", "its caption is not text", "'text' contains half of a surrogate pair")
    ]


def test_captions_of_a_saved_dataset_that_are_no_text(tmp_path: Path) -> None:
    import datasets

    files = [str(folder_of(tmp_path / "pictures", (48, 32)) / "000.png")]
    made = datasets.Dataset.from_dict({"image": files, "caption": [[1, 2]]})
    made.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    found = read(tmp_path / "saved", tmp_path / "cache")
    assert [tuple(item) for item in found.left_out] == [
        ("row 0", "its caption is not text", "'caption' is a list; text is required")
    ]


def test_the_choice_between_two_columns_of_captions_is_said(tmp_path: Path) -> None:
    import datasets

    chooses = "; --data.caption_column chooses another"
    table = table_of(tmp_path / "table", 2, text=["a", None], caption=["b", "b"])
    found = read(table, tmp_path / "cache")
    assert found.notices == [f"captions come from 'text'; those of 'caption' are not read{chooses}"]
    assert list(captions(found).values()) == ["a", None]
    assert not read(table, tmp_path / "cache", caption_column="caption").notices

    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    names, texts = ("000.png", "001.png"), ("a", None)
    columns = {"image": [str(folder / name) for name in names], "text": list(texts), "caption": ["b", "b"]}
    made = datasets.Dataset.from_dict(columns)
    made.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    rows = [{"file_name": name, "text": text, "caption": "b"} for name, text in zip(names, texts, strict=True)]
    metadata(without_texts(folder), *rows)
    for source in (folder, tmp_path / "saved"):
        found = read(source, tmp_path / "cache")
        assert found.notices == [f"captions come from 'text', and in rows without one from 'caption'{chooses}"]
        assert list(captions(found).values()) == ["a", "b"]


# To open a pipe without a writer waits for one: a scan that does so never ends, so this would fail by its time limit.
def test_named_pipes_are_left_out_and_not_waited_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", (48, 32), (32, 48))
    os.mkfifo(folder / "z.png")
    (folder / "001.txt").unlink()
    os.mkfifo(folder / "001.txt")
    os.mkfifo(folder / "unrelated")
    found = read(folder, tmp_path / "cache")
    assert list(captions(found)) == ["000.png"]
    detail = "a named pipe, and a regular file is required"
    assert sorted(tuple(item) for item in found.left_out) == [
        ("001.txt", "caption is not readable text", detail),
        ("z.png", "cannot be read", detail),
    ]
    os.mkfifo(folder / "metadata.jsonl")
    with pytest.raises(UsageError, match=r"metadata.jsonl cannot be read: a named pipe.*Correct or remove it"):
        read(folder, tmp_path / "cache")


def test_pictures_behind_links_to_folders_are_read_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "all" / "data", (48, 32))
    below = folder_of(folder / "z", (20, 20))
    elsewhere = folder_of(tmp_path / "elsewhere", (24, 24))
    # To the folder itself, to one that holds it, to one inside that comes later, and to one outside.
    for name, target in {"again": folder, "up": tmp_path / "all", "twin": below, "other": elsewhere}.items():
        (folder / name).symlink_to(target)
    (folder / "circle").symlink_to(folder / "circle")
    found = read(folder, tmp_path / "cache")
    assert list(captions(found)) == ["000.png", "other/000.png", "z/000.png"]
    assert found.notices == ["3 links to folders that are read already, or contain this one: again, twin, up"]


def test_a_folder_without_permission_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "data", (48, 32))
    folder_of(folder / "closed", (20, 20))
    list_all = os.listdir

    def refusing(path: Path) -> list[str]:
        # The superuser, whom containers test as, may read every folder.
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return list_all(path)

    monkeypatch.setattr(os, "listdir", refusing)
    found = read(folder, tmp_path / "cache")
    assert [tuple(item) for item in found.left_out] == [("closed", "the folder cannot be read", "Permission denied")]
