"""Adapters as other programs read them: diffusers' ``load_lora_weights``, and the names of kohya's sd-scripts.

``pytorch_lora_weights.safetensors`` has peft's keys below the component, and the settings of the adapter as metadata.
kohya's file, also read by ComfyUI, has the layers of the original model with ``lora_down``, ``lora_up`` and ``alpha``.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.kohya.layer_names import Layer, renamed, renamed_text
from accel_train.domains.images.kohya.metadata import written
from accel_train.domains.images.pipelines.components import quiet
from accel_train.domains.images.pipelines.loading import text_encoders
from accel_train.domains.models import adapters, lora
from accel_train.store import strict_json
from accel_train.store.weights import TensorReader

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
KOHYA_FILE = "kohya_lora.safetensors"
METADATA_KEY = "lora_adapter_metadata"
"""Key of an adapter's settings, as diffusers looks for them."""
PREFIX = "base_model.model."
"""Of the keys in peft's own files."""
LAYER = ".lora_A."
"""In the name of one tensor of each layer."""
DENOISER = "denoiser"
TEXT = "text_encoder"
"""Beginning of the names of text encoders."""
TEXT_MODEL = "text_model."
UNSAVED = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping")


def write_diffusers(directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], component: str) -> str:
    """Write ``pytorch_lora_weights.safetensors`` from tensors by peft's keys, and return a line with their number.

    ``settings`` is the content of adapter_config.json, ``component`` unet or transformer. Tensors of trained text
    encoders come with the names of all components, and are written under ``text_encoder`` and ``text_encoder_2``.
    """
    kept = {name: value for name, value in settings.items() if name not in UNSAVED}
    below: dict[str, Tensor] = {}
    packed: dict[str, Any] = {}
    for part, of_part in by_component(tensors, component).items():
        # diffusers finds the component by the first word of a key.
        below |= {f"{part}.{path}": tensor for path, tensor in of_part.items()}
        values = kept
        if is_joint(tensors):
            values = kept | settings_of_part(part, of_part, settings)
        packed |= {f"{part}.{name}": value for name, value in values.items()}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}
    save_file(below, directory / DIFFUSERS_FILE, metadata=metadata)
    return f"{DIFFUSERS_FILE}: {len(below)} tensors for pipeline.load_lora_weights"


def is_joint(tensors: Mapping[str, Tensor]) -> bool:
    """Return True for adapters of a denoiser and of text encoders. Their keys begin with the component."""
    return any(key.startswith(f"{PREFIX}{TEXT}") for key in tensors)


def by_component(tensors: Mapping[str, Tensor], component: str) -> dict[str, dict[str, Tensor]]:
    """Return tensors by component, and by their key below it.

    Those of text encoders are below ``text_model``, as all versions of transformers but 5 have it, and all programs.
    """
    if not is_joint(tensors):
        below = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
        return {component: below}
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        part, _, path = key.removeprefix(PREFIX).partition(".")
        if part.startswith(TEXT) and not path.startswith(TEXT_MODEL):
            path = TEXT_MODEL + path
        found.setdefault(part, {})[path] = tensor
    return found


