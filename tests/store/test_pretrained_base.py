"""The files of a base: their hashes, remembered while nothing about a file has changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from accel_train.config import UsageError, expand_path
from accel_train.store import pretrained_base
from accel_train.store.pretrained_base import (
    PretrainedBase,
    looks_like_path,
    refuse_missing_folder,
    refuse_other_base,
    remembered_sha256,
)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is read to be hashed. Files count as old at once."""
    found: list[Path] = []
    right = pretrained_base._sha256

    def recording(path: Path) -> str:
        found.append(path)
        return right(path)

    monkeypatch.setattr(pretrained_base, "_sha256", recording)
    monkeypatch.setattr(pretrained_base, "COARSE_SECONDS", -1e9)
    return found


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_that_has_not_changed_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    base = PretrainedBase("org/base", tmp_path, (weights.name,))
    for _ in range(3):
        facts = base.reference(tmp_path / "cache")["files"][weights.name]
        assert facts == {"size": 3, "sha256": digest(b"one")}
    assert len(reads) == 1
    assert base.reference()["files"][weights.name]["sha256"] == digest(b"one")
    assert len(reads) == 2, "without a cache every byte is read"


def test_a_changed_file_is_read_again_whatever_its_time_says(tmp_path: Path, reads: list[Path]) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    before = weights.stat()
    assert remembered_sha256(weights, tmp_path / "cache") == digest(b"one")
    weights.write_bytes(b"two")  # the same size
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert remembered_sha256(weights, tmp_path / "cache") == digest(b"two")
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"six")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(weights)
    assert remembered_sha256(weights, tmp_path / "cache") == digest(b"six")


