"""torchrun, as ``accel-train launch`` starts it: silent about processes that have explained their end themselves.

For any exit code but 0 torchrun prints a long traceback of its own, below the message of the process. That hides a
stop (75) and wrong usage (2). The report on a process that failed in any other way is printed unchanged.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accel_train.launch_files.parents import EXIT_CODE_VARIABLE
from accel_train.runtime.exiting import EXIT_AGAIN, EXIT_PREEMPTED, reported_exit_code

EXPLAINED = (2, EXIT_PREEMPTED)
"""Exit codes of processes that have said why they end."""


def main() -> None:
    """Run torchrun with the arguments of this process. Exits with 1 in place of a report that would explain nothing."""
    for handler in logging.getLogger("torch.distributed").handlers:
        handler.addFilter(lambda _: _reported() not in (*EXPLAINED, EXIT_AGAIN))
    try:
        run.main()
    except ChildFailedError as error:
        if not _is_explained(error):
            raise
        sys.exit(1)
    except SignalException:
        # None: the signal came before any process could report, and `accel-train launch` says so.
        if _reported() not in (None, 0, *EXPLAINED, EXIT_AGAIN):
            raise
        sys.exit(1)


def _reported() -> int | None:
    path = os.environ.get(EXIT_CODE_VARIABLE)
    return None if path is None else reported_exit_code(Path(path), stopped=False)


def _is_explained(error: ChildFailedError) -> bool:
    """Return True if the first process to fail has said why, and no other failed in a way of its own."""
    _, first = error.get_first_failure()
    # torchrun ends the others by SIGTERM, some of them before they handle it.
    codes = {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM}
    return _reported() is not None and first.exitcode in EXPLAINED and codes <= set(EXPLAINED)


if __name__ == "__main__":
    main()
