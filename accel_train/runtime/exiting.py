"""Start and exit of a recipe or command: the fast path before its imports, exit codes, and how usage errors are
printed."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn, TextIO

from accel_train.config import MendedError, UsageError, requested_output_dir
from accel_train.launch_files.parents import EXIT_CODE_VARIABLE, launcher_with_traceback

SECONDS_TO_BE_HEARD = 5
"""Delay of the other local ranks after a usage error. torchrun ends all of them when the first one exits."""
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: saved; start the same command again to resume."""
EXIT_AGAIN = 76
"""Reported to ``accel-train launch`` in place of 75 by a process asking for a new start at once."""
EXIT_ASKED = 77
"""Reported in place of 75 by a process stopped on request before its first step."""
STARTED_AGAIN_VARIABLE = "ACCEL_TRAIN_STARTED_AGAIN"
"""Set by ``accel-train launch`` for a start continuing the run of the same command. Removed by ``one_run``."""

current_run = ExitStack()
"""Cleanup of the run in this process."""
unfinished: list[str] = []
"""Runs in this process that ``loop.finish`` has not found finished. After one, ``main`` may only return 75."""
_imports = ExitStack()
"""Callbacks for the end of a recipe's imports."""
_continues = False
"""The run in this process continues an earlier start of the same command."""
_recipe: str | None = None
"""File of the ``main`` of the run in this process."""


class StartAgain(RuntimeError):
    """The run cannot go on in this process. Its directory has everything for a new start.

    ``one_run`` starts it again if there is one process. Several processes end with exit code 75.
    """


def started_again() -> bool:
    """Return True in a start continuing the run of its own command: ``--overwrite`` was obeyed already."""
    return _continues


def recipe_file() -> str | None:
    """Return the absolute path of the file with the ``main`` of ``one_run``, else of this process's script.

    None where there is no file: in a cell of a notebook.
    """
    found = _recipe or getattr(sys.modules.get("__main__"), "__file__", None)
    if found is None or not Path(found).is_file():
        return None
    return found


def one_run(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorate a recipe's ``main``: release the process-wide state of the run, even after an error.

    Releases the lock on its directory, its log handlers and, with one process, Accelerate's shared state. A notebook or
    a sweep may then call ``main`` again. Failures are logged before. Several processes keep their process group. Raises
    ``UsageError`` after a ``main`` that does not return the exit code of ``loop.finish``.
    """

    # Resolved now: the path may be relative, and the recipe may change its directory.
    code = getattr(inspect.unwrap(main), "__code__", None)
    file = code and os.path.abspath(code.co_filename)

    @functools.wraps(main)
    def run(argv: Sequence[str]) -> int:
        global _continues, _recipe
        _recipe = file
        unfinished.clear()
        # Applies to this run only: not to processes it starts, nor to the next run in this process.
        _continues = os.environ.pop(STARTED_AGAIN_VARIABLE, None) is not None
        try:
            while True:
                try:
                    with current_run:
                        return _checked(main(argv))
                except StartAgain as again:
                    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                        raise
                    print(f"{again}: starting again", file=sys.stderr, flush=True)
                # The error is gone by now, and with it the frames that held the model.
                _free_memory()
                # The next round resumes, even if the command says --overwrite (`policy.of_this_start`).
                _continues = True
        finally:
            _continues = False
            _recipe = None

    return run


def _checked(code: object) -> int:
    """Return the exit code that ``main`` returned. Raises ``UsageError`` if a stop would be taken for the end."""
    if isinstance(code, int) and (not unfinished or code == EXIT_PREEMPTED):
        return code
    raise UsageError(
        f"main returned {code!r}, and the exit code of loop.finish{''.join(f' for {run}' for run in unfinished)} is "
        "required; end it with return loop.finish(training), and start the same command again: the run is kept"
    )


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def begin_run() -> ExitStack:
    """Clean up after an earlier run of this process and return the empty ``current_run``.

    Raises ``UsageError`` outside the main thread, because Python delivers signals to the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"a run in thread {threading.current_thread().name!r}: a run handles signals and changes its process, so "
            "the main thread is required; call main() there, one run after the other, or start a process for each"
        )
    current_run.close()
    return current_run


