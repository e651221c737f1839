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


def dora(tensors: dict[str, Tensor]) -> None:
    for key in list(tensors):
        if key.endswith(".lora_up.weight"):
            tensors[key.replace(".lora_up.weight", ".dora_scale")] = torch.ones(len(tensors[key]), 1)


def of_rank_0(tensors: dict[str, Tensor]) -> None:
    layer = next(key for key in tensors if key.endswith("lora_down.weight")).removesuffix(".lora_down.weight")
    tensors[f"{layer}.lora_down.weight"] = torch.ones(0, 8)
    tensors[f"{layer}.lora_up.weight"] = torch.ones(8, 0)


def of_two_alphas(tensors: dict[str, Tensor]) -> None:
    tensors[next(key for key in tensors if key.endswith(".alpha"))] = torch.ones(2)


def of_no_alpha(tensors: dict[str, Tensor]) -> None:
    tensors[next(key for key in tensors if key.endswith(".alpha"))] = torch.tensor(0.0)


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
            r"diffusers left out 32 of its 32 layers or scaled them otherwise .*give the --base that it was trained on",
        ),
        (
            dora,
            r"did not take the magnitudes of DoRA as they are in the file on 32 of its 32 layers .*or merge it",
        ),
        (of_rank_0, r"the matrices of lora_unet_\S+ have the shapes \(0, 8\) and \(8, 0\); .*with one rank above 0"),
        (of_two_alphas, r"alpha of lora_unet_\S+, in the file or .*: a finite number above 0 is required .*2 elements"),
        (of_no_alpha, r"alpha of lora_unet_\S+, in the file or .*: a finite number above 0 is required .*scale of 0"),
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
    with pytest.raises(UsageError, match=r"diffusers left out 7 of its 7 layers"):
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


def lora_of(layers: dict[str, tuple[int, int]], rank: int, *, is_dora: bool = False) -> dict[str, Tensor]:
    """Adapters in the names of diffusers, by path and (in, out) of their layers."""
    tensors: dict[str, Tensor] = {}
    for path, (width, out) in layers.items():
        tensors |= {f"{path}.lora_A.weight": torch.randn(rank, width), f"{path}.lora_B.weight": torch.randn(out, rank)}
        if is_dora:
            end = ".weight" if path.startswith("text_encoder") else ""
            tensors[f"{path}.lora_magnitude_vector{end}"] = torch.rand(out) + 3
    return tensors


def denoiser_of(base: Path) -> dict[str, tuple[int, int]]:
    from diffusers import UNet2DConditionModel

    unet: Any = UNet2DConditionModel.from_pretrained(base / "unet")
    attention = (".to_q", ".to_k", ".to_v", ".to_out.0")
    linear = {f"unet.{path}": module for path, module in unet.named_modules() if path.endswith(attention)}
    return {path: (module.in_features, module.out_features) for path, module in linear.items()}


def encoder(name: str) -> dict[str, tuple[int, int]]:
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    return {f"{name}.text_model.encoder.layers.0.self_attn.{end}": (16, 16) for end in projections}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name in ("sd1", "sdxl"):
        (folder / name).mkdir()
        tiny.save(name, folder / name / "base")
    return folder


def test_a_layer_of_a_small_change_is_not_lost(bases: Path, tmp_path: Path) -> None:
    layers = denoiser_of(bases / "sd1" / "base")
    tensors = lora_of(layers, 4)
    lost = next(iter(layers))
    file = tmp_path / "lora.safetensors"
    for end in ("lora_A.weight", "lora_B.weight"):
        tensors[f"{lost.replace('unet.', 'unet.extra_')}.{end}"] = tensors.pop(f"{lost}.{end}") * 1e-4
    save_file(tensors, file)
    with pytest.raises(UsageError, match=rf"left out 1 of its 32 layers .*\({lost.replace('unet.', 'unet.extra_')}\)"):
        converted(bases / "sd1" / "out", file, tmp_path / "made")
    # The base has one text encoder.
    weak = {key: 1e-4 * value for key, value in lora_of(encoder("text_encoder_2"), 4).items()}
    save_file(lora_of(layers, 4) | weak, file)
    with pytest.raises(UsageError, match=r"left out 4 of its 36 layers .*text_encoder_2"):
        converted(bases / "sd1" / "out", file, tmp_path / "made")


