"""``loading.json`` counts the starts that died while they read a checkpoint; the third sets it aside as ``.bad``."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from accel_train import strict_json
from accel_train.config import UsageError
from accel_train.store import commit
from accel_train.store.commit import Checkpoint

LOADING_FILE = "loading.json"
MAX_NOTE_BYTES = 64 << 10
LOADING_ATTEMPTS = 3
"""A checkpoint under which the process died this often while loading is set aside."""


@contextmanager
def counted(directory: Path, checkpoint: Checkpoint, *, last: bool) -> Generator[None]:
    """Count this reading of the checkpoint until it ends. Main process.

    What was read, or refused with a reason, does not count; the ``last`` part to be read forgets earlier crashes.
    """
    before = _attempts(directory, checkpoint)
    _note(directory, checkpoint, before + 1)
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):  # a device that is too full is not the checkpoint's fault
        _note(directory, checkpoint, before)
        raise
    _note(directory, checkpoint, 0 if last else before)


def newest_loadable(directory: Path, *, with_state: bool) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest verified checkpoint that no three starts died of, and why newer ones are passed over.

    The others are set aside.
    """
    checkpoint, reasons = commit.newest_verified(directory / "checkpoints", with_state=with_state)
    if checkpoint is None or _attempts(directory, checkpoint) < LOADING_ATTEMPTS:
        return checkpoint, reasons
    aside = checkpoint.path.with_name(f"{checkpoint.path.name}.bad")
    os.rename(checkpoint.path, aside)
    commit.delete_file(directory / LOADING_FILE)
    reason = f"{aside}: {LOADING_ATTEMPTS} starts ended while it was being loaded; it is set aside"
    checkpoint, more = newest_loadable(directory, with_state=with_state)
    return checkpoint, [reason, *reasons, *more]


def set_aside(directory: Path) -> list[str]:
    """Say of each checkpoint set aside how to bring it back: without these a run would start again from step 0."""
    found = sorted((directory / "checkpoints").glob("checkpoint_*.bad"))
    return [f"{path}: set aside, because starts ended while it was loaded; rename it to try again" for path in found]


def _attempts(directory: Path, checkpoint: Checkpoint) -> int:
    try:
        note = strict_json.read_object(directory / LOADING_FILE, MAX_NOTE_BYTES)
        strict_json.check_seal(note)
    except (FileNotFoundError, ValueError):
        return 0  # one that was torn or changed counts no crash: the checkpoint itself was verified
    attempts = note.get("attempts")
    return attempts if isinstance(attempts, int) and note.get("checkpoint") == checkpoint.path.name else 0


def _note(directory: Path, checkpoint: Checkpoint, attempts: int) -> None:
    if attempts:
        note = {"checkpoint": checkpoint.path.name, "attempts": attempts}
        commit.replace_json(directory / LOADING_FILE, strict_json.sealed(note))
    else:
        commit.delete_file(directory / LOADING_FILE)
