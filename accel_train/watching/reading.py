"""The files of a run on the disk, read at one moment. Nothing is written, and no lock is taken."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_train.commands.places import contents
from accel_train.config import UsageError, expand_path
from accel_train.hub.queue import HubQueue
from accel_train.options.tree import flatten
from accel_train.store import manifest, run_file
from accel_train.store.commit import is_alive
from accel_train.store.lock import HOLDER
from accel_train.store.names import LOCK_FILE, METRICS_FILE, OF_A_START
from accel_train.watching.run_files import MetricsFile, Process, Record, RunFiles, SavedCheckpoint


class NoRunError(UsageError):
    """A file or directory that exists but is not a run."""


def find_directories(places: Sequence[str]) -> list[Path]:
    """Return the directories of runs, each once, in the given order.

    Places that exist but are not a run, as ``runs/*`` may name, are skipped with a line on stderr. Raises
    ``UsageError`` as ``find_directory`` does for any other error, and if no run is left.
    """
    directories: dict[Path, None] = {}
    skipped: list[NoRunError] = []
    for place in places:
        try:
            directories[find_directory(place)] = None
        except NoRunError as error:
            skipped.append(error)
    if not directories:
        raise UsageError("\n".join(map(str, skipped)))
    for error in skipped:
        print(f"skipped: {error}", file=sys.stderr, flush=True)
    return list(directories)


def find_directory(text: str) -> Path:
    """Return the directory of a run, even of one that has just begun. Raises ``UsageError`` for anything else."""
    path = expand_path(text)
    chosen = run_file.choice_of(path)
    if chosen is not None:
        raise UsageError(f"{path}: names one checkpoint, and this command is about a whole run; give {chosen.run}")
    if path.exists() and not path.is_dir():
        raise NoRunError(f"{path}: is a file; give the directory of a run, with {METRICS_FILE} in it")
    if not path.is_dir():
        raise UsageError(f"{path}: does not exist; give the directory of a run, with {METRICS_FILE} in it")
    metrics = path / METRICS_FILE
    if metrics.exists() and not metrics.is_file():
        raise UsageError(f"{metrics}: is not a file; a run writes one there: move this away")
    if metrics.exists() and not os.access(metrics, os.R_OK):
        raise UsageError(f"{metrics}: cannot be read by this user; watch as a user with read access")
    # Any one is enough: a start writes them one after another.
    names = (*OF_A_START, "checkpoints")
    if not any((path / name).exists() for name in names):
        held = contents(path)
        raise NoRunError(
            f"{path}: not a run, which has {', '.join(names)}; it contains {held}; give the directory of a run"
        )
    return path


def read_files(directory: Path, metrics: MetricsFile, now: float) -> RunFiles:
    """Read everything that a page shows of a run. Only the new lines of ``metrics`` are parsed.

    Raises ``UsageError`` for a disk that cannot be read, such as an unavailable one of another machine.
    """
    try:
        return _read(directory, metrics, now)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"{directory}: cannot be read ({reason}); mount its disk, or correct its permissions"
        ) from None


def _read(directory: Path, metrics: MetricsFile, now: float) -> RunFiles:
    records = metrics.read()
    checkpoint = _newest_checkpoint(directory)
    # A recipe opens its log before it takes the lock, and writes its first record before its first checkpoint.
    is_beyond_records = checkpoint is not None or not (directory / "logs").is_dir()
    return RunFiles(
        directory=directory,
        records=records,
        options=_options(directory, records),
        process=_process(directory / LOCK_FILE),
        checkpoint=checkpoint,
        failed_pushes=HubQueue(directory).failed(),
        now=now,
        without_records=is_beyond_records and not metrics.path.exists(),
    )


def _options(directory: Path, records: Sequence[Record]) -> Mapping[str, Any]:
    # The newest start may have other options than the first.
    for record in reversed(records):
        if record.get("event") == "config" and isinstance(record.get("config"), dict):
            return flatten(record["config"])
    # Before the first line, and for a run whose recorder was given no config.
    with suppress(OSError, ValueError):
        return run_file.load(directory).get("experiment", {})
    return {}


def _process(lock: Path) -> Process | None:
    """Return the process named in the lock file. Taking the lock instead could fail a run that starts right now."""
    try:
        text = lock.read_text(encoding="utf-8", errors="replace").strip()
        started_at = lock.stat().st_mtime
    except OSError:
        return None
    holder = HOLDER.fullmatch(text)
    # The file is empty for a moment, while a start writes its name.
    if holder is None:
        return None
    # A process number means nothing on another host.
    alive = None
    if holder[2] == socket.gethostname():
        alive = is_alive(int(holder[1]), started_at)
    return Process(text, started_at, alive)


def _newest_checkpoint(directory: Path) -> SavedCheckpoint | None:
    try:
        committed = manifest.committed(directory / "checkpoints")
    except (OSError, ValueError):
        # Deleted between two calls, or on a disk that is unavailable.
        return None
    if not committed:
        return None
    step, path = committed[-1]
    written_at = None
    with suppress(OSError, ValueError, TypeError, KeyError):
        text = manifest.read(path)["written_at"]
        written_at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    return SavedCheckpoint(step, written_at)
