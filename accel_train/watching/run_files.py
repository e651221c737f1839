"""The files of a run, as the pages read them. ``reading.py`` finds them on the disk."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from accel_train.metrics.records import last_pass, parse_lines

Record = Mapping[str, Any]

Status = Literal["starting", "training", "silent", "finished", "stopped", "crashed", "unrecorded"]


@dataclass(frozen=True)
class Condition:
    """The status of a run."""

    status: Status
    reason: str = ""
    """Explanation of the status. Empty if the status says enough."""


@dataclass(frozen=True)
class Process:
    """The process named by the lock of a run."""

    text: str
    """``process 1234 on host``"""
    started_at: float
    """When it took the lock, in seconds since 1970."""
    alive: bool | None
    """None for a process on another host."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The newest committed checkpoint."""

    step: int
    written_at: float | None
    """Seconds since 1970. None if its manifest cannot be read."""


@dataclass(frozen=True)
class RunFiles:
    """Everything written by a run up to ``now``."""

    directory: Path
    records: Sequence[Record]
    options: Mapping[str, Any]
    """Options of the experiment by dotted name. Empty before the first start has written any."""
    process: Process | None
    checkpoint: SavedCheckpoint | None
    failed_pushes: Mapping[str, str]
    """Reason for each failed push to the Hub, by the name of the checkpoint."""
    now: float
    without_records: bool = False
    """True if its script seems to have no ``Recorder``: there is no ``metrics.jsonl``, and there is a checkpoint or no
    log directory."""

    @cached_property
    def training(self) -> Sequence[Record]:
        """The training lines by rising step. If a step was repeated after a crash, the later line counts."""
        return last_pass(self.records, "train")

    @cached_property
    def evaluations(self) -> Sequence[Record]:
        """The evaluation lines, likewise."""
        return last_pass(self.records, "evaluation")

    @cached_property
    def last_start(self) -> Sequence[Record]:
        """The records of the last start, in file order."""
        for index in range(len(self.records) - 1, -1, -1):
            # Every start writes it as its first line.
            if self.records[index].get("event") == "environment":
                return self.records[index:]
        return self.records

    def max_steps(self) -> int | None:
        """Return the length of the run in optimizer steps, or None if its files do not tell it yet."""
        steps = self.options.get("max_steps")
        if isinstance(steps, int):
            return steps
        epochs = self.options.get("max_epochs")
        if not isinstance(epochs, (int, float)) or not self.training:
            return None
        newest = self.training[-1]
        epoch = number(newest, "epoch")
        if not epoch:
            return None
        # As experiment.py derives it. The margin keeps a rounded quotient from becoming one step more.
        return math.ceil(epochs * newest["step"] / epoch - 1e-6)


def number(record: Record, name: str) -> float | None:
    """Return a numeric field, or None."""
    value = record.get(name)
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


@dataclass
class MetricsFile:
    """Records of a growing ``metrics.jsonl``: each ``read`` parses the new lines only."""

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
        # The writer may be in the middle of its last line.
        whole = content[: content.rfind(b"\n") + 1]
        self.records += parse_lines(whole.split(b"\n"))
        self._offset += len(whole)
        return self.records

    def _begin_again(self, inode: int) -> None:
        self.records = []
        self._offset = 0
        self._inode = inode
