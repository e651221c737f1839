"""A pipeline of diffusers that changed between a start and its resume is refused, by the file that differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_train
from accel_train import cli
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.domains.images import recorded_base
from accel_train.domains.images.pipelines import loading
from accel_train.domains.images.pipelines.loading import BaseConfig
from accel_train.store import commit
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_lora_recipe import pictures, settings, train, weights_of

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("fresh")]
CHECKPOINT = "checkpoint_00000005"
SCHEDULER = "scheduler/scheduler_config.json"


def edit(base: Path, name: str, **values: Any) -> str:
    content = json.loads((base / name).read_text())
    (base / name).write_text(json.dumps(content | values))
    return name


def flip(base: Path, name: str) -> str:
    content = bytearray((base / name).read_bytes())
    content[-3] ^= 1
    (base / name).write_bytes(content)
    return name


def write(base: Path, name: str, text: str) -> str:
    (base / name).parent.mkdir(exist_ok=True)
    (base / name).write_text(text)
    return name


REFUSED: dict[str, Callable[[Path], str]] = {
    "prediction": lambda base: edit(base, SCHEDULER, prediction_type="v_prediction"),
    "noise levels": lambda base: edit(base, SCHEDULER, beta_end=0.02),
    "class of the scheduler": lambda base: edit(base, "model_index.json", scheduler=["diffusers", "DDPMScheduler"]),
    "denoiser": lambda base: edit(base, "unet/config.json", norm_eps=1e-3),
    "heads of the denoiser": lambda base: edit(base, "unet/config.json", attention_head_dim=2),
    "scale of latents": lambda base: edit(base, "vae/config.json", scaling_factor=0.5),
    "weights of the VAE": lambda base: flip(base, "vae/diffusion_pytorch_model.safetensors"),
    "text encoder": lambda base: edit(base, "text_encoder/config.json", hidden_act="gelu"),
    "weights of the text encoder": lambda base: flip(base, "text_encoder/model.safetensors"),
    "length of prompts": lambda base: edit(base, "tokenizer/tokenizer_config.json", model_max_length=8),
    "vocabulary": lambda base: write(base, "tokenizer/vocab.json", "{}"),
}

QUICK = {"prediction", "denoiser", "weights of the VAE", "text encoder", "vocabulary"}


def rewrite(base: Path, run: Path) -> None:
    """Say the same in another way, as other versions of the libraries do."""
    content = json.loads((base / SCHEDULER).read_text())
    changed = dict(reversed(content.items())) | {"_diffusers_version": "0.1"}
    (base / SCHEDULER).write_text(json.dumps(changed, indent=7))
    edit(base, "text_encoder/config.json", _name_or_path="elsewhere", transformers_version="4.0")


def add_unused(base: Path, run: Path) -> None:
    write(base, "README.md", "new")
    write(base, "tokenizer/README.txt", "new")
    write(base, "safety_checker/config.json", "{}")
    edit(base, "model_index.json", requires_safety_checker=True)


def change_all_unread(base: Path, run: Path) -> None:
    rewrite(base, run)
    add_unused(base, run)


def move(base: Path, run: Path) -> None:
    # Replaced by a copy, with other times and inodes.
    shutil.copytree(base, base.parent / "new")
    shutil.rmtree(base)
    (base.parent / "new").rename(base)


def save_again(base: Path, run: Path) -> None:
    from diffusers import DiffusionPipeline

    DiffusionPipeline.from_pretrained(base).save_pretrained(base)


TAKEN = {"rewritten, more files": change_all_unread, "saved again": save_again, "copied": move}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps."""
    folder = tmp_path_factory.mktemp("begun")
    tiny.save("sd1", folder / "base")
    pictures(folder / "photos")
    settings(folder, "sd1")
    train(folder, "run", "--max_steps", "5")
    return folder


@pytest.fixture
def base(begun: Path) -> Iterator[Path]:
    """The pipeline, which is restored afterwards."""
    shutil.copytree(begun / "base", begun / "kept")
    yield begun / "base"
    shutil.rmtree(begun / "base")
    (begun / "kept").rename(begun / "base")


def contents(run: Path) -> dict[Path, bytes]:
    files = {file.relative_to(run): file for file in run.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if name.parts[0] != "logs"}


# Slow: another value in a file of which one is compared every day, or of another part by the same code.
@pytest.mark.parametrize(
    "change", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]
)
def test_a_change_of_what_the_run_reads_is_refused_by_name(change: str, begun: Path, base: Path) -> None:
    before = contents(begun / "run")
    name = REFUSED[change](base)
    with pytest.raises(UsageError, match=rf"{CHECKPOINT}: its base is {base}, and .* has (another )?{name}.*; give"):
        train(begun, "run")
    assert contents(begun / "run") == before


def test_shards_beside_the_file_are_refused(begun: Path, base: Path) -> None:
    """diffusers would load them in its place."""
    shard = "diffusion_pytorch_model-00001-of-00001.safetensors"
    shutil.copy(base / "unet" / "diffusion_pytorch_model.safetensors", base / "unet" / shard)
    with pytest.raises(UsageError, match=f"has {shard}, which it did not have before"):
        train(begun, "run")


