"""The weights that a run starts from: what is verified, what is refused, and what other programs write."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from accel_train.checkpoints import restore
from accel_train.checkpoints.fetch import CheckpointsUnusableError, fetch, find_weights, read_manifest
from accel_train.checkpoints.run import Run
from accel_train.config import UsageError
from accel_train.store import commit
from tests.store.test_commit import make


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The newest of two checkpoints of a run."""
    make(tmp_path / "run" / "checkpoints", 50)
    return make(tmp_path / "run" / "checkpoints", 100)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: flip(path / "model.safetensors"), "model.safetensors has changed since it was written"),
        (lambda path: flip(path / "manifest.json"), "manifest.json cannot be read"),
        (
            lambda path: (path / "optimizer" / "exp_avg.safetensors").unlink(),
            "optimizer/exp_avg.* is missing",
        ),
    ],
)
@pytest.mark.parametrize("name", ["checkpoint_00000100", "my-weights"])
def test_a_damaged_checkpoint_is_refused_by_its_own_path_too(
    saved: Path, name: str, harm: Callable[[Path], object], reason: str
) -> None:
    place = saved.rename(saved.with_name(name))
    assert find_weights(str(place)) == (place, [f"weights of {place}"])
    harm(place)
    with pytest.raises(UsageError, match=rf"init_from: .*{name}: {reason}.*; restore it from a copy, or name another"):
        find_weights(str(place))


def test_a_checkpoint_without_its_manifest_is_refused(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"init_from: .*checkpoint_00000100: no manifest\.json"):
        find_weights(str(saved))


@pytest.mark.parametrize("kind", ["tmp", "trash"])
def test_an_unfinished_save_is_refused(saved: Path, kind: str) -> None:
    unfinished = saved.rename(saved.with_name(commit.temporary_name(100, "abc", kind)))
    with pytest.raises(UsageError, match=r"init_from: .* is unfinished or half-deleted; name a checkpoint_ directory"):
        find_weights(str(unfinished))


@pytest.mark.parametrize("place", ["nowhere@7", "nowhere@best"])
def test_a_step_of_a_run_that_is_not_there_is_refused_as_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / place.partition("@")[0]
    with pytest.raises(UsageError, match=f"^init_from: {run} does not exist; a run with a checkpoint, .* is required"):
        find_weights(place)
    with pytest.raises(UsageError, match=f"^resume: '{place}' is not auto, .*, and {run} does not exist"):
        fetch(place, tmp_path / "there")


def test_a_step_of_a_run_is_resumed_as_its_path_is(saved: Path, tmp_path: Path) -> None:
    run = saved.parents[1]
    assert fetch(f"{run}@50", tmp_path / "there").step == 50
    assert read_manifest(f"{run}@50")["step"] == 50
    for option, take in (("resume", read_manifest), ("init_from", find_weights)):
        with pytest.raises(UsageError, match=f"^{option}: {run}@7: there is no checkpoint of this step; there are 50"):
            take(f"{run}@7")


def test_the_newest_that_verifies_is_taken_from_a_run(saved: Path) -> None:
    flip(saved / "model.safetensors")
    older = saved.with_name("checkpoint_00000050")
    for place in (saved.parents[1], saved.parent):
        found, notes = find_weights(str(place))
        assert (found, notes[0]) == (older, f"weights of {older}")
        assert "checkpoint_00000100: model.safetensors has changed since it was written" in notes[1]
    shutil.rmtree(older)
    with pytest.raises(UsageError, match=r"init_from: no checkpoint of .*run verifies; restore .* copy.*\n.*00000100"):
        find_weights(str(saved.parents[1]))


def test_a_run_whose_newest_checkpoint_is_damaged_stands_for_an_older_one_with_a_warning(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(saved / "model.safetensors")
    assert fetch(str(saved.parents[1]), tmp_path / "there").step == 50
    assert "checkpoint_00000100: model.safetensors has changed since it was written" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_copy_that_fails_leaves_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(source: Path, target: Path) -> None:
        if target.name == "exp_avg.safetensors":
            raise OSError(number, os.strerror(number), str(target))
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(shutil, "copy2", full)
    says = "Input/output error"
    if number == errno.ENOSPC:
        says = r"no space left for a checkpoint in .*/there \(need about [0-9]+ KiB, free "
    with pytest.raises(CheckpointsUnusableError, match=rf"resume: {saved} could not be fetched: .*{says}"):
        fetch(str(saved), tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_a_copy_holds_what_the_manifest_lists(saved: Path, tmp_path: Path) -> None:
    (saved / "ema.safetensors").write_bytes(b"of nobody")
    assert commit.unlisted(fetch(str(saved), tmp_path / "there")) == []


@pytest.mark.parametrize("foreign", [None, "{}", "[", '{"name": "another tool", "files": []}'])
def test_the_folder_of_another_program_needs_no_manifest(tmp_path: Path, foreign: str | None) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    if foreign is not None:
        (tmp_path / "manifest.json").write_text(foreign)
    assert find_weights(str(tmp_path)) == (tmp_path, [f"weights of {tmp_path}"])


def test_a_manifest_that_was_damaged_meanwhile_is_no_foreign_one(saved: Path) -> None:
    """What it says of the frozen parameters must not be lost: the base would not be compared."""
    flip(saved / "manifest.json")
    run = Run(saved.parents[1], "x", None, "", {}, initial_weights=saved)
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read"):
        restore.load_initial_weights(nn.Linear(3, 2), run)
