"""Adapters as peft writes them: names of files, keys of tensors, and the folders with both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ADAPTER = "default"
"""Name of the adapter in a model. peft leaves it out of file names and keys."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_STEM = "adapter_model"
PREFIX = "base_model.model."
"""Prefix of all keys: peft wraps the adapted model in a model of its own."""


def by_key_of_peft(tensors: Mapping[str, T], adapter: str = ADAPTER) -> dict[str, T]:
    """Return the tensors of an adapter by the keys of peft's files. Leaves out other tensors."""
    found: dict[str, T] = {}
    for name, tensor in tensors.items():
        key = adapter_key(name, adapter)
        if key is not None:
            found[key] = tensor
    return found


def adapter_key(name: str, adapter: str = ADAPTER) -> str | None:
    """Return peft's key of a parameter of an adapter, None for any other parameter."""
    # peft's files name DoRA's magnitudes without the `.weight` of the parameter.
    if f".lora_magnitude_vector.{adapter}." in name:
        return f"{PREFIX}{name.partition('.lora_magnitude_vector.')[0]}.lora_magnitude_vector"
    if not re.search(rf"\.lora_[AB]\.{re.escape(adapter)}\.", name):
        return None
    return f"{PREFIX}{name.replace(f'.{adapter}.', '.')}"


def folders(directory: Path) -> dict[str, Path]:
    """Return the folders with the weights of an adapter, by the prefix of its keys in the whole model.

    A directory written by peft is itself the only folder, with an empty prefix. An export of adapters for several
    components has one folder for each. Returns no folder for any other directory, such as a checkpoint.
    """
    # Imported late, because bases of pictures import this module, and chains of imports are short.
    from accel_train.store import manifest

    # A download of a pushed checkpoint also has files for other programs, which its manifest does not list.
    if not (directory / CONFIG_FILE).is_file() or manifest.is_checkpoint(directory):
        return {}
    if _has_weights(directory):
        return {"": directory}
    parts = sorted(path.parent for path in directory.glob(f"*/{CONFIG_FILE}"))
    return {f"{part.name}.": part for part in parts if _has_weights(part)}


def conversion_hint(place: Path) -> str:
    """Return what to do with a file of weights, or a folder with one, that may hold adapters in another layout."""
    files = [place] if place.is_file() else place.glob("*.safetensors")
    if not any(file.suffix == ".safetensors" for file in files):
        return ""
    return (
        "; adapters in a file of diffusers or kohya become a folder of peft with `accel-train checkpoints convert FILE "
        "FOLDER --base BASE`"
    )


def _has_weights(folder: Path) -> bool:
    return any(folder.glob(f"{WEIGHTS_STEM}*.safetensors"))


def of_whole(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the tensors of one of the ``folders`` by their keys in the whole model."""
    return {f"{PREFIX}{prefix}{key.removeprefix(PREFIX)}": tensor for key, tensor in tensors.items()}
