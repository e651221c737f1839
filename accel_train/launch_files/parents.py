"""Parents of this process: end with them, and read their command lines. Small programs import it first.

Only the standard library is imported at the top.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

EXIT_CODE_VARIABLE = "ACCEL_TRAIN_EXIT_CODE_FILE"
"""Path of the file for the workers' exit codes, read by ``accel-train launch``. torchrun turns each into 1."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's ``prctl``."""
TIED = f"""
import ctypes, os, sys
number, parent = map(int, sys.argv[1:3])
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, number)
# A parent that ended before the call sends no signal.
if os.getppid() != parent:
    sys.exit(128 + number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel send this process a signal when its parent ends, even by SIGKILL. ``exec`` keeps the setting.

    Does nothing outside Linux. No signal is sent if the parent has already ended.
    """
    if sys.platform == "linux":
        # Python has no call for it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def killed_with_parent() -> None:
    """Call ``end_with_parent`` with SIGKILL, for work that nobody waits for. A recipe would save first at SIGTERM."""
    end_with_parent(signal.SIGKILL)


def tied_to_parent(command: Sequence[str], number: int = signal.SIGTERM) -> list[str]:
    """Return a command that calls ``end_with_parent`` and then becomes ``command``, in one process. Costs 20 ms.

    This process must start it directly: a child of any other parent ends at once, as if its parent had ended. Not a
    ``preexec_fn``: that runs Python between fork and exec, where a lock held by another thread is never released, and
    numpy and torch start threads.
    """
    if sys.platform != "linux":
        return list(command)
    # Isolated, without site-packages: it starts faster, and imports nothing from the working directory.
    return [sys.executable, "-I", "-S", "-c", TIED, str(int(number)), str(os.getpid()), *command]


def parent_command_lines(levels: int = 4) -> list[list[str]]:
    """Return the command lines of the parents, nearest first. Empty if the system hides them."""
    import psutil

    try:
        parents = psutil.Process().parents()[:levels]
        return [parent.cmdline() for parent in parents]
    except psutil.Error:
        return []


def launcher_with_traceback() -> str | None:
    """Name the launcher of this process, or None if there is none or it prints no traceback for exit code 2."""
    # `accel-train launch` keeps such a traceback from the terminal.
    if EXIT_CODE_VARIABLE in os.environ:
        return None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    # As the kernel has them: the command and its arguments, each ended by a zero byte.
    words = command.decode(errors="replace").split("\0")
    if "-q" in words or "--quiet" in words:
        return None
    # The interpreter comes first, then a script, or -m and a module.
    names = {Path(word).name for word in words[1:3]}
    if names & {"accelerate", "accelerate-launch", "accelerate.commands.launch"}:
        return "accelerate launch"
    return None