def settings_of_part(part: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a component's own settings, in place of the whole model's."""
    downs: dict[str, Tensor] = {}
    for path, tensor in tensors.items():
        if LAYER in path:
            layer, _, _ = path.rpartition(".lora_")
            downs[layer] = tensor
    any_down = next(iter(downs.values()))
    alphas = settings.get("alpha_pattern") or {}
    return {
        "r": any_down.shape[0],
        "lora_alpha": alphas.get(lora.part_pattern(part), settings["lora_alpha"]),
        "rank_pattern": {},
        "alpha_pattern": {},
        # peft finds the end of a path, with text_model before it or without.
        "target_modules": sorted(layer.removeprefix(TEXT_MODEL) for layer in downs),
    }


def write_kohya(
    directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], facts: Mapping[str, str]
) -> str:
    """Write ``kohya_lora.safetensors`` for a UNet or a transformer, and return a line with the number of layers.

    ``facts`` are from ``kohya_facts``. Raises ``UsageError`` for a layer without a name there.
    """
    parts = by_component(tensors, DENOISER)
    found: dict[str, dict[str, Layer]] = {}
    for part, of_part in parts.items():
        values = settings_of_part(part, of_part, settings)
        alpha = _alpha(values["r"], values["lora_alpha"], settings)
        found[part] = _layers(of_part, alpha)
    texts = [part for part in found if part.startswith(TEXT)]
    (denoiser,) = [part for part in found if part not in texts]
    renamed_layers = renamed(found[denoiser], facts)
    for part in texts:
        renamed_layers |= renamed_text(found[part], part, facts)
    layers = sum(len(of_part) for of_part in found.values())
    assert 2 * layers == len(tensors), "every adapter has two matrices"
    rank = int(settings["r"])
    alpha = _alpha(rank, settings["lora_alpha"], settings)
    named: dict[str, Tensor] = {}
    for name, layer in renamed_layers.items():
        named[f"{name}.lora_down.weight"] = layer.down.contiguous()
        named[f"{name}.lora_up.weight"] = layer.up.contiguous()
        # A tensor for each layer: kohya's format has no other place for it.
        named[f"{name}.alpha"] = torch.tensor(layer.alpha)
    metadata = written(facts) | {"ss_network_dim": str(rank), "ss_network_alpha": str(alpha)}
    save_file(named, directory / KOHYA_FILE, metadata={"format": "pt", **metadata})
    return f"{KOHYA_FILE}: {layers} layers, {len(named)} keys, for kohya's scripts and ComfyUI"


def _alpha(rank: int, alpha: float, settings: Mapping[str, Any]) -> float:
    if settings.get("use_rslora"):
        # Its product counts alpha / sqrt(rank) times, that of the file alpha / rank times.
        return float(alpha) * math.sqrt(rank)
    return float(alpha)


def _layers(tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Layer]:
    """Return the adapter of each layer, by its path."""
    found: dict[str, Layer] = {}
    for key, tensor in tensors.items():
        path, _, matrix = key.rpartition(".lora_")
        if matrix == "A.weight":
            found[path] = Layer(tensor, tensors[f"{path}.lora_B.weight"], alpha)
    return found


def read_adapter(directory: Path) -> dict[str, Tensor]:
    """Read the adapter of a checkpoint, an export or a folder written by peft, by peft's keys. Of a checkpoint with an
    average it is that.
    """
    tensors = adapters.read_adapter(directory)
    with TensorReader(tensors) as reader:
        # Copies, because the files are closed behind them.
        return {name: reader.read(name).clone() for name in tensors}


def load_directory(pipeline: Any, component: str, directory: Path, name: str) -> None:
    """Load the adapter of a checkpoint, an export or a folder of peft by diffusers, as ``name``, and choose it.

    Raises ``UsageError`` as ``load_into``.
    """
    if (directory / DIFFUSERS_FILE).is_file():
        load_into(pipeline, component, directory / DIFFUSERS_FILE, name)
        return
    with tempfile.TemporaryDirectory() as temporary:
        tensors = read_adapter(directory)
        write_diffusers(Path(temporary), tensors, peft_settings(directory), component)
        load_into(pipeline, component, Path(temporary) / DIFFUSERS_FILE, name)


def peft_settings(directory: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises ``UsageError``."""
    path = directory / lora.CONFIG_FILE
    try:
        return strict_json.read_object(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy, or export it again") from None


def load_into(pipeline: Any, component: str, file: Path, adapter: str) -> None:
    """Load ``pytorch_lora_weights.safetensors`` by diffusers, as ``adapter``.

    Raises ``UsageError`` if it leaves a layer out.
    """
    with quiet(), warnings.catch_warnings():
        # Several adapters are what is asked for.
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
        # By the same function that others use, so that what we write is tried whenever it is read.
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=adapter)
    model: Any = getattr(pipeline, component)
    parts = [model, *text_encoders(pipeline).values()]
    loaded = 0
    for part in parts:
        # peft puts the adapter's name behind the matrix's.
        loaded += sum(1 for name, _ in part.named_parameters() if f"{LAYER}{adapter}." in name)
    with safe_open(file, "pt") as opened:
        expected = sum(1 for key in opened.keys() if LAYER in key)  # noqa: SIM118, an opened file is no dict
    # diffusers warns of keys that it does not know and continues without them.
    if loaded != expected:
        raise UsageError(
            f"{file}: diffusers found {loaded} of its {expected} layers in {type(model).__name__}; give the base that "
            "the adapter was trained on"
        )
