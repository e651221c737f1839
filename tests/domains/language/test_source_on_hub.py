"""A language model on the Hub, whose branch moves on: a run reads one commit, from its first start to its last."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_train.config import UsageError
from accel_train.domains.language import tokenizers
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.sources import at_commit, base_of
from accel_train.domains.models.lora import LoraConfig
from accel_train.store import commit
from accel_train.store.pretrained_base import PretrainedBase, TrainedBase
from recipes import causal_lm
from tests.domains.language import tiny
from tests.hub_server import HubServer, serving_repository

pytest.importorskip("peft")
pytestmark = [
    # peft reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.usefixtures("fresh"),
]
REPOSITORY = "me/tiny"
BRANCH = ModelConfig(source=REPOSITORY, revision="main")


def push(server: HubServer, folder: Path) -> str:
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return server.repositories[REPOSITORY].add("main", "model", "", files).oid


def edit(base: Path, name: str, **values: Any) -> None:
    (base / name).write_text(json.dumps(json.loads((base / name).read_text()) | values))


def move_on(server: HubServer, base: Path) -> str:
    """Push another config, chat template and weights, as upstream does."""
    edit(base, "config.json", rms_norm_eps=1e-3)
    edit(base, "tokenizer_config.json", eos_token="<pad>")
    (base / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    weights_file = base / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    return push(server, base)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_repository(monkeypatch, tmp_path / "home", REPOSITORY) as hub:
        yield hub


@pytest.fixture
def base(tmp_path: Path) -> Path:
    texts = "\n\n".join(f"{n} {text}" for n in range(12) for text in tiny.TEXTS)
    (tmp_path / "texts.txt").write_text(texts)
    (tmp_path / "tiny.yaml").write_text(
        "global_batch_size: 4\nmicro_batch_size: 4\nprecision: fp32\nlog: {log_every: 1, progress_bar: off}\n"
        f"data: {{path: {tmp_path / 'texts.txt'}, max_length: 32, cache_dir: {tmp_path / 'cache'}}}\n"
        "optimizer: {lr: 1e-2}\nschedule: {kind: constant, warmup_steps: 0}\n"
        "evaluation: {samples: 2, shown: 1, max_new_tokens: 2}\n"
    )
    return tiny.save(tmp_path / "base")


def train(folder: Path, steps: int, *words: str, name: str = "run", source: str = REPOSITORY) -> Path:
    flags = ["--model.source", source, "--output_dir", str(folder / name), "--max_steps", str(steps), *words]
    assert causal_lm.main([str(folder / "tiny.yaml"), *flags]) == 0
    return folder / name / "checkpoints" / f"checkpoint_{steps:08d}"


# Slow: three trainings, up to 100 s beside other tests. The pin and the record are tested apart below.
@pytest.mark.slow
def test_a_whole_model_stays_at_the_commit_of_its_run(
    server: HubServer, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    first = push(server, base)
    checkpoint = train(tmp_path, 2)
    expected = {"source": REPOSITORY, "revision": first}
    assert commit.verify(checkpoint).manifest["hub_base"] == expected
    second = move_on(server, base)
    assert commit.verify(train(tmp_path, 3)).manifest["hub_base"] == expected
    # Without a network too: the cache has it.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elsewhere = train(tmp_path, 3, "--resume", str(checkpoint), name="elsewhere")
    assert commit.verify(elsewhere).manifest["hub_base"] == expected
    assert second != first


def test_all_files_of_a_fresh_start_are_of_one_commit(
    server: HubServer, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves on once the tokenizer is read."""
    first = push(server, base)
    shutil.copytree(base, tmp_path / "kept")
    read = tokenizers.load_tokenizer

    def read_and_push(name: str, revision: str | None, **named: Any) -> Any:
        found = read(name, revision, **named)
        if name == REPOSITORY:
            move_on(server, base)
        return found

    monkeypatch.setattr(tokenizers, "load_tokenizer", read_and_push)
    checkpoint = train(tmp_path, 1)
    assert server.repositories[REPOSITORY].branches["main"] != first
    assert commit.verify(checkpoint).manifest["hub_base"]["revision"] == first
    same = train(tmp_path, 1, name="folder", source=str(tmp_path / "kept"))
    assert "hub_base" not in commit.verify(same).manifest
    found, expected = (load_file(folder / "model.safetensors") for folder in (checkpoint, same))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert json.loads((checkpoint / "config.json").read_text())["rms_norm_eps"] != 1e-3


def test_the_commit_of_a_branch(server: HubServer, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    first = push(server, base)
    for options in (ModelConfig(source=REPOSITORY), BRANCH):
        assert at_commit(options).revision == first
    pinned = at_commit(BRANCH)
    assert at_commit(pinned) == pinned
    for options in (ModelConfig(), ModelConfig(source=str(base))):
        assert at_commit(options) is options
    assert base_of(pinned, LoraConfig()) == TrainedBase(REPOSITORY, first)
    adapted = base_of(pinned, LoraConfig(rank=2))
    assert isinstance(adapted, PretrainedBase)
    assert adapted.revision == first
    assert base_of(ModelConfig(source=str(base)), LoraConfig()) is None
    assert base_of(ModelConfig(), LoraConfig()) is None
    with pytest.raises(UsageError, match=r"--model.source 'me/tiny' cannot be loaded .*dev is not a valid git"):
        at_commit(ModelConfig(source=REPOSITORY, revision="dev"))
    # What the cache had at the last look, without asking.
    move_on(server, base)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert at_commit(BRANCH).revision == first


@pytest.mark.parametrize("place", ["folder", "Hub"])
def test_adapters_are_no_source(place: str, server: HubServer, base: Path, tmp_path: Path) -> None:
    """transformers would put them on the model that they name, and train nothing of what was asked for."""
    (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "me/other", "peft_type": "LORA"}))
    source = str(base)
    if place == "Hub":
        push(server, base)
        source = REPOSITORY
    with pytest.raises(UsageError, match=rf"--model.source '{source}' contains adapters .*Merge .*or give that base"):
        train(tmp_path, 1, source=source)
    assert not (tmp_path / "run" / "checkpoints").exists()
