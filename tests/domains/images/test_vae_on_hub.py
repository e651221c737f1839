"""An autoencoder on the Hub, whose branch moves on: a run and its pictures stay at the commit that it began with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import UsageError
from accel_train.domains.images import captioned
from accel_train.domains.images.captioned import PictureConfig, prepare_pictures
from accel_train.domains.models.vae import VaeReference, load_vae
from accel_train.domains.text.dataset import load_assets
from accel_train.domains.text.options import DataConfig
from accel_train.domains.text.prepare import prepare_data
from accel_train.options.tree import flatten
from accel_train.store import atomic_files, manifest
from tests.domains.images import tiny_pipelines as tiny
from tests.hub_server import HubServer, serving_repository

pytest.importorskip("diffusers")
# diffusers passes it on to a version that no longer has it.
pytestmark = pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks`:UserWarning")
REPOSITORY = "me/vae"


def push(server: HubServer, folder: Path, seed: int) -> str:
    """Push other weights to the branch, and return the commit."""
    torch.manual_seed(seed)
    tiny.vae(4).save_pretrained(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return server.repositories[REPOSITORY].add("main", "weights", "", files).oid


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_repository(monkeypatch, tmp_path / "home", REPOSITORY) as hub:
        yield hub


def prepared(folder: Path, config: PictureConfig, earlier: Path | None = None) -> VaeReference:
    data = DataConfig(path="shapes", cache_dir=str(folder / "cache"), vocab_size=300, max_length=40)
    pictures = prepare_pictures(config, data, weights=earlier and WeightsAssets(earlier, resumes=True))
    assert pictures is not None
    assert pictures.vae is not None
    prepare_data(pictures.rows(data), pictures=pictures).assets.save(folder / "checkpoint" / "assets")
    options = flatten({"pictures": {"vae": config.vae, "vae_revision": config.vae_revision}})
    files = {"assets/assets.json": {"size": 1, "sha256": "0" * 64}}
    content = manifest.sealed({"step": 2, "files": files, "experiment": options})
    atomic_files.write_json_in_place(folder / "checkpoint" / manifest.MANIFEST, content)
    return pictures.vae


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_run_keeps_the_commit_of_its_autoencoder(revision: str | None, server: HubServer, tmp_path: Path) -> None:
    config = PictureConfig(latents="vae", vae=REPOSITORY, vae_revision=revision, size=16, patch=2, samples=20)
    first = push(server, tmp_path / "vae", 0)
    begun = prepared(tmp_path, config)
    assert begun.revision == first
    second = push(server, tmp_path / "vae", 1)
    earlier = tmp_path / "checkpoint" / "assets"
    # Pictures of the checkpoint, and a resume.
    recorded = load_assets(earlier).vae
    assert recorded == begun
    assert load_vae(REPOSITORY, begun.revision, "the autoencoder", begun).reference == begun
    assert prepared(tmp_path, config, earlier) == begun
    # A fresh start has the newest, as has another revision. Reading the branch again would be refused.
    fresh = prepared(tmp_path / "fresh", config)
    assert fresh.revision == second
    assert fresh.sha256 != begun.sha256
    server.repositories[REPOSITORY].branches["dev"] = second
    other = PictureConfig(latents="vae", vae=REPOSITORY, vae_revision="dev", size=16, patch=2, samples=20)
    assert prepared(tmp_path / "other", other, earlier) == fresh
    with pytest.raises(UsageError, match="the sha256 of its weights is"):
        load_vae(REPOSITORY, revision, "the autoencoder", begun)


def test_other_processes_read_the_commit_of_rank_0(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PictureConfig(latents="vae", vae=REPOSITORY, size=16, patch=2, samples=20)
    data = DataConfig(path="shapes", cache_dir=str(tmp_path / "cache"), vocab_size=300, max_length=40)
    first = push(server, tmp_path / "vae", 0)
    push(server, tmp_path / "vae", 1)
    monkeypatch.setattr(captioned, "of_rank_0", lambda *_: first)
    pictures = prepare_pictures(config, data, rank=1, world_size=2)
    assert pictures is not None
    assert pictures.vae is not None
    assert pictures.vae.revision == first


def test_config_and_weights_are_of_one_commit(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves on between the two."""
    import diffusers

    first = push(server, tmp_path / "vae", 0)
    expected = load_vae(str(tmp_path / "vae"), None, "the autoencoder").reference.sha256
    read = diffusers.AutoModel.load_config

    def read_and_push(*arguments: Any, **named: Any) -> Any:
        found = read(*arguments, **named)
        push(server, tmp_path / "vae", 1)
        return found

    monkeypatch.setattr(diffusers.AutoModel, "load_config", read_and_push)
    found = load_vae(REPOSITORY, None, "the autoencoder").reference
    assert (found.revision, found.sha256) == (first, expected)
