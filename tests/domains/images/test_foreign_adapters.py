"""LoRA files of other programs, converted for ``--init_from``: the same change of each weight, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train import cli
from accel_train.config import UsageError
from accel_train.domains.images.pipelines import adapter_files
from accel_train.domains.models.adapters import read_adapter
from accel_train.store.weights import TensorReader

from . import test_lora_recipe as lora_recipe
from . import tiny_pipelines as tiny

SHORT = ("--max_steps", "2", "--evaluation.every", "0")
SINGLE = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
WITH_TEXT = ("--text_encoders.rank", "2", "--text_encoders.alpha", "3")


def exported(folder: Path, name: str, *flags: str) -> Path:
    tiny.save(name, folder / "base")
    lora_recipe.pictures(folder / "photos")
    lora_recipe.settings(folder, name)
    run = lora_recipe.train(folder, "run", *SHORT, *flags)
    assert cli._main(["export", str(run), str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("sd1"), "sd1")


def converted(out: Path, file: Path, to: Path) -> Path:
    assert cli._main(["checkpoints", "convert", str(file), str(to), "--base", str(out.parent / "base")]) == 0
    return to


def changes(directory: Path) -> dict[str, Tensor]:
    """What the adapter adds to the weight of each layer, in fp64."""
    tensors = read_adapter(directory)
    settings = json.loads((directory / "adapter_config.json").read_text("utf-8"))
    with TensorReader(tensors) as reader:
        values = {name: reader.read(name).double() for name in tensors}
    found: dict[str, Tensor] = {}
    for key, down in values.items():
        layer, _, matrix = key.rpartition(".lora_")
        if matrix == "A.weight":
            alpha = settings["lora_alpha"]
            for pattern, other in settings["alpha_pattern"].items():
                if pattern.split(r"\.")[0] in layer.split("."):
                    alpha = other
            found[layer] = alpha / down.shape[0] * (values[f"{layer}.lora_B.weight"] @ down)
    return found


@pytest.mark.parametrize("file", [adapter_files.DIFFUSERS_FILE, adapter_files.KOHYA_FILE])
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sdxl", WITH_TEXT),
        pytest.param("sd1", WITH_TEXT, marks=pytest.mark.slow),  # sdxl has more kinds of layers
    ],
)
def test_a_file_of_another_program_gives_the_same_change(
    name: str, flags: tuple[str, ...], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = exported(tmp_path, name, *flags)
    capsys.readouterr()
    made = converted(out, out / file, tmp_path / "made")
    printed = capsys.readouterr().out
    expected = changes(out)
    found = changes(made)
    assert found.keys() == expected.keys()
    for layer, change in expected.items():
        assert change.abs().max() > 0
        torch.testing.assert_close(found[layer], change, rtol=1e-5, atol=1e-9)
    assert "--lora.rank 3 --lora.alpha 6" in printed
    if flags:
        assert " ".join(WITH_TEXT) in printed


def test_joined_layers_of_flux_are_taken_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    tiny.save("flux", base)
    config = base / "transformer" / "config.json"
    # diffusers converts Flux in its real width only. The weights in the folder have another one, and are not read.
    real = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 1, "num_single_layers": 1}
    config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), **real}))
    # As sd-scripts trains it: one adapter for query, key and value.
    tensors: dict[str, Tensor] = {}
    widths = {"double_blocks_0_img_attn_qkv": 9216, "single_blocks_0_linear1": 21504}
    for name, width in widths.items():
        tensors[f"lora_unet_{name}.lora_down.weight"] = torch.randn(2, 3072)
        tensors[f"lora_unet_{name}.lora_up.weight"] = torch.randn(width, 2)
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(1.0)
    for projection in ("q_proj", "out_proj"):
        text = f"lora_te1_text_model_encoder_layers_0_self_attn_{projection}"
        tensors |= {f"{text}.lora_down.weight": torch.randn(2, 16), f"{text}.lora_up.weight": torch.randn(16, 2)}
        tensors[f"{text}.alpha"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "lora.safetensors")
    found = changes(converted(tmp_path / "out", tmp_path / "lora.safetensors", tmp_path / "made"))
    assert "left out: text_encoder: 2 layers, because it is not trained here" in capsys.readouterr().out
    expected: dict[str, Tensor] = {}
    parts = {"transformer_blocks.0.attn": ("to_q", "to_k", "to_v"), "single_transformer_blocks.0": SINGLE}
    for (name, width), (path, names) in zip(widths.items(), parts.items(), strict=True):
        down, up = (tensors[f"lora_unet_{name}.lora_{side}.weight"].double() for side in ("down", "up"))
        assert up.shape[0] == width
        sizes = (3072, 3072, 3072, 12288)[: len(names)]
        expected |= {
            f"base_model.model.{path}.{part}": 0.5 * rows @ down
            for part, rows in zip(names, up.split(sizes), strict=True)
        }
    assert found.keys() == expected.keys()
    for layer, change in expected.items():
        torch.testing.assert_close(found[layer], change, rtol=1e-5, atol=1e-6)


def test_layers_without_influence_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = exported(tmp_path, "sdxl", *WITH_TEXT)
    tensors = load_file(out / adapter_files.KOHYA_FILE)
    # sd-scripts trains the last block of the first encoder, which XL does not read.
    for key in [key for key in tensors if key.startswith("lora_te1_text_model_encoder_layers_0_")]:
        tensors[key.replace("layers_0_", "layers_1_")] = tensors[key].clone()
    save_file(tensors, tmp_path / "lora.safetensors")
    capsys.readouterr()
    made = converted(out, tmp_path / "lora.safetensors", tmp_path / "made")
    assert "left out: text_encoder: encoder.layers.1." in capsys.readouterr().out.replace("text_model.", "")
    assert changes(made).keys() == changes(out).keys()
    lora_recipe.train(tmp_path, "both", *SHORT, "--init_from", str(made), *WITH_TEXT)


@pytest.mark.parametrize("file", [adapter_files.DIFFUSERS_FILE, adapter_files.KOHYA_FILE])
def test_a_run_starts_from_it_as_from_the_export(file: str, sd1: Path, tmp_path: Path) -> None:
    folder = sd1.parent
    made = converted(sd1, sd1 / file, tmp_path / "made")
    losses: list[list[float]] = []
    for number, place in enumerate((sd1, made)):
        begun = lora_recipe.train(folder, f"of_{number}_{file}", *SHORT, "--init_from", str(place))
        lines = [json.loads(line) for line in (begun / "metrics.jsonl").read_text("utf-8").splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1] != []


def test_text_encoders_are_continued_together_or_left_behind(tmp_path: Path) -> None:
    out = exported(tmp_path, "sdxl", *WITH_TEXT)
    made = converted(out, out / adapter_files.KOHYA_FILE, tmp_path / "made")
    both = lora_recipe.train(tmp_path, "both", *SHORT, "--init_from", str(made), *WITH_TEXT)
    assert any("text_encoder_2." in name for name in lora_recipe.weights_of(both, 2))
    alone = lora_recipe.train(tmp_path, "alone", *SHORT, "--init_from", str(made / "unet"))
    assert not any("text_encoder" in name for name in lora_recipe.weights_of(alone, 2))


def test_targets_other_than_the_default_are_printed(
    tmp_path: Path, sd1: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(sd1 / adapter_files.DIFFUSERS_FILE)
    kept = {key: value for key, value in tensors.items() if "to_q" in key or "to_v" in key}
    save_file(kept, tmp_path / "lora.safetensors")
    converted(sd1, tmp_path / "lora.safetensors", tmp_path / "made")
    printed = capsys.readouterr().out
    assert "--lora.rank 3 --lora.alpha 3 --lora.targets to_q to_v" in printed, "without settings alpha is the rank"
    flags = ("--lora.rank", "3", "--lora.alpha", "3", "--lora.targets", "to_q", "to_v")
    lora_recipe.train(sd1.parent, "of_targets", *SHORT, "--init_from", str(tmp_path / "made"), *flags)


def renamed_layer(tensors: dict[str, Tensor]) -> None:
    for key in list(tensors):
        if "up_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q" in key:
            tensors[key.replace("lora_unet_", "lora_control_")] = tensors.pop(key)


def other_rank(tensors: dict[str, Tensor]) -> None:
    layer = next(key for key in tensors if key.endswith("lora_down.weight")).removesuffix(".lora_down.weight")
    tensors[f"{layer}.lora_down.weight"] = torch.ones(1, tensors[f"{layer}.lora_down.weight"].shape[1])
    tensors[f"{layer}.lora_up.weight"] = torch.ones(tensors[f"{layer}.lora_up.weight"].shape[0], 1)


def hadamard(tensors: dict[str, Tensor]) -> None:
    tensors["lora_unet_mid_block_attentions_0_proj_in.hada_w1_a"] = torch.ones(2, 2)


def half_a_layer(tensors: dict[str, Tensor]) -> None:
    del tensors[next(key for key in tensors if key.endswith("lora_up.weight"))]


def wrong_shape(tensors: dict[str, Tensor]) -> None:
    key = next(key for key in tensors if key.endswith("lora_up.weight"))
    tensors[key] = torch.ones(5, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            renamed_layer,
            r"diffusers read \d+ layers from its \d+, with a squared norm of .*give the --base that it was",
        ),
        (other_rank, r"layers of its unet have the ranks \[1, 3\] and the alphas \[6.0\]; one of each is required"),
        (hadamard, r"has lora_unet_.*hada_w1_a, which is no part of LoRA; a LoRA file is required"),
        (half_a_layer, r"has one of the two matrices of .*; a LoRA file is required"),
        (
            wrong_shape,
            r"diffusers cannot put it on Stable Diffusion 1.x and 2.x of .*; give the --base that it was trained on",
        ),
    ],
)
def test_a_file_that_cannot_be_trained_as_it_is_is_refused(
    change: Any, message: str, sd1: Path, tmp_path: Path
) -> None:
    tensors = load_file(sd1 / adapter_files.KOHYA_FILE)
    change(tensors)
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file)
    with pytest.raises(UsageError, match=message):
        converted(sd1, file, tmp_path / "made")
    assert not list(tmp_path.glob("*made*"))


def test_a_file_that_diffusers_passes_over_in_silence_is_refused(tmp_path: Path) -> None:
    out = exported(tmp_path, "sd3")
    with pytest.raises(UsageError, match=r"diffusers read 0 layers from its \d+"):
        converted(out, out / adapter_files.KOHYA_FILE, tmp_path / "made")


def test_a_damaged_file_and_a_wrong_place_are_refused(sd1: Path, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    file.write_bytes(b"12345678{")
    with pytest.raises(
        UsageError, match=r"lora.safetensors: cannot be read .*; a safetensors file of LoRA is required"
    ):
        converted(sd1, file, tmp_path / "made")
    with pytest.raises(UsageError, match=r"out: with --base, the path of a LoRA file in safetensors is required"):
        converted(sd1, sd1, tmp_path / "made")
    with pytest.raises(UsageError, match=r"--stem model: a LoRA file has one collection"):
        arguments = ["checkpoints", "convert", str(file), str(tmp_path / "made"), "--base", "b", "--stem", "model"]
        cli._main(arguments)
