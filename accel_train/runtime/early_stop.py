"""Stop before there is anything to save, while data is prepared or a model is built.

The process ends at once. Nothing is lost, and an interrupted file in a cache is no worse than after a crash. Commands
that train nothing end in the same way (``stoppable``).
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from accel_train.launch_files.parents import end_with_parent, parent_command_lines
from accel_train.runtime.exiting import EXIT_ASKED, EXIT_PREEMPTED, report_exit_code

if TYPE_CHECKING:
    from accel_train.runtime.hosts.leaving import Others

STOP_FILE = "STOP"
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SECONDS_FOR_THE_HANDLER = 2.0
"""Python runs a handler between two bytecodes. Within a long call of a C library that would be too late."""
LAUNCHERS = {
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accel-train",
    "accel_train",
    "accel_train.cli",
    "accel_train.cli.torchrun",
    "deepspeed",
    "deepspeed.launcher.launch",
}
"""Launchers in the parent's command line, by program or module. Any other parent, such as a shell, may end first."""


def end_with_the_launcher() -> None:
    """Let the death of this process's launcher, if it has one, count as SIGTERM."""
    parents = parent_command_lines(1)
    if not parents:
        return
    # The program comes after the interpreter and its options.
    names = {Path(word).name for word in parents[0][:6]}
    if names & LAUNCHERS:
        end_with_parent()


def _launcher_is_gone() -> bool:
    """Return True if a launcher started this process and died during its imports: nobody would watch it train.

    Must be called before Accelerate sets some of the launcher's variables itself.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    by_accelerate = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= os.environ.keys()
    if not by_torchrun and not by_accelerate:
        return False
    # A launcher leads the process group of this process, or a shell does that may have ended since, as with
    # `ssh host 'nohup accelerate launch ... &'`. Every launcher is a Python program.
    if not Path("/proc/self").exists() or Path(f"/proc/{os.getpgrp()}").exists():
        return False
    programs = [Path(line[0]).name for line in parent_command_lines() if line]
    return not any(program.startswith("python") for program in programs)


def leave(number: int, *, told: bool = False) -> NoReturn:
    """End this process at once with exit code 75, and tell the others. Safe in a handler and in any thread.

    ``number`` is the signal, or 0 for the ``STOP`` file. ``told`` is True if another process passed the stop on.
    """
    EARLY.leaving = True
    # Undone before the message, because a second signal may follow that.
    if EARLY.undo is not None:
        with suppress(Exception):
            EARLY.undo()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = f"the file {STOP_FILE}"
        if number:
            name = signal.Signals(number).name
        if told:
            name = "another process was"
        remedy = "start the same command again to resume (exit code 75)"
        text = f"asked to stop ({name}) while there is nothing to save; {remedy}\n"
        # A print is not safe in a handler.
        os.write(2, text.encode())
    if EARLY.others is not None:
        EARLY.others.tell(terminated=number == signal.SIGTERM)
    # torchrun sends SIGTERM to the others when one process fails, and nothing else.
    report_exit_code(EXIT_PREEMPTED if number == signal.SIGTERM else EXIT_ASKED)
    os._exit(EXIT_PREEMPTED)


class EarlyStop:
    """Obeys a stop from the start of a recipe, after its imports, until its first step."""

    def __init__(self) -> None:
        self.installed = False
        self.leaving = False
        """True once this process is about to end. Its main thread may still fail because others have left already."""
        self.others: Others | None = None
        self.undo: Callable[[], None] | None = None
        """Removes a note on the disk that only a crash should leave."""
        self._owner = 0
        self._stop_file: Path | None = None
        self._pipe: tuple[int, int] | None = None

    def install(self) -> None:
        """Install the handlers and start the thread. Main thread, once a process."""
        self.installed = True
        self._owner = os.getpid()
        for number in listened():
            signal.signal(number, self._on_signal)
        self._pipe = os.pipe()
        reader, writer = self._pipe
        # Python writes the number of each signal to the pipe at once, even while the main thread is inside a C library.
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(reader,), name="early stop", daemon=True)
        thread.start()

    def hear(self, others: Others) -> None:
        """Leave once one of ``others`` has been asked to stop, and tell them of a stop of this process."""
        self.others = others
        others.listen(lambda: None if self.leaving else leave(0, told=True))

    def begin(self) -> None:
        """Note that the first step is done: from now on there is something to save."""
        if self.others is not None:
            self.others.end()
            self.others = None

    def look_for(self, stop_file: Path) -> None:
        """Treat ``stop_file`` as a request as well."""
        self._stop_file = stop_file

    def end(self) -> None:
        """Hand over to ``StopRequests``. The handlers stay until they are replaced."""
        if self._pipe is not None and self._owner == os.getpid():
            signal.set_wakeup_fd(-1)
            # Closing the pipe ends the thread.
            os.close(self._pipe[1])
            self._pipe = None

    def forget(self) -> None:
        """Keep the signals of a forked child out of its parent's pipe. Called in the child."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A worker forked since then dies of the signal, as it would without this handler.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # A repeated signal is ignored while the others are being told, which takes seconds at most.
        if not self.leaving:
            leave(number)

    def _watch(self, pipe: int) -> None:
        """Obey the file, and signals while the main thread is inside a C library. Runs in a thread."""
        while True:
            readable, _, _ = select.select([pipe], [], [], 1.0)
            if not readable:
                self._obey_file()
                continue
            read = os.read(pipe, 1)
            if not read:
                os.close(pipe)
                return
            number = read[0]
            # Python writes the number of every signal with a handler, not only of these.
            if number in STOPPING:
                # Time for the main thread to run the handler, or to hand over to `StopRequests`, which clears the pipe.
                time.sleep(SECONDS_FOR_THE_HANDLER)
                if self._pipe is not None and not self.leaving:
                    leave(number)

    def _obey_file(self) -> None:
        if self._pipe is None or self._stop_file is None or self.leaving:
            return
        if self._stop_file.exists():
            # Otherwise the file would stop the next start too.
            with suppress(OSError):
                self._stop_file.unlink()
            leave(0)


