"""A base on the Hub, whose branch moves on: the main process finds the commit that all processes read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.domains.images.pipelines import loading
from accel_train.domains.images.pipelines.loading import Base, BaseConfig
from accel_train.domains.images.recorded_base import at_commit
from accel_train.store import manifest
from accel_train.store.pretrained_base import at_recorded_revision
from tests.domains.images import test_lora_recipe as lora_recipe
from tests.domains.images import tiny_pipelines as tiny
from tests.hub_server import HubServer, serving_repository

REPOSITORY = "me/base"
BRANCH = BaseConfig(source=REPOSITORY, revision="main")


def push(server: HubServer, number: int) -> str:
    files = {"model_index.json": b'{"number": %d}' % number}
    return server.repositories[REPOSITORY].add("main", "base", "", files).oid


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_repository(monkeypatch, tmp_path / "home", REPOSITORY) as hub:
        yield hub


def test_the_commit_of_a_branch(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    first = push(server, 1)
    for options in (BaseConfig(source=REPOSITORY), BRANCH):
        assert at_commit(options) == BaseConfig(source=REPOSITORY, revision=first)
    pinned = at_commit(BRANCH)
    second = push(server, 2)
    assert at_commit(BRANCH).revision == second
    for options in (pinned, BaseConfig(), BaseConfig(source=str(tmp_path)), BaseConfig(source="runs/image-demo")):
        assert at_commit(options) is options
    with pytest.raises(UsageError, match=r"base.source 'me/base' cannot be loaded .*Revision"):
        at_commit(BaseConfig(source=REPOSITORY, revision="dev"))
    with pytest.raises(UsageError, match=r"--base.source './nowhere'"):
        at_commit(BaseConfig(source="./nowhere"))
    # What the cache had at the last look, without asking.
    push(server, 3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert at_commit(BRANCH).revision == second


def test_a_pushed_run_as_base_is_found_again_at_its_commit() -> None:
    at = f"hub:me/run@{'a' * 40}"
    for source in ("hub:me/run", "hub:me/run@main", at):
        assert at_recorded_revision(BaseConfig(source=source), {"source": at, "revision": None}).source == at
    other = BaseConfig(source="hub:me/other")
    assert at_recorded_revision(other, {"source": at, "revision": None}) is other


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_reads_the_commit_that_the_main_process_has_found(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves on before the base is read, and again before the resume."""
    pytest.importorskip("diffusers")
    from diffusers.pipelines import pipeline_utils
    from huggingface_hub import HfApi

    # diffusers asks for the list of files by a client of its own.
    monkeypatch.setattr(pipeline_utils, "model_info", HfApi(endpoint=server.url).model_info)
    base = tiny.save("sd1", tmp_path / "base")

    def push_pipeline(seed: int) -> str:
        (base / "unet" / "seed.json").write_text(str(seed))
        weights = base / "unet" / "diffusion_pytorch_model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= seed
        weights.write_bytes(content)
        files = {str(file.relative_to(base)): file.read_bytes() for file in base.rglob("*") if file.is_file()}
        return server.repositories[REPOSITORY].add("main", "base", "", files).oid

    first = push_pipeline(0)
    lora_recipe.pictures(tmp_path / "photos", 6)
    lora_recipe.settings(tmp_path, "sd1")
    read = loading.find_base

    def push_and_read(config: BaseConfig) -> Base:
        push_pipeline(1)
        return read(config)

    monkeypatch.setattr(loading, "find_base", push_and_read)
    for steps in ("1", "2"):
        run = lora_recipe.train(tmp_path, "run", "--base.source", REPOSITORY, "--max_steps", steps)
        base_files = manifest.read(run / "checkpoints" / f"checkpoint_0000000{steps}")["base"]
        assert base_files["revision"] == first
