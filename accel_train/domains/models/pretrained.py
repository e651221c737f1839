"""Load weights from a directory or the Hub into a model, for `from_pretrained` of every model here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import load_torch_model, snapshot_download
from torch import nn

DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""Options passed by the hub mixin to `_from_pretrained` besides the model's own arguments."""
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]


def load_pretrained(
    model: nn.Module, model_id: str, map_location: str = "cpu", strict: bool = True, **download_options: Any
) -> None:
    """Load one weights file, or several with an index. The hub mixin's own loader cannot read several.

    Strict, unlike the mixin's default: weights missing from the files would silently stay random. If `model_id` is a
    directory, nothing is downloaded. Otherwise `download_options` go to `snapshot_download`.
    """
    directory = model_id
    if not Path(model_id).is_dir():
        directory = snapshot_download(model_id, allow_patterns=WEIGHT_FILES, **download_options)
    load_directory(model, Path(directory), "model", map_location, strict)


def load_directory(
    model: nn.Module,
    directory: Path,
    stem: str,
    map_location: str = "cpu",
    strict: bool = True,
) -> None:
    """Load the weights (``model``) or their EMA (``ema``) of a directory, from one file or several with an index."""
    single = directory / f"{stem}.safetensors"
    # A single file is passed by name, because the directory may hold both the weights and their EMA.
    source = single if single.is_file() else directory
    pattern = stem + "{suffix}.safetensors"
    load_torch_model(model, source, strict=strict, map_location=map_location, filename_pattern=pattern)