EARLY = EarlyStop()
os.register_at_fork(after_in_child=EARLY.forget)


def leave_when_asked() -> None:
    """Let a stop end this process at once with exit code 75, until ``StopRequests`` takes over.

    Call it at the start of a recipe, on its main thread, before anything slow. Does nothing on another thread.
    """
    if threading.current_thread() is threading.main_thread():
        if _launcher_is_gone():
            leave(signal.SIGTERM)
        end_with_the_launcher()
        EARLY.install()


def look_for_stop_file(directory: Path) -> None:
    """Obey the ``STOP`` file of a run directory until ``StopRequests`` takes over. Main process."""
    EARLY.look_for(directory / STOP_FILE)


def ignore_stops() -> None:
    """Ignore SIGTERM and the like: during the interpreter's shutdown one would make a finished run count as killed."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def listened() -> list[signal.Signals]:
    """Return the signals that ask for a stop. SIGHUP is left out if it is ignored, as under nohup."""
    numbers: list[signal.Signals] = list(STOPPING)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return numbers


# ------------------------------------------------------------------------------------------- commands without training
class _Stopped(BaseException):
    """Raised by a signal, with its number. No ``except Exception`` catches it."""


@contextmanager
def stoppable(text: str) -> Generator[None]:
    """Make Ctrl-C, SIGTERM or SIGHUP in the body print ``text`` and exit with 128 + signal. Main thread only.

    Every ``finally`` in the body runs first, so that temporary folders are deleted.
    """

    times = [-math.inf]

    def stop(number: int, _: FrameType | None) -> None:
        times.append(time.monotonic())
        # One Ctrl-C may come twice, from terminal and launcher, and must not interrupt the cleanup. A later one counts:
        # Python drops an exception in a callback, such as those around a fork.
        if times[-1] - times[-2] > 2:
            raise _Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # nohup makes the process ignore SIGHUP, and a shell makes one in the background ignore SIGINT.
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    except _Stopped as stopped:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        if os.environ.get("RANK", "0") == "0":
            print(text, file=sys.stderr, flush=True)
        raise SystemExit(128 + stopped.args[0]) from None
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)
