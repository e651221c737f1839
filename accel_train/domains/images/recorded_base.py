"""The base of adapters: its commit on the Hub, and what their files record of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path
from accel_train.data.artifacts import cache_if_usable
from accel_train.domains.images.pipelines.components import not_loaded
from accel_train.domains.images.pipelines.family import INDEX
from accel_train.domains.images.pipelines.loading import Base, BaseConfig, DiffusersBase
from accel_train.pipeline import settings
from accel_train.store import manifest, strict_json
from accel_train.store.pretrained_base import (
    COMMIT,
    at_recorded_revision,
    refuse_missing_folder,
    refuse_other_base,
)


def at_commit(config: BaseConfig) -> BaseConfig:
    """Return the options with a branch or tag on the Hub replaced by its commit. One process calls it, for all.

    Without a network, the commit is the one in the cache. Raises ``UsageError`` for a source that cannot be read.
    """
    # Imported late, because reading a checkpoint does not need it.
    from accel_train.domains.images.trained_mmdit import finding

    source = config.source
    if source is not None and source.startswith(finding.HUB):
        from accel_train.hub import download

        pinned = download.at_commit(source.removeprefix(finding.HUB))
        return replace(config, source=finding.HUB + pinned)
    if source is None or finding.is_meant(source) or expand_path(source).is_dir():
        return config
    refuse_missing_folder("--base.source", source)
    if COMMIT.fullmatch(config.revision or ""):
        return config
    from huggingface_hub import hf_hub_download

    try:
        index = hf_hub_download(source, INDEX, revision=config.revision)
    except Exception as error:  # failures of hub, network and format have no common type
        raise UsageError(not_loaded(source, error)) from None
    # The folder of a snapshot has the name of its commit.
    return replace(config, revision=Path(index).parent.name)


def is_pipeline_folder(directory: Path) -> bool:
    """Return True for a folder of diffusers, rather than a checkpoint or an export."""
    return (directory / INDEX).is_file() and not (directory / "config.json").is_file()


def read_described(directory: Path) -> Mapping[str, Any]:
    """Read config.json of a checkpoint or an export. Raises ``UsageError`` for a damaged one or a newer version."""
    described = settings(read_description(directory), directory) or {}
    lacking = [name for name in ("base", "sampler") if not isinstance(described.get(name), Mapping)]
    if lacking:
        raise UsageError(f"{directory / 'config.json'}: has no {' and no '.join(lacking)}; restore it from a copy")
    return described


def read_description(directory: Path) -> Mapping[str, Any]:
    """Read config.json; empty for a folder written by peft alone. Raises ``UsageError`` for a damaged one."""
    path = directory / "config.json"
    try:
        return strict_json.read_object(path) if path.is_file() else {}
    except ValueError as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy") from None


def base_config(described: Mapping[str, Any], directory: Path) -> BaseConfig:
    """Return the options of an adapter's base, at the commit that its run began with.

    Raises ``UsageError`` for one in a folder that is not on this machine.
    """
    config = at_recorded_revision(BaseConfig(**described["base"]), base_files(described, directory))
    _refuse_moved(config, directory)
    return config


def base_files(described: Mapping[str, Any], directory: Path) -> Mapping[str, Any] | None:
    """Return the files of an adapter's base, with their sha256. None if they are not recorded."""
    recorded = None
    if (directory / manifest.MANIFEST).is_file():
        # Those that the run began with. The description has those of the save.
        recorded = manifest.read(directory).get("base")
    return recorded or described.get("base_files")


def with_trained_text(base: Base, described: Mapping[str, Any]) -> Base:
    """Return the base with the text encoders that were trained with its denoiser."""
    if isinstance(base, DiffusersBase):
        return replace(base, trained_text=tuple(described.get("text_encoders", ())))
    return base


def _refuse_moved(config: BaseConfig, directory: Path) -> None:
    source = str(config.source)
    # A folder is recorded with its absolute path. Other sources are no absolute paths.
    if config.revision is not None or not Path(source).is_absolute() or Path(source).is_dir():
        return
    raise UsageError(
        f"{directory}: its base, {source}, is not on this machine; put it there. If it is a diffusers pipeline, "
        "another path to the same files also works: load(BASE, adapters={'mine': PATH}), or accel-train sample BASE "
        "--adapters mine=PATH"
    )


def refuse_other_files(base: Base, described: Mapping[str, Any], directory: Path) -> None:
    """Raise ``UsageError`` unless the base has the files recorded with the adapter, by their sha256."""
    recorded = base_files(described, directory)
    if recorded is not None:
        refuse_other_base(recorded, base.files().reference(cache_if_usable()), directory)
