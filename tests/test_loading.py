"""``accel_train.load``: from every kind of place, with hashes, and never code that a folder names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_train
from accel_train import cli, loading
from accel_train.config import UsageError
from accel_train.domains.pde.pipeline import FieldPipeline
from accel_train.pipeline import describe, settings
from accel_train.store import commit
from tests.trained import commit_checkpoint, field_run, text_run

ROOT = Path(__file__).parents[1]


def test_a_run_its_checkpoint_and_its_export_are_the_same_model(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run")
    assert cli._main(["export", str(run), str(tmp_path / "out")]) == 0
    places = (run, str(run), run / "checkpoints" / "checkpoint_00000003", tmp_path / "out")
    answers = [accel_train.load(place)("a bird on the sea", seed=3) for place in places]
    assert answers[0].texts
    for answer in answers[1:]:
        assert answer.texts == answers[0].texts
        assert torch.equal(answer.latents, answers[0].latents)


def test_config_json_alone_says_how_to_sample(tmp_path: Path) -> None:
    """Neither manifest nor experiment.json is there to be asked."""
    shutil.copytree(text_run(tmp_path / "run") / "checkpoints" / "checkpoint_00000003", tmp_path / "alone")
    (tmp_path / "alone" / "manifest.json").unlink()
    both = accel_train.load(tmp_path / "alone").both
    assert (both.diffusion.kind, both.diffusion.schedule, both.diffusion.prediction) == ("ddpm", "cosine", "v")
    assert (both.text.steps, both.text.guidance, both.latent.steps, both.latent.guidance) == (4, 1.5, 3, 2.0)
    assert both.seed == 7
    described = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert described["recipe"] == "mmdit"
    assert described["normalisation"].keys() == {"mean", "std"}
    assert {"objective", "sampler", "units"} <= described.keys()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint_00000007", "no manifest.json, so it is not a committed checkpoint"),
        (".tmp-checkpoint_00000007-host-5-ab", "is unfinished or half-deleted"),
        (".trash-checkpoint_00000007-host-5-ab", "is unfinished or half-deleted"),
        (".tmp-export-out-5", "is unfinished or half-deleted"),
    ],
)
def test_nothing_is_loaded_that_nobody_vouches_for(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=re.escape(says)):
        loading.find(tmp_path / name)


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    run = field_run(tmp_path / "run")
    cli._main(["export", str(run), str(tmp_path / "out")])
    for directory in (tmp_path / "out", run / "checkpoints" / "checkpoint_00000003"):
        weights = bytearray((directory / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (directory / "model.safetensors").write_bytes(weights)
    with pytest.raises(UsageError, match=r"out: model\.safetensors changed since the export"):
        accel_train.load(tmp_path / "out")
    with pytest.raises(UsageError, match="no checkpoint verifies"):
        accel_train.load(run)


@pytest.mark.parametrize(
    "named",
    [
        "os:system",
        "strangers_module:Pipeline",
        "accel_train.domains.text.pipeline:TextLatentPipeline.from_directory",
        "accel_train.domains.text.pipeline.strangers_module:Pipeline",
        "accel_train.domains...pipeline:X",
        "accel_train.commands.sample:sample",
        ["accel_train.domains.text.pipeline:TextLatentPipeline"],
    ],
)
def test_a_folder_has_no_code_imported(named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strangers_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"format": 1, "pipeline": named}))
    with pytest.raises(
        UsageError, match=r"which is not part of this package.*pass the class, as in load\(place, pipeline"
    ):
        accel_train.load(folder)
    assert "strangers_module" not in sys.modules


@pytest.mark.parametrize(
    "named",
    [
        "accel_train.domains.text.pipeline:Missing",
        "accel_train.domains.no.pipeline:Foo",
        "accel_train.domains.text.pipeline:Path",
    ],
)
def test_a_pipeline_that_is_not_here_is_of_another_version(named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": 1, "pipeline": named}))
    with pytest.raises(UsageError, match="which this version of accel_train lacks"):
        accel_train.load(tmp_path)


def test_a_place_without_a_model_is_refused_with_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        accel_train.load(tmp_path / "none")
    (tmp_path / "config.json").write_text('{"hidden": 3}')
    with pytest.raises(UsageError, match="no recipe of this package wrote it"):
        accel_train.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: cannot be read"):
        accel_train.load(tmp_path)
    with pytest.raises(UsageError, match=r"format 2, was written by another version.*reads 1"):
        settings({"format": 2}, tmp_path)


@pytest.mark.parametrize("device", ["tpu", "meta", "xla", "cpux", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--device {device}: torch has no such device on this machine; give cpu"):
        accel_train.load(tmp_path, device=device)


class Doubler:
    """A pipeline of somebody's own recipe."""

    recipe = "own"
    tag = None
    usage = ""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @classmethod
    def from_directory(cls, directory: Path, device: str) -> Doubler:
        return cls(torch.nn.Linear(1, 1).to(device))


def test_a_pipeline_of_your_own_is_passed_and_not_named(tmp_path: Path) -> None:
    own: Any = Doubler
    from accel_train.domains.models.mmdit import MMDiTConfig

    description = describe(own, MMDiTConfig(), objective={}, sampler={}, normalisation={}, units={}, card={})
    commit_checkpoint(tmp_path / "run", torch.nn.Linear(1, 1), description, Path.mkdir)
    assert isinstance(accel_train.load(tmp_path / "run", pipeline=own), Doubler)
    with pytest.raises(UsageError, match=r"tests\.test_loading:Doubler', which is not part of this package"):
        accel_train.load(tmp_path / "run")


def test_a_model_on_the_hub_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub itself is tested in tests/hub. Here it hands out a checkpoint, and counts."""
    from accel_train.hub import download as hub

    source = field_run(tmp_path / "run") / "checkpoints" / "checkpoint_00000003"
    downloads: list[str] = []

    def download(spec: str, directory: Path) -> Path:
        downloads.append(spec)
        return Path(shutil.copytree(source, directory / source.name))

    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "download", download)
    found = "org/name@0123", dict(commit.verify(source).manifest)
    monkeypatch.setattr(hub, "_manifest_at_commit", lambda _, **options: found)
    first = loading.find("hub:org/name@3")
    assert isinstance(accel_train.load("hub:org/name@3"), FieldPipeline)
    assert downloads == ["org/name@0123"]
    (first / "model.safetensors").write_bytes(b"damaged")
    assert isinstance(accel_train.load("hub:org/name@3"), FieldPipeline)
    assert len(downloads) == 2


def test_importing_the_package_costs_nothing_until_load_is_asked_for() -> None:
    code = "import sys, accel_train; assert not {'torch', 'numpy', 'accel_train.loading'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = accel_train.unknown
