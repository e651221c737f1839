"""How a process of a recipe or command ends: its exit code, and the text of a wrong usage where a person reads it."""

from __future__ import annotations

import functools
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
from typing import NoReturn

from accel_train.config import UsageError, requested_output_dir

SECONDS_TO_BE_HEARD = 5
EXIT_CODE_VARIABLE = "ACCEL_TRAIN_EXIT_CODE_FILE"
"""Names the file in which a worker tells ``accel-train launch`` its exit code, which torchrun would turn into 1."""
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: saved, start again to go on."""


current_run = ExitStack()
"""What the run of this process gives back at its end."""


def one_run(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorate a recipe's ``main``: however it ends, what the run took of the process is given back.

    The lock on its directory, the handlers of its logs and, with one process, Accelerate's shared state: a notebook or
    a sweep may call ``main`` again. A failure is in the log by then. Several processes leave their group alone.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str]) -> int:
        with current_run:
            return main(argv)

    return run


def begin_run() -> ExitStack:
    """``current_run``, emptied: what an earlier run of this process left is given back first.

    Raises ``UsageError`` in a thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"a run in thread {threading.current_thread().name!r}: a run takes signals and the state of its process, "
            "so the main thread is required; call main() there, one run after the other, or start a process for each"
        )
    current_run.close()
    return current_run


def run_main(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run a recipe: call ``main(argv)`` and exit with its code, as ``exit_with`` does.

    A stop (SIGTERM, SIGUSR1, Ctrl-C, the launcher's death) that comes before there is anything to save ends the process
    at once with exit code 75.
    """
    from accel_train.runtime.early_stop import leave_when_asked

    report_exit_code(1)  # until something better is known: a launcher tells a crash from a stop during the imports
    leave_when_asked()
    exit_with(main)


def exit_with(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Call ``main(argv)`` and exit with its code; a ``UsageError`` becomes its text and exit code 2.

    Launchers turn a child's 2 into 1, so the text says which it was. Before the processes know of each other all of
    them meet the same error, and torchrun ends all when the first leaves: one a host is heard first, the others wait.
    """
    try:
        code = main(sys.argv[1:])
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and not _processes_are_connected():
            time.sleep(SECONDS_TO_BE_HEARD)
        _report(f"error (wrong usage, exit code 2): {error}")
        code = 2
    except SystemExit as left:  # argparse's 2, 0 after --help
        if not isinstance(left.code, int):
            raise
        code = left.code
    except BrokenPipeError:
        # `recipe --help | head`: the reader of this output has left. Any other pipe is a real error.
        if not _stdout_is_closed():
            raise
        code = 1
    except Exception:
        if not _stopped_before_the_first_step():
            raise
        code = EXIT_PREEMPTED
    _leave(int(code or 0))


def _stdout_is_closed() -> bool:
    """Return True if standard output is a pipe that nobody reads any more, and discard what follows."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        closed = any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        # Captured output of a notebook or a test has no file descriptor.
        return False
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _report(text: str) -> None:
    """Tell the terminal, the log of the run where there is one, and torchrun, which repeats it below its traceback."""
    rank = os.environ.get("RANK", "0")
    own = f"[rank {rank}] {text}" if rank != "0" else text
    launcher = _launcher()
    note = (
        f"\n(what follows is a report of {launcher}: it can be ignored, the error is the one above)" if launcher else ""
    )
    print(own + note, file=sys.stderr, flush=True)
    _log(text)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        seconds = str(int(time.time()))
        message = {"message": text, "errorCode": 2, "extraInfo": {"py_callstack": text, "timestamp": seconds}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _launcher() -> str | None:
    """Who started this process and answers its exit code 2 with a traceback."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    loud = {"-q", "--quiet"}.isdisjoint(words)
    programs = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
    return "accelerate launch" if loud and any(Path(word).name in programs for word in words[1:3]) else None


def _log(text: str) -> None:
    """Into the log of this process where the run is set up, else below the output directory where one is there."""
    record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, "%s", (text,), None)
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
    files = [h for h in handlers if Path(h.baseFilename).name.startswith("rank_")]
    for handler in files:
        handler.handle(record)
    directory = requested_output_dir()
    path = directory / "logs" / f"rank_{os.environ.get('RANK', '0')}.log" if directory else None
    if path and not files and path.is_file():
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        with suppress(OSError), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            print(f"{when} ERROR {__name__}: {text}", file=file)


def report_exit_code(code: int) -> None:
    """Tell ``accel-train launch``, if it started this process; the last word of each rank counts. Safe in a handler."""
    if path := os.environ.get(EXIT_CODE_VARIABLE):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{os.environ.get('RANK', '0')} {code}\n".encode())
        os.close(file)


def reported_exit_code(path: Path, *, stopped: bool) -> int | None:
    """What the ranks of a failed launch said, as one code; None where none of them came as far as ``run_main``.

    ``stopped``: the launcher passed a stop on. Otherwise a rank that leaves with 75 may only have been ended by
    torchrun because another one failed.
    """
    if not path.exists():
        return None
    codes = set(dict(line.split() for line in path.read_text().splitlines()).values())
    preference = ("2", "75", "1") if stopped else ("2", "1", "75")
    return next((int(code) for code in preference if code in codes), max(map(int, codes)))


def _leave(code: int) -> NoReturn:
    """Exit; several CPU processes leave at once, without tearing torch down.

    gloo's threads race with the interpreter's end and abort now and then (torch 2.13), which would fail a finished run.
    """
    report_exit_code(code)
    logging.shutdown()
    if _stdout_is_closed():
        code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    torch = sys.modules.get("torch")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch is not None and not torch.accelerator.is_available():
        os._exit(code)
    raise SystemExit(code)


def _stopped_before_the_first_step() -> bool:
    signals = sys.modules.get("accel_train.runtime.signals")
    return signals is not None and signals.stopped_before_the_first_step()


def _processes_are_connected() -> bool:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
