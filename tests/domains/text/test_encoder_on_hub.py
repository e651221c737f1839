"""A text encoder on the Hub, whose branch moves on: a run and its checkpoints stay at the commit that it began with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_train.domains.text import prepare
from accel_train.domains.text.encoders import TransformerEncoder, load_encoder
from accel_train.domains.text.options import DataConfig
from accel_train.domains.text.splits import Processes
from tests import tiny_encoders
from tests.hub_server import HubServer, serving_repository

REPOSITORY = "me/bert"


def push(server: HubServer, folder: Path, seed: int) -> str:
    """Push other weights to the branch, and return the commit."""
    tiny_encoders.bert(folder, seed)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return server.repositories[REPOSITORY].add("main", "weights", "", files).oid


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_repository(monkeypatch, tmp_path / "home", REPOSITORY) as hub:
        yield hub


def test_a_saved_encoder_is_loaded_at_its_commit(server: HubServer, tmp_path: Path) -> None:
    first = push(server, tmp_path / "bert", 0)
    encoder = TransformerEncoder(REPOSITORY)
    encoder.save(tmp_path)
    assert json.loads((tmp_path / "encoder.json").read_text())["revision"] == first
    push(server, tmp_path / "bert", 1)
    loaded = load_encoder(tmp_path)
    assert loaded.identity == encoder.identity
    assert (loaded.encode(["my lord"]) == encoder.encode(["my lord"])).all()
    assert TransformerEncoder(REPOSITORY).identity != encoder.identity
    # Saved again, as by a resume that takes its assets.
    (tmp_path / "again").mkdir()
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / "encoder.json").read_text() == (tmp_path / "encoder.json").read_text()


def test_other_processes_read_the_commit_of_rank_0(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = push(server, tmp_path / "bert", 0)
    push(server, tmp_path / "bert", 1)
    monkeypatch.setattr(prepare, "of_rank_0", lambda *_: first)
    data = DataConfig(path="demo", encoder=REPOSITORY, cache_dir=str(tmp_path / "cache"))
    processes = Processes(1, 2, lambda: None, progress=False, device="cpu")
    encoder = prepare._build_encoder(data, None, [], tmp_path, processes)
    assert isinstance(encoder, TransformerEncoder)
    assert encoder.commit == first


def test_a_cache_without_links_has_the_same_files(server: HubServer, tmp_path: Path) -> None:
    push(server, tmp_path / "bert", 0)
    encoder = TransformerEncoder(REPOSITORY)
    shutil.copytree(encoder.folder, tmp_path / "copy")
    assert not any(file.is_symlink() for file in (tmp_path / "copy").iterdir())
    assert TransformerEncoder(str(tmp_path / "copy"), weights_hash=encoder.files_hash).identity == encoder.identity
