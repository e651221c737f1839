"""Refused starts: a missing base, and the cleanup of files created by the start, never of older ones."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from accel_train.checkpoints.policy import RunOptions
from accel_train.config import expand_path
from accel_train.runtime.exiting import SECONDS_TO_BE_HEARD
from accel_train.store import commit, manifest
from accel_train.store import lock as locks
from accel_train.store.names import OF_A_START
from accel_train.store.pretrained_base import refuse_missing_folder
from accel_train.store.run_file import has_trained, recall


def present(directory: Path) -> frozenset[Path]:
    """Return the existing files of a run directory and its parents. Call it before a start creates any of them."""
    places = (directory, *directory.parents, *directory.glob("*"), *directory.glob("logs/*"))
    # `lexists`, because a broken link is somebody's too.
    return frozenset(place for place in places if os.path.lexists(place))


def remove_new(directory: Path, before: frozenset[Path], rank: int) -> None:
    """Remove the files created by this start in a directory without a run.

    Every process calls it, after closing its log and lock. Only files of a start and the checkpoint it copied are
    removed, if absent from ``before`` and if no other process holds the lock. Empty folders go too. Never raises:
    anything undeletable stays.
    """
    with suppress(OSError, locks.LockedError):
        if rank == 0:
            _remove_all_files(directory, before)
        else:
            _wait_for_main(directory, before)
            _unlink(directory / "logs" / f"rank_{rank}.log", before)
    for folder in (directory / "logs", directory, *directory.parents):
        _rmdir(folder, before)


def _wait_for_main(directory: Path, before: frozenset[Path]) -> None:
    """Wait some seconds for the main process, because torchrun ends all processes once the first exits."""
    deadline = time.monotonic() + SECONDS_TO_BE_HEARD
    while _of_main(directory, before) and not has_trained(directory) and time.monotonic() < deadline:
        time.sleep(0.05)


def _remove_all_files(directory: Path, before: frozenset[Path]) -> None:
    with closing(locks.acquire(directory)):
        # Asked under the lock: another start may have begun to train here meanwhile.
        if _holds_run(directory, before):
            return
        for checkpoint in directory.glob("checkpoints/*"):
            # If it stayed, the next start would find a used directory and resume from it.
            commit.remove(checkpoint)
        _rmdir(directory / "checkpoints", before)
        for file in (*directory.glob("logs/rank_*.log"), *_of_main(directory, before)):
            _unlink(file, before)


def _holds_run(directory: Path, before: frozenset[Path]) -> bool:
    """Return True for more than an untrained start with the checkpoint it copied."""
    if has_trained(directory):
        return True
    checkpoints = directory / "checkpoints"
    held = {path.name for path in checkpoints.glob("*")}
    if not held:
        return False
    return checkpoints in before or held != {_copied(directory)}


def _copied(directory: Path) -> str | None:
    """Return the name of the checkpoint copied by a start with ``--resume PATH``, or None."""
    saved, _ = recall(directory)
    parent = None if saved is None else saved.get("parent")
    return None if parent is None else parent["checkpoint"]


def _of_main(directory: Path, before: frozenset[Path]) -> list[Path]:
    """List the files created by the main process since ``before``. The lock, held here, comes last."""
    files = (directory / name for name in ("logs/rank_0.log", *OF_A_START))
    return [file for file in files if file not in before and os.path.lexists(file)]


def _unlink(file: Path, before: frozenset[Path]) -> None:
    if file not in before:
        with suppress(OSError):
            file.unlink()


def _rmdir(folder: Path, before: frozenset[Path]) -> None:
    if folder not in before:
        # It may not be empty, or another process was faster.
        with suppress(OSError):
            folder.rmdir()


def refuse_missing_base(option: str | None, source: str | None, options: RunOptions) -> None:
    """Raise ``UsageError`` if ``source``, the value of ``option``, is a missing base folder.

    The message includes the record of it in the checkpoint to resume from.
    """
    if option is None or source is None:
        return
    checkpoint = _resumed_checkpoint(options)
    recorded: Mapping[str, Any] | None = None
    if checkpoint is not None:
        # A damaged manifest is reported by the resume.
        with suppress(OSError, ValueError):
            recorded = manifest.read(checkpoint).get("base")
    refuse_missing_folder(f"--{option}", source, recorded, checkpoint)


def _resumed_checkpoint(options: RunOptions) -> Path | None:
    """Return the local checkpoint to resume from, None for a fresh start."""
    if options.overwrite:
        return None
    found = manifest.committed(expand_path(options.output_dir) / "checkpoints")
    if found:
        _, newest = found[-1]
        return newest
    # A policy such as auto, or hub:owner/name@step, is no such folder.
    named = expand_path(options.resume)
    return named if (named / manifest.MANIFEST).is_file() else None
