"""A stop before there is anything to save: imports are over, data is prepared, a model is built. It ends the process.

Nothing of this start is lost by it, and an interrupted file in a cache is no worse than after a crash.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from accel_train.launch_files.parents import end_with_parent, parent_command_lines
from accel_train.runtime.exiting import EXIT_PREEMPTED, report_exit_code

STOP_FILE = "STOP"
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SECONDS_FOR_THE_HANDLER = 2.0
"""Python runs a handler between two bytecodes: within a long call of a C library it would come too late."""
LAUNCHERS = {
    *("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("accel-train", "accel_train.cli", "deepspeed", "deepspeed.launcher.launch"),
}
"""Programs and modules of the parent's command line that are launchers: a shell may end while training goes on."""


def end_with_the_launcher() -> None:
    """From now on the death of this process's launcher, if it has one, counts as SIGTERM."""
    parent = next(iter(parent_command_lines(1)), [])
    if LAUNCHERS & {Path(word).name for word in parent[:6]}:  # interpreter and its options, then the program
        end_with_parent()


def _launcher_is_gone() -> bool:
    """Return True if a launcher started this process and died during its imports: nobody would watch it train.

    Call it before Accelerate sets some of these variables itself. A launcher leads this process's group, or a shell
    does that has ended since (``ssh host 'nohup accelerate launch ... &'``). All launchers are Python programs.
    """
    known = ({"TORCHELASTIC_RUN_ID"}, {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"})
    launched = any(names <= os.environ.keys() for names in known)
    if not launched or not Path("/proc/self").exists() or Path(f"/proc/{os.getpgrp()}").exists():
        return False
    return not any(Path(line[0]).name.startswith("python") for line in parent_command_lines() if line)


def leave(number: int) -> NoReturn:
    """End this process with exit code 75, at once: there is nothing to save. Safe in a handler and in any thread."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = signal.Signals(number).name if number else f"the file {STOP_FILE}"
        text = f"asked to stop ({name}) while there is nothing to save; start again to go on (exit code 75)\n"
        os.write(2, text.encode())
    report_exit_code(EXIT_PREEMPTED)
    os._exit(EXIT_PREEMPTED)


class EarlyStop:
    """Obeys a stop from the start of a recipe to its first step: imports are over, nothing has been trained."""

    def __init__(self) -> None:
        self.installed = False
        self._owner = 0
        self._stop_file: Path | None = None
        self._pipe: tuple[int, int] | None = None

    def install(self) -> None:
        """Main thread, once a process."""
        self.installed, self._owner = True, os.getpid()
        for number in listened():
            signal.signal(number, self._on_signal)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(self._pipe[0],), name="early stop", daemon=True).start()

    def look_for(self, stop_file: Path) -> None:
        """From now on ``stop_file`` is a request as well."""
        self._stop_file = stop_file

    def end(self) -> None:
        """Somebody else obeys from now on. The handlers stay until they are replaced."""
        if self._pipe is not None and self._owner == os.getpid():
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # ends the thread
            self._pipe = None

    def forget(self) -> None:
        """In a forked child: its signals are not its parent's."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a worker that somebody forked meanwhile
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        leave(number)

    def _watch(self, pipe: int) -> None:
        """In a thread: for the file, and for signals while the main thread is inside a C library."""
        while True:
            if select.select([pipe], [], [], 1.0)[0]:
                read = os.read(pipe, 1)
                if not read:
                    os.close(pipe)
                    return
                if read[0] in STOPPING:
                    time.sleep(SECONDS_FOR_THE_HANDLER)
                    if self._pipe is not None:
                        leave(read[0])
            elif self._pipe is not None and self._stop_file is not None and self._stop_file.exists():
                with suppress(OSError):
                    self._stop_file.unlink()  # obeyed: the next start is to train
                leave(0)


EARLY = EarlyStop()
os.register_at_fork(after_in_child=EARLY.forget)


def leave_when_asked() -> None:
    """From now on a stop ends this process at once with exit code 75. For a recipe's start, on its main thread, before
    anything that takes time; ``StopRequests`` takes over where there is something to save."""
    if threading.current_thread() is threading.main_thread():
        if _launcher_is_gone():
            leave(signal.SIGTERM)
        end_with_the_launcher()
        EARLY.install()


def look_for_stop_file(directory: Path) -> None:
    """The ``STOP`` file of a run directory counts from now on. Main process; for the time before ``StopRequests``."""
    EARLY.look_for(directory / STOP_FILE)


def listened() -> list[signal.Signals]:
    """The signals that ask for a stop: SIGHUP unless it is ignored, as under nohup."""
    return [s for s in STOPPING if s != signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]
