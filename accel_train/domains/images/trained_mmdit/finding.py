"""Finding a trained MMDiT to use as a base: a run of recipes/mmdit.py on pictures, a checkpoint of it, or an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path, refuse_without_effect
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.sampling import LatentSamplingConfig
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.pipelines import components
from accel_train.domains.images.pipelines.loading import BaseConfig
from accel_train.domains.images.trained_mmdit.run_base import ASSETS, HUB, MMDiTBase
from accel_train.domains.models.mmdit import MultimodalMMDiTConfig
from accel_train.options.loading import from_tree
from accel_train.store import commit, manifest, strict_json
from accel_train.store.run_file import experiment_options

DEMO = "runs/image-demo"
"""Location of the base of the preset lora_demo."""
MAKE_DEMO = "accelerate launch recipes/mmdit.py image_demo"
MARKS = (manifest.MANIFEST, "run.json", "checkpoints", f"{ASSETS}/assets.json")
"""Any of these marks a directory as a checkpoint, a run or an export."""


def is_meant(source: str) -> bool:
    """Return True for a source from recipes/mmdit.py, rather than a diffusers pipeline."""
    path = expand_path(source)
    if source.startswith(HUB) or source == DEMO:
        return True
    return any((path / name).exists() for name in MARKS)


def find(config: BaseConfig) -> MMDiTBase:
    """Find and verify the base. Raises ``UsageError`` for a run without a checkpoint, and a model of other latents."""
    source = str(config.source)
    _refuse_options(config)
    directory = _directory(source)
    components.refuse_adapters(directory, source)
    try:
        described = strict_json.read_object(directory / "config.json")
    except (OSError, ValueError) as error:
        raise UsageError(f"base.source {source!r}: {directory} has no config.json to read ({error})") from None
    grid = described.get("latent_grid")
    if described.get("recipe") != "mmdit" or grid is None or "latent" not in described.get("sampler", {}):
        raise UsageError(
            f"base.source {source!r}: {directory} is not a picture model of recipes/mmdit.py; give a run such as "
            f"{DEMO}, made by: {MAKE_DEMO}"
        )
    path = f"{directory / 'config.json'}"
    sampler = from_tree(LatentSamplingConfig, described["sampler"]["latent"], f"{path}: sampler.latent")
    names = MultimodalMMDiTConfig.__dataclass_fields__
    return MMDiTBase(
        config,
        directory,
        MultimodalMMDiTConfig(**{name: described[name] for name in names}),
        from_tree(LatentDiffusionConfig, described["objective"]["latent"], f"{path}: objective.latent"),
        sampler,
        _times(directory, described["objective"]),
    )


def _refuse_options(config: BaseConfig) -> None:
    names = ("revision", "variant", "encoder_precision", "offload_encoders", "prompt_tokens", "guidance")
    because = f"with base.source: {config.source}, a model of recipes/mmdit.py"
    refuse_without_effect(config, "base", names, because)


def _directory(source: str) -> Path:
    """Return the directory of a checkpoint (of a run, the newest that verifies), an export, or a download."""
    if source.startswith(HUB):
        from accel_train.hub.download import download_once

        return download_once(source.removeprefix(HUB))
    path = expand_path(source)
    make = f"make it with: {MAKE_DEMO}" if source == DEMO else "give the directory of a run, or of a checkpoint"
    if not path.is_dir():
        raise UsageError(f"base.source {source!r}: {path} does not exist; {make}")
    if (path / manifest.MANIFEST).is_file():
        try:
            return commit.verify(path).path
        except ValueError as error:
            raise UsageError(f"base.source {source!r}: fails verification ({error}); give another checkpoint") from None
    if (path / ASSETS / "assets.json").is_file():
        return path
    found, reasons = commit.newest_verified(path / "checkpoints")
    if found is None:
        why = "; ".join(reasons) or "it has none yet"
        raise UsageError(f"base.source {source!r}: no checkpoint in {path} can be used ({why}); {make}")
    return found.path


def _times(directory: Path, objective: Mapping[str, Any]) -> TimeConfig:
    """Return the times of the base's training, from a merged export or from the options of the run."""
    if "times" in objective:
        return from_tree(TimeConfig, objective["times"], f"{directory / 'config.json'}: objective.times")
    options = experiment_options(directory)
    tree = {name.removeprefix("times."): value for name, value in options.items() if name.startswith("times.")}
    if not tree:
        raise UsageError(f"base.source: {options.file} has no times.* of the run; give a run, or export it again")
    return from_tree(TimeConfig, tree, f"{options.file}: times.*")
