"""Exports of what was pushed, and exports on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors.torch import load_file

from accel_train import cli, load
from accel_train.config import UsageError
from accel_train.hub.client import check_repository
from accel_train.hub.options import HubConfig
from accel_train.hub.queue import Entry
from accel_train.hub.repository import push_checkpoint
from tests.hub_server import HubServer, serving
from tests.trained import language_run

REPO = "me/lm"
NAME = "checkpoint_00000003"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    with serving(monkeypatch, tmp_path / "hf_home") as served:
        yield served


def test_a_pushed_model_is_exported_and_loaded(server: HubServer, tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    check_repository(HubConfig(repo_id=REPO))
    push_checkpoint(run / "checkpoints" / NAME, Entry(NAME, 3, "abc", REPO), run)
    folder = tmp_path / "exported"
    assert cli._main(["export", f"hub:{REPO}@3", str(folder)]) == 0
    weights = load_file(run / "checkpoints" / NAME / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in exported.items())


def test_an_export_is_uploaded_by_hf(server: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "my export"
    assert cli._main(["export", str(language_run(tmp_path / "run")), str(folder)]) == 0
    with pytest.raises(UsageError, match=f"goes to the Hub with: hf upload OWNER/NAME '{folder}'$"):
        cli._main(["checkpoints", "push", str(folder), "--repo_id", "me/export"])
    api = HfApi()
    api.create_repo("me/export")
    api.upload_folder(repo_id="me/export", folder_path=folder)
    # With the commit that was looked at.
    advice = r"for an uploaded export or plain weights: hf download me/export --revision \w{40} --local-dir FOLDER"
    with pytest.raises(UsageError, match=advice):
        load("hub:me/export")
    assert load(snapshot_download("me/export", local_dir=tmp_path / "back"))("a text", max_new_tokens=2) is not None


def test_a_name_that_may_be_of_the_hub_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("me/lm", "me/lm@1200"):
        with pytest.raises(UsageError, match=f"does not exist.*; for the Hub: hub:{place}$"):
            load(place)
    (tmp_path / "me" / "lm").mkdir(parents=True)
    for place in ("me/lm", "lm", "/me/lm", "./me/lm", "runs/me/lm"):
        with pytest.raises(UsageError) as raised:
            load(place)
        assert "hub:" not in str(raised.value)
