"""Caches of embeddings and latents: whatever changes the outputs of an encoder, no old entry is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train import cli
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipelines import encoding
from accel_train.domains.images.pipelines.inputs import Inputs, prepare_inputs
from accel_train.domains.images.pipelines.loading import BaseConfig, DiffusersBase, find_base
from accel_train.domains.images.pipelines.validation import EvaluationConfig
from accel_train.domains.images.trained_text.adapters import TextEncoderConfig, with_trained_text
from accel_train.domains.models.pretrained import config_hash
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.drawn import folder_of
from tests.domains.images.test_lora_recipe import PROMPT, pictures

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
CPU = torch.device("cpu")
Edit = Callable[[Path], None]


def edited(file: str, **values: Any) -> Edit:
    def edit(base: Path) -> None:
        path = base / file
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")

    return edit


def permuted(base: Path) -> None:
    """Exchange the ids of two letters."""
    path = base / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    path.write_text(json.dumps(content), "utf-8")


TEXTS = {
    "activation": edited("text_encoder/config.json", hidden_act="relu"),
    "heads": edited("text_encoder/config.json", num_attention_heads=4),
    "tokenizer": permuted,
}
LATENTS = {"activation": edited("vae/config.json", act_fn="relu")}
NEITHER = {
    "versions": edited("text_encoder/config.json", transformers_version="9.9", _name_or_path="there"),
    "of diffusers": edited("vae/config.json", _diffusers_version="9.9", _name_or_path="there"),
    "denoiser": edited("unet/config.json", dropout=0.5),
}


def found(folder: Path) -> DiffusersBase:
    base = find_base(BaseConfig(source=str(folder)))
    assert isinstance(base, DiffusersBase)
    return base


def inputs(folder: Path, cache: str) -> Inputs:
    data = PictureDataConfig(
        str(folder / "photos"),
        resolutions=(tiny.SIDE,),
        bucket_step=4,
        cache_dir=str(folder / cache),
        heldout_fraction=0.2,
    )
    return prepare_inputs(data, found(folder / "base"), EvaluationConfig(prompts=(PROMPT,)), CPU)


@pytest.mark.fault(
    "I48",
    injected="activation, heads or tokenizer of the same encoder weights changed, an old cache",
    outcome="every caption is encoded anew, and latents if it is the VAE's config",
)
@pytest.mark.parametrize(
    ("edits", "changed"),
    [
        # Slow: one identity holds all that is read of an encoder, and heads are in the next test.
        *(
            pytest.param([edit], {"prompt"}, id=f"text {name}", marks=() if name == "activation" else pytest.mark.slow)
            for name, edit in TEXTS.items()
        ),
        pytest.param([*LATENTS.values()], {"mean", "logvar"}, id="vae"),
        pytest.param([*NEITHER.values()], set[str](), id="neither"),
    ],
)
def test_a_fresh_start_with_an_old_cache_reads_what_an_empty_cache_gives(
    edits: list[Edit], changed: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save("sd1", tmp_path / "base")
    pictures(tmp_path / "photos", 4)
    before = inputs(tmp_path, "old").train[0]
    folders = len(list((tmp_path / "old" / "tensors").iterdir()))
    for edit in edits:
        edit(tmp_path / "base")
    with_old = inputs(tmp_path, "old").train[0]
    with_empty = inputs(tmp_path, "empty").train[0]
    assert all(torch.equal(with_old[name], value) for name, value in with_empty.items())
    assert {name for name, value in before.items() if not torch.equal(value, with_old[name])} == changed
    # The entries of before are still there, and are looked after like all others.
    assert len(list((tmp_path / "old" / "tensors").iterdir())) == folders + bool(changed)
    for verb in ("ls", "verify", "clear"):
        assert cli._main(["data", "cache", verb, "--cache_dir", str(tmp_path / "old")]) == 0
    assert str(tmp_path / "base") in capsys.readouterr().out


def test_tokens_of_trained_text_encoders_belong_to_the_tokenizer(tmp_path: Path) -> None:
    tiny.save("sd1", tmp_path / "base")
    identities = []
    for edit in (lambda base: None, TEXTS["heads"], permuted):
        edit(tmp_path / "base")
        base = with_trained_text(found(tmp_path / "base"), TextEncoderConfig(rank=2))
        identities.append(encoding.identity_of_texts(base.components(CPU), base))
    # An encoder that is trained computes nothing ahead.
    assert identities[0] == identities[1] != identities[2]


def test_a_config_is_compared_without_defaults_and_versions(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    vae = tiny.vae(4)
    vae.save_pretrained(tmp_path)
    before = config_hash(AutoencoderKL.from_pretrained(tmp_path))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    # As an older version of diffusers wrote it, which did not have the option.
    assert config.pop("mid_block_add_attention") is True
    path.write_text(json.dumps(config), "utf-8")
    without = config_hash(AutoencoderKL.from_pretrained(tmp_path))
    path.write_text(json.dumps(config | {"_diffusers_version": "0.1", "_new": 3}), "utf-8")
    assert config_hash(AutoencoderKL.from_pretrained(tmp_path)) == without
    path.write_text(json.dumps(config | {"act_fn": "relu"}), "utf-8")
    assert config_hash(AutoencoderKL.from_pretrained(tmp_path)) not in (before, without)
    assert config_hash(tiny.clip_text(False)) != config_hash(tiny.clip_text(True))


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny autoencoder and small pictures in place of those of the page."""
    page = (Path(__file__).parents[3] / "docs" / "images.md").read_text().split("## From Python")[1]
    script = page.split("```python\n")[1].split("```")[0]
    for named, here in (('from_pretrained("stabilityai/sdxl-vae")', "from_config(tiny)"), ("(512,)", "(64,)")):
        assert script.count(named) == 1
        script = script.replace(named, here)
    folder_of(tmp_path / "pictures", *[(80, 80)] * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"tiny": dict(tiny.vae(4).config)}
    exec(compile(script, "images.md", "exec"), names)
    assert names["latents"].shape == (1, 4, *names["sample"]["mean"].shape[1:])
    assert torch.isfinite(names["latents"]).all()
