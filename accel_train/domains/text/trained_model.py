"""Loading a trained text and latent model for sampling, from a checkpoint or an export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from accel_train import pipeline
from accel_train.config import UsageError
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, TextSamplingConfig
from accel_train.domains.models.mmdit import MultimodalMMDiT
from accel_train.domains.models.pretrained import load_directory
from accel_train.domains.text.both_ways import BothWays
from accel_train.domains.text.dataset import DataAssets, load_assets
from accel_train.domains.text.encoders import TransformerEncoder
from accel_train.domains.text.modes import ModeConfig
from accel_train.options.loading import from_tree
from accel_train.store.run_file import experiment_options
from accel_train.store.weights import has_ema

G = TypeVar("G")


def load_both_ways(directory: Path, device: str = "cpu") -> tuple[BothWays, DataAssets]:
    """Load the model with its objective and samplers, and the assets for its inputs.

    ``directory`` is a checkpoint or the output of ``accel-train export``. A checkpoint's EMA weights are used if it has
    them. Hashes are not verified here (see ``accel_train.load``). Raises ``UsageError`` if options or assets are
    missing or have another version.
    """
    diffusion, text, latent, seed = _settings(directory)
    model = MultimodalMMDiT.from_pretrained(directory)
    # from_pretrained has read the trained weights, over which these are laid.
    if has_ema(directory):
        load_directory(model, directory, "ema")
    assets = load_assets(directory / "assets", device)
    both = BothWays(model.to(device).eval(), assets.tokenizer.mask_id, seed, diffusion, text, latent)
    return both, assets


def refuse_moved(assets: DataAssets) -> None:
    """Raise ``UsageError`` if the folder of the text encoder is gone: its name would be taken for a Hub id."""
    encoder = assets.encoder
    if isinstance(encoder, TransformerEncoder) and Path(encoder.name).is_absolute() and not Path(encoder.name).is_dir():
        raise UsageError(
            f"encoder {encoder.name!r}: the folder with the text encoder of the training is not there; if it has "
            "moved, give its place with --encoder (in Python, pipeline.with_models(encoder=...))"
        )


def given_texts(texts: str | Sequence[str], assets: DataAssets) -> list[str]:
    """Return texts to sample from as a list. Raises ``UsageError`` for none, and for one without a token."""
    given = pipeline.listed(texts)
    if not given:
        raise UsageError("texts: none given; at least one is required")
    maskable = assets.tokenizer.maskable()
    for text in given:
        if not bool(maskable[assets.tokenizer.tokenise([text], assets.max_length).ids].any()):
            raise UsageError(f"text {text[:60]!r}: the tokenizer leaves no token of it; give a text with words")
    return given


Settings = tuple[LatentDiffusionConfig, TextSamplingConfig, LatentSamplingConfig, int]


def _settings(directory: Path) -> Settings:
    """Read the objective, the samplers and the seed of the evaluation."""
    path = directory / "config.json"
    described = pipeline.settings(json.loads(path.read_text("utf-8")), directory) if path.is_file() else None
    if described is None:
        return _settings_of_run(directory)
    try:
        sampler = described["sampler"]
        return (
            from_tree(LatentDiffusionConfig, described["objective"]["latent"], f"{path}: objective.latent"),
            from_tree(TextSamplingConfig, sampler["text"], f"{path}: sampler.text"),
            from_tree(LatentSamplingConfig, sampler["latent"], f"{path}: sampler.latent"),
            int(sampler["seed"]),
        )
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: lacks {error} of the objective or the sampler of recipes/mmdit.py; export the model again"
        ) from None


def learned_modes(directory: Path) -> ModeConfig | None:
    """Read the modes of the run. None if an older version wrote the directory."""
    path = directory / "config.json"
    described = pipeline.settings(json.loads(path.read_text("utf-8")), directory)
    if described is None or "modes" not in described["objective"]:
        return None
    return from_tree(ModeConfig, described["objective"]["modes"], f"{path}: objective.modes")


def _settings_of_run(directory: Path) -> Settings:
    """Read them as an older version wrote them: as options of the run."""
    options = _options(directory)
    return (
        _group(LatentDiffusionConfig, options, "latent."),
        _group(TextSamplingConfig, options, "evaluation.text."),
        _group(LatentSamplingConfig, options, "evaluation.latent."),
        int(options["seed"]),
    )


def _options(directory: Path) -> dict[str, Any]:
    options = experiment_options(directory)
    # A manifest of another recipe has options as well.
    if not {"latent.kind", "seed"} <= options.keys():
        raise UsageError(
            f"{options.file}: names no objective (latent.kind); give a checkpoint of recipes/mmdit.py, "
            "or export it again"
        )
    return options


def _group(kind: type[G], options: dict[str, Any], prefix: str) -> G:
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name.startswith(prefix):
            values[name.removeprefix(prefix)] = value
    return from_tree(kind, values, f"{prefix}*")
