"""What a refused start leaves behind: nothing that it made itself, and everything that was there before it."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from pathlib import Path

from accel_train.runtime.exiting import SECONDS_TO_BE_HEARD
from accel_train.store import lock as locks
from accel_train.store.names import RUN_FILE
from accel_train.store.run_file import has_trained

FILES = ("metrics.jsonl", "config.yaml", RUN_FILE, ".lock")
"""What the main process writes before the first step, beside its log. The lock last: it is held here."""


def present(directory: Path) -> frozenset[Path]:
    """What is there of a run directory, its logs and its parents: to be asked before a start makes any of it."""
    places = (directory, *directory.parents, *directory.glob("*"), *directory.glob("logs/*"))
    return frozenset(place for place in places if os.path.lexists(place))


def remove_new(directory: Path, before: frozenset[Path], rank: int) -> None:
    """Remove what this start made of a directory that holds no run. Every process, once its log and lock are closed.

    Only files that a start writes and that were not there ``before``, and not while another process has the directory;
    folders only where nothing is left in them. Of several processes the main one is waited for, some seconds, because
    torchrun ends all when the first leaves. Never raises: what cannot be removed stays.
    """
    with suppress(OSError, locks.LockedError):
        if rank:
            deadline = time.monotonic() + SECONDS_TO_BE_HEARD
            while _of_main(directory, before) and not _holds_run(directory) and time.monotonic() < deadline:
                time.sleep(0.05)
            _unlink(directory / "logs" / f"rank_{rank}.log", before)
        else:
            _remove_all_files(directory, before)
    for folder in (directory / "logs", directory, *directory.parents):
        _rmdir(folder, before)


def _remove_all_files(directory: Path, before: frozenset[Path]) -> None:
    with closing(locks.acquire(directory)):
        if not _holds_run(directory):
            _rmdir(directory / "checkpoints", before)
            for file in (*directory.glob("logs/rank_*.log"), *_of_main(directory, before)):
                _unlink(file, before)


def _holds_run(directory: Path) -> bool:
    return has_trained(directory) or any(directory.glob("checkpoints/*"))


def _of_main(directory: Path, before: frozenset[Path]) -> list[Path]:
    files = (directory / name for name in ("logs/rank_0.log", *FILES))
    return [file for file in files if file not in before and os.path.lexists(file)]


def _unlink(file: Path, before: frozenset[Path]) -> None:
    if file not in before:
        with suppress(OSError):
            file.unlink()


def _rmdir(folder: Path, before: frozenset[Path]) -> None:
    if folder not in before:
        with suppress(OSError):  # not empty, or another process was faster
            folder.rmdir()
