"""``metrics.jsonl``: one JSON object a line, appended whole, repaired after a crash; and small JSON files.

The schema is in ``docs/metrics.md``. Nothing here is collective, and nothing imports torch: reading is fast.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from accel_train.atomic_files import replace_file

logger = logging.getLogger(__name__)

EVENTS = ("environment", "config", "resume", "train", "evaluation", "checkpoint", "warning", "end")

TRAIN_FIELDS = (
    "loss",
    "epoch",
    "lr",
    "grad_norm",
    "global_batch_size",
    "samples_per_second",
    "tokens_per_second",
    "step_seconds",
    "data_wait_fraction",
)
"""What every training line has beside ``event``, ``step`` and ``time``."""

REWOUND = ("train", "evaluation")
"""Events of steps that a run resumed at an earlier step does again."""

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no such numbers: they are written as these strings, which ``float()`` reads back."""


def plain(value: object) -> Any:
    """``value`` as JSON can hold it. A tensor becomes a number or nested lists, which waits for its device.

    Floats keep every digit (``repr``); non-finite ones become the strings of ``NON_FINITE``; what JSON does
    not know (paths, enums, dtypes) becomes its text.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(float(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in cast(list[Any], value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    to_list = getattr(value, "tolist", None)
    return plain(to_list()) if callable(to_list) else str(value)


def encode(record: Mapping[str, object]) -> bytes:
    """One line, newline included; valid JSON whatever the values are."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"


class LineWriter:
    """Appends records to one file, each with a single ``os.write``. Never raises for a failing disk.

    A line is in the kernel's hands when ``write`` returns: it outlives a crash of the process, though not a
    loss of power. The file is opened for each line, so a directory that comes back is written to again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False
        self._torn = _ends_torn(path)

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record. The first failure is a warning, later ones are silent; each call tries."""
        line = (b"\n" if self._torn else b"") + encode(record)
        try:
            written = _append(self._path, line)
            if written < len(line):
                self._torn = True
                raise OSError(f"wrote {written} of {len(line)} bytes")
            self._torn = False
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = "%s cannot be written (%s); training goes on, lines are lost until it can be"
                logger.warning(text, self._path, error)


def _append(path: Path, line: bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        return os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def repair_metrics(path: Path, step: int) -> int:
    """Make the file that of a run which stands at ``step``; returns the number of lines dropped.

    Drops training and evaluation lines beyond ``step``, which will be written again, and torn lines. All
    other lines stay, byte for byte. The file is replaced atomically (temporary file, fsync, rename) and only
    where something changes. Main process only; raises ``OSError`` where it cannot write.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        lines = file.readlines()
    kept = [line for line in lines if _stays(line, step)]
    whole = [line if line.endswith(b"\n") else line + b"\n" for line in kept]
    if whole != lines:
        replace_file(path, b"".join(whole))
    return len(lines) - len(kept)


def _stays(line: bytes, step: int) -> bool:
    record = _parse(line)
    if record is None:
        return False
    at = record.get("step")
    return not (record.get("event") in REWOUND and isinstance(at, int) and at > step)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return cast(dict[str, Any], record) if isinstance(record, dict) else None


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every record, in the order of the file; for any process, also while the run writes.

    A torn line (the last one of a run that was killed, or one that met a full disk) is left out. Numbers
    that were not finite are floats again.
    """
    with Path(path).open("rb") as file:
        records = [record for record in map(_parse, file) if record is not None]
    for record in records:
        record |= {k: NON_FINITE[v] for k, v in record.items() if isinstance(v, str) and v in NON_FINITE}
    return records


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a small JSON file, such as ``evaluation.json``, atomically. Main process only."""
    text = json.dumps(plain(values), indent=2, ensure_ascii=False, allow_nan=False)
    replace_file(path, text.encode("utf-8", "replace") + b"\n")
