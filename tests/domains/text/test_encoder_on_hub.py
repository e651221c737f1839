"""A text encoder on the Hub, whose branch moves on: a run and its checkpoints stay at the commit that it began with."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import UsageError
from accel_train.domains.text import prepare
from accel_train.domains.text.encoders import MODEL_FILES, TransformerEncoder, load_encoder
from accel_train.domains.text.options import DataConfig
from accel_train.domains.text.prepare import prepare_data
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


def former_hash(folder: Path) -> str:
    """As the versions before recorded it: of links into the Hub's cache the names of their blobs."""
    digest = hashlib.sha256()
    for file in sorted(set(itertools.chain.from_iterable(folder.glob(pattern) for pattern in MODEL_FILES))):
        assert file.is_symlink()
        digest.update(f"{file.name}\0{file.resolve().name}\n".encode())
    return digest.hexdigest()


def as_before(assets: Path, folder: Path) -> str:
    """Rewrite the record as the versions before wrote it, and return its hash."""
    record = json.loads((assets / "encoder.json").read_text())
    del record["revision"]
    record["weights_hash"] = former_hash(folder)
    (assets / "encoder.json").write_text(json.dumps(record))
    return record["weights_hash"]


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


def test_a_record_of_an_older_version_still_counts(server: HubServer, tmp_path: Path) -> None:
    push(server, tmp_path / "bert", 0)
    encoder = TransformerEncoder(REPOSITORY)
    encoder.save(tmp_path)
    former = as_before(tmp_path, encoder.folder)
    assert former != encoder.files_hash
    loaded = load_encoder(tmp_path)
    assert loaded.encode(["my lord"]).shape == (1, 16)
    # The identity of its data stays.
    assert loaded.identity == encoder.resumed(tmp_path).identity != encoder.identity
    # Also with a copy of the cache, as hard disks without links have it.
    shutil.copytree(encoder.folder, tmp_path / "copy")
    assert TransformerEncoder(str(tmp_path / "copy"), weights_hash=former).files_hash == former
    push(server, tmp_path / "bert", 1)
    with pytest.raises(UsageError, match="its files changed since the latents were made"):
        load_encoder(tmp_path).encode(["my lord"])


@pytest.mark.parametrize("older", [False, True])
def test_a_resume_has_the_data_of_its_first_start(older: bool, server: HubServer, tmp_path: Path) -> None:
    words = tiny_encoders.WORDS
    texts = [" ".join(words[(i * k) % 15] for k in range(1, 6)) + f" {i}" for i in range(40)]
    (tmp_path / "rows.txt").write_text("\n".join(texts))
    config = DataConfig(
        path=str(tmp_path / "rows.txt"),
        heldout_fraction=0.2,
        vocab_size=300,
        encoder=REPOSITORY,
        max_length=16,
        cache_dir=str(tmp_path / "cache"),
    )
    push(server, tmp_path / "bert", 0)
    begun = prepare_data(config)
    assets = tmp_path / "assets"
    begun.assets.save(assets)
    weights = WeightsAssets(assets, resumes=True)
    expected = begun.fingerprint
    if older:
        encoder = begun.assets.encoder
        assert isinstance(encoder, TransformerEncoder)
        as_before(assets, encoder.folder)
        expected = prepare_data(config, weights=weights).fingerprint
        assert expected != begun.fingerprint
    else:
        push(server, tmp_path / "bert", 1)
        assert prepare_data(config).fingerprint != expected
    assert prepare_data(config, weights=weights).fingerprint == expected
