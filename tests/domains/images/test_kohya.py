"""kohya_lora.safetensors: what diffusers' own converters make of every layer is the adapter that was written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.diffusion.noise_levels import levels_of
from accel_train.domains.images.kohya.metadata import kohya_facts
from accel_train.domains.images.pipelines import adapter_files
from accel_train.domains.images.pipelines.components import quiet
from tests.domains.images import tiny_pipelines as tiny

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")
# Of diffusers itself, when it reads transformers' classes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
RANK = 3
ALPHA = 6.0
FLUX_CONVERTER = "_convert_kohya_flux_lora_to_diffusers"
READ_BY_DIFFUSERS = ("sd1", "sd2", "sdxl", "flux", "flux2", "qwen_image", "z_image")
WITHOUT_NAME = {
    "flux2": ("modulation", "norm_out"),
    "z_image": ("all_", "t_embedder", "cap_embedder"),
}
"""Layers outside the blocks that their table lacks."""
Adapter = dict[str, Tensor]


def denoiser_of(pipeline: Any) -> Any:
    return getattr(pipeline, "unet", None) or pipeline.transformer


def linear_layers(model: nn.Module, name: str) -> dict[str, nn.Linear]:
    left_out = WITHOUT_NAME.get(name, ())
    found = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {path: layer for path, layer in found.items() if not any(word in path for word in left_out)}


def adapter_of(layers: Mapping[str, nn.Linear]) -> Adapter:
    """An adapter for each layer, by peft's keys."""
    torch.manual_seed(5)
    tensors: Adapter = {}
    for path, layer in layers.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(RANK, layer.in_features)
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(layer.out_features, RANK)
    return tensors


def changes(tensors: Adapter) -> dict[str, Tensor]:
    """What is added to each weight."""
    found: dict[str, Tensor] = {}
    for key, down in tensors.items():
        path, _, part = key.removeprefix("base_model.model.").rpartition(".lora_")
        if part == "A.weight":
            found[path] = ALPHA / RANK * tensors[f"base_model.model.{path}.lora_B.weight"] @ down
    return found


def write(folder: Path, pipeline: Any, tensors: Adapter) -> dict[str, str]:
    """Write the file, and return its metadata. The line about it names the base that diffusers reads nothing for."""
    levels = levels_of(pipeline.scheduler, "base")
    family = type(pipeline).__name__
    facts = kohya_facts(family, levels.prediction, denoiser_of(pipeline).config, "base", tiny.SIDE)
    assert facts is not None
    line = adapter_files.write_kohya(folder, tensors, {"r": RANK, "lora_alpha": ALPHA}, facts)
    assert ("diffusers ignores this file" in line) == (family == "StableDiffusion3Pipeline")
    with safe_open(folder / adapter_files.KOHYA_FILE, "pt") as file:
        return file.metadata()


def of_other_widths(convert: Any, width: int) -> Callable[[Any], Any]:
    """diffusers' function for Flux with the widths of the tiny one, and with the prefix that it leaves out."""
    source = inspect.getsource(convert)
    theirs = "dims=[3072, 3072, 3072, 12288]"
    assert theirs in source
    scope = dict(convert.__globals__)
    exec(source.replace(theirs, f"dims=[{width}, {width}, {width}, {4 * width}]"), scope)

    def converted(state: Any) -> Any:
        found = scope[convert.__name__](state)
        return {key if key.startswith("transformer.") else f"transformer.{key}": value for key, value in found.items()}

    return converted


@pytest.mark.parametrize("name", READ_BY_DIFFUSERS)
def test_diffusers_reads_every_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.loaders import lora_pipeline

    pipeline = tiny.make(name)
    tensors = adapter_of(linear_layers(denoiser_of(pipeline), name))
    write(tmp_path, pipeline, tensors)
    if name == "flux":
        converter = of_other_widths(getattr(lora_pipeline, FLUX_CONVERTER), 32)
        monkeypatch.setattr(lora_pipeline, FLUX_CONVERTER, converter)
    with quiet():
        pipeline.load_lora_weights(tmp_path, weight_name=adapter_files.KOHYA_FILE)
    loaded: dict[str, Tensor] = {}
    for path, layer in denoiser_of(pipeline).named_modules():
        if hasattr(layer, "get_delta_weight"):
            loaded[path] = layer.get_delta_weight("default_0")
    assert_same(loaded, changes(tensors))


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    nonzero = {path for path, change in found.items() if change.any()}
    assert nonzero == expected.keys()
    for path, change in expected.items():
        torch.testing.assert_close(found[path], change, rtol=1e-5, atol=1e-5)


