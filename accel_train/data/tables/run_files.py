"""Files that a run writes into its directory. They are not read as data, or a later start would see other data."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from accel_train.store.names import CONFIG_FILE, LOCK_FILE, OF_A_RUN, REPORT, RUN_FILE
from accel_train.wording import shortened

RUN_FOLDERS = ("checkpoints", "logs", REPORT)
"""Folders in the directory of a run. The report has curves and drawn pictures, which no later start must learn."""
OWN_FOLDERS = (*RUN_FOLDERS, "hub")
SHOWN = 4


def listed(source: Path) -> list[Path]:
    """Return the contents of a folder, the matches of a glob, or the file itself, sorted by name."""
    # Sorted, because the order of the files is the order of the samples on every machine.
    if source.is_dir():
        return sorted(source.iterdir())
    if source.exists() or not glob.has_magic(str(source)):
        return [source]
    return sorted(Path(name) for name in glob.glob(str(source), recursive=True))


def without_run_files(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Divide files into data and those that a run has written.

    Those of a run are recognised by their names in its directory. Other files there are data, as they were at the first
    start.
    """
    is_run = cache(_is_run)
    kept: list[Path] = []
    own: list[Path] = []
    for file in files:
        is_own = any(_is_own(file.relative_to(folder)) and is_run(folder) for folder in file.parents)
        # The log of a first start exists before the files that mark its directory as a run.
        is_log = file.parent.name == "logs" and file.match("rank_*.log")
        (own if is_own or is_log else kept).append(file)
    return kept, own


def run_file_notices(files: Iterable[Path]) -> list[str]:
    """Return a line that names the files of runs."""
    names = [str(file) for file in without_run_files(files)[1]]
    if not names:
        return []
    return [f"{len(names):,} files of runs are left out: {shortened(names, SHOWN)}"]


def _is_run(folder: Path) -> bool:
    # A start that died early leaves only its lock.
    return (folder / LOCK_FILE).exists() or all((folder / name).exists() for name in (RUN_FILE, CONFIG_FILE))


def _is_own(name: Path) -> bool:
    return str(name) in OF_A_RUN or (len(name.parts) > 1 and name.parts[0] in OWN_FOLDERS)
