"""The lock of a run's directory: one process at a time writes or deletes there."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class HeldError(RuntimeError):
    """Another process has it; the message says which."""


def take(directory: Path, purpose: str = "") -> Any:
    """The open file that holds the lock until it is closed, or the process ends.

    Raises ``HeldError``, and ``OSError`` where the directory cannot be written. A file system without locks (Lustre
    without ``-o flock``, NFS without lockd) is a warning: then nothing but the user keeps a second process away.
    """
    lock = (directory / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise HeldError(holder) from None
    except OSError as error:
        logger.warning("%s: its file system has no locks (%s): see to it that one run alone uses it", directory, error)
    if not os.fstat(lock.fileno()).st_nlink:  # removed by its holder, a refused start: another may hold a new one
        lock.close()
        return take(directory, purpose)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}{purpose}\n")
    lock.flush()
    os.register_at_fork(after_in_child=lock.close)  # loader workers outlive a killed trainer by seconds
    return lock