def test_a_joined_layer_of_flux_has_its_real_widths(tmp_path: Path) -> None:
    """By diffusers' converter as it is. Of a layer's parts, one has no adapter."""
    from diffusers.loaders import lora_conversion_utils as theirs

    torch.manual_seed(0)
    path = "single_transformer_blocks.37"
    tensors: Adapter = {}
    for part in ("attn.to_q", "attn.to_v", "proj_mlp"):
        tensors[f"base_model.model.{path}.{part}.lora_A.weight"] = torch.randn(RANK, 3072)
        wide = 12288 if part == "proj_mlp" else 3072
        tensors[f"base_model.model.{path}.{part}.lora_B.weight"] = torch.randn(wide, RANK)
    config = {"num_layers": 19, "num_attention_heads": 24, "attention_head_dim": 128, "guidance_embeds": True}
    facts = kohya_facts("FluxPipeline", "flow", config, "base", 1024)
    assert facts is not None
    adapter_files.write_kohya(tmp_path, tensors, {"r": RANK, "lora_alpha": ALPHA}, facts)
    convert = getattr(theirs, FLUX_CONVERTER)
    converted = convert(load_file(tmp_path / adapter_files.KOHYA_FILE))
    for part, change in changes(tensors).items():
        product = converted[f"transformer.{part}.lora_B.weight"] @ converted[f"transformer.{part}.lora_A.weight"]
        torch.testing.assert_close(product, change, rtol=1e-4, atol=1e-4)
    assert not converted[f"transformer.{path}.attn.to_k.lora_B.weight"].any()


def original_of_sd3(model: Any) -> dict[str, Tensor]:
    """Zeros for all weights of Stability's SD3, as large as those of ``model``."""
    width = 16
    shapes: dict[str, tuple[int, ...]] = {
        "pos_embed": (1, 64, width),
        "x_embedder.proj": (width, 4, 2, 2),
        "t_embedder.mlp.0": (width, 256),
        "t_embedder.mlp.2": (width, width),
        "context_embedder": (width, 2 * tiny.WIDTH),
        "y_embedder.mlp.0": (width, 2 * tiny.WIDTH),
        "y_embedder.mlp.2": (width, width),
        "final_layer.linear": (16, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    for block in range(model.config.num_layers):
        is_last = block == model.config.num_layers - 1
        for stream in ("x_block", "context_block"):
            place = f"joint_blocks.{block}.{stream}"
            shapes[f"{place}.attn.qkv"] = (3 * width, width)
            is_short = is_last and stream == "context_block"
            shapes[f"{place}.adaLN_modulation.1"] = (2 * width if is_short else 6 * width, width)
            if not is_short:
                shapes[f"{place}.attn.proj"] = (width, width)
                shapes[f"{place}.mlp.fc1"] = (4 * width, width)
                shapes[f"{place}.mlp.fc2"] = (width, 4 * width)
    found = {"pos_embed": torch.zeros(shapes.pop("pos_embed"))}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = torch.zeros(shape)
        found[f"{name}.bias"] = torch.zeros(shape[0])
    return found


def test_sd3_has_the_names_of_its_original(tmp_path: Path) -> None:
    """diffusers converts no such adapter, but checkpoints: the file is added to one, as kohya and ComfyUI do it."""
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    pipeline = tiny.make("sd3")
    tensors = adapter_of(linear_layers(pipeline.transformer, "sd3"))
    write(tmp_path, pipeline, tensors)
    file = load_file(tmp_path / adapter_files.KOHYA_FILE)
    original = original_of_sd3(pipeline.transformer)
    by_name = {f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}": key for key in original}
    for key in list(file):
        name, _, part = key.partition(".")
        if part == "lora_down.weight":
            down = file.pop(key)
            scale = float(file.pop(f"{name}.alpha")) / down.shape[0]
            original[by_name[name]] += scale * file.pop(f"{name}.lora_up.weight") @ down
    assert not file
    converted = convert_sd3_transformer_checkpoint_to_diffusers(original)
    found = {key.removesuffix(".weight"): value for key, value in converted.items() if key.endswith(".weight")}
    assert_same(found, changes(tensors))


@pytest.mark.parametrize(
    ("name", "version", "architecture"),
    [
        ("sd2", "sd_v1", "stable-diffusion-v1/lora"),
        ("sdxl", "sdxl_base_v1-0", "stable-diffusion-xl-v1-base/lora"),
        ("flux", "flux1", "flux-1-dev/lora"),
    ],
)
def test_metadata(name: str, version: str, architecture: str, tmp_path: Path) -> None:
    pipeline = tiny.make(name)
    metadata = write(tmp_path, pipeline, adapter_of({"proj_out" if name == "flux" else "conv": nn.Linear(2, 2)}))
    assert metadata["ss_base_model_version"] == version
    assert metadata["ss_network_dim"] == str(RANK)
    assert metadata["ss_network_alpha"] == str(ALPHA)
    assert metadata["modelspec.architecture"] == architecture
    assert metadata["modelspec.resolution"] == f"{tiny.SIDE}x{tiny.SIDE}"
    assert not any(key in metadata for key in ("names", "layers", "width", "layers_per_block"))


def test_a_layer_without_a_name_is_refused(tmp_path: Path) -> None:
    pipeline = tiny.make("flux2")
    tensors = adapter_of({"double_stream_modulation_img.linear": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"double_stream_modulation_img.linear has no name .* --lora.targets"):
        write(tmp_path, pipeline, tensors)
    assert kohya_facts("SanaPipeline", "flow", {}, "base", 16) is None
