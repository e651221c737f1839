"""`accel-train data check` and `accel-train data cache`, through the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFilter

from accel_train import cli
from accel_train.config import UsageError
from accel_train.data.tensor_cache import TensorCache, entries
from tests.domains.images.drawn import encoded
from tests.domains.images.test_quality import scene


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    for number in range(6):
        (made / f"{number}.png").write_bytes(encoded(scene(number)))
        (made / f"{number}.txt").write_text(f"a scene of blobs, number {number}")
    return made


def run(*words: str | Path, cache: Path) -> int:
    return cli._main(["data", *map(str, words), "--cache_dir", str(cache)])


def report(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = run("check", folder, "--json", "true", "--resolutions", "256", *flags, cache=folder.parent / "cache")
    return code, json.loads(capsys.readouterr().out)


def test_a_good_dataset_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", folder, "--resolutions", "256", cache=folder.parent / "cache") == 0
    text = capsys.readouterr().out
    assert "6 pictures, 0 left out" in text
    assert "width: 320, 320, 320" in text
    assert "320x192: 6, 0, 80%" in text
    assert "words (min, median, max): 6, 6, 6; 11 different ones" in text
    assert text.rstrip().endswith("passed: --min_dataset_quality 0.5")
    code, tree = report(capsys, folder)
    assert (code, tree["passed"], len(tree["pictures"])) == (0, True, 6)


def test_duplicates_and_bad_pictures_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "copy.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "small.jpg").write_bytes(encoded(scene(1).resize((300, 225)), "JPEG", quality=80))
    (folder / "blurred.png").write_bytes(encoded(scene(8).filter(ImageFilter.GaussianBlur(20))))
    (folder / "dark.png").write_bytes(encoded(scene(9).point(lambda value: value // 40)))
    for name in ("copy", "small", "blurred", "dark"):
        (folder / f"{name}.txt").write_text("one of the bad ones")
    (folder / "2.txt").write_text("")
    (folder / "3.txt").write_text("word " * 90)
    (folder / "broken.png").write_bytes(b"broken")
    code, tree = report(capsys, folder, "--min_quality", "0.4", "--min_dataset_quality", "0.9")
    assert (code, tree["passed"]) == (1, False)
    assert tree["exact_duplicates"] == [["0.png", "copy.png"]]
    assert sorted(map(sorted, tree["near_duplicates"])) == [["0.png", "copy.png"], ["1.png", "small.jpg"]]
    assert tree["duplicates"] == pytest.approx(2 / 10)
    rows = {row["name"]: row for row in tree["pictures"]}
    assert rows["blurred.png"]["reasons"][0].startswith("sharpness")
    assert rows["dark.png"]["reasons"][0].startswith(("contrast", "exposure", "sharpness"))
    assert rows["2.png"]["scores"]["caption"] == 0
    assert rows["3.png"]["scores"]["caption"] == pytest.approx(60 / 90)
    low = [row for row in rows.values() if row["quality"] < 0.4]
    assert tree["usable"] == pytest.approx((10 - len(low)) / 11)
    mean = sum(row["quality"] for row in rows.values()) / 10
    assert tree["quality"] == pytest.approx(mean * tree["usable"] * 0.8)
    assert run("check", folder, "--min_dataset_quality", "0.9", cache=folder.parent / "cache") == 1
    text = capsys.readouterr().out
    assert "FAILED: --min_dataset_quality 0.9" in text
    assert "1 empty: 2.png" in text
    assert "1 longer than 60 words: 3.png" in text
    assert "2.png: quality 0.00, caption 0.00" in text


def test_pictures_of_one_colour_are_duplicates_only_if_their_files_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        level = 60 * min(number, 2)
        (tmp_path / f"{number}.png").write_bytes(encoded(Image.new("RGB", (40, 40), (level, level, level))))
    code, tree = report(capsys, tmp_path)
    assert code == 1
    assert tree["near_duplicates"] == [["2.png", "3.png"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--min_qualty", "1"), "did you mean"),
        (("--min_quality", "3"), "min_quality"),
        (("--resolutions", "8"), "each resolution must be at least bucket_step"),
    ],
)
def test_wrong_flags(folder: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run("check", folder, *flags, cache=folder.parent / "cache")


def test_options_are_refused_before_a_picture_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("read before the options were refused")

    monkeypatch.setattr("accel_train.domains.images.checking.check.read_pictures", read)
    with pytest.raises(UsageError, match="each resolution must be at least bucket_step"):
        run("check", folder, "--resolutions", "16", cache=folder.parent / "cache")


def test_pictures_that_training_leaves_out_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "2.txt").write_text(" ")
    (folder / "3.txt").unlink()
    run("check", folder, "--resolutions", "256", cache=folder.parent / "cache")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "6 pictures, 0 left out",
        "  2 more are left out in training without --data.default_caption",
    ]
    assert report(capsys, folder)[1]["without_caption"] == ["2.png", "3.png"]


def test_a_folder_without_usable_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"no usable picture: 1 left out, not a picture"):
        run("check", tmp_path, cache=tmp_path / "cache")


# ---------------------------------------------------------------------------------------------------------- the cache
def filled(folder: Path) -> TensorCache:
    cache = TensorCache(folder, {"kind": "latents", "source": "tiny/vae", "revision": "main", "weights": "abc" * 9})
    for number in range(3):
        cache.write(f"{number:064x}", {"mean": torch.full((100,), float(number))})
    other = TensorCache(folder, {"kind": "texts", "source": "tiny/text", "revision": None, "weights": "def" * 9})
    other.write(f"{9:064x}", {"embedding": torch.zeros(10)})
    return cache


@pytest.mark.parametrize("action", ["ls", "verify", "clear"])
def test_a_cache_that_is_not_there_is_refused_and_not_made(tmp_path: Path, action: str) -> None:
    with pytest.raises(UsageError, match=r"--cache_dir '.*/cahce': .* is not a folder; give"):
        run("cache", action, cache=tmp_path / "cahce")
    assert not (tmp_path / "cahce").exists()


def test_the_cache_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "ls", cache=tmp_path) == 0
    assert "0.00 GiB in all" in capsys.readouterr().out
    filled(tmp_path)
    assert run("cache", "ls", cache=tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("latents" in line and "tiny/vae main abcabcabcabc" in line for line in lines)
    assert run("cache", "ls", "--json", "true", cache=tmp_path) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["about"]["kind"], row["entries"]) for row in rows} == {("latents", 3), ("texts", 1)}


def test_damaged_entries_are_found_and_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = filled(tmp_path)
    assert run("cache", "verify", cache=tmp_path) == 0
    file = cache.file(f"{1:064x}")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run("cache", "verify", cache=tmp_path) == 1
    assert f"damaged, deleted: {file}" in capsys.readouterr().out
    assert run("cache", "verify", cache=tmp_path) == 0
    assert len(list(entries(cache.root))) == 3


def test_clearing_leaves_what_is_in_use_or_young(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = filled(tmp_path)
    os.utime(cache.file(f"{0:064x}"), (1, 1))
    assert run("cache", "clear", "--unused_days", "2", cache=tmp_path) == 0
    assert "1 entries deleted" in capsys.readouterr().out
    lease = cache.lease([f"{1:064x}"])
    assert run("cache", "clear", cache=tmp_path) == 0
    out = capsys.readouterr().out
    assert "2 entries deleted" in out
    assert "1 entries are kept: a live run uses them" in out
    assert [entry.file.stem for entry in entries(cache.root)] == [f"{1:064x}"]
    lease.close()
    assert run("cache", "clear", cache=tmp_path) == 0
    assert not list(entries(cache.root))
    assert not [folder for folder in cache.root.iterdir() if folder.is_dir() and folder.name != "leases"]


def test_every_action_of_the_cache_obeys_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str, code: int = 0) -> Any:
        assert run("cache", *words, "--json", cache=tmp_path) == code
        return json.loads(capsys.readouterr().out)

    cache = filled(tmp_path)
    old = cache.file(f"{0:064x}")
    os.utime(old, (1, 1))
    assert [row["entries"] for row in shown("ls", "--unused_days", "2")] == [1]
    assert sorted(row["entries"] for row in shown("ls")) == [1, 3]
    assert shown("verify") == {"entries": 4, "damaged": []}
    size = old.stat().st_size
    assert shown("clear", "--unused_days", "2") == {"deleted": 1, "bytes": size, "in_use": 0}
    damaged = cache.file(f"{1:064x}")
    damaged.write_bytes(b"damaged")
    assert shown("verify", code=1) == {"entries": 3, "damaged": [str(damaged)]}
    with pytest.raises(UsageError, match=r"unused_days: 30: verify hashes every entry, .* give it to ls or clear"):
        run("cache", "verify", "--unused_days", "30", cache=tmp_path)
