"""Bring a checkpoint from elsewhere into a run's directory: from a path, or from the Hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.atomic_files import fsync_directory
from accel_train.config import UsageError, expand_path
from accel_train.store import commit
from accel_train.store import manifest as manifests
from accel_train.store.commit import Checkpoint

HUB = "hub:"


class CheckpointsUnusableError(RuntimeError):
    """Checkpoints exist and none verifies: the run stops, because starting again would hide the loss."""


def fetch(place: str, directory: Path) -> Checkpoint:
    """Copy the checkpoint that ``place`` names below ``directory`` and verify the copy; main process only.

    ``place`` is the path of a checkpoint or of a run (its newest one that can be resumed), or ``hub:org/name@step``.
    Raises ``UsageError`` naming what was found instead.
    """
    with _bringing(place):
        directory.mkdir(parents=True, exist_ok=True)
        if place.startswith(HUB):
            from accel_train.hub.download import download

            found = commit.open_verified(download(place.removeprefix(HUB), directory))  # it has verified it
        else:
            found = _copy(_find(place), directory)
    if not found.manifest.get("state", True):
        commit.remove(found.path)
        raise UsageError(
            f"resume: {place} holds weights without optimizer state, so a run cannot go on from it; --init_from starts "
            "a new run with these weights"
        )
    return found


def manifest_of(place: str) -> Mapping[str, Any]:
    """The manifest of the checkpoint that ``place`` names; copies nothing. One process; raises as ``fetch``."""
    with _bringing(place):
        if place.startswith(HUB):
            from accel_train.hub import download

            return download.download_manifest(place.removeprefix(HUB))
        path = expand_path(place)
        for directory in (*(path for _, path in reversed(commit.committed(path / "checkpoints"))), path):
            with suppress(ValueError):
                if (found := manifests.read(directory)).get("state", True):
                    return found
        return _find(place).manifest  # which says what is there instead


@contextmanager
def _bringing(place: str) -> Generator[None]:
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointsUnusableError(f"resume: {place} could not be brought here: {error}") from error


def find_weights(init_from: str | None) -> tuple[Path | None, list[str]]:
    """Where ``init_from`` has its weights, and what to say of it: a run's newest verified checkpoint, that of a
    directory which ``convert`` made, else itself.

    Said before a model is built, with what was found instead.
    """
    if init_from is None:
        return None, []
    source = expand_path(init_from)
    holds_checkpoints = source if commit.committed(source) else source / "checkpoints"
    newest, reasons = commit.newest_verified(holds_checkpoints)
    if newest is None and reasons:
        raise CheckpointsUnusableError(f"init_from: no checkpoint of {source} verifies:\n  " + "\n  ".join(reasons))
    source = newest.path if newest is not None else source
    if any((source / f"model.safetensors{ending}").is_file() for ending in ("", ".index.json")):
        return source, [f"weights of {source}", *(f"refused: {reason}" for reason in reasons)]
    found = f"holds {', '.join(sorted(p.name for p in source.iterdir())[:6]) or 'nothing'}" if source.is_dir() else ""
    found = found or ("is a file" if source.exists() else "does not exist")
    raise UsageError(
        f"init_from: {source} {found}; a directory with model.safetensors, or a run with a checkpoint, is required; "
        "correct --init_from or leave it out"
    )


def names(place: str, checkpoint: Path) -> bool:
    """Whether ``place`` is the path of this very checkpoint."""
    return not place.startswith(HUB) and expand_path(place).resolve() == checkpoint.resolve()


def _find(place: str) -> Checkpoint:
    path = expand_path(place)
    newest, reasons = commit.newest_verified(path / "checkpoints", with_state=True)
    if newest is not None:
        return newest
    if reasons:
        raise UsageError(f"resume: no checkpoint of {path} can be resumed:\n  " + "\n  ".join(reasons))
    if path.name.startswith(".tmp-"):
        raise UsageError(f"resume: {path} is a save that was never finished; name a checkpoint_ directory beside it")
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UsageError(
            f"resume: {place!r} is none of auto, must, never, and {path} {what}; give one of these, the directory of a "
            "checkpoint or run, or hub:org/name@step"
        )
    try:
        return commit.verify(path)
    except ValueError as error:
        held = ", ".join(sorted(p.name for p in path.iterdir())[:6]) or "nothing"
        raise UsageError(f"resume: {error} (it holds {held}); name a checkpoint_ directory or a run") from None


def _copy(source: Checkpoint, directory: Path) -> Checkpoint:
    temporary = directory / commit.temporary_name(source.step, commit.new_nonce())
    shutil.copytree(source.path, temporary)
    for path in temporary.rglob("*"):
        if path.is_file():
            commit.seal_file(path)
    commit.fsync_folders(temporary)
    final = directory / manifests.checkpoint_name(source.step)
    try:
        copied = commit.verify(temporary)  # under this name: a kill meanwhile leaves nothing that counts
    except ValueError:
        commit.remove(temporary)
        raise
    commit.clear_name(final)
    os.rename(temporary, final)
    fsync_directory(directory)
    return replace(copied, path=final)
