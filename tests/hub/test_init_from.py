"""Weights on the Hub as the start of a run: ``--init_from hub:org/name``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator

from accel_train.checkpoints import fetch
from accel_train.checkpoints.run import assets_of_weights
from accel_train.config import UsageError
from accel_train.hub.queue import Entry
from accel_train.hub.repository import push_checkpoint
from accel_train.runtime.exiting import current_run
from accel_train.store import commit
from accel_train.store.run_file import load
from tests.checkpoints.test_run import WithWeights, options_of, start
from tests.distributed.launching import Finished, Layout, run_recipe
from tests.hub.test_hub import REPO, make_checkpoint, push
from tests.hub_server import HubServer, serving
from tests.store.test_commit import make

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    with serving(monkeypatch, tmp_path / "hf_home") as served, current_run:
        yield served


@pytest.fixture
def pushed(tmp_path: Path) -> Path:
    """A run whose checkpoints a test may push."""
    (tmp_path / "pushed" / "checkpoints").mkdir(parents=True)
    return tmp_path / "pushed"


def main_of(server: HubServer) -> str:
    return f"hub:{REPO}@{server.repositories[REPO].branches['main']}"


def test_a_run_begins_from_the_commit_that_its_first_start_found(
    server: HubServer, pushed: Path, accelerator: Accelerator, tmp_path: Path
) -> None:
    push(first := make_checkpoint(pushed, 1))
    config = WithWeights(str(tmp_path / "run"), init_from=f"hub:{REPO}")
    run = start(accelerator, config)
    begun = main_of(server)
    assert run.initial_weights is not None
    assert commit.verify(run.initial_weights).file("model.safetensors").read_bytes() == (
        first.file("model.safetensors").read_bytes()
    )
    assert f"weights of {begun} in {run.initial_weights}" in run.decision
    saved = load(run.directory)
    assert (saved["init_from"], saved["experiment"]["init_from"]) == (begun, f"hub:{REPO}")
    # It trained and saved nothing, and the branch has moved since.
    push(make_checkpoint(pushed, 2))
    assert main_of(server) != begun
    current_run.close()
    again = start(accelerator, config)
    assert (again.initial_weights, load(run.directory)["init_from"]) == (run.initial_weights, begun)
    # Nor does it need the Hub, whose weights it has.
    requests = len(server.requests)
    server.close()
    current_run.close()
    assert start(accelerator, config).initial_weights == run.initial_weights
    assert len(server.requests) == requests
    make(run.checkpoints, 3)
    shutil.rmtree(tmp_path / "cache")
    current_run.close()
    resumed = start(accelerator, config)
    assert (resumed.start_step, resumed.initial_weights, load(run.directory)["init_from"]) == (3, None, begun)
    with pytest.raises(UsageError, match=rf"give --init_from hub:{REPO}, as the run began, to continue"):
        start(accelerator, replace(config, init_from=begun))


def test_a_run_that_did_not_train_and_a_new_one_take_the_newest(
    server: HubServer, pushed: Path, accelerator: Accelerator, tmp_path: Path
) -> None:
    push(make_checkpoint(pushed, 1))
    first = main_of(server)
    config = WithWeights(str(tmp_path / "run"), init_from=f"hub:{REPO}")
    start(accelerator, config, trains=False)
    push(make_checkpoint(pushed, 2))
    current_run.close()
    assert start(accelerator, config).saved["init_from"] == main_of(server) != first
    other = replace(config, output_dir=str(tmp_path / "other"), init_from=f"hub:{REPO}@1")
    commits = server.repositories[REPO].branches
    assert start(accelerator, other).saved["init_from"] == f"hub:{REPO}@{commits['step-00000001']}"
    # Before a save the weights may still be changed, and the record follows.
    changed = replace(other, init_from=first, allow=("init_from",))
    assert start(accelerator, changed).saved["init_from"] == first
    local = start(accelerator, replace(other, init_from=str(pushed), allow=("init_from",)))
    assert "init_from" not in local.saved
    assert "init_from" not in load(local.directory)
    push(make_checkpoint(pushed, 3))
    current_run.close()
    assert start(accelerator, replace(config, overwrite=True)).saved["init_from"] == main_of(server)


def test_offline_the_cache_is_enough_and_without_it_the_start_is_refused(
    server: HubServer, pushed: Path, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    push(make_checkpoint(pushed, 1))
    config = WithWeights(str(tmp_path / "run"), init_from=f"hub:{REPO}")
    missing = replace(config, init_from=f"hub:{REPO}@7")
    with pytest.raises(UsageError, match=r"org/model has no revision step-00000007; it has main, step-00000001"):
        start(accelerator, missing)
    with pytest.raises(UsageError, match="'hub:model' is not ORGANISATION/NAME"):
        start(accelerator, replace(config, init_from="hub:model"))
    assert not (tmp_path / "run").exists()
    found = fetch.find_weights(config.init_from)[0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("ACCEL_TRAIN_HUB_BACKOFF_SECONDS", "1e9")
    run = start(accelerator, config)
    assert (run.initial_weights, run.saved["init_from"]) == (found, main_of(server))
    remedy = r"HF_HUB_OFFLINE unset.*hf download org/model --revision step-00000007 --local-dir FOLDER\) and give"
    with pytest.raises(UsageError, match=remedy):
        start(accelerator, replace(missing, output_dir=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


def test_the_assets_are_those_of_the_same_commit(
    server: HubServer, pushed: Path, accelerator: Accelerator, tmp_path: Path
) -> None:
    push(make_checkpoint(pushed, 1))
    options = options_of(WithWeights(str(tmp_path / "run"), init_from=f"hub:{REPO}"))
    fetch.download_weights(accelerator, options)
    push(make_checkpoint(pushed, 2))
    found = assets_of_weights(options)
    assert found is not None
    assert not found.resumes
    run = start(accelerator, WithWeights(options.output_dir, init_from=options.init_from))
    assert run.initial_weights == found.folder.parent
    assert commit.verify(found.folder.parent).step == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_as_from_the_folder(server: HubServer, tmp_path: Path) -> None:
    """Also after the repository has moved on and is out of reach."""
    # A resume keeps the schedule of the first start, which is shorter.
    constant = ("--schedule.kind", "constant", "--schedule.floor", "0", "--schedule.warmup_steps", "0")
    flags = (*constant, "--checkpoints.save_every", "2", "--init_from")
    first = run_recipe(Layout("single", 1), tmp_path / "first" / "run", "--max_steps", "2")
    push_run(server, first, 2)
    begun = main_of(server)
    pair = Layout("ddp", 2)
    expected = run_recipe(pair, tmp_path / "local" / "run", *flags, str(first.directory), "--max_steps", "4")
    place, online = tmp_path / "hub" / "run", {"HF_HUB_OFFLINE": "0"}
    asked = len(server.times("info"))
    found = run_recipe(pair, place, *flags, f"hub:{REPO}", "--max_steps", "2", extra=online)
    assert f"weights of {begun}" in found.output
    # One process asked for both: for the commit, and for its files.
    assert len(server.times("info")) == asked + 2
    assert json.loads((place / "run.json").read_text())["init_from"] == begun
    server.repositories[REPO].add("main", "another", "", {"model.safetensors": b""})
    server.close()
    shutil.rmtree(tmp_path / "cache" / "hub")
    again = run_recipe(pair, place, *flags, f"hub:{REPO}", "--max_steps", "4", extra=online)
    assert again.losses() == expected.losses()
    refused = run_recipe(pair, tmp_path / "new" / "run", *flags, f"hub:{REPO}", extra=online, ok=False)
    assert refused.code == 2, refused.output
    assert "org/model could not be downloaded from" in refused.output
    assert not (tmp_path / "new" / "run").exists()


def push_run(server: HubServer, run: Finished, step: int) -> None:
    from accel_train.hub.client import check_repository
    from accel_train.hub.options import HubConfig

    path = run.checkpoint(step)
    check_repository(HubConfig(repo_id=REPO))
    push_checkpoint(path, Entry(path.name, step, load(run.directory)["run_id"], REPO), run.directory)
