"""``accel_train.load``: a trained model from a run, a checkpoint, an export or the Hub, ready to be called."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, TypeVar, cast, overload

from accel_train.commands import places
from accel_train.config import UsageError, expand_path
from accel_train.pipeline import ADAPTER_DESCRIPTION, Pipeline, TrainedModel
from accel_train.store import manifest, names, strict_json
from accel_train.store.exports import peft_layout
from accel_train.store.exports.verification import EXPORTED_OPTIONS, MAX_DESCRIPTION_BYTES, verify_export

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=TrainedModel)

DOMAINS = "accel_train.domains"
ALLOWED = re.compile(r"accel_train\.domains\.([a-z_]+)\.pipeline:([A-Z][A-Za-z]*)")
"""Names allowed in a config.json. A folder is data and must never decide about the code to import: only the pipelines
inside this package can be named."""
DESCRIPTIONS = ("config.json", ADAPTER_DESCRIPTION, "adapter_config.json", "model_index.json")
"""Files that describe weights: the first one present counts. adapter_config.json alone means peft, and
model_index.json means diffusers."""
PROOFS = ("example.json", ADAPTER_DESCRIPTION)
"""Files of an export that hold the sha256 of all others: its example, or the description of adapters."""


OWN_RECIPE = (
    "A recipe of your own needs a pipeline class: give load(place, pipeline=MyPipeline), or the recipe that declares "
    'it, as in `accel-train sample --recipe FILE {}`: docs/use.md, "A pipeline for a recipe of your own"'
)


class Adaptable(Protocol):
    """A pipeline that takes further adapters."""

    def attach(self, adapters: Mapping[str, Path]) -> None: ...


Place = str | PathLike[str]


@overload
def load(place: Place, *, device: str = "cpu", adapters: Mapping[str, Place] | None = None) -> Any: ...
@overload
def load(place: Place, *, pipeline: type[P], device: str = "cpu", adapters: Mapping[str, Place] | None = None) -> P: ...
def load(
    place: Place,
    *,
    pipeline: type[P] | None = None,
    device: str = "cpu",
    adapters: Mapping[str, Place] | None = None,
) -> Any:
    """Load a trained model with all that is needed to use it, and return its recipe's pipeline.

    ``place`` is a run (its newest checkpoint that verifies), a checkpoint, the directory of an export, or
    ``hub:org/name``, ``hub:org/name@1200`` or ``hub:org/name@REVISION``. EMA weights are used where a checkpoint has
    them. Files are compared with the sha256 of the manifest, or of the export's example, before any is read.

    If ``place`` holds adapters, they are loaded onto their base, whose files must match the sha256 in the checkpoint.
    ``adapters`` maps names to further places with adapters for the same base, or for the model at ``place``. A call of
    the pipeline selects one by name.

    The folder is data: its config.json can name a pipeline of this package and nothing else. For a recipe of your own
    pass its class as ``pipeline``. Raises ``UsageError`` for a place without a model, a damaged file, an unknown
    pipeline, a missing or changed base, an absent device, and ``HubError`` if the Hub cannot be reached.
    """
    refuse_absent(device)
    directory = find(place)
    loaded = (pipeline or pipeline_of(directory)).from_directory(directory, device)
    attach(loaded, adapters or {})
    return loaded


def refuse_absent(device: str) -> None:
    """Raise ``UsageError`` if torch cannot use ``device`` on this machine. The message lists the devices present."""
    import torch

    try:
        # A tensor on it, because torch accepts the names of many devices that it cannot use.
        is_usable = torch.empty(1, device=device).device.type != "meta"
    except (RuntimeError, AssertionError):
        is_usable = False
    if is_usable:
        return
    present = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        present += [f"{kind}:{number}" for number in range(torch.accelerator.device_count())]
    raise UsageError(f"--device {device}: torch has no such device on this machine; give {' or '.join(present)}")


def attach(pipeline: Any, adapters: Mapping[str, Place]) -> None:
    """Put adapters on the model of a pipeline. Raises ``UsageError`` for a pipeline that takes none."""
    if not adapters:
        return
    if not hasattr(pipeline, "attach"):
        raise UsageError(
            f"adapters {', '.join(adapters)}: {type(pipeline).__name__} takes no adapters; language models do, and "
            "runs of adapters on pictures"
        )
    adaptable: Adaptable = pipeline
    adaptable.attach({name: _find_adapter(name, place) for name, place in adapters.items()})


def _find_adapter(name: str, place: Place) -> Path:
    try:
        return find(place)
    except UsageError as error:
        hint = peft_layout.conversion_hint(expand_path(place))
        if not hint:
            raise
        raise UsageError(
            f"adapters {name}={place}: {error}, or an export of adapters or a folder of peft{hint}"
        ) from None


def find(place: Place) -> Path:
    """Return the directory with the model at ``place``, its files verified. Downloads one from the Hub."""
    if isinstance(place, str) and place.startswith(places.HUB):
        from accel_train.hub.download import download_once

        return download_once(place.removeprefix(places.HUB))
    path = expand_path(place)
    if path.name.startswith(names.UNFINISHED):
        raise UsageError(
            f"{path}: is unfinished or half-deleted, so its files cannot be trusted; give another checkpoint or "
            "export, or the run"
        )
    is_export = any((path / file).is_file() for file in (*DESCRIPTIONS, EXPORTED_OPTIONS))
    # A checkpoint has config.json too, and is told from an export by its name or its manifest.
    if is_export and not manifest.NAME.fullmatch(path.name) and not (path / manifest.MANIFEST).is_file():
        verify_export(path, PROOFS)
        return path
    checkpoint, skipped = places.newest_at(place)
    # A warning, because without the damaged checkpoint the model is that of an earlier step.
    for reason in skipped:
        logger.warning("skipped: %s", reason)
    return checkpoint.path


def is_allowed(named: object) -> bool:
    """Return True for the name of a pipeline inside this package."""
    return isinstance(named, str) and ALLOWED.fullmatch(named) is not None


def pipeline_of(directory: Path) -> type[Pipeline]:
    """Return the class of the pipeline for the model in ``directory``. Raises ``UsageError`` if there is none."""
    description = read_description(directory)
    named = description.get("pipeline")
    if named is None:
        return _recognised(description, directory)
    match = ALLOWED.fullmatch(named) if isinstance(named, str) else None
    if match is None:
        raise UsageError(
            f"{_description_file(directory)}: names the pipeline {str(named)[:100]!r}, which is not part of this "
            "package, and a folder is not allowed to have other code imported. If the model is of your own recipe, "
            "pass the class, as in load(place, pipeline=MyPipeline), or give `accel-train sample` the file, with "
            "--recipe"
        )
    module, _, name = named.partition(":")
    pipeline: Any = None
    # The package first: `find_spec` raises for a module of a missing one.
    if find_spec(f"{DOMAINS}.{match[1]}") is not None and find_spec(module) is not None:
        # Only now is code imported, and only of this package.
        pipeline = getattr(import_module(module), name, None)
    # A class that the module has merely imported is not a pipeline of it.
    if not isinstance(pipeline, type) or pipeline.__module__ != module:
        raise UsageError(
            f"{_description_file(directory)}: names the pipeline {named}, which this version of accel_train lacks; "
            "install the version that wrote it, or a newer one"
        )
    return cast("type[Pipeline]", pipeline)


def _recognised(description: Mapping[str, Any], directory: Path) -> type[Pipeline]:
    """Find the pipeline for a description without its name, as other libraries write it."""
    for domain in iter_modules(import_module(DOMAINS).__path__, f"{DOMAINS}."):
        # Some domains only serve others.
        if find_spec(f"{domain.name}.pipeline") is None:
            continue
        for value in vars(import_module(f"{domain.name}.pipeline")).values():
            if getattr(value, "__module__", None) == f"{domain.name}.pipeline" and hasattr(value, "recognises"):
                candidate: Any = value
                if candidate.recognises(description):
                    return candidate
    raise UsageError(
        f"{_description_file(directory)}: does not name the pipeline of its recipe, and no recipe of this package "
        f"wrote it. {OWN_RECIPE.format(directory)}"
    )


def read_description(directory: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint or an export, or its counterpart for adapters. Raises ``UsageError``."""
    path = _description_file(directory)
    try:
        return strict_json.read_object(path, MAX_DESCRIPTION_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"{directory}: has no config.json, so the model of its weights is unknown. {OWN_RECIPE.format(directory)}"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy") from None


def _description_file(directory: Path) -> Path:
    present = [name for name in DESCRIPTIONS if (directory / name).is_file()]
    return directory / (present or DESCRIPTIONS)[0]
