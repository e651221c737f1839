"""Parents of this process: end with them, and read their command lines. Small programs import it first.

Only the standard library is imported at the top.
"""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of Linux's ``prctl``."""


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel send this process a signal when its parent ends, even by SIGKILL. ``exec`` keeps the setting.

    Does nothing outside Linux. No signal is sent if the parent has already ended.
    """
    if sys.platform == "linux":
        # Python has no call for it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def killed_with_parent() -> None:
    """``end_with_parent`` for work that nobody else waits for. A recipe takes SIGTERM for a request to save first."""
    end_with_parent(signal.SIGKILL)


def parent_command_lines(levels: int = 4) -> list[list[str]]:
    """Return the command lines of the parents, nearest first. Empty if the system hides them."""
    import psutil

    try:
        parents = psutil.Process().parents()[:levels]
        return [parent.cmdline() for parent in parents]
    except psutil.Error:
        return []
