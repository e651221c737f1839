"""Pictures of adapters that are not trained: which adapter draws, their base elsewhere, and the files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import accel_train
from accel_train import cli
from accel_train.config import UsageError
from accel_train.domains.images import pipeline as subject
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipeline import PicturePipeline
from accel_train.domains.images.pipelines.drawing import draw_picture, prompt_arguments
from accel_train.domains.images.pipelines.loading import Base, BaseConfig, DiffusersBase, find_base
from accel_train.domains.images.pipelines.validation import EvaluationConfig
from accel_train.domains.models.lora import LoraConfig, apply_lora
from accel_train.store import commit
from tests.domains.images import tiny_pipelines as tiny
from tests.trained import commit_checkpoint

pytest.importorskip("diffusers")
pytest.importorskip("peft")
# Of diffusers itself, when it reads transformers' classes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
PROMPT = "a red flag"


def adapter_run(run: Path, base: Base, seed: int, **options: Any) -> Path:
    """Write a run of recipes/lora.py with adapters of random values."""
    torch.manual_seed(seed)
    model = base.denoiser("fp32")
    apply_lora(model, LoraConfig(rank=2, targets=("attention",), **options))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data += 0.5 * torch.randn(parameter.shape)
    reference = base.files().reference()
    about = EvaluationConfig(steps=2, side=tiny.SIDE), PictureDataConfig(path="photos")

    def save(assets: Path) -> None:
        subject.write_files(model, base, reference, "epsilon", *about, assets.parent)
        save_file(trained, assets.parent / "model.safetensors")

    commit_checkpoint(run, torch.nn.Identity(), {}, save, reference)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and two runs of adapters on it."""
    folder = tmp_path_factory.mktemp("pictures")
    tiny.save("sd1", folder / "base")
    base = find_base(BaseConfig(source=str(folder / "base")))
    for seed, name in enumerate(("flags", "ink")):
        adapter_run(folder / name, base, seed)
    return folder


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> PicturePipeline:
    return accel_train.load(folder / "flags", pipeline=PicturePipeline, adapters={"ink": folder / "ink"})


def test_calls_inside_using_draw_with_its_adapter(pipeline: PicturePipeline) -> None:
    drawn = {name: pipeline.draw(PROMPT, adapter=name) for name in ("default", "ink", "base")}
    assert not torch.equal(drawn["ink"], drawn["default"])
    with pipeline.using("ink"):
        assert torch.equal(pipeline.draw(PROMPT), drawn["ink"])
        # The call before has put none back.
        assert torch.equal(pipeline.draw(PROMPT), drawn["ink"])
        with pipeline.using("base"):
            assert torch.equal(pipeline.draw(PROMPT), drawn["base"])
        assert torch.equal(pipeline.draw(PROMPT), drawn["ink"])
    assert torch.equal(pipeline.draw(PROMPT), drawn["default"])


def test_an_adapter_is_drawn_with_a_share_of_its_strength(pipeline: PicturePipeline) -> None:
    """As diffusers' ``set_adapters`` with a weight."""
    drawn = {scale: pipeline.draw(PROMPT, scale=scale) for scale in (0.0, 0.5, 1.0)}
    assert torch.equal(drawn[0.0], pipeline.draw(PROMPT, adapter="base"))
    assert torch.equal(drawn[1.0], pipeline.draw(PROMPT))
    pipeline.pipeline.set_adapters(["default"], adapter_weights=[0.5])
    assert torch.equal(pipeline.draw(PROMPT, scale=1.0, adapter=None), drawn[1.0])  # a call chooses anew
    pipeline.pipeline.set_adapters(["default"], adapter_weights=[0.5])
    prompts = prompt_arguments(pipeline.pipeline, pipeline.base, PROMPT, None, None)
    theirs = draw_picture(pipeline.pipeline, pipeline.base.family, prompts, 0, (tiny.SIDE, tiny.SIDE), 2, None)
    pipeline.pipeline.set_adapters(["default"])
    torch.testing.assert_close(theirs, drawn[0.5], rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match=r"scale 0.5: belongs to an adapter, but only the base is drawn"):
        pipeline.draw(PROMPT, adapter="base", scale=0.5)
    with pytest.raises(UsageError, match=r"scale nan: a finite number of 0 or more is required"):
        pipeline.draw(PROMPT, scale=float("nan"))


