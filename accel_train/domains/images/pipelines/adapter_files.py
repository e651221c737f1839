"""Adapters as other programs read them: diffusers' ``load_lora_weights``, and the names of kohya's sd-scripts.

``pytorch_lora_weights.safetensors`` has peft's keys below the component, and the settings of the adapter as metadata.
The names of kohya, which ComfyUI reads too, are those of the original UNet with ``lora_down``, ``lora_up`` and
``alpha``.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.pipelines.loading import quiet
from accel_train.domains.models import lora
from accel_train.store import weights
from accel_train.store.weights import TensorReader

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
KOHYA_FILE = "kohya_lora.safetensors"
METADATA_KEY = "lora_adapter_metadata"
"""Under which diffusers looks for the settings of an adapter."""
PREFIX = "base_model.model."
"""Of the keys in peft's own files."""
LAYER = ".lora_A."
"""In the name of one tensor of each layer."""
UNSAVED = ("base_model_name_or_path", "inference_mode", "auto_mapping")

BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(attentions|resnets)\.(\d+)\.(.+)")
MIDDLE = re.compile(r"mid_block\.(attentions|resnets)\.(\d+)\.(.+)")
PLACES = {"resnets": 0, "attentions": 1}
SGM_LAYERS = {
    "time_emb_proj": "emb_layers.1",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
"""Layers outside of attention in the original UNet of XL."""


def write_diffusers(directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], component: str) -> str:
    """Write ``pytorch_lora_weights.safetensors`` from tensors by peft's keys, and return a line with their number.

    ``settings`` is the content of adapter_config.json, ``component`` unet or transformer.
    """
    renamed = {f"{component}.{key.removeprefix(PREFIX)}": tensor for key, tensor in tensors.items()}
    kept = {name: value for name, value in settings.items() if name not in UNSAVED}
    packed = {f"{component}.{name}": value for name, value in kept.items()}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}
    save_file(renamed, directory / DIFFUSERS_FILE, metadata=metadata)
    return f"{DIFFUSERS_FILE}: {len(renamed)} tensors for pipeline.load_lora_weights, and for ComfyUI"


def write_kohya(
    directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], facts: Mapping[str, str]
) -> str:
    """Write ``kohya_lora.safetensors`` for a UNet, and return a line with the number of layers.

    ``facts`` are from ``kohya_facts``. Every tensor is in the file, and every key is read back as the layer that it
    came from, or ``UsageError`` is raised.
    """
    is_xl = facts["ss_base_model_version"].startswith("sdxl")
    layers_per_block = int(facts["layers_per_block"])
    rank = int(settings["r"])
    alpha = float(settings["lora_alpha"])
    if settings.get("use_rslora"):
        # Its product counts alpha / sqrt(rank) times, that of the file alpha / rank times.
        alpha = alpha * math.sqrt(rank)
    names = {key: key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors}
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = kohya_name(names[key], layers_per_block if is_xl else None)
        part = "lora_down" if ".lora_A." in key else "lora_up"
        renamed[f"{name}.{part}.weight"] = tensor.contiguous()
        renamed[f"{name}.alpha"] = torch.tensor(alpha)
    layers = len(set(names.values()))
    if len(renamed) != 3 * layers:
        raise UsageError(
            f"{KOHYA_FILE}: {layers} layers have {len(renamed)} keys, and 3 of each are required; two layers have one "
            "name, or a part is missing"
        )
    metadata = {name: value for name, value in facts.items() if name.startswith("ss_")}
    metadata |= {"ss_network_dim": str(rank), "ss_network_alpha": str(alpha)}
    save_file(renamed, directory / KOHYA_FILE, metadata={"format": "pt", **metadata})
    return f"{KOHYA_FILE}: {layers} layers, {len(renamed)} keys, for kohya's scripts and ComfyUI"


