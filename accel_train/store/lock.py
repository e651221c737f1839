"""The lock on a run directory: one process at a time writes or deletes there."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from accel_train.config import UsageError
from accel_train.store.names import LOCK_FILE

logger = logging.getLogger(__name__)

HOLDER = re.compile(r"process (\d+) on (\S+)")
"""Holder's name in the file if it is a run. Other commands, such as `checkpoints prune`, append their purpose to it."""


class LockedError(RuntimeError):
    """Another process holds the lock. The message names it."""


@dataclass
class Lock:
    """A lock that is held until it is released or closed, or until the process ends."""

    _file: IO[str]
    _earlier: str
    """Name that a killed process has left in the file, usually empty."""
    _earlier_time: int
    """Modification time of the file with that name, in nanoseconds."""
    is_exclusive: bool
    """False on a file system without locks."""

    def release(self, error: type[BaseException] | None = None) -> None:
        """Release the lock, and remove the name of this process from the file, unless ``error`` has ended it.

        A name that stays tells ``accel-train monitor`` of a dead process, so an earlier name is restored.
        """
        # A refused start leaves the run as it was. After any other error the name stays: it may be the only trace of
        # the failure, if that came before the first record.
        if error is not None and not issubclass(error, UsageError):
            self.close()
            return
        # If the file is closed already or the disk fails, the name stays.
        with suppress(OSError, ValueError):
            self._file.truncate(0)
            self._file.write(self._earlier)
            self._file.flush()
            if self._earlier:
                os.utime(self._file.fileno(), ns=(self._earlier_time, self._earlier_time))
        self.close()

    def close(self) -> None:
        """Release the lock, and leave the name of this process in the file. A second call has no effect."""
        self._file.close()


def acquire(directory: Path, purpose: str = "") -> Lock:
    """Lock a run directory. ``purpose`` follows the name of this process in the file.

    Raises ``LockedError``, or ``OSError`` if the directory cannot be written. A file system without locks (Lustre
    without ``-o flock``, NFS without lockd) gives a warning: only the user can then prevent a second process.
    """
    # Not "w": opening must not empty the file that names the present holder.
    lock = (directory / LOCK_FILE).open("a+")
    is_exclusive = True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise LockedError(holder) from None
    except OSError as error:
        is_exclusive = False
        logger.warning(
            "%s: its file system does not support locks (%s): make sure that only one run uses it", directory, error
        )
    # `flock` locks the file behind the descriptor, not its name.
    if not os.fstat(lock.fileno()).st_nlink:
        # The last holder, a refused start, has deleted the file. A third process may hold a new one.
        lock.close()
        return acquire(directory, purpose)
    earlier_time = os.fstat(lock.fileno()).st_mtime_ns
    lock.seek(0)
    earlier = lock.read()
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}{purpose}\n")
    lock.flush()
    os.register_at_fork(after_in_child=lock.close)  # workers of a loader outlive a killed trainer by seconds
    return Lock(lock, earlier, earlier_time, is_exclusive)


def holder_of(directory: Path) -> str | None:
    """Return the name of the living process that holds the lock of a run directory, or None. Writes nothing.

    A start at this very moment would be refused, so a command that watches a run must not call this.
    """
    # No run, no locks on its file system, or no path.
    with suppress(OSError, ValueError), (directory / LOCK_FILE).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().decode(errors="replace").strip() or "another process"
    return None


def is_free(directory: Path) -> bool:
    """Return True if it is certain that no living process holds the lock of a run directory. Writes nothing."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    # Held, or no locks on its file system.
    except OSError:
        return False
    return True


def in_use(directory: Path, holder: object) -> UsageError:
    """Build the error for a run directory that is locked. This process may hold it itself, as in a notebook."""
    match = HOLDER.match(str(holder))
    if match is not None and match.groups() == (str(os.getpid()), socket.gethostname()):
        return UsageError(
            f"output_dir: {directory} is in use by an earlier run of this process ({holder}), which still holds it; "
            "release it first: after open_run, put all of a run's work into `with contextlib.closing(run):`, or "
            "decorate the main of a recipe with runtime.exiting.one_run"
        )
    return UsageError(f"output_dir: {directory} is in use by {holder}; give another --output_dir or end that run first")
