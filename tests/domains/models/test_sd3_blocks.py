"""Blocks of a `MultimodalMMDiT` that start from SD3's give the outputs of diffusers' blocks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_train.config import UsageError
from accel_train.domains.models import sd3_blocks
from accel_train.domains.models.mmdit import ModelConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.models.sd3 import SD3Config
from tests.domains.models.test_sd3 import TINY, diffusers_model

FILE = "diffusion_pytorch_model.safetensors"


def tiny_options(source: Path, qk_norm: bool = False) -> ModelConfig:
    return ModelConfig("sd3_medium", str(source), 32, 3, 4, qk_norm=qk_norm, bias=True)


def tiny_shape(options: ModelConfig) -> MultimodalMMDiTConfig:
    return options.multimodal(50, 6, (4, 12), (2, 2))


@pytest.fixture(params=[False, True], ids=["sd3", "qk_norm"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, ModelConfig]:
    """diffusers' model saved as a pipeline's transformer, and the options that start from it."""
    model = diffusers_model(replace(TINY, qk_norm=request.param))
    model.save_pretrained(tmp_path / "transformer")
    return model, tiny_options(tmp_path, request.param)


@torch.no_grad()
def test_blocks_of_a_source_give_diffusers_outputs(saved: tuple[Any, ModelConfig]) -> None:
    theirs, options = saved
    ours = sd3_blocks.build(tiny_shape(options), options)
    text = torch.randn(2, 5, 32)
    image = torch.randn(2, 4, 32)
    conditioning = torch.randn(2, 32)
    silu = torch.nn.functional.silu(conditioning)
    last = len(theirs.transformer_blocks) - 1
    for number, block in enumerate(theirs.transformer_blocks):
        expected_text, expected_image = block(image, text, conditioning)
        found_text, found_image = ours.transformer.blocks[number]([text, image], silu, None)
        torch.testing.assert_close(found_image, expected_image, rtol=1e-5, atol=1e-5)
        if number < last:
            torch.testing.assert_close(found_text, expected_text, rtol=1e-5, atol=1e-5)


def test_what_sd3_lacks_is_named_and_stays(saved: tuple[Any, ModelConfig]) -> None:
    _, options = saved
    torch.manual_seed(1)
    model = MultimodalMMDiT(tiny_shape(options))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    assert options.blocks_from is not None
    new = sd3_blocks.load_blocks(model, options.blocks_from)
    for name, tensor in model.named_parameters():
        same = torch.equal(tensor, before[name])
        partly_or_never = any(part in name for part in new)
        assert not same or partly_or_never, name
        if not name.startswith("transformer.blocks."):
            assert same, name
    assert "token_embedding" in new
    assert "transformer.blocks.2.streams.0.out" in new
    # SD3's last text stream has no queries, gates and feed-forward layer: what is filled in part is named too.
    assert {"transformer.blocks.2.streams.0.qkv", "transformer.blocks.2.streams.0.modulation.linear"} <= set(new)
    assert not any("blocks.1" in part or "streams.1" in part for part in new)


def test_a_resumed_run_and_the_meta_device_need_no_source(tmp_path: Path) -> None:
    options = tiny_options(tmp_path / "gone")
    sd3_blocks.build(tiny_shape(options), options, start_step=3)
    with torch.device("meta"):
        sd3_blocks.build(tiny_shape(options), options)


def test_the_size_is_that_of_sd3_medium() -> None:
    named = SD3Config()
    assert ModelConfig("sd3_medium", qk_norm=False, bias=True).transformer() == replace(named.block, depth=named.depth)


def without_a_norm(weights: dict[str, Any]) -> None:
    del weights["transformer_blocks.1.attn.to_q.weight"]


def with_another(weights: dict[str, Any]) -> None:
    weights["transformer_blocks.1.attn2.to_q.weight"] = torch.zeros(2)


def misshapen(weights: dict[str, Any]) -> None:
    weights["transformer_blocks.1.attn.to_out.0.weight"] = torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_norm, r"attn\.to_q\.weight' is missing"),
        (with_another, r"transformer_blocks\.1\.attn2\.to_q\.weight have no place"),
        (misshapen, r"blocks\.1\.streams\.1\.out\.weight has the shape \(8, 8\), the model \(32, 32\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    diffusers_model(TINY).save_pretrained(tmp_path)
    weights = load_file(tmp_path / FILE)
    change(weights)
    save_file(weights, tmp_path / FILE)
    options = tiny_options(tmp_path)
    with pytest.raises(UsageError, match=message):
        sd3_blocks.build(tiny_shape(options), options)


def load(source: Path | str) -> None:
    options = tiny_options(Path("unread"))
    sd3_blocks.build(tiny_shape(options), replace(options, blocks_from=str(source)))


def cut_short(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[: len(content) // 2])


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{", "utf-8")


def only_fp16(folder: Path) -> None:
    (folder / FILE).rename(folder / "diffusion_pytorch_model.fp16.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"), [(cut_short, FILE), (no_json, r"config\.json"), (only_fp16, f"{FILE} or .* are required")]
)
def test_a_damaged_source_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    diffusers_model(TINY).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("source", ["./missing/x/y", "no/such"])
def test_a_source_that_is_nowhere_is_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=f"blocks_from '{source}': no such directory, and the hub answered"):
        load(source)


def test_other_variants_of_the_weights_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the home directory, as it is written there. With shards, the files of the index count alone."""
    model = diffusers_model(TINY)
    expected = model.state_dict()
    model.save_pretrained(tmp_path / "sd3", max_shard_size="20KB")
    assert not (tmp_path / "sd3" / FILE).exists()
    others = {name: tensor + 1 for name, tensor in expected.items()}
    save_file(others, tmp_path / "sd3" / "diffusion_pytorch_model.fp16.safetensors")
    save_file(others, tmp_path / "sd3" / "diffusion_pytorch_model_old.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    found, settings = sd3_blocks.read_transformer("~/sd3")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert settings["num_layers"] == 3


def test_options_that_contradict_the_source_are_refused(tmp_path: Path) -> None:
    diffusers_model(TINY).save_pretrained(tmp_path)
    options = tiny_options(tmp_path)
    shape = tiny_shape(options)
    for other in (replace(options, bias=False), replace(options, size="demo")):
        with pytest.raises(UsageError, match=r"need --model\.size sd3_medium --model\.bias true"):
            sd3_blocks.build(shape, other)
    with pytest.raises(UsageError, match="a run starts from only one of them"):
        sd3_blocks.build(shape, options, init_from="runs/other")
    deeper = replace(options, depth=4, qk_norm=True)
    with pytest.raises(UsageError, match="3 blocks, 4 heads and qk_norm False; the model has 4, 4 and True"):
        sd3_blocks.build(tiny_shape(deeper), deeper)
    empty = replace(options, blocks_from=str(tmp_path / "nothing"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="Name a diffusers pipeline of SD3"):
        sd3_blocks.build(shape, empty)
