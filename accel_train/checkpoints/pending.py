"""A save before its commit: its phases, and the values agreed on by the ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_train.config import MachineError
from accel_train.rng import preserve_random_states
from accel_train.speed.out_of_memory import explain_save, ran_out
from accel_train.store import atomic_files, commit
from accel_train.store.exports.extras import extra_files
from accel_train.store.manifest import checkpoint_name
from accel_train.store.strict_json import Json

if TYPE_CHECKING:
    from accel_train.checkpoints import snapshot
    from accel_train.store import planning

REDUCTIONS: Mapping[str, Callable[..., int]] = {
    "stop": max,  # 1 on a process with a request to stop
    "written": min,  # number of the last save written by this rank; min, because every rank must have written it
    "failed": max,  # number of the last save that this rank could not write or commit
    "committed": max,  # number of the last save committed by the main process
    "wanted": max,  # number of the save due by the main process's clock
}
"""Values exchanged by the ranks after every step, with their reductions. Saves are numbered from 1, because the values
arrive one step late and must not be mistaken for those of the next save."""


class NoSpaceError(commit.CheckpointWriteError, MachineError):
    """A checkpoint could not be written because the disk is full: exit code 1, as for any failed save, no traceback."""


def write_error(reason: str) -> commit.CheckpointWriteError:
    """Return the error of a save that failed for ``reason``, which names every failed rank."""
    return NoSpaceError(reason) if commit.NO_SPACE in reason else commit.CheckpointWriteError(reason)


@dataclass
class Attempt:
    """Beginning of a save, until the writers get their jobs. A rank that fails alone tells the others in ``agree``."""

    step: int
    directory: Path
    """Folder of the checkpoints."""
    gather: Callable[[Any], list[Any]]
    """Collective: returns the values of all ranks."""
    needed_bytes: int = 0
    temporary: Path | None = None
    """Temporary directory made by this rank."""
    error: Exception | None = None
    """Error of this rank."""
    reason: str = ""
    """Errors of all ranks, after ``agree`` has found one."""

    @contextmanager
    def part(self, *, alone: bool = True) -> Generator[None]:
        """Keep an error of the body for ``agree``. Raise it unless the body works ``alone``, without other ranks."""
        try:
            yield
        except Exception as error:  # code of the recipe may raise anything
            if not alone:
                # The others wait for what this rank would have sent, so its process has to end.
                self.discard()
                raise
            self.error = error

    def agree(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, or None if any rank has failed. A collective."""
        answers = self.gather((value, self._describe_error()))
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        self.reason = "; ".join(failed)
        if failed:
            return None
        return [value for value, _ in answers]

    def _describe_error(self) -> str | None:
        if self.error is None:
            return None
        if self.ran_out_of_memory:
            text = explain_save(self.error, self.step)
        else:
            text = commit.describe_write_error(self.error, self.directory, self.needed_bytes)
        return "; ".join([text, *getattr(self.error, "__notes__", ())])

    @property
    def ran_out_of_memory(self) -> bool:
        """True if this rank has run out of memory."""
        return self.error is not None and ran_out(self.error, "save")

    def write_job(self, temporary: Path, rank: int, files: list[Json], *, hurry: bool) -> Json:
        """Build a writer's job. The main process adds ``texts`` and ``extras``, which others do not write."""
        return {
            "do": "write",
            "rank": rank,
            "directory": str(temporary),
            "files": files,
            "texts": {},
            "extras": [],
            "needed_bytes": self.needed_bytes,
            "hurry": hurry,
        }

    def discard(self) -> None:
        """Delete the temporary directory."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


def try_extras(attempt: Attempt, write_extras: Callable[[Path], None] | None) -> None:
    """Call ``write_extras`` once with a directory that is deleted, so that a fault in it loses no step. A collective.

    The main process alone gives a function. Costs the time and the space on the disk of its files. An error is raised
    on every rank, one of the file system as ``CheckpointWriteError``. A full disk is left to the first save, which has
    a policy for it (``checkpoints.on_error``).
    """
    if write_extras is not None:
        # A name that the next start sweeps, should this one be killed meanwhile.
        attempt.temporary = attempt.directory / commit.temporary_name(attempt.step, atomic_files.new_nonce())
        # Training draws what it would have drawn without the trial.
        with attempt.part(), preserve_random_states(of_device=True):
            attempt.temporary.mkdir(parents=True)
            extra_files(attempt.temporary, write_extras)
        attempt.discard()
    if attempt.error is not None and commit.is_disk_full(attempt.error):
        attempt.error = None
    agreed = attempt.agree(None)
    if attempt.error is not None and not isinstance(attempt.error, OSError):
        raise attempt.error
    if agreed is None:
        raise commit.CheckpointWriteError(attempt.reason) from attempt.error


class Phase(Enum):
    """Phases of a save, in order. Ranks enter the last one at the same step boundary, the others by themselves."""

    COPYING = "the snapshot is being copied from the device"
    WRITING = "each rank's writer writes its files"
    COMMITTING = "the main process's writer commits, then deletes old checkpoints"


@dataclass
class PendingSave:
    """A save before its commit. The same on every rank except for the answer of its writer."""

    number: int
    step: int
    temporary: Path
    manifest: Json
    began: float
    needed_bytes: int
    job: Json
    """Job for the writer, sent once the snapshot is complete."""
    phase: Phase = Phase.COPYING
    answer: Json | None = None
    """Answer of this rank's writer to the job of this phase."""

    @property
    def _success(self) -> str:
        return "committed" if self.phase is Phase.COMMITTING else "written"

    def outcome(self) -> str:
        """Return the key in ``REDUCTIONS`` to report this rank's answer under."""
        assert self.answer is not None
        return "failed" if "error" in self.answer else self._success

    def may_advance(self, agreed: Mapping[str, int]) -> bool:
        """Return True once every rank has written, the main process has committed, or any rank has failed."""
        return self.number in (agreed["failed"], agreed[self._success])

    def commit_job(self, keep: Mapping[str, Any], queue: Path) -> Json:
        """Build the writer's job: commit, then delete checkpoints held by neither ``keep`` nor the ``queue``."""
        return {
            "do": "commit",
            "temporary": str(self.temporary),
            "final": str(self.temporary.with_name(checkpoint_name(self.step))),
            "manifest": self.manifest,
            "keep": keep,
            "queue": str(queue),
            "needed_bytes": self.needed_bytes,
        }


class Buffers(NamedTuple):
    """Plan and memory of the snapshots, reused while the optimizer has state under the same ``keys``."""

    keys: dict[str, list[str]]
    plan: planning.Plan
    files: list[Json]
    """Files of this rank for its writer: name, tensors, and start in the buffer."""
    snapshot: snapshot.Snapshot
