"""Paths on the command line: a run, a directory of checkpoints, or a single checkpoint."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_train.config import UsageError, expand_path
from accel_train.store import commit, manifest, run_file
from accel_train.store.manifest import NAME, Checkpoint
from accel_train.store.strict_json import UnreadableError
from accel_train.wording import shortened

HUB = "hub:"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class Place:
    """Checkpoints at a path, with their run."""

    path: Path
    """Absolute form of the given path."""
    checkpoints: tuple[Path, ...]
    """Oldest first, by step, unverified."""
    run: Path | None
    """None for checkpoints outside a run."""
    single: bool = False
    """True if the path is a checkpoint, False for a directory of checkpoints."""


def find_place(text: str | os.PathLike[str]) -> Place:
    """Find the checkpoints at a path, or one of a run by ``RUN@STEP`` or ``RUN@best``.

    Raises ``UsageError`` for any other path, with a list of its contents.
    """
    path = expand_path(text)
    chosen = run_file.choice_of(path)
    if chosen is not None:
        place = find_place(chosen.run)
        checkpoint = run_file.find_chosen(chosen, place.run, place.checkpoints)
        return Place(path, (checkpoint,), place.run, single=True)
    # An unmounted disk is the likely cause of a dangling link, and a better message than "does not exist".
    links = commit.describe_broken_link(path) or commit.describe_broken_link(path / "checkpoints")
    if lost := links or commit.describe_lost(path / "checkpoints") or commit.describe_lost(path):
        raise UsageError(f"{lost}; mount it, or correct the link")
    if not path.is_dir():
        raise UsageError(f"{path}: {_describe_wrong_path(path)}; give the directory of a run or of a checkpoint")
    if commit.TEMPORARY.fullmatch(path.name):
        raise UsageError(f"{path}: an unfinished or half-deleted checkpoint; name a checkpoint_ directory next to it")
    # A checkpoint may have been renamed or copied, so its manifest counts as well as its name.
    if NAME.fullmatch(path.name) or (path / "manifest.json").is_file():
        run = path.parent.parent if path.parent.name == "checkpoints" else None
        return Place(path, (path,), run, single=True)
    if (path / "checkpoints").is_dir() or (path / "run.json").is_file():
        return Place(path, _committed(path / "checkpoints"), path)
    found = _committed(path)
    if path.name == "checkpoints":
        return Place(path, found, path.parent)
    if found:
        return Place(path, found, None)
    upload = ""
    # A file that only an export has.
    if (path / "experiment.json").is_file():
        upload = f"; it is an export, which goes to the Hub with: hf upload OWNER/NAME {shlex.quote(str(path))}"
    raise UsageError(
        f"{path}: neither a run (checkpoints/, run.json) nor a checkpoint (manifest.json); it contains "
        f"{contents(path)}; give one of these{upload}"
    )


def _committed(directory: Path) -> tuple[Path, ...]:
    try:
        return tuple(path for _, path in manifest.committed(directory))
    except UnreadableError as error:
        raise UsageError(f"{error}; mount its disk, or correct its permissions") from None


def find_run(text: str | os.PathLike[str]) -> tuple[Place, Path]:
    """Find a run by its own directory or its checkpoints/. Raises ``UsageError`` for anything else."""
    place = find_place(text)
    if place.single or place.run is None:
        raise UsageError(f"{place.path}: a run is required, the directory with checkpoints/ in it; give that")
    return place, place.run


def newest_at(text: str | os.PathLike[str]) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint at a path, or the newest verified one of a run, and the reasons for skipping newer ones.

    Downloads one that was pushed to the Hub, ``hub:org/name``, ``hub:org/name@1200`` or ``hub:org/name@REVISION``.
    Hashes every file it considers. Raises ``UsageError`` if nothing verifies, and ``HubError`` if the Hub cannot be
    reached.
    """
    if isinstance(text, str) and text.startswith(HUB):
        # Here, because only this place needs it.
        from accel_train.hub.download import download_once

        downloaded = download_once(text.removeprefix(HUB))
        return commit.open_verified(downloaded), []
    try:
        place = find_place(text)
    except UsageError as error:
        if not REPOSITORY.fullmatch(str(text)) or expand_path(text).exists():
            raise
        raise UsageError(f"{error}; for the Hub: {HUB}{text}") from None
    # A damaged checkpoint does not stop the search: the run itself would resume from the one before it.
    reasons: list[str] = []
    for path in reversed(place.checkpoints):
        try:
            return commit.verify(path), reasons
        except ValueError as error:
            reasons.append(str(error))
    if not reasons:
        raise UsageError(f"{place.path}: contains no checkpoint yet; train first, or name another run")
    listed = "\n  ".join(reasons)
    raise UsageError(f"{place.path}: no checkpoint verifies; restore one from a copy, or name another:\n  {listed}")


def contents(directory: Path) -> str:
    """List the first names in a directory, for a message."""
    return shortened(sorted(path.name for path in directory.iterdir()), 6)


def _describe_wrong_path(path: Path) -> str:
    if path.exists():
        return "is a file"
    parent = next(p for p in path.parents if p.is_dir())
    return f"does not exist ({parent} contains {contents(parent)})"


def disk_bytes(path: Path) -> int:
    """Return the total size of all files below ``path``."""
    total = 0
    for file in path.rglob("*"):
        # Retention may delete it meanwhile.
        with suppress(FileNotFoundError):
            if file.is_file():
                total += file.stat().st_size
    return total


def is_gone(checkpoint: Path) -> bool:
    """Return True for a checkpoint that the retention of a run in training has deleted since it was found."""
    # Not `Path.exists`, which raises for a network disk that is unavailable.
    try:
        checkpoint.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
