"""Paths on the command line: a run, a directory of checkpoints, or a single checkpoint."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path
from accel_train.options.strict_yaml import YamlError, read_yaml
from accel_train.store import commit, manifest
from accel_train.store.manifest import NAME, Checkpoint
from accel_train.store.strict_json import UnreadableError
from accel_train.wording import shortened

CHOICE = re.compile(r"(.+)@(best|\d+)")
"""End of a path that chooses a checkpoint of a run."""


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

    For any other path, raise ``UsageError`` with its contents.
    """
    path = expand_path(text)
    chosen = CHOICE.fullmatch(path.name)
    if chosen and not path.exists():
        return _chosen(find_place(path.with_name(chosen[1])), chosen[2])
    # An unmounted disk is the likely cause of a dangling link, and a better message than "does not exist".
    links = commit.describe_broken_link(path) or commit.describe_broken_link(path / "checkpoints")
    if lost := links or commit.describe_lost(path / "checkpoints") or commit.describe_lost(path):
        raise UsageError(f"{lost}; mount it, or correct the link")
    if not path.is_dir():
        raise UsageError(f"{path}: {_describe_wrong_path(path)}; give the directory of a run or of a checkpoint")
    if commit.TEMPORARY.fullmatch(path.name):
        raise UsageError(f"{path}: an unfinished or half-deleted checkpoint; name a checkpoint_ directory beside it")
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
    raise UsageError(
        f"{path}: neither a run (checkpoints/, run.json) nor a checkpoint (manifest.json); it holds {contents(path)}; "
        "give one of these"
    )


def _chosen(place: Place, choice: str) -> Place:
    """Return the checkpoint of a step, or the best one by ``checkpoints.best_metric`` of the run."""
    by_step = {facts.step: facts.path for facts in _facts(place)}
    steps = ", ".join(map(str, by_step)) or "none"
    if choice == "best":
        path = best_of(place)
        if path is None:
            remedy = "it has no checkpoint yet"
            if by_step:
                remedy = f"name a step, as in {place.path}@{max(by_step)}; there are {steps}"
            raise UsageError(
                f"{place.path}@best: a run with checkpoints.best_metric in its config.yaml, and a checkpoint with that "
                f"metric, is required; {remedy}"
            )
    else:
        if int(choice) not in by_step:
            raise UsageError(f"{place.path}@{choice}: there is no checkpoint of this step; there are {steps}")
        path = by_step[int(choice)]
    return Place(path, (path,), place.run, single=True)


def best_of(place: Place) -> Path | None:
    """Return the best checkpoint by ``checkpoints.best_metric`` of the run, None without the option or the metric."""
    metric, mode = best_metric(place.run)
    # The newest first, which counts among equal ones.
    best = manifest.ranked(_facts(place)[::-1], metric, mode)
    return best[0].path if best else None


def _facts(place: Place) -> list[manifest.CheckpointFacts]:
    """Return the facts of the readable checkpoints, oldest first."""
    found = ((path, manifest.read_if_valid(path)) for path in place.checkpoints)
    return [manifest.facts_from_manifest(path, facts) for path, facts in found if facts is not None]


def best_metric(run: Path | None) -> tuple[str | None, str]:
    """Return ``checkpoints.best_metric`` and ``best_mode`` of a run. None without, or beside an unreadable config."""
    options: dict[str, Any] = {}
    if run is not None:
        # Listing checkpoints also works beside a config.yaml that cannot be read.
        with suppress(UsageError):
            options = options_of(run, "checkpoints")
    return options.get("best_metric"), str(options.get("best_mode", "min"))


def options_of(run: Path, group: str) -> dict[str, Any]:
    """Return a group of options from the run's config.yaml, empty if there is none. Raises ``UsageError``."""
    path = run / "config.yaml"
    if not path.is_file():
        return {}
    try:
        options: Any = read_yaml(path).get(group)
    except YamlError as error:
        raise UsageError(str(error)) from None
    # Somebody may have edited it by hand.
    return options if isinstance(options, dict) else {}


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

    Hashes every file it considers. Raises ``UsageError`` if nothing verifies.
    """
    place = find_place(text)
    # A damaged checkpoint does not stop the search: the run itself would resume from the one before it.
    reasons: list[str] = []
    for path in reversed(place.checkpoints):
        try:
            return commit.verify(path), reasons
        except ValueError as error:
            reasons.append(str(error))
    if not reasons:
        raise UsageError(f"{place.path}: holds no checkpoint yet; train first, or name another run")
    listed = "\n  ".join(reasons)
    raise UsageError(f"{place.path}: no checkpoint verifies; restore one from a copy, or name another:\n  {listed}")


def contents(directory: Path) -> str:
    """List the first names in a directory, for a message."""
    return shortened(sorted(path.name for path in directory.iterdir()), 6)


def _describe_wrong_path(path: Path) -> str:
    if path.exists():
        return "is a file"
    parent = next(p for p in path.parents if p.is_dir())
    return f"does not exist ({parent} holds {contents(parent)})"


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
    # Not `Path.exists`, which raises for a network disk that is away.
    try:
        checkpoint.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
