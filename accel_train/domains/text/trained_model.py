"""Sampling from what a run of text and latents left behind: a checkpoint, or an export of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from accel_train.config import UsageError, from_tree
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, TextSamplingConfig
from accel_train.domains.models.mmdit import MultimodalMMDiT
from accel_train.domains.models.pretrained import load_directory
from accel_train.domains.text.both_ways import BothWays
from accel_train.domains.text.dataset import DataAssets, load_assets

G = TypeVar("G")


def load_both_ways(directory: Path, device: str = "cpu") -> tuple[BothWays, DataAssets]:
    """The model with the objective it was trained for and the run's samplers, and what turns text into its inputs.

    ``directory`` is a checkpoint or what ``accel-train checkpoints export`` wrote. Of a checkpoint the averaged weights
    are taken where it has them. Nothing is hashed (``newest_verified`` does). Raises ``UsageError`` where options or
    assets are missing, or of another version.
    """
    options = _options(directory)
    model = MultimodalMMDiT.from_pretrained(directory)
    if any(directory.glob("ema*.safetensors")):
        load_directory(model, directory, "ema")
    assets = load_assets(directory / "assets", device)
    both = BothWays(
        model.to(device).eval(),
        assets.tokenizer.mask_id,
        int(options["seed"]),
        _group(LatentDiffusionConfig, options, "latent."),
        _group(TextSamplingConfig, options, "evaluation.text."),
        _group(LatentSamplingConfig, options, "evaluation.latent."),
    )
    return both, assets


def _options(directory: Path) -> dict[str, Any]:
    for file, key in (("experiment.json", "options"), ("manifest.json", "experiment")):
        path = directory / file
        if path.is_file():
            options: dict[str, Any] = json.loads(path.read_text("utf-8")).get(key) or {}
            if "latent.kind" in options and "seed" in options:
                return options
            raise UsageError(f"{path}: names no objective (latent.kind); a checkpoint of recipes/mmdit.py is required")
    raise UsageError(
        f"{directory}: neither experiment.json nor manifest.json, so the objective is not known; give a checkpoint, or "
        "export it again with `accel-train checkpoints export`"
    )


def _group(kind: type[G], options: dict[str, Any], prefix: str) -> G:
    found = {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
    return from_tree(kind, found, f"{prefix}*")