def kohya_facts(family: str, levels: str, config: Mapping[str, Any], source: str) -> dict[str, str] | None:
    """Return the metadata of a UNet's file by what the base is, None for a transformer.

    ``family`` is the class of the pipeline, ``levels`` what its scheduler predicts, ``config`` that of the UNet.
    """
    versions = {"StableDiffusionPipeline": "sd_v1", "StableDiffusionXLPipeline": "sdxl_base_v1-0"}
    version = versions.get(family)
    if version is None:
        return None
    # Stable Diffusion 2 has text embeddings of width 1024.
    if version == "sd_v1" and config["cross_attention_dim"] == 1024:
        version = "sd_v2_v" if levels == "v_prediction" else "sd_v2"
    return {
        "ss_network_module": "networks.lora",
        "ss_base_model_version": version,
        "ss_v2": str(version.startswith("sd_v2")),
        "ss_sd_model_name": source,
        "layers_per_block": str(config["layers_per_block"]),
    }


def kohya_name(path: str, layers_per_block: int | None = None) -> str:
    """Return kohya's name of a layer of a UNet, whose path is that of diffusers.

    ``layers_per_block`` of the UNet of XL gives the name in the original UNet, as kohya has it for XL alone.
    """
    if layers_per_block is not None:
        path = _in_original(path, layers_per_block + 1)
    return "lora_unet_" + path.replace(".", "_")


def _in_original(path: str, per_block: int) -> str:
    match = BLOCK.fullmatch(path)
    if match is not None:
        side, block, kind, layer, rest = match.groups()
        number = int(block) * per_block + int(layer)
        if side == "down":
            return f"input_blocks.{number + 1}.{PLACES[kind]}.{SGM_LAYERS.get(rest, rest)}"
        return f"output_blocks.{number}.{PLACES[kind]}.{SGM_LAYERS.get(rest, rest)}"
    match = MIDDLE.fullmatch(path)
    if match is not None:
        kind, layer, rest = match.groups()
        number = 1 if kind == "attentions" else 2 * int(layer)
        return f"middle_block.{number}.{SGM_LAYERS.get(rest, rest)}"
    return SGM_LAYERS.get(path, path)


def read_adapter(directory: Path) -> dict[str, Tensor]:
    """Read ``adapter_model.safetensors`` of an export, by peft's keys. It may be in shards."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("adapter_model*.safetensors")):
        found |= load_file(file)
    return found


def load_directory(pipeline: Any, component: str, directory: Path) -> None:
    """Load the adapter of a checkpoint or an export by diffusers. Raises ``UsageError`` as ``load_into``."""
    if (directory / DIFFUSERS_FILE).is_file():
        load_into(pipeline, component, directory / DIFFUSERS_FILE)
        return
    with tempfile.TemporaryDirectory() as temporary:
        tensors = _adapter_of_checkpoint(directory)
        write_diffusers(Path(temporary), tensors, peft_settings(directory), component)
        load_into(pipeline, component, Path(temporary) / DIFFUSERS_FILE)


def peft_settings(directory: Path) -> dict[str, Any]:
    """Read adapter_config.json."""
    return json.loads((directory / lora.CONFIG_FILE).read_text("utf-8"))


def _adapter_of_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Return the averaged adapter, or the trained one of a run without an average, by peft's keys."""
    stem = "ema" if any(directory.glob("ema*.safetensors")) else "model"
    tensors = lora.by_key_of_peft(weights.find_tensors(directory, stem))
    with TensorReader(tensors) as reader:
        return {name: reader.read(name).clone() for name in tensors}


def load_into(pipeline: Any, component: str, file: Path) -> None:
    """Load ``pytorch_lora_weights.safetensors`` by diffusers. Raises ``UsageError`` if it leaves a layer out."""
    with quiet():
        pipeline.load_lora_weights(file.parent, weight_name=file.name)
    model: Any = getattr(pipeline, component)
    loaded = sum(1 for name, _ in model.named_parameters() if LAYER in name)
    with safe_open(file, "pt") as opened:
        expected = sum(1 for key in opened.keys() if LAYER in key)  # noqa: SIM118, an opened file is no dict
    if loaded != expected:
        raise UsageError(
            f"{file}: diffusers found {loaded} of its {expected} layers in {type(model).__name__}; give the base that "
            "the adapter was trained on"
        )