def test_dora_is_drawn_as_trained_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    """A scale of peft leaves its magnitudes, so that even 0 would not be the base."""
    base = find_base(BaseConfig(source=str(folder / "base")))
    run = adapter_run(tmp_path / "dora", base, 2, variant="dora")
    pipeline = accel_train.load(run, pipeline=PicturePipeline, adapters={"ink": folder / "ink"})
    drawn = {name: pipeline.draw(PROMPT, adapter=name) for name in ("default", "base", "ink")}
    assert not torch.equal(drawn["default"], drawn["base"])
    assert torch.equal(pipeline.draw(PROMPT, scale=0.0), drawn["base"])
    assert torch.equal(pipeline.draw(PROMPT, scale=1.0), drawn["default"])
    for scale in (0.5, 2.0):
        with pytest.raises(UsageError, match=rf"scale {scale:g}: adapter 'default' is DoRA, .* 0 .* or 1 .* required"):
            pipeline.draw(PROMPT, scale=scale)
    # Plain adapters beside it are scaled, and a refusal changes nothing.
    assert not torch.equal(pipeline.draw(PROMPT, adapter="ink", scale=0.5), drawn["ink"])
    assert torch.equal(pipeline.draw(PROMPT), drawn["default"])


def test_guidance_leads_away_from_a_negative_prompt(pipeline: PicturePipeline) -> None:
    """Against diffusers, which is given both as texts."""
    drawn = pipeline.draw(PROMPT, negative_prompt="a dog", guidance=3.0)
    generator = torch.Generator().manual_seed(0)
    images = pipeline.pipeline(
        prompt=PROMPT,
        negative_prompt="a dog",
        guidance_scale=3.0,
        height=tiny.SIDE,
        width=tiny.SIDE,
        num_inference_steps=2,
        generator=generator,
        output_type="np",
    ).images
    expected = torch.from_numpy(images)[0].permute(2, 0, 1) * 2 - 1
    torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-5)
    assert not torch.equal(drawn, pipeline.draw(PROMPT, guidance=3.0))
    with pytest.raises(UsageError, match=r"negative_prompt 'a dog': has no effect with guidance 1 of Stable Diffusion"):
        pipeline.draw(PROMPT, negative_prompt="a dog", guidance=1.0)


@pytest.mark.parametrize("given", [3, None, [], ["a red flag"]], ids=str)
def test_a_prompt_that_is_no_text_is_refused(given: Any, pipeline: PicturePipeline) -> None:
    with pytest.raises(UsageError, match=r"prompt .*: is of type (int|NoneType|list); a string is required"):
        pipeline(given)


def test_a_damaged_description_is_named(folder: Path, tmp_path: Path) -> None:
    export = tmp_path / "exported"
    assert cli._main(["export", str(folder / "ink"), str(export)]) == 0
    described = json.loads((export / "config.json").read_text())
    for name in ("base", "sampler"):
        rest = {key: value for key, value in described.items() if key != name}
        (tmp_path / "config.json").write_text(json.dumps(rest))
        with pytest.raises(UsageError, match=f"config.json: has no {name}; restore it from a copy"):
            PicturePipeline.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json: cannot be read"):
        PicturePipeline.from_directory(tmp_path)


@pytest.mark.parametrize(("height", "width"), [(24, 16), (16, 32), (None, 24)])
def test_a_picture_that_is_not_square_is_that_of_diffusers(
    height: int | None, width: int, pipeline: PicturePipeline
) -> None:
    """A height or a width that is not given is the side of the evaluation."""
    drawn = pipeline.draw(PROMPT, height=height, width=width, seed=5)
    assert drawn.shape == (3, height or tiny.SIDE, width)
    images = pipeline.pipeline(
        prompt=PROMPT,
        height=height or tiny.SIDE,
        width=width,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images
    expected = torch.from_numpy(images)[0].permute(2, 0, 1) * 2 - 1
    torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-5)


