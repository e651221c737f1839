"""Loading a trained text and latent model for sampling, from a checkpoint or an export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accel_train import pipeline
from accel_train.config import UsageError
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, TextSamplingConfig
from accel_train.domains.models.mmdit import MultimodalMMDiT
from accel_train.domains.models.pretrained import load_directory, read_config
from accel_train.domains.text.both_ways import BothWays
from accel_train.domains.text.dataset import DataAssets, load_assets
from accel_train.domains.text.encoders import TransformerEncoder
from accel_train.domains.text.modes import ModeConfig
from accel_train.options.loading import from_tree
from accel_train.store.weights import has_ema


def load_both_ways(directory: Path, device: str = "cpu") -> tuple[BothWays, DataAssets]:
    """Load the model with its samplers, and the assets for its inputs.

    ``directory`` is a checkpoint or the output of ``accel-train export``. A checkpoint's EMA weights are used if it has
    them. Hashes are not verified here (see ``accel_train.load``). Raises ``UsageError`` if options or assets are
    missing or have another version.
    """
    settings = read_settings(directory)
    model = MultimodalMMDiT.from_pretrained(directory)
    # from_pretrained has loaded the raw weights, which the EMA weights replace.
    if has_ema(directory):
        load_directory(model, directory, "ema")
    assets = load_assets(directory / "assets", device)
    model = model.to(device).eval()
    both = BothWays(model, assets.tokenizer.mask_id, settings.seed, settings.diffusion, settings.text, settings.latent)
    return both, assets


def refuse_moved(assets: DataAssets) -> None:
    """Raise ``UsageError`` if the text encoder's folder is missing. Its path would otherwise be taken for a Hub id."""
    encoder = assets.encoder
    if isinstance(encoder, TransformerEncoder) and Path(encoder.name).is_absolute() and not Path(encoder.name).is_dir():
        raise UsageError(
            f"encoder {encoder.name!r}: the folder with the text encoder used in training does not exist; if it has "
            "moved, give its new location with --encoder (in Python, pipeline.with_models(encoder=...))"
        )


def given_texts(texts: str | Sequence[str], assets: DataAssets) -> list[str]:
    """Return the texts to sample from as a list. Raises ``UsageError`` if there are none, or one has no token."""
    given = pipeline.listed(texts)
    if not given:
        raise UsageError("texts: none given; at least one is required")
    maskable = assets.tokenizer.maskable()
    for text in given:
        if not bool(maskable[assets.tokenizer.tokenise([text], assets.max_length).ids].any()):
            raise UsageError(f"text {text[:60]!r}: the tokenizer finds no token in it; give a text with words")
    return given


class Settings(NamedTuple):
    """Objective and sampler settings of a trained model."""

    diffusion: LatentDiffusionConfig
    text: TextSamplingConfig
    latent: LatentSamplingConfig
    seed: int
    """Seed of the evaluation."""
    modes: ModeConfig
    """Modes that the model was trained in."""


def read_settings(directory: Path) -> Settings:
    """Read the objective and the samplers from config.json. Raises ``UsageError`` if it lacks them."""
    path = directory / "config.json"
    described = pipeline.settings(read_config(directory), directory) or {}
    try:
        objective, sampler = described["objective"], described["sampler"]
        return Settings(
            from_tree(LatentDiffusionConfig, objective["latent"], f"{path}: objective.latent"),
            from_tree(TextSamplingConfig, sampler["text"], f"{path}: sampler.text"),
            from_tree(LatentSamplingConfig, sampler["latent"], f"{path}: sampler.latent"),
            int(sampler["seed"]),
            from_tree(ModeConfig, objective["modes"], f"{path}: objective.modes"),
        )
    except KeyError as error:
        raise UsageError(
            f"{path}: lacks {error} of the objective or the sampler of recipes/mmdit.py; export the model again"
        ) from None
    # Of a value that `from_tree` refuses, by name.
    except UsageError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: objective and sampler are required as recipes/mmdit.py writes them ({error}); export the model "
            "again"
        ) from None
