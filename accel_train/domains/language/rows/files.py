"""Find files of rows in every format: a file, a folder or a glob."""

from __future__ import annotations

from pathlib import Path

from accel_train.config import UsageError
from accel_train.data.tables.formats import KINDS
from accel_train.data.tables.run_files import listed, without_run_files


def files_of(option: str, path: str, source: Path) -> list[Path]:
    """Return the files of a file, folder or glob, sorted by name, without those that runs have written."""
    files = listed(source)
    if not files and not source.is_dir():
        raise UsageError(f"{option} {path!r}: {source} matches no file. Give a pattern such as 'data/*.parquet'.")
    # A file given by its own name is always meant.
    files = files if files == [source] else without_run_files(files)[0]
    if not files[:1] or files[0].exists():
        kinds = KINDS.keys() - {".json"} if source.is_dir() else KINDS.keys()
        known = [file for file in files if file.suffix in kinds and file.is_file()]
        if known:
            return known
        raise UsageError(
            f"{option} {path!r} is not a source of rows. Give 'demo', a file, folder or glob of files ending in "
            f"{', '.join(KINDS)} (the last only by its own name or a glob), a folder made by dataset.save_to_disk, or "
            "a Hub id, or convert the data to JSONL."
        )
    raise UsageError(f"{option} {path!r}: {source} does not exist. Give a file, folder or glob that exists.")