def test_a_link_stands_for_its_target(tmp_path: Path, reads: list[Path]) -> None:
    """As in the cache of the Hub, where a snapshot has links to blobs."""
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode())
    link = tmp_path / "model.safetensors"
    for name in ("one", "two", "one"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        assert remembered_sha256(link, tmp_path / "cache") == digest(name.encode())
    assert len(reads) == 2


def test_a_file_just_written_is_not_remembered(tmp_path: Path) -> None:
    """Its times may be too coarse to tell a second write."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    assert time.time() - weights.stat().st_mtime < pretrained_base.COARSE_SECONDS
    remembered_sha256(weights, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"file": 1}', '{"sha256": "x"}'])
def test_a_damaged_entry_is_no_answer(content: str, tmp_path: Path, reads: list[Path]) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    remembered_sha256(weights, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").rglob("*.json")
    entry.write_text(content)
    assert remembered_sha256(weights, tmp_path / "cache") == digest(b"one")
    assert len(reads) == 2
    changed = json.loads(entry.read_text()) | {"sha256": "short"}
    entry.write_text(json.dumps(changed))
    assert remembered_sha256(weights, tmp_path / "cache") == digest(b"one")


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, reads: list[Path]) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    (tmp_path / "cache").write_text("a file")
    assert remembered_sha256(weights, tmp_path / "cache") == digest(b"one")


def test_a_missing_or_other_base_is_named(tmp_path: Path) -> None:
    base = PretrainedBase("org/base", tmp_path, ("model.safetensors",), "v2")
    with pytest.raises(UsageError, match=r"the base org/base: .* has no model.safetensors; download it again"):
        base.reference()
    (tmp_path / "model.safetensors").write_bytes(b"one")
    recorded = base.reference()
    (tmp_path / "model.safetensors").write_bytes(b"two")
    with pytest.raises(UsageError, match=r"are those of org/base at revision v2, and .* has another model.safetensors"):
        refuse_other_base(recorded, base.reference(), tmp_path / "checkpoint")
    with pytest.raises(UsageError, match=r"but this model was built without a base"):
        refuse_other_base(recorded, None, tmp_path / "checkpoint")


@pytest.mark.parametrize("source", ["./x", "../x", "{absolute}/x", "~/x", "$HOME/x", "runs/x", "a/b/c", "x/"])
def test_a_path_without_a_folder_is_refused_as_one(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source = source.format(absolute=tmp_path)
    assert looks_like_path(source)
    with pytest.raises(UsageError, match=r"--model.source '.*': the base is a local folder, but /.*[xc] is not there"):
        refuse_missing_folder("--model.source", source)
    expand_path(source).mkdir(parents=True)
    if source[0] in "~$":
        with pytest.raises(UsageError, match=rf"is not expanded; .*--model.source {tmp_path}/home/x"):
            refuse_missing_folder("--model.source", source)
        return
    refuse_missing_folder("--model.source", source)


def test_a_single_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        UsageError, match=r"--base.source '.*model.safetensors': is a file, but a folder .*from_single_file"
    ):
        refuse_missing_folder("--base.source", str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("source", ["gpt2", "Qwen/Qwen3-0.6B", "org/runs"])
def test_a_hub_id_is_no_missing_folder(source: str, tmp_path: Path) -> None:
    elsewhere = {"source": str(tmp_path / "gone"), "revision": None, "files": {}}
    refuse_missing_folder("--model.source", source)
    refuse_missing_folder("--model.source", source, elsewhere, tmp_path)


def test_a_name_is_a_folder_if_the_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    files = PretrainedBase(str(tmp_path / "mine"), tmp_path, ("a.safetensors", "b.safetensors"), "7")
    reference = files.reference()
    with pytest.raises(UsageError) as error:
        refuse_missing_folder("--model.source", "mine", reference, tmp_path / "checkpoint_00000002")
    said = str(error.value)
    for part in (
        f"{tmp_path}/mine is not there",
        f"{tmp_path}/checkpoint_00000002 records source {tmp_path}/mine, revision 7",
        f"a.safetensors with sha256 {digest(b'a.safetensors')}, b.safetensors with sha256 {digest(b'b.safetensors')}",
        "--model.source FOLDER --allow model.source, with the same files",
        "--checkpoints.base embed",
    ):
        assert part in said, said


def test_what_defines_a_base_is_compared_by_its_meaning(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "model.safetensors").write_bytes(b"one")
    config = tmp_path / "config.json"
    config.write_text('{"a": 1, "inner": {"_note": "x", "b": [2]}, "unread": 3}')
    (tmp_path / "words.txt").write_text("one")

    def reference(*names: str) -> dict[str, Any]:
        return PretrainedBase(
            "org/base", tmp_path / "part", ("model.safetensors",), None, names, tmp_path, ("unread",)
        ).reference()

    recorded = reference("config.json", "words.txt")
    assert list(recorded["definition"]) == ["config.json", "words.txt"]
    assert recorded["definition"]["words.txt"] == digest(b"one")
    config.write_text('{"unread": 4, "inner": {"b": [2]}, "a": 1, "transformers_version": "9", "_class": "y"}')
    refuse_other_base(recorded, reference("words.txt", "config.json"), tmp_path)
    # A base may have none.
    refuse_other_base(recorded, reference(), tmp_path)
    refuse_other_base(reference(), recorded, tmp_path)

    (tmp_path / "more.txt").write_text("two")
    for names, says in (
        (("config.json",), r"has no words\.txt"),
        (("config.json", "words.txt", "more.txt"), r"has more\.txt, which it did not have before"),
    ):
        with pytest.raises(UsageError, match=says):
            refuse_other_base(recorded, reference(*names), tmp_path)
    config.write_text('{"a": 1, "inner": {"b": [3]}}')
    with pytest.raises(UsageError, match=r"org/base has another config\.json \(sha256 .*, with the same file"):
        refuse_other_base(recorded, reference("config.json", "words.txt"), tmp_path)
    config.unlink()
    with pytest.raises(UsageError, match=r"has no config\.json; download it again"):
        reference("config.json")
