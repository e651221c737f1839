"""A base on the Hub, whose branch moves on: a run keeps the commit that it began with, unless its options change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from accel_train.checkpoints.fetch import CheckpointsUnusableError
from accel_train.checkpoints.policy import RunOptions
from accel_train.config import UsageError
from accel_train.frozen_weights import pinned
from accel_train.store import atomic_files, manifest
from tests.hub_server import serving

FIRST = "a" * 40
FILES = {"model.safetensors": {"size": 1, "sha256": "0" * 64}}


@dataclass(frozen=True)
class Base:
    source: str | None = "me/tiny"
    revision: str | None = None


def recorded(revision: str | None, name: str = "base") -> dict[str, Any]:
    """The manifest of a run that was started with this revision."""
    reference = {"source": "me/tiny", "revision": FIRST, "files": FILES, "definition": {}}
    return {"step": 2, "files": FILES, "experiment": {"base.revision": revision}, name: reference}


def write(run: Path, content: dict[str, Any]) -> None:
    folder = run / "checkpoints" / "checkpoint_00000002"
    folder.mkdir(parents=True)
    atomic_files.write_json_in_place(folder / manifest.MANIFEST, manifest.sealed(content))


def options(run: Path, base: Base, **more: Any) -> RunOptions:
    return RunOptions(str(run), {"base.source": base.source, "base.revision": base.revision}, **more)


def pin(accelerator: Accelerator, run: Path, base: Base, **more: Any) -> str | None:
    found = pinned(accelerator, base, "base.revision", options(run, base, **more), lambda base: base)
    assert found.source == base.source
    return found.revision


@pytest.mark.parametrize("name", ["base", "embedded_base"])
@pytest.mark.parametrize("revision", [None, "main"])
def test_a_resume_reads_the_commit_of_its_run(
    revision: str | None, name: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    write(tmp_path / "run", recorded(revision, name))
    base = Base(revision=revision)
    assert pin(accelerator, tmp_path / "run", base) == FIRST
    # Also from elsewhere. A fresh start has the newest.
    assert pin(accelerator, tmp_path / "other", base, resume=str(tmp_path / "run")) == FIRST
    assert pin(accelerator, tmp_path / "other", base) == revision
    assert pin(accelerator, tmp_path / "run", base, overwrite=True) == revision


def test_another_revision_or_source_is_another_base(accelerator: Accelerator, tmp_path: Path) -> None:
    write(tmp_path / "run", recorded("main"))
    for other in (Base(revision="dev"), Base(), Base(source="me/other", revision="main"), Base(source=None)):
        assert pin(accelerator, tmp_path / "run", other) == other.revision


def test_a_checkpoint_without_a_commit_changes_nothing(accelerator: Accelerator, tmp_path: Path) -> None:
    """As one on a base in a folder."""
    content = recorded("main")
    content["base"] = content["base"] | {"revision": None}
    write(tmp_path / "run", content)
    assert pin(accelerator, tmp_path / "run", Base(revision="main")) == "main"


def test_a_checkpoint_on_the_hub_names_the_commit(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch, tmp_path / "home") as server:
        from huggingface_hub import HfApi

        HfApi(endpoint=server.url).create_repo("me/run")
        content = atomic_files.to_json(manifest.sealed(recorded("main"))).encode()
        server.repositories["me/run"].add("step-00000002", "step 2", "", {manifest.MANIFEST: content})
        resume = "hub:me/run@2"
        assert pin(accelerator, tmp_path / "new", Base(revision="main"), resume=resume) == FIRST
        assert pin(accelerator, tmp_path / "new", Base(revision="dev"), resume=resume) == "dev"
        with pytest.raises((CheckpointsUnusableError, UsageError), match=r"me/run has no revision step-00000003"):
            pin(accelerator, tmp_path / "new", Base(revision="main"), resume="hub:me/run@3")
    # What is in the directory already comes first, and needs no network.
    write(tmp_path / "begun", recorded("main"))
    assert pin(accelerator, tmp_path / "begun", Base(revision="main"), resume=resume) == FIRST


def test_another_source_of_one_repository_is_another_base(accelerator: Accelerator, tmp_path: Path) -> None:
    at = f"hub:me/run@{FIRST}"
    content = recorded(None) | {"experiment": {"base.source": "hub:me/run@2", "base.revision": None}}
    content["base"] = content["base"] | {"source": at, "revision": None}
    write(tmp_path / "run", content)
    for source, expected in (("hub:me/run@2", at), ("hub:me/run", "hub:me/run")):
        base = Base(source=source)
        found = pinned(accelerator, base, "base.revision", options(tmp_path / "run", base), lambda base: base)
        assert found.source == expected
