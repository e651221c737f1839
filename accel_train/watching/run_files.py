"""The files of a run as they are at one moment. Nothing is written, and no lock is taken."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_train.commands.places import contents
from accel_train.config import UsageError, expand_path
from accel_train.hub.queue import HubQueue
from accel_train.metrics.records import last_pass, parse_lines
from accel_train.options.tree import flatten
from accel_train.store import manifest, run_file
from accel_train.store.names import LOCK_FILE, METRICS_FILE, OF_A_START

Record = Mapping[str, Any]

# Written by store/lock.py. A purpose behind the host is of another command, such as `checkpoints prune`.
HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class Process:
    """The process named by the lock of a run."""

    text: str
    """``process 1234 on host``"""
    started_at: float
    """When it took the lock, in seconds since 1970."""
    alive: bool | None
    """None on another host, which cannot be asked."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The newest committed checkpoint."""

    step: int
    written_at: float | None
    """Seconds since 1970. None if its manifest cannot be read."""


@dataclass(frozen=True)
class RunFiles:
    """What a run has written up to ``now``."""

    directory: Path
    records: Sequence[Record]
    options: Mapping[str, Any]
    """Options of the experiment by dotted name. Empty before the first start has written any."""
    process: Process | None
    checkpoint: SavedCheckpoint | None
    failed_pushes: Mapping[str, str]
    """Reasons of the Hub by the name of the checkpoint."""
    now: float

    def last_start(self) -> Sequence[Record]:
        """Return the records of the last start, in file order."""
        for index in range(len(self.records) - 1, -1, -1):
            if self.records[index].get("event") == "environment":
                return self.records[index:]
        return self.records

    def max_steps(self) -> int | None:
        """Return the length of the run in optimizer steps, or None if its files do not tell."""
        steps = self.options.get("max_steps")
        if isinstance(steps, int):
            return steps
        epochs = self.options.get("max_epochs")
        lines = last_pass(self.records, "train")
        if not isinstance(epochs, (int, float)) or not lines:
            return None
        epoch = number(lines[-1], "epoch")
        if not epoch:
            return None
        # As experiment.py derives it. The margin keeps a rounded quotient from becoming one step more.
        return math.ceil(epochs * lines[-1]["step"] / epoch - 1e-6)


def number(record: Record, name: str) -> float | None:
    """Return a field that is a number, or None."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


@dataclass
class MetricsFile:
    """Records of a ``metrics.jsonl`` that grows: each ``read`` parses the new lines only."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _offset: int = 0
    _inode: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all records so far. A last line without its end is left for the next call."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._begin_again(0)
            return self.records
        with file:
            status = os.fstat(file.fileno())
            # A start that resumes replaces the file, without the lines that it is going to repeat.
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._begin_again(status.st_ino)
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.records += parse_lines(whole.split(b"\n"))
        self._offset += len(whole)
        return self.records

    def _begin_again(self, inode: int) -> None:
        self.records = []
        self._offset = 0
        self._inode = inode


def find_directory(text: str) -> Path:
    """Return the directory of a run, also of one that has only begun. Raises ``UsageError`` for anything else."""
    path = expand_path(text)
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{path}: {kind}; give the directory of a run, with {METRICS_FILE} in it")
    names = (*OF_A_START, "checkpoints")
    if not any((path / name).exists() for name in names):
        held = contents(path)
        raise UsageError(f"{path}: no run, which has {', '.join(names)}; it holds {held}; give the directory of a run")
    return path


def read_files(directory: Path, metrics: MetricsFile, now: float) -> RunFiles:
    """Read everything that a page shows of a run. Only the new lines of ``metrics`` are parsed."""
    records = metrics.read()
    return RunFiles(
        directory=directory,
        records=records,
        options=_options(directory, records),
        process=_process(directory / LOCK_FILE),
        checkpoint=_newest_checkpoint(directory),
        failed_pushes=HubQueue(directory).failed(),
        now=now,
    )


def _options(directory: Path, records: Sequence[Record]) -> Mapping[str, Any]:
    for record in reversed(records):
        if record.get("event") == "config" and isinstance(record.get("config"), dict):
            return flatten(record["config"])
    # Before the first line, and for a run whose recorder was given no config.
    with suppress(OSError, ValueError):
        return run_file.load(directory).get("experiment", {})
    return {}


def _process(lock: Path) -> Process | None:
    """Return the process in the lock file. Trying the lock instead could refuse a run that starts at this moment."""
    try:
        text = lock.read_text(encoding="utf-8", errors="replace").strip()
        started_at = lock.stat().st_mtime
    except OSError:
        return None
    holder = HOLDER.fullmatch(text)
    if holder is None:
        return None
    alive = None
    if holder[2] == socket.gethostname():
        alive = _is_alive(int(holder[1]), started_at)
    return Process(text, started_at, alive)


def _is_alive(pid: int, locked_at: float) -> bool:
    import psutil  # accelerate needs it too

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # A process that began after the lock was taken has only inherited the number. One second for coarse clocks.
        return process.create_time() <= locked_at + 1
    except psutil.NoSuchProcess:
        return False


def _newest_checkpoint(directory: Path) -> SavedCheckpoint | None:
    try:
        found = manifest.committed(directory / "checkpoints")
    except OSError:
        return None
    if not found:
        return None
    step, path = found[-1]
    written_at = None
    with suppress(OSError, ValueError, TypeError):
        text = manifest.read(path)["written_at"]
        written_at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    return SavedCheckpoint(step, written_at)
