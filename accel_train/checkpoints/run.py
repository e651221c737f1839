"""The opened directory of a run, which every part of the training holds."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel_train.config import UsageError
from accel_train.store import atomic_files, strict_json
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import RUN_FILE
from accel_train.store.run_file import write_run

LOADING_FILE = "loading.json"
"""Counts the starts that died while they read a checkpoint."""
MAX_NOTE_BYTES = 64 << 10

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """An opened run directory. Every rank holds one; only the main process writes to it."""

    directory: Path
    run_id: str
    checkpoint: Checkpoint | None
    """The newest verified checkpoint, None for a fresh start."""
    decision: str
    """Whether it starts or resumes, and why: for the log."""
    saved: Mapping[str, Any]
    """``run.json`` as it stands."""
    timeout_seconds: float = 1800.0
    """How long a process waits for the others when it saves: ``collective_timeout_seconds`` of the config."""
    initial_weights: Path | None = None
    """Where ``init_from`` has its weights; the same on every rank."""
    _lock: Any = field(default=None, repr=False)

    def close(self) -> None:
        """Give the directory free before the process ends."""
        if self._lock is not None:
            self._lock.close()

    @contextmanager
    def loading(self, *, last: bool) -> Generator[None]:
        """Count the starts that die while they read the checkpoint (``run.counted``). Main process; ``last`` is for
        the last part of it to be read."""
        if self._lock is None or self.checkpoint is None:
            yield
        else:
            with counted(self.directory, self.checkpoint, last=last):
                yield

    def note_training(self) -> None:
        """From now on the directory is held to this experiment. Main process, after the first step; cheap afterwards.
        A disk that fails is left to the next save, which says so."""
        if not self.saved.get("trained"):
            self.saved = dict(self.saved) | {"trained": True}
            with suppress(OSError):
                write_run(self.directory, self.saved)

    def restore_directory(self) -> None:
        """Make the directory again if somebody deleted it while the run went on. Main process; raises ``OSError``."""
        if not (self.directory / RUN_FILE).exists() or not self.checkpoints.is_dir():
            logger.warning("%s or part of it was deleted while the run went on; it is made again", self.directory)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_run(self.directory, self.saved)

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.directory / "checkpoints"

    def resolved(self, key: str) -> Any:
        """A value that the first start derived and later starts keep, such as ``schedule.decay_steps``."""
        return self.saved["resolved"][key]

    @property
    def start_step(self) -> int:
        """Optimizer steps already done."""
        return self.checkpoint.step if self.checkpoint is not None else 0


@contextmanager
def counted(directory: Path, checkpoint: Checkpoint, *, last: bool) -> Generator[None]:
    """Count this reading of the checkpoint until it ends. Main process.

    What was read, or refused with a reason, does not count; the ``last`` part to be read forgets earlier crashes.
    """
    before = attempts(directory, checkpoint)
    _note(directory, checkpoint, before + 1)
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):  # a device that is too full is not the checkpoint's fault
        _note(directory, checkpoint, before)
        raise
    _note(directory, checkpoint, 0 if last else before)


def attempts(directory: Path, checkpoint: Checkpoint) -> int:
    """Return how many starts in a row died while they read this checkpoint. Main process."""
    try:
        note = strict_json.read_object(directory / LOADING_FILE, MAX_NOTE_BYTES)
        strict_json.check_seal(note)
    except (FileNotFoundError, ValueError):
        return 0  # one that was torn or changed counts no crash: the checkpoint itself was verified
    count = note.get("attempts")
    if isinstance(count, int) and note.get("checkpoint") == checkpoint.path.name:
        return count
    return 0


def _note(directory: Path, checkpoint: Checkpoint, count: int) -> None:
    if count:
        note = {"checkpoint": checkpoint.path.name, "attempts": count}
        atomic_files.replace_json(directory / LOADING_FILE, strict_json.sealed(note))
    else:
        atomic_files.delete_file(directory / LOADING_FILE)
