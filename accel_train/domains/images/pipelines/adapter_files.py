"""Adapters as other programs read them: diffusers' ``load_lora_weights``, and the names of kohya's sd-scripts.

``pytorch_lora_weights.safetensors`` has peft's keys below the component, and the settings of the adapter as metadata.
kohya's file, which ComfyUI reads too, has the layers of the original model with ``lora_down``, ``lora_up`` and
``alpha``.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.kohya.layer_names import Layer, renamed
from accel_train.domains.images.kohya.metadata import written
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


def write_diffusers(directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], component: str) -> str:
    """Write ``pytorch_lora_weights.safetensors`` from tensors by peft's keys, and return a line with their number.

    ``settings`` is the content of adapter_config.json, ``component`` unet or transformer.
    """
    below = {f"{component}.{key.removeprefix(PREFIX)}": tensor for key, tensor in tensors.items()}
    kept = {name: value for name, value in settings.items() if name not in UNSAVED}
    packed = {f"{component}.{name}": value for name, value in kept.items()}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}
    save_file(below, directory / DIFFUSERS_FILE, metadata=metadata)
    return f"{DIFFUSERS_FILE}: {len(below)} tensors for pipeline.load_lora_weights"


def write_kohya(
    directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], facts: Mapping[str, str]
) -> str:
    """Write ``kohya_lora.safetensors`` for a UNet or a transformer, and return a line with the number of layers.

    ``facts`` are from ``kohya_facts``. Raises ``UsageError`` for a layer that has no name there.
    """
    rank = int(settings["r"])
    alpha = float(settings["lora_alpha"])
    if settings.get("use_rslora"):
        # Its product counts alpha / sqrt(rank) times, that of the file alpha / rank times.
        alpha = alpha * math.sqrt(rank)
    layers: dict[str, Layer] = {}
    for key, tensor in tensors.items():
        path, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        if part == "A.weight":
            layers[path] = Layer(tensor, tensors[f"{PREFIX}{path}.lora_B.weight"], alpha)
    assert 2 * len(layers) == len(tensors), "every adapter has two matrices"
    named: dict[str, Tensor] = {}
    for name, layer in renamed(layers, facts).items():
        named[f"{name}.lora_down.weight"] = layer.down.contiguous()
        named[f"{name}.lora_up.weight"] = layer.up.contiguous()
        named[f"{name}.alpha"] = torch.tensor(layer.alpha)
    metadata = written(facts) | {"ss_network_dim": str(rank), "ss_network_alpha": str(alpha)}
    save_file(named, directory / KOHYA_FILE, metadata={"format": "pt", **metadata})
    return f"{KOHYA_FILE}: {len(layers)} layers, {len(named)} keys, for kohya's scripts and ComfyUI"


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
