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
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.kohya.layer_names import Layer, renamed, renamed_text
from accel_train.domains.images.kohya.metadata import written
from accel_train.domains.images.pipelines.components import quiet
from accel_train.domains.images.pipelines.family import text_encoders
from accel_train.domains.images.pipelines.loading import Base
from accel_train.domains.models import adapters, lora
from accel_train.pipeline import PLACE
from accel_train.store import atomic_files, manifest, strict_json
from accel_train.store.exports.peft_layout import CONFIG_FILE, PREFIX, WEIGHTS_STEM, by_key_of_peft
from accel_train.store.weights import TensorReader
from accel_train.wording import shortened

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
KOHYA_FILE = "kohya_lora.safetensors"
METADATA_KEY = "lora_adapter_metadata"
"""Key of an adapter's settings, as diffusers looks for them."""
LAYER = ".lora_A."
"""Part of the name of one tensor of each layer."""
MAGNITUDE = ".lora_magnitude_vector"
"""End of the key of DoRA's magnitudes, in peft's own files."""
DENOISER = "denoiser"
TEXT = "text_encoder"
"""Prefix of the names of text encoders."""
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
        below |= {f"{part}.{_key_of_diffusers(part, path)}": tensor for path, tensor in of_part.items()}
        values = kept
        if is_joint(tensors):
            values = kept | settings_of_part(part, of_part, settings)
        packed |= {f"{part}.{name}": value for name, value in values.items()}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}
    save_file(below, directory / DIFFUSERS_FILE, metadata=metadata)
    return f"{DIFFUSERS_FILE}: {len(below)} tensors for pipeline.load_lora_weights"


def code_for_diffusers(base: Base) -> dict[str, str]:
    """Return the code that draws with the adapter in diffusers, for the card."""
    # A folder on this machine is none on others.
    source = '"FOLDER_OF_THE_BASE"' if base.revision is None else f'"{base.source}", revision="{base.revision}"'
    code = (
        f"from diffusers import DiffusionPipeline\n\npipeline = DiffusionPipeline.from_pretrained({source})\n"
        f'pipeline.load_lora_weights({PLACE}, weight_name="{DIFFUSERS_FILE}")'
    )
    return {"program": "diffusers", "needs": DIFFUSERS_FILE, "code": code}


def _key_of_diffusers(part: str, path: str) -> str:
    # For text encoders, transformers reads the file. It puts the adapter's name after `lora_magnitude_vector`, and does
    # not know that peft's files leave `.weight` out. Without it, the magnitudes would stay those of the base.
    return f"{path}.weight" if part.startswith(TEXT) and path.endswith(MAGNITUDE) else path


def is_joint(tensors: Mapping[str, Tensor]) -> bool:
    """Return True for adapters of a denoiser and of text encoders. Their keys begin with the component."""
    return any(key.startswith(f"{PREFIX}{TEXT}") for key in tensors)


def by_component(tensors: Mapping[str, Tensor], component: str) -> dict[str, dict[str, Tensor]]:
    """Return tensors by component, and by their key below it.

    Keys of text encoders are below ``text_model``, as in other programs and in all versions of transformers except 5.
    """
    if not is_joint(tensors):
        below = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
        return {component: below}
    found: dict[str, dict[str, Tensor]] = {}
    for part, of_part in _components(tensors).items():
        for path, tensor in of_part.items():
            if part.startswith(TEXT):
                path = _below_text_model(path)
            found.setdefault(part, {})[path] = tensor
    return found


