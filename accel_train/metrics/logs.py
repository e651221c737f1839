"""Python logging of a run: a quiet console on the main process, and full logs in ``logs/rank_N.log``."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TextIO

from accel_train.config import UsageError, disk_error
from accel_train.metrics.environment import command_line
from accel_train.runtime.exiting import discard_unread_output
from accel_train.runtime.hosts.lost import explain
from accel_train.wording import FILE_ONLY

logger = logging.getLogger(__name__)

# Loggers shown on the console from INFO. All others are shown from WARNING.
OWN = ("accel_train", "recipes", "__main__")

LINE = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"

WITH_A_CONSOLE = "huggingface_hub"
"""Logger with its own handler on stderr, on every process. Its messages also reach the root logger."""

_active: Logs | None = None


class Logs:
    """Handlers and hooks of ``setup_logging``, until ``close`` restores the previous ones.

    As a context manager it also logs the traceback of an exception.
    """

    def __init__(self, path: Path, handlers: list[logging.Handler]) -> None:
        self.path = path
        self._handlers = handlers
        self._root = logging.getLogger()
        self._level = self._root.level
        self._sys_hook = sys.excepthook
        self._thread_hook = threading.excepthook
        self._root.setLevel(min(self._level, logging.INFO) or logging.INFO)  # 0 is NOTSET
        for handler in handlers:
            self._root.addHandler(handler)
        twice = logging.getLogger(WITH_A_CONSOLE)
        self._second_console = twice.handlers
        twice.handlers = []
        logging.captureWarnings(True)
        sys.excepthook = _logging_hook(self._sys_hook)
        threading.excepthook = _logging_thread_hook(self._thread_hook)

    def close(self) -> None:
        global _active
        # A later `setup_logging` has closed this one already, and the later one's hooks must stay.
        if _active is not self:
            return
        _active = None
        sys.excepthook = self._sys_hook
        threading.excepthook = self._thread_hook
        logging.captureWarnings(False)
        self._root.setLevel(self._level)
        logging.getLogger(WITH_A_CONSOLE).handlers += self._second_console
        for handler in self._handlers:
            self._root.removeHandler(handler)
            with suppress(OSError):  # flushes the last lines, which fails on a full disk
                handler.close()

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            _log_uncaught(error)
        self.close()


def setup_logging(output_dir: Path, rank: int, world_size: int) -> Logs:
    """Send Python's logging, warnings and uncaught exceptions to ``output_dir/logs/rank_N.log``.

    Every process calls it once ``output_dir`` is known. No collective. A restart appends to the file after a header
    line. Only the main process writes to the console (stdout): messages of this project and its recipes from INFO,
    others from WARNING. A second call replaces the first. A ``UsageError`` is logged without traceback, a
    ``SystemExit`` not at all.
    """
    global _active
    if _active is not None:  # a notebook or test that starts a second run
        _active.close()
    path = log_file(output_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _RankFile(path, _header(rank, world_size))
    except OSError as error:
        _refuse_link_to_nowhere(output_dir)
        raise disk_error(error)(
            f"output_dir={str(output_dir)!r}: the log {path} cannot be opened ({error}); a directory writable by this "
            "user with free space is required: make it writable or give another --output_dir"
        ) from error
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        handlers.append(_Console(sys.stdout))
    _active = Logs(path, handlers)
    return _active


def _refuse_link_to_nowhere(output_dir: Path) -> None:
    """Refuse an output directory on a dangling symlink, of which the operating system says only that it exists."""
    for path in (output_dir / "logs", output_dir, *output_dir.parents):
        if path.is_symlink() and not path.exists():
            raise UsageError(
                f"output_dir={str(output_dir)!r}: {path} is a link to {path.readlink()}, which does not exist; a "
                "directory is required there: make it, delete the link, or give another --output_dir"
            )


def log_file(output_dir: Path, rank: int) -> Path:
    """Return the log of one process."""
    return output_dir / "logs" / f"rank_{rank}.log"


def _header(rank: int, world_size: int) -> str:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return f"===== {started} rank {rank} of {world_size}, pid {os.getpid()}: {command_line(sys.argv)}"


class _RankFile(logging.FileHandler):
    """Log file with timestamps in UTC, so that the files of several hosts merge by sorting."""

    def __init__(self, path: Path, header: str) -> None:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            print(header, file=file)
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        formatter = logging.Formatter(LINE, "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        self.setFormatter(formatter)
        self._failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Print one warning. Python would print a traceback per message, which floods the terminal on a full disk."""
        if not self._failed:
            self._failed = True
            print(f"warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


class _Console(logging.StreamHandler[TextIO]):
    """Console with short lines. Clears a progress bar before each line and redraws it after.

    A run continues without its console, as after ``recipe | head`` or when the terminal is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.addFilter(_is_for_console)

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name == "py.warnings":  # "path:line: UserWarning: text" with the line of source below
            text = text.strip().rsplit("\n  ", 1)[0]
        if record.levelno < logging.WARNING:
            return text
        return f"{record.levelname.lower()}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:  # never imported, so no bar can be on the screen
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Stop writing to the console after an ``OSError``. Any other error is that of one message."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        discard_unread_output()
        logging.getLogger().removeHandler(self)
        logger.warning("the console cannot be written (%s); what follows is only in this log", error)


def _is_for_console(record: logging.LogRecord) -> bool:
    if getattr(record, FILE_ONLY, False):
        return False
    package = record.name.split(".", 1)[0]
    lowest = logging.INFO if package in OWN else logging.WARNING
    return record.levelno >= lowest


def _log_uncaught(error: BaseException, where: str = "") -> None:
    """Log an exception to the files only. The console gets Python's own traceback."""
    if isinstance(error, UsageError):
        logger.error("wrong usage%s: %s", where, error, extra={FILE_ONLY: True})
        return
    # Explained here, because data, kernels and models call collectives in many places.
    explain(error)
    trace = (type(error), error, error.__traceback__)
    name = type(error).__name__
    logger.critical("uncaught %s%s", name, where, exc_info=trace, extra={FILE_ONLY: True})


SysHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
ThreadHook = Callable[[threading.ExceptHookArgs], object]


def _logging_hook(previous: SysHook) -> SysHook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _log_uncaught(error)
        # Replaces only Python's own hook, which would print a traceback. A custom hook gets the error unchanged.
        if isinstance(error, UsageError) and previous is sys.__excepthook__:
            print(f"error (wrong usage): {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    return hook


def _logging_thread_hook(previous: ThreadHook) -> ThreadHook:
    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread else "?"
            _log_uncaught(args.exc_value, f" in thread {name}")
        previous(args)

    return hook


def info(logger: logging.Logger, *lines: str) -> None:
    """Log each line as a message, to the console of the main process and the file of every process."""
    for line in lines:
        logger.info("%s", line)


def details(logger: logging.Logger, *lines: str) -> None:
    """Log each line as a message, to the file of every process only."""
    for line in lines:
        logger.info("%s", line, extra={FILE_ONLY: True})