def run_main(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run a recipe: call ``main(argv)`` and exit with its code, as ``exit_with`` does.

    Until there is something to save, a stop (SIGTERM, SIGUSR1, Ctrl-C, the launcher's death) ends the process at once
    with exit code 75.
    """
    # Imported late, so that a command that trains nothing does not pay for it.
    from accel_train.runtime.early_stop import leave_when_asked

    _imports.close()
    # What was imported stays until the end, so collections need not look at it: 0.5 s of CPU before the first step.
    gc.freeze()
    leave_when_asked()
    # Overwritten by the real code. Without it the launcher takes a crash for a stop during the imports. Not earlier,
    # because a process that torchrun ends just before the handler is set has not failed.
    report_exit_code(1)
    exit_with(main)


def before_imports() -> None:
    """Print the help asked for on the command line and exit with code 0, if an earlier start has written the text.

    A recipe calls it before its other imports, which take seconds. Without such a text ``load_config`` writes one. The
    garbage collector is off until ``run_main``: nothing that modules create is garbage.
    """
    # Imported late, so that other commands do not pay for it.
    from accel_train.options import help_cache

    text = help_cache.find()
    if text is not None:
        exit_with(lambda _: print(text, end=""))
    if gc.isenabled():
        gc.disable()
        _imports.callback(gc.enable)


def exit_with(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Call ``main(argv)`` and exit with its code. A ``UsageError`` is reported as text, with its exit code.

    Launchers turn a child's 2 into 1, so the text names the code. Before the processes are connected all of them meet
    the same error, and torchrun ends all when the first one exits: local rank 0 reports first, the others wait.
    """
    asks_again = False
    is_first = STARTED_AGAIN_VARIABLE not in os.environ
    try:
        code = main(sys.argv[1:]) or 0
    except MendedError as error:
        _report(f"error (exit code {EXIT_PREEMPTED}: start the same command again): {error}")
        code = EXIT_PREEMPTED
        # Only once: a disk that damages what is written would cause restarts for ever.
        asks_again = is_first
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and not _processes_are_connected():
            # Long enough for local rank 0 to be heard first, and short beside any start.
            time.sleep(SECONDS_TO_BE_HEARD)
        _report(f"error ({error.summary}): {error}")
        code = error.exit_code
    except SystemExit as left:
        # argparse exits with 2, and with 0 after --help.
        if not isinstance(left.code, int):
            raise
        code = left.code
    except StartAgain as again:
        _report(f"{again} (exit code {EXIT_PREEMPTED}: start the same command again)")
        code = EXIT_PREEMPTED
        asks_again = True
    except BrokenPipeError:
        # `recipe --help | head`: the reader of this output has left. Any other pipe is a real error.
        if not discard_unread_output():
            raise
        code = 1
    except Exception as error:
        if _stopped_before_the_first_step():
            # The error may follow from the stop, as in a collective without the processes that have left.
            code = EXIT_PREEMPTED
        elif _leaves_without_teardown():
            # Python would print the same, and then wait in gloo's teardown for a host that is gone.
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
        else:
            raise
    if code == EXIT_PREEMPTED and not asks_again and _rank() == "0":
        launcher = launcher_with_traceback()
        if launcher is not None:
            print(_ignorable(launcher, "this run has stopped as it was asked to"), file=sys.stderr, flush=True)
    _leave(int(code), reported=EXIT_AGAIN if asks_again else int(code))


def discard_unread_output() -> bool:
    """Discard further output to standard output and error, each if it is a pipe without a reader.

    Returns True if standard output is one.
    """
    # `recipe 2>&1 | head` leaves neither a reader.
    _discard_if_unread(sys.stderr)
    return _discard_if_unread(sys.stdout)


def _is_written(stream: TextIO) -> bool:
    """Flush a stream. Returns False if output was lost, but not if its reader left after all of it was written."""
    try:
        stream.flush()
    except OSError as error:
        lose_output(stream, error)
        return False
    _discard_if_unread(stream)
    return True


def lose_output(stream: TextIO, error: OSError) -> None:
    """Say why a stream cannot be written, unless its reader has left, and discard what follows."""
    if not isinstance(error, BrokenPipeError):
        with suppress(OSError):
            print(f"standard output: cannot be written ({error.strerror})", file=sys.stderr, flush=True)
    # Without this, Python would fail once more when it flushes at exit.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _discard_if_unread(stream: TextIO) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        unread = any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        # Captured output of a notebook or a test has no file descriptor.
        return False
    if unread:
        lose_output(stream, BrokenPipeError())
    return unread


def _report(text: str) -> None:
    """Write to the terminal, to the log of the run if there is one, and to torchrun's error file.

    torchrun repeats the text below its traceback.
    """
    shown = text
    if (rank := _rank()) != "0":
        shown = f"[rank {rank}] {text}"
    launcher = launcher_with_traceback()
    if launcher is not None:
        shown += "\n" + _ignorable(launcher, "the error is the one above")
    print(shown, file=sys.stderr, flush=True)
    _log(text)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": text, "errorCode": 2, "extraInfo": extra}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _ignorable(launcher: str, why: str) -> str:
    return f"(what follows is a report of {launcher}: it can be ignored, {why})"


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _log(text: str) -> None:
    """Write to the log of this process, or to its file in an existing output directory if logging is not set up."""
    root = logging.getLogger()
    handlers = [handler for handler in root.handlers if isinstance(handler, logging.FileHandler)]
    # Recognised by name, because a notebook or a test may have file handlers of its own.
    own = [h for h in handlers if Path(h.baseFilename).name.startswith("rank_")]
    if own:
        record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, "%s", (text,), None)
        for handler in own:
            handler.handle(record)
        return
    directory = requested_output_dir()
    # A refused start must not write into the log of a running one. Looked up instead of imported, as further below.
    lock = sys.modules.get("accel_train.store.lock")
    if directory is None or (lock is not None and lock.holder_of(directory)):
        return
    path = directory / "logs" / f"rank_{_rank()}.log"
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    # The start may have been refused for this directory, with a name that no file system accepts.
    with suppress(OSError, ValueError):
        if path.is_file():
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                print(f"{when} ERROR {__name__}: {text}", file=file)


def report_exit_code(code: int) -> None:
    """Report to ``accel-train launch``, if it started this process. The last report of a rank counts.

    Safe in a signal handler.
    """
    if path := os.environ.get(EXIT_CODE_VARIABLE):
        # All ranks of a host append to the same file, each line in one write.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{_rank()} {code}\n".encode())
        os.close(file)


def reported_exit_code(path: Path, *, stopped: bool) -> int | None:
    """Combine the reports of the ranks of a failed launch. None if no rank reached ``run_main``.

    ``stopped`` means that the launcher forwarded a stop. Otherwise a rank that reports 75 may only have been ended by
    torchrun after another one failed, which ``EXIT_ASKED`` rules out.
    """
    if not path.exists():
        return None
    # A later report of a rank replaces its earlier one.
    by_rank = dict(line.split() for line in path.read_text().splitlines())
    codes = {int(code) for code in by_rank.values()}
    if EXIT_ASKED in codes:
        codes = codes - {EXIT_ASKED} | {EXIT_PREEMPTED}
        stopped = True
    # Wrong usage explains everything else. After a stop the failures of the others are its consequences, as they are
    # of a process that asks for a new start.
    preference = (2, EXIT_PREEMPTED, EXIT_AGAIN, 1) if stopped else (2, EXIT_AGAIN, 1, EXIT_PREEMPTED)
    for code in preference:
        if code in codes:
            return code
    # An exit code that only the recipe defines.
    return max(codes, default=None)


def _leave(code: int, reported: int) -> NoReturn:
    """Exit with all output written. Several CPU processes exit at once, without tearing torch down."""
    from accel_train.runtime.early_stop import ignore_stops

    ignore_stops()
    report_exit_code(reported)
    logging.shutdown()
    if not _is_written(sys.stdout):
        code = code or 1
    _is_written(sys.stderr)
    if _leaves_without_teardown():
        os._exit(code)
    raise SystemExit(code)


def _leaves_without_teardown() -> bool:
    """Return True for one of several CPU processes.

    gloo's threads race with the shutdown of the interpreter and abort now and then (torch 2.13), which would fail a
    finished run. If a host is cut off, the shutdown waits for it for ever.
    """
    torch = sys.modules.get("torch")
    # Compared as text: the start may have been refused because the variable is not a number.
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    return several and torch is not None and not torch.accelerator.is_available()


# Modules are looked up, not imported: a command without torch must not pay for its import to exit.
def _stopped_before_the_first_step() -> bool:
    signals = sys.modules.get("accel_train.runtime.signals")
    return signals is not None and signals.stopped_before_the_first_step()


def _processes_are_connected() -> bool:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