def _components(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return tensors of several components by component, and by their name in its model."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        part, _, path = key.removeprefix(PREFIX).partition(".")
        found.setdefault(part, {})[path] = tensor
    return found


def _below_text_model(path: str) -> str:
    return TEXT_MODEL + path.removeprefix(TEXT_MODEL)


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


def write_components(directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> list[str]:
    """Replace the one adapter of an export by a folder of peft for each component, and return a line about them.

    Does nothing for adapters of the denoiser alone.
    """
    if not is_joint(tensors):
        return []
    parts = _components(tensors)
    for part, of_part in parts.items():
        folder = directory / part
        folder.mkdir()
        file = folder / f"{WEIGHTS_STEM}.safetensors"
        save_file({f"{PREFIX}{path}": tensor for path, tensor in of_part.items()}, file, metadata={"format": "pt"})
        write_settings(folder, {**settings, **settings_of_part(part, of_part, settings)})
    # Other programs have no model of all components. peft would put these adapters on one, with initial values.
    for file in directory.glob(f"{WEIGHTS_STEM}*"):
        file.unlink()
    return [f"{', '.join(parts)}: a folder for each, for PeftModel.from_pretrained(COMPONENT, FOLDER) of peft"]


def write_kohya(
    directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], facts: Mapping[str, str]
) -> str:
    """Write ``kohya_lora.safetensors`` for a UNet or a transformer, and return a line with the number of layers.

    ``facts`` are from ``kohya_facts``. Raises ``UsageError`` for a layer without a name in kohya's format.
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
    line = f"{KOHYA_FILE}: {layers} layers, {len(named)} keys, for kohya's scripts and ComfyUI"
    # diffusers looks only for its own keys, and just warns if it finds none.
    silent = f"; diffusers ignores this file without an error and draws the base: give it {DIFFUSERS_FILE}"
    return line + (silent if facts.get("names") == "sd3" else "")


def _alpha(rank: int, alpha: float, settings: Mapping[str, Any]) -> float:
    if settings.get("use_rslora"):
        # rsLoRA scales by alpha / sqrt(rank), and readers of the file by alpha / rank.
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
    """Read the adapter of a checkpoint, an export or a folder written by peft, by peft's keys.

    Takes the EMA of a checkpoint that has one.
    """
    tensors = adapters.read_adapter(directory)
    with TensorReader(tensors) as reader:
        # Copies, because the files are closed afterwards.
        return {name: reader.read(name).clone() for name in tensors}


def load_directory(pipeline: Any, component: str, directory: Path, name: str) -> None:
    """Load the adapter of a checkpoint, an export or a folder of peft with diffusers, as ``name``, and select it.

    Raises ``UsageError`` for an unreadable adapter, and if diffusers leaves a tensor out.
    """
    file = directory / DIFFUSERS_FILE
    # Beside a downloaded checkpoint it is not in the manifest, so it was not verified.
    if file.is_file() and not manifest.is_checkpoint(directory):
        load_into(pipeline, component, file, name)
        return
    with tempfile.TemporaryDirectory() as temporary:
        tensors = read_adapter(directory)
        write_diffusers(Path(temporary), tensors, peft_settings(directory), component)
        load_into(pipeline, component, Path(temporary) / DIFFUSERS_FILE, name)


def write_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write adapter_config.json."""
    atomic_files.write_json_in_place(directory / CONFIG_FILE, settings)


def peft_settings(directory: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises ``UsageError``."""
    path = directory / CONFIG_FILE
    try:
        return strict_json.read_object(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy, or export it again") from None


def load_into(pipeline: Any, component: str, file: Path, adapter: str) -> None:
    """Load ``pytorch_lora_weights.safetensors`` with diffusers, as ``adapter``.

    Raises ``UsageError`` if diffusers leaves a tensor out.
    """
    with quiet(), warnings.catch_warnings():
        # Several adapters are intended.
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
        # With the function that other programs call, so that what we write is tested whenever it is read.
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=adapter)
    expected = load_file(file)
    # diffusers warns of keys that it does not know and continues without them, with initial values in their place.
    left_out = _left_out(expected, _loaded(pipeline, component, adapter))
    if left_out:
        found = len(expected) - len(left_out)
        raise UsageError(
            f"{file}: diffusers found {found} of its {len(expected)} tensors in {type(pipeline).__name__}, but not "
            f"{shortened(left_out, 2)}; give the base that the adapter was trained on"
        )


def _loaded(pipeline: Any, component: str, adapter: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter in a pipeline, by the keys of diffusers' file."""
    parts = {component: getattr(pipeline, component), **text_encoders(pipeline)}
    found: dict[str, Tensor] = {}
    for part, model in parts.items():
        of_part = by_key_of_peft(dict(model.named_parameters()), adapter)
        for key, parameter in of_part.items():
            path = key.removeprefix(PREFIX)
            if part.startswith(TEXT):
                path = _below_text_model(path)
            found[f"{part}.{_key_of_diffusers(part, path)}"] = parameter
    return found


def _left_out(expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> list[str]:
    """List the tensors of a file that a model lacks or holds with other values."""
    missing: list[str] = []
    for key, value in expected.items():
        found = loaded.get(key)
        # A base in half precision rounds the values that it loads.
        if found is None or not torch.allclose(found.cpu(), value.to(found.dtype), rtol=0, atol=0, equal_nan=True):
            missing.append(key)
    return missing