def test_a_height_and_a_width_are_given_on_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", str(folder / "flags"), "--prompt", PROMPT, "--output", str(tmp_path / "drawn")]
    assert cli._main([*words, "--height", "24", "--width", "16"]) == 0
    (file,) = (tmp_path / "drawn").iterdir()
    with Image.open(file) as image:
        assert image.size == (16, 24)
    with pytest.raises(UsageError, match=r"side 16 with height 24 and width 8: side is both height and width"):
        cli._main([*words, "--side", "16", "--height", "24", "--width", "8"])
    with pytest.raises(UsageError, match=r"width 20: .* multiples of 8 .*; give 16 or 24"):
        cli._main([*words, "--width", "20"])


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 0},
        {"side": 0},
        {"height": 0},
        {"guidance": float("nan")},
        {"guidance": -1.0},
        {"steps": -3},
        {"height": "16"},
        {"width": 16.5},
        {"steps": True},
        {"guidance": "3"},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(given: dict[str, Any], pipeline: PicturePipeline) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError, match=f"{name} {value!r}.*of steps and pixels, 1 or more, and a finite guidance"):
        pipeline(PROMPT, **given)


def test_another_picture_of_one_prompt_and_seed_has_another_file(folder: Path, tmp_path: Path) -> None:
    words = ["sample", str(folder / "flags"), "--prompt", PROMPT, "--output", str(tmp_path / "drawn")]
    kept: dict[Path, bytes] = {}
    for more in ([], ["--adapter", "base"], ["--steps", "3"], ["--guidance", "2"], ["--side", "24"]):
        assert cli._main([*words, *more]) == 0
        assert all(file.read_bytes() == content for file, content in kept.items())
        found = {file: file.read_bytes() for file in (tmp_path / "drawn").iterdir()}
        assert len(found) == len(kept) + 1
        kept = found
    assert cli._main(words) == 0
    assert len(list((tmp_path / "drawn").iterdir())) == len(kept)


def test_a_base_that_was_moved_is_given_instead(folder: Path, pipeline: PicturePipeline, tmp_path: Path) -> None:
    shutil.copytree(folder / "base", tmp_path / "base")
    base = find_base(BaseConfig(source=str(tmp_path / "base")))
    adapter_run(tmp_path / "ink", base, 1)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"base, .*base, is not on this machine.*sample BASE --adapters mine=PATH"):
        accel_train.load(tmp_path / "ink")
    moved: Any = accel_train.load(tmp_path / "moved", adapters={"ink": tmp_path / "ink"})
    assert moved.adapters == ("ink",)
    assert torch.equal(moved.draw(PROMPT), pipeline.draw(PROMPT, adapter="ink"))
    assert torch.equal(moved.draw(PROMPT, adapter="base"), pipeline.draw(PROMPT, adapter="base"))


def test_adapters_written_by_peft_alone(folder: Path, pipeline: PicturePipeline, tmp_path: Path) -> None:
    accel_train_export = ["export", str(folder / "ink"), str(tmp_path / "exported")]
    assert cli._main(accel_train_export) == 0
    (tmp_path / "peft").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(tmp_path / "exported" / name, tmp_path / "peft")
    alone: Any = accel_train.load(folder / "base", adapters={"ink": tmp_path / "peft"})
    drawn = alone.draw(PROMPT, side=tiny.SIDE, steps=2)
    assert torch.equal(drawn, pipeline.draw(PROMPT, adapter="ink"))
    (tmp_path / "peft" / "adapter_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"adapter_config.json: cannot be read"):
        accel_train.load(folder / "base", adapters={"ink": tmp_path / "peft"})


def test_the_base_given_must_have_the_files_of_the_training(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    tiny.save("sd2", tmp_path / "other")
    with pytest.raises(UsageError, match=r"its frozen weights are those of .*another diffusion_pytorch_model"):
        accel_train.load(tmp_path / "other", adapters={"ink": folder / "ink"})


def test_adapters_name_the_commit_of_a_base_on_the_hub(folder: Path, tmp_path: Path) -> None:
    base = find_base(BaseConfig(source=str(folder / "base")))
    assert isinstance(base, DiffusersBase)
    pinned = replace(base, config=replace(base.config, source="me/tiny"), revision="a" * 40)
    adapter_run(tmp_path / "run", pinned, 0)
    checkpoint = commit.verify(tmp_path / "run" / "checkpoints" / "checkpoint_00000003")
    config = json.loads(checkpoint.file("adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/tiny", "a" * 40)
