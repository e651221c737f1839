"""A process that does not outlive its parent. Standard library only: small programs begin with it."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """From now on, the end of the parent (even by SIGKILL) sends this process a signal; it is kept by ``exec``.

    Linux only; elsewhere nothing happens. A parent that has ended already sends none.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def parent_command_lines(levels: int = 4) -> list[list[str]]:
    """Command lines of the parents, nearest first; empty where the system does not show them."""
    import psutil

    try:
        return [parent.cmdline() for parent in psutil.Process().parents()[:levels]]
    except psutil.Error:
        return []