def test_magnitudes_of_dora_in_the_names_of_diffusers_are_kept(
    bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = lora_of(denoiser_of(bases / "sdxl" / "base") | encoder("text_encoder"), 4, is_dora=True)
    tensors |= lora_of(encoder("text_encoder_2"), 4, is_dora=True)
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file)
    made = converted(bases / "sdxl" / "out", file, tmp_path / "made")
    assert "--lora.rank 4 --lora.alpha 4 --lora.variant dora --text_encoders.rank 4" in capsys.readouterr().out
    for part in ("unet", "text_encoder", "text_encoder_2"):
        found = load_file(made / part / "adapter_model.safetensors")
        magnitudes = {key: value for key, value in tensors.items() if key.startswith(f"{part}.") and "magnitude" in key}
        assert sum("magnitude" in key for key in found) == len(magnitudes)
        for key, value in magnitudes.items():
            path = key.removeprefix(f"{part}.").removesuffix(".weight").removeprefix("text_model.")
            (name,) = [name for name in found if name.endswith(path)]
            assert torch.equal(found[name], value)
    # transformers passes over this name and would take the magnitudes of the base.
    key = next(key for key in tensors if key.startswith("text_encoder.") and "magnitude" in key)
    tensors[key.removesuffix(".weight")] = tensors.pop(key)
    save_file(tensors, file)
    with pytest.raises(UsageError, match=r"magnitudes of DoRA .* on 1 of its \d+ layers .*for text encoders"):
        converted(bases / "sdxl" / "out", file, tmp_path / "again")


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"rank": 2}, {"rank": 3}, "they differ in rank or alpha, and --text_encoders.rank"),
        ({"rank": 2, "is_dora": True}, {"rank": 2, "is_dora": True}, "some of the adapters are DoRA and some are not"),
        ({"rank": 2}, None, "they are on other layers in one than in the other"),
    ],
)
def test_options_that_no_run_has_are_not_printed(
    first: dict[str, Any],
    second: dict[str, Any] | None,
    reason: str,
    bases: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = lora_of(denoiser_of(bases / "sdxl" / "base"), 4) | lora_of(encoder("text_encoder"), **first)
    if second is not None:
        tensors |= lora_of(encoder("text_encoder_2"), **second)
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file)
    made = converted(bases / "sdxl" / "out", file, tmp_path / "made")
    printed = capsys.readouterr().out
    assert "no run starts from those of text_encoder" in printed
    assert reason in printed
    assert f"start a run from those of the unet alone with --init_from {made / 'unet'} --lora.rank 4" in printed
    assert "--text_encoders.rank 2" not in printed


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("no json", r"the settings of adapters as JSON are required \(it is not JSON"),
        ("[1]", r"the settings of adapters as JSON are required \(\[1\] is not an object\)"),
        ('{"unet.lora_alpha": 4, "unet.alpha_pattern": {"*": 3}}', r"alpha of unet\.\S+, .*nothing to repeat"),
        ('{"unet.lora_alpha": "much"}', r"alpha of unet\.\S+, .* is required \(could not convert string"),
        ('{"unet.alpha_pattern": [1]}', r"alpha of unet\.\S+, .* is required \('list' object"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(settings: str, fault: str, bases: Path, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    metadata = {adapter_files.METADATA_KEY: settings}
    save_file(lora_of(denoiser_of(bases / "sd1" / "base"), 4), file, metadata=metadata)
    with pytest.raises(UsageError, match=rf"lora\.safetensors: .*{fault}"):
        converted(bases / "sd1" / "out", file, tmp_path / "made")
