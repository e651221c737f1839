"""The lock on a run directory: one process at a time writes or deletes there."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Any

from accel_train.store.names import LOCK_FILE

logger = logging.getLogger(__name__)


class LockedError(RuntimeError):
    """Another process holds the lock. The message names it."""


def acquire(directory: Path, purpose: str = "") -> Any:
    """Lock a run directory and return the open lock file, to be kept until the lock is released by closing it.

    Raises ``LockedError``, or ``OSError`` if the directory cannot be written. A file system without locks (Lustre
    without ``-o flock``, NFS without lockd) is a warning: the user alone then prevents a second process.
    """
    # Not "w": opening must not empty the file that names the present holder.
    lock = (directory / LOCK_FILE).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise LockedError(holder) from None
    except OSError as error:
        logger.warning("%s: its file system has no locks (%s): make sure that only one run uses it", directory, error)
    # `flock` locks the file behind the descriptor, not its name.
    if not os.fstat(lock.fileno()).st_nlink:
        # The last holder, a refused start, has deleted the file. A third process may hold a new one.
        lock.close()
        return acquire(directory, purpose)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}{purpose}\n")
    lock.flush()
    os.register_at_fork(after_in_child=lock.close)  # workers of a loader outlive a killed trainer by seconds
    return lock
