"""Sources of rows: the bundled demo, files of every format, saved datasets and the Hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from accel_train.config import UsageError, expand_path
from accel_train.data.tables.row_blocks import RowBlocks, SampleBy, dataset_rows, file_rows
from accel_train.data.tables.row_files import files_of
from accel_train.data.tables.text_sources import hub_dataset, is_saved_dataset, saved_dataset
from accel_train.domains.language import rows
from accel_train.store.pretrained_base import remembered_sha256

DEMO_FILE = Path(__file__).parents[1] / "text" / "demo" / "shakespeare.txt"


def open_rows(path: str, *, option: str, split: str, text_column: str, sample_by: SampleBy, cache: Path) -> RowBlocks:
    """Find the rows of ``path``. Hashes the files, which identify what is cached, and reads none of their rows.

    ``split`` names a split of a saved or Hub dataset. Raises ``UsageError`` for what is no source.
    """
    sha256 = partial(remembered_sha256, cache=cache)
    if path != "demo" and rows.is_hub_id(path):
        return dataset_rows(hub_dataset(path, split), path, split, sha256)
    source = DEMO_FILE if path == "demo" else expand_path(path)
    if is_saved_dataset(source):
        return dataset_rows(saved_dataset(source, split), path, split, sha256)
    files = [source] if path == "demo" else files_of(option, path, source)
    if split != "train":
        raise UsageError(f"--data.split {split!r} has no effect with {option} {path!r}: files have no splits.")
    return file_rows(option, files, [text_column, *rows.FIELDS], sample_by, sha256)
