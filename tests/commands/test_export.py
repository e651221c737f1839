"""Where an export goes, and which files of a checkpoint come along."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from accel_train import cli
from accel_train.commands import export, tensor_files
from accel_train.config import MachineError, UsageError
from tests.trained import commit_checkpoint


def own_run(run: Path) -> Path:
    """Write a run of a recipe without a pipeline, with files of its own. Returns the checkpoint."""

    def save(assets: Path) -> None:
        directory = assets.parent
        for name in ("model.yaml", "model-card.md", "ema.txt", "tables/codes.bin", "codes.safetensors", "assets/a.txt"):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(name)
        # Of the collections and the state of the training.
        for name in ("optimizer/index.json", "trainer_state.json"):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text("{}")

    return commit_checkpoint(run, torch.nn.Linear(2, 2), {}, save)


def test_all_files_of_a_recipe_of_ones_own_come_along(tmp_path: Path) -> None:
    checkpoint = own_run(tmp_path / "run")
    found, _ = export.places.newest_at(checkpoint)
    (tmp_path / "out").mkdir()
    export._copy_extras(found, tmp_path / "out")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {
        "model.yaml",
        "model-card.md",
        "ema.txt",
        "tables/codes.bin",
        "codes.safetensors",
        "assets/a.txt",
    }


@pytest.mark.parametrize(
    "name", ["model.safetensors", "ema-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_weights_are_written_anew(name: str) -> None:
    assert export.LEFT_OUT.fullmatch(name)


def small_run(run: Path) -> Path:
    return commit_checkpoint(run, torch.nn.Linear(2, 2), {}, lambda assets: None)


@pytest.mark.parametrize("exists", [True, False], ids=["to an empty directory", "to nothing"])
def test_a_link_leads_to_the_destination(exists: bool, tmp_path: Path) -> None:
    checkpoint = small_run(tmp_path / "run")
    (tmp_path / "disk").mkdir()
    if exists:
        (tmp_path / "disk" / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    assert cli._main(["export", str(checkpoint), str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space (os error 28)")]
)
def test_a_full_disk_is_no_wrong_usage(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = small_run(tmp_path / "run")

    def fills(_: Path) -> None:
        raise error

    monkeypatch.setattr(tensor_files, "_flush", fills)
    with pytest.raises(MachineError, match=r"cannot be written \(.*No space.*\); free space or write elsewhere"):
        cli._main(["export", str(checkpoint), str(tmp_path / "out")])


@pytest.mark.skipif(not os.path.ismount("/dev"), reason="needs a mount point")
def test_a_mount_point_is_refused_at_once(tmp_path: Path) -> None:
    checkpoint = small_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"/dev: is a mount point, which cannot be replaced; give a directory in it"):
        cli._main(["export", str(checkpoint), "/dev"])


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_fault_of_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the retention of a run that goes on."""
    run = tmp_path / "run"
    checkpoint = commit_checkpoint(
        run, torch.nn.Linear(2, 2), {}, lambda assets: assets.with_name("notes.txt").write_text("read me") and None
    )
    write = export.write_collection

    def deleting(*given: Any) -> None:
        write(*given)
        shutil.rmtree(checkpoint)

    monkeypatch.setattr(export, "write_collection", deleting)
    with pytest.raises(UsageError, match=r"notes\.txt: cannot be read \(No such file.*use a newer one"):
        cli._main(["export", str(checkpoint), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
