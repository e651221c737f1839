"""``accel-train report``: one HTML file about one or several runs, which makes no network requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from accel_train.config import UsageError, expand_path, refuse_unwritable
from accel_train.store.atomic_files import replace_file
from accel_train.store.names import METRICS_FILE
from accel_train.watching.html_report.page import GENERATOR, page_html
from accel_train.watching.html_report.tables import ReportedRun
from accel_train.watching.reading import find_directories, read_files
from accel_train.watching.run_files import MetricsFile
from accel_train.watching.run_state import state_of
from accel_train.watching.status import condition_of
from accel_train.wording import readable_size


def report(places: Sequence[str], output: str) -> int:
    """Write the report and print its path. The runs are only read, and may still be training."""
    path = expand_path(output)
    _refuse_output(path)
    directories = find_directories(places)
    # One moment for all runs, so that their ages are comparable.
    now = time.time()
    runs: list[ReportedRun] = []
    for directory in directories:
        files = read_files(directory, MetricsFile(directory / METRICS_FILE), now)
        state = state_of(files, condition_of(files))
        runs.append(ReportedRun(_name(directory, directories), files, state))
    # A file name may have bytes that are not valid text.
    content = page_html(runs).encode("utf-8", "replace")
    with refuse_unwritable(f"--output {path}", "give a file in a directory with write access"):
        replace_file(path, content)
    print(f"written: {path}, {readable_size(len(content))}")
    return 0


def _refuse_output(path: Path) -> None:
    """Raise ``UsageError`` if no file can be at ``path``, or if one is there that is not a report."""
    if path.is_dir():
        raise UsageError(f"--output {path}: is a directory; give the name of a file, such as {path}/report.html")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: {path.parent} does not exist; make it, or give another file")
    # An earlier report may be replaced, but no other file.
    if path.exists() and not _is_report(path):
        raise UsageError(f"--output {path}: exists and is not a report of accel-train; give another file")


def _is_report(path: Path) -> bool:
    # Reading a pipe would wait for its writer.
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            # The mark is in the head of the page, and a report may be large.
            return GENERATOR.encode() in file.read(1000)
    except OSError:
        return False


def _name(directory: Path, directories: Sequence[Path]) -> str:
    """Return the name of the directory, or its path if another run has the same name."""
    same = [other for other in directories if other.name == directory.name]
    if len(same) == 1:
        return directory.name
    return str(directory)
