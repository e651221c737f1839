"""Weights from a directory or the Hub into a model: what `from_pretrained` of every model here does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import load_torch_model, snapshot_download
from torch import nn

DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""What the hub mixin hands to `_from_pretrained` beside the model's own arguments."""
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]


def load_pretrained(
    model: nn.Module, model_id: str, map_location: str = "cpu", strict: bool = True, **of_the_hub: Any
) -> None:
    """One file or several with an index, which the hub mixin's own loader cannot read.

    Strict, unlike the mixin's default: weights missing in the files would stay random without a word. `of_the_hub`:
    the arguments of `snapshot_download`; nothing is downloaded where `model_id` is a directory.
    """
    directory = model_id
    if not Path(model_id).is_dir():
        directory = snapshot_download(model_id, allow_patterns=WEIGHT_FILES, **of_the_hub)
    load_directory(model, Path(directory), "model", map_location, strict)


def load_directory(
    model: nn.Module, directory: Path, stem: str, map_location: str = "cpu", strict: bool = True
) -> None:
    """The weights (``model``) or their average (``ema``) of a directory, in one file or several with an index."""
    whole = directory / f"{stem}.safetensors"  # named, because that of the other may stand beside it
    source, pattern = whole if whole.is_file() else directory, stem + "{suffix}.safetensors"
    load_torch_model(model, source, strict=strict, map_location=map_location, filename_pattern=pattern)
