"""Adapters on the Hub, read by the programs that they are for, and exports of what was pushed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors.torch import load_file

from accel_train import cli, load
from accel_train.checkpoints.fetch import find_weights
from accel_train.domains.images.pipelines.loading import BaseConfig, find_base
from accel_train.domains.language import pipeline, pretrained
from accel_train.domains.language.samples import EvaluationConfig
from accel_train.domains.models.adapters import read_adapter
from accel_train.hub import other_programs
from accel_train.hub.client import check_repository
from accel_train.hub.model_card import CardFacts, build_card
from accel_train.hub.options import HubConfig
from accel_train.hub.queue import Entry
from accel_train.hub.repository import push_checkpoint
from accel_train.store import commit, strict_json
from tests.domains.images import test_pipeline as pictures
from tests.domains.images import tiny_pipelines
from tests.domains.language import tiny
from tests.hub_server import HubServer, serving
from tests.trained import adapter_run, language_run

REPO = "me/adapter"
NAME = "checkpoint_00000003"
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    # Of diffusers itself, when it reads transformers' classes.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    with serving(monkeypatch, tmp_path / "hf_home") as served:
        yield served


def push(run: Path) -> Path:
    """Push the checkpoint of a run, and return its directory."""
    checkpoint = run / "checkpoints" / NAME
    check_repository(HubConfig(repo_id=REPO))
    push_checkpoint(checkpoint, Entry(NAME, 3, "abc", REPO), run)
    return checkpoint


def code_of(card: str, program: str) -> str:
    (code,) = re.findall(rf"With {program}[^`]*(?:`[^`]*`:)?\s+```python\n(.*?)\n```", card, re.DOTALL)
    return code


def test_peft_loads_a_pushed_adapter(server: HubServer, tmp_path: Path) -> None:
    base = tiny.save(tmp_path / "base")
    checkpoint = push(adapter_run(tmp_path / "run", base, ema=True))
    card = server.files(REPO)["README.md"].decode()
    code = code_of(card, "peft, from `adapter_model.safetensors`:").replace("FOLDER_OF_THE_BASE", str(base))
    assert f'PeftModel.from_pretrained(base, "{REPO}", revision="step-00000003")' in code
    names: dict[str, Any] = {}
    exec(code, names)
    tokens = torch.arange(12).reshape(1, -1)
    expected = load(checkpoint).model(tokens).logits
    assert torch.equal(names["model"](tokens).logits, expected)
    from peft import AutoPeftModelForCausalLM

    assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(REPO)(tokens).logits, expected)
    downloaded = Path(snapshot_download(REPO, local_dir=tmp_path / "downloaded"))
    assert torch.equal(load(downloaded).model(tokens).logits, expected)
    assert torch.equal(load(f"hub:{REPO}").model(tokens).logits, expected)


def test_diffusers_draws_with_a_pushed_adapter(server: HubServer, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    tiny_pipelines.save("sd1", tmp_path / "base")
    run = pictures.adapter_run(tmp_path / "run", find_base(BaseConfig(source=str(tmp_path / "base"))), 0)
    checkpoint = push(run)
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "base")
    pipeline.load_lora_weights(REPO)
    assert pipeline.get_active_adapters() == ["default_0"]
    ours = load(checkpoint)
    trained = {name: p for name, p in ours.model.named_parameters() if "lora_" in name}
    theirs = dict(pipeline.unet.named_parameters())
    assert trained
    for name, parameter in trained.items():
        assert torch.equal(parameter, theirs[name.replace(".default.", ".default_0.")]), name
    names: dict[str, Any] = {}
    exec(
        code_of(server.files(REPO)["README.md"].decode(), "diffusers").replace(
            "FOLDER_OF_THE_BASE", str(tmp_path / "base")
        ),
        names,
    )
    assert names["pipeline"].get_active_adapters() == ["default_0"]


def test_files_for_other_programs_stay_beside_the_checkpoint(server: HubServer, tmp_path: Path) -> None:
    """What is verified, loaded and trained further is the checkpoint itself."""
    checkpoint = push(adapter_run(tmp_path / "run", tiny.save(tmp_path / "base"), ema=True))
    pushed = server.files(REPO)
    assert "adapter_model.safetensors" in pushed
    assert not {"verify.py", "experiment.json"} & pushed.keys()
    listed = strict_json.parse(pushed["manifest.json"])["files"]
    assert "adapter_model.safetensors" not in listed
    assert pushed["pipeline.json"] == (checkpoint / "pipeline.json").read_bytes()
    downloaded = Path(snapshot_download(REPO, local_dir=tmp_path / "downloaded"))
    # Never read: it could be another adapter, because the manifest does not seal it.
    (downloaded / "adapter_model.safetensors").write_bytes(b"changed")
    commit.verify(downloaded)
    assert {info.file.name for info in read_adapter(downloaded).values()} == {"ema.safetensors"}
    found, notices = find_weights(str(downloaded))
    assert found == downloaded
    assert "adapters" not in notices[0]
    fetched, _ = find_weights(f"hub:{REPO}")
    assert fetched is not None
    assert {info.file.name for info in read_adapter(fetched).values()} == {"ema.safetensors"}
    assert cli._main(["export", str(downloaded), str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    (tmp_path / "pushed.safetensors").write_bytes(pushed["adapter_model.safetensors"])
    again = load_file(tmp_path / "pushed.safetensors")
    assert exported.keys() == again.keys()
    assert all(torch.equal(exported[name], again[name]) for name in again)


def test_an_adapter_that_is_not_exported_is_pushed_with_the_remedy(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = tiny.save(tmp_path / "base")
    first = push(adapter_run(tmp_path / "run", base))
    assert "adapter_model.safetensors" in server.files(REPO)
    HfApi().upload_file(path_or_fileobj=b"another", path_in_repo="style_lora/adapter_model.safetensors", repo_id=REPO)
    monkeypatch.setattr(other_programs.sys, "executable", "/bin/false")
    push(adapter_run(tmp_path / "again", base, seed=2))
    pushed = server.files(REPO)
    # That of the first push would be another adapter.
    assert "adapter_model.safetensors" not in pushed
    # The owner's, in a folder of no component.
    assert pushed["style_lora/adapter_model.safetensors"] == b"another"
    assert f"{first.name}: pushed without files for other programs: " in caplog.text
    card = pushed["README.md"].decode()
    assert "**peft cannot load this repository as it is**: it has no `adapter_model.safetensors`" in card
    assert f"hf download {REPO} --revision " in card
    assert "accel-train export downloaded exported\n" in card
    assert 'PeftModel.from_pretrained(base, "exported")' in card


def test_an_adapter_on_a_base_of_the_hub_is_loaded_by_its_name(tmp_path: Path) -> None:
    model = pretrained.build(
        tiny_source := pretrained.ModelConfig(source=str(tiny.save(tmp_path / "base"))),
        pretrained.resolve_config(tiny_source, tiny.tokenizer(), 64),
        load_source=True,
        adapters=pretrained.LoraConfig(rank=2),
    )
    about = (replace(tiny_source, source="org/base"), EvaluationConfig(), ["org/texts"], "fp32", tmp_path)
    pipeline.write_files(model, tiny.tokenizer(), *about)
    card = build_card(
        commit.Checkpoint(tmp_path, 3, {}),
        {},
        CardFacts(REPO, "main", others=("adapter_model.safetensors",)),
        json.loads((tmp_path / "pipeline.json").read_text()),
    )
    assert f'AutoPeftModelForCausalLM.from_pretrained("{REPO}", revision="main")' in card


# ------------------------------------------------------------------------------------------------------- whole models
@pytest.mark.parametrize("ema", [False, True])
def test_transformers_loads_a_pushed_model(server: HubServer, tmp_path: Path, *, ema: bool) -> None:
    checkpoint = push(language_run(tmp_path / "run", ema=ema))
    card = server.files(REPO)["README.md"].decode()
    names: dict[str, Any] = {}
    exec(code_of(card, "transformers:"), names)
    trained = load_file(checkpoint / "model.safetensors")
    found = names["model"].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    assert names["tokenizer"].encode("a text")
    (more,) = re.findall(r"These are the trained weights.*?```python\n(.*?)\n```", card, re.DOTALL) or [""]
    assert bool(more) == ema
    if ema:
        exec(more, names)
        averaged = load_file(checkpoint / "ema.safetensors")
        found = names["model"].state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in averaged.items())