@pytest.mark.slow  # compared by the same code as a base that is named
def test_an_embedded_base_is_compared_too(begun: Path, base: Path) -> None:
    train(begun, "embedded", "--max_steps", "5", "--checkpoints.base", "embed")
    name = REFUSED["prediction"](base)
    with pytest.raises(UsageError, match=rf"{CHECKPOINT}: its base is {base}, and .* has another {name}"):
        train(begun, "embedded")


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=pytest.mark.slow if name in ("saved again", "copied") else ()) for name in TAKEN],
)
def test_what_no_run_reads_may_change(change: str, begun: Path, base: Path, tmp_path: Path) -> None:
    shutil.copytree(begun / "run", begun / change)
    TAKEN[change](base, begun / change)
    run = train(begun, change)
    assert all(bool(torch.isfinite(value).all()) for value in weights_of(run).values())


def purge(base: Path) -> None:
    for name in ("model_index.json", "unet", "vae"):
        (base / name).rename(base / f"{name}.gone")


@pytest.mark.parametrize("change", [purge, REFUSED["denoiser"]], ids=["purged", "updated"])
def test_a_save_needs_no_file_of_the_base(
    change: Callable[[Path], object], begun: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(begun / "run", tmp_path / "run")
    recipe: Any = import_recipe(find_recipe("lora"))
    loss_sums = recipe.loss_sums
    calls: list[object] = []

    def changing(*inputs: Any) -> torch.Tensor:
        if not calls:
            calls.append(change(base))
        return loss_sums(*inputs)

    monkeypatch.setattr(recipe, "loss_sums", changing)
    options = [str(begun / "tiny.yaml"), "--evaluation.every", "0", "--max_steps", "6"]
    assert recipe.main([*options, "--output_dir", str(tmp_path / "run")]) == 0
    saved = tmp_path / "run" / "checkpoints" / "checkpoint_00000006"
    recorded = commit.verify(begun / "run" / "checkpoints" / CHECKPOINT).manifest["base"]
    assert commit.verify(saved).manifest["base"] == recorded
    assert json.loads((saved / "config.json").read_text())["base_files"] == recorded


@pytest.mark.parametrize("change", ["prediction", "weights of the VAE"])
@pytest.mark.parametrize("words", [["sample", "{run}", "--prompt", "x"], ["export", "{run}", "{out}", "--merged"]])
def test_pictures_and_merged_exports_are_of_the_same_base(
    change: str, words: list[str], begun: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = REFUSED[change](base)
    with pytest.raises(UsageError, match=rf"its base is {base}, and .* has another {name}"):
        cli._main([word.format(run=begun / "run", out=tmp_path / "out") for word in words])
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize("revision", [None, "main"])
def test_an_adapter_is_loaded_on_the_commit_of_its_run(revision: str | None, tmp_path: Path) -> None:
    """Whatever its run was asked for: the branch may have moved on."""
    base = BaseConfig(source="me/tiny", revision=revision, variant="fp16")
    described = {"base": asdict(base), "base_files": {"source": "me/tiny", "revision": "a" * 40, "files": {}}}
    assert recorded_base.base_config(described, tmp_path) == replace(base, revision="a" * 40)


@pytest.mark.slow  # the choice of the commit is tested in tests/checkpoints/test_pinned_base.py
def test_a_base_on_the_hub_stays_at_the_commit_that_its_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub itself is in tests/hub/test_pretrained.py."""
    old, new = "a" * 40, "b" * 40
    tiny.save("sd1", tmp_path / old)
    shutil.copytree(tmp_path / old, tmp_path / new)
    edit(tmp_path / new, SCHEDULER, beta_end=0.02)
    branch = {"main": old}

    def snapshot(revision: str | None) -> Path:
        return tmp_path / (revision or branch["main"])

    monkeypatch.setattr(loading, "_download", lambda config: snapshot(config.revision))
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda _, name, revision=None: str(snapshot(revision) / name)
    )
    pictures(tmp_path / "photos")
    settings(tmp_path, "sd1")

    def begin(name: str, *flags: str) -> Path:
        return train(tmp_path, name, "--base.source", "me/tiny", *flags)

    def commit_of(run: Path) -> str:
        return commit.verify(run / "checkpoints" / "checkpoint_00000010").manifest["base"]["revision"]

    whole = begin("whole")
    begin("run", "--max_steps", "5")
    branch["main"] = new
    resumed = begin("run")
    elsewhere = begin("elsewhere", "--resume", str(tmp_path / "run" / "checkpoints" / CHECKPOINT))
    for run in (resumed, elsewhere):
        assert commit_of(run) == old
        assert all(torch.equal(value, weights_of(whole)[name]) for name, value in weights_of(run).items())
        loaded: Any = accel_train.load(run)
        assert loaded.base.revision == old
    assert commit_of(begin("new")) == new
    # A commit that is asked for is another experiment.
    with pytest.raises(UsageError, match=r"base.revision: None there, 'b+' now"):
        begin("run", "--max_steps", "12", "--base.revision", new)
