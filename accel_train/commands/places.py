"""What a path on the command line means: a run, a directory of checkpoints, one checkpoint, or none of these."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from accel_train.config import UsageError, expand_path
from accel_train.store import commit
from accel_train.store.commit import Checkpoint


@dataclass(frozen=True)
class Place:
    """Checkpoints at one place, and the run that they belong to."""

    path: Path
    """What was given, made absolute."""
    checkpoints: tuple[Path, ...]
    """Oldest first, by step; not verified."""
    run: Path | None
    """None for checkpoints that lie outside a run."""
    single: bool = False
    """One checkpoint was named, not a directory of them."""


def find_place(text: str | os.PathLike[str]) -> Place:
    """Raises ``UsageError`` with what was found for a path that is none of the three."""
    path = expand_path(text)
    if lost := commit.lost_link(path) or commit.lost_link(path / "checkpoints"):
        raise UsageError(f"{lost}; mount it, or correct the link")
    if not path.is_dir():
        raise UsageError(f"{path}: {_what_is_there(path)}; give the directory of a run or of a checkpoint")
    if commit.TEMPORARY.fullmatch(path.name):
        raise UsageError(f"{path}: never finished, or on its way to deletion; name a checkpoint_ directory beside it")
    if commit.NAME.fullmatch(path.name) or (path / "manifest.json").is_file():
        run = path.parent.parent if path.parent.name == "checkpoints" else None
        return Place(path, (path,), run, single=True)
    if (path / "checkpoints").is_dir() or (path / "run.json").is_file():
        return Place(path, tuple(p for _, p in commit.committed(path / "checkpoints")), path)
    found = tuple(p for _, p in commit.committed(path))
    if found or path.name == "checkpoints":
        return Place(path, found, path.parent if path.name == "checkpoints" else None)
    raise UsageError(
        f"{path}: neither a run (checkpoints/, run.json) nor a checkpoint (manifest.json); it holds {contents(path)}; "
        "give one of these"
    )


def find_run(text: str | os.PathLike[str]) -> tuple[Place, Path]:
    """A run, named by its own directory or by the checkpoints in it; else ``UsageError``."""
    place = find_place(text)
    if place.single or place.run is None:
        raise UsageError(f"{place.path}: a run is required, which is the directory that holds checkpoints/; give that")
    return place, place.run


def newest_at(text: str | os.PathLike[str]) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that a path names, or the newest of a run that verifies, with why newer ones were passed over.

    Hashes what it reads. Raises ``UsageError`` where nothing verifies.
    """
    place = find_place(text)
    reasons: list[str] = []
    for path in reversed(place.checkpoints):
        try:
            return commit.verify(path), reasons
        except ValueError as error:
            reasons.append(str(error))
    if not reasons:
        raise UsageError(f"{place.path}: holds no checkpoint yet; train first, or name another run")
    listed = "\n  ".join(reasons)
    raise UsageError(
        f"{place.path}: no checkpoint that verifies; restore one from a copy, or name another:\n  {listed}"
    )


def contents(directory: Path, limit: int = 6) -> str:
    """The first names in a directory, for a message."""
    names = sorted(path.name for path in directory.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more


def _what_is_there(path: Path) -> str:
    if path.exists():
        return "is a file"
    parent = next(p for p in path.parents if p.is_dir())
    return f"does not exist ({parent} holds {contents(parent)})"


def readable_size(size_bytes: float) -> str:
    """Bytes with three digits and a unit of 1000: ``402 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.0f} {unit}" if size_bytes >= 99.95 or unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def disk_bytes(path: Path) -> int:
    """Bytes of all files below ``path`` that are still there."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
