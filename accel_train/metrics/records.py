"""``metrics.jsonl``, one JSON object per line, appended whole and repaired after a crash. Also small JSON files.

``docs/metrics.md`` has the schema. No function is a collective, and no torch is imported, so that reading is fast.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from accel_train.store import strict_json
from accel_train.store.atomic_files import replace_file, to_json
from accel_train.store.names import EVALUATION_FILE, OTHER_DATA

logger = logging.getLogger(__name__)

EVENTS = (
    "environment",
    "config",
    "resume",
    "train",
    "evaluation",
    "checkpoint",
    "bad_step",
    "memory",
    "out_of_memory",
    "rollback",
    "straggler",
    "replicas_differ",
    "plateau",
    "noise_scale",
    "warning",
    "end",
)

# Required fields of a training line, beside event, step and time.
TRAIN_FIELDS = (
    "loss",
    "epoch",
    "lr",
    "grad_norm",
    "global_batch_size",
    "samples_per_second",
    "step_seconds",
    "data_wait_fraction",
)

# Events written again by a run resumed at an earlier step.
REPEATED = ("train", "evaluation", "bad_step", "sample", "plateau", "noise_scale")

# Numbers that JSON lacks. They are written as these strings, and float() reads them back.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: object) -> Any:
    """Convert a value to JSON types. A tensor becomes a number or nested lists, with a wait for its device.

    Floats keep every digit (``repr``), and non-finite ones become the strings of ``NON_FINITE``. Any other type (paths,
    enums, dtypes) becomes its text.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return json.dumps(float(value))  # NaN, Infinity or -Infinity, as a string
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {str(key): plain(item) for key, item in items}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in cast(list[Any], value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    to_list = getattr(value, "tolist", None)  # tensors and numpy arrays, without importing either
    if callable(to_list):
        return plain(to_list())
    return str(value)


def encode(record: Mapping[str, object]) -> bytes:
    """Encode a record as a line of valid JSON, newline included."""
    text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


class LineWriter:
    """Appends records to a file, with a single ``os.write`` per call. Never raises if the disk fails.

    After ``write`` a line is in the kernel: it survives a crash of the process, but not a loss of power. Each write
    opens the file, so that a directory can disappear and return. Build it before other writers of the file start, since
    a half-written line looks like one torn by a crash.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False
        self._torn = _ends_torn(path)

    def write(self, *records: Mapping[str, object]) -> None:
        """Append records. Only the first failure is logged, and each call tries again."""
        line = b"".join(map(encode, records))
        if self._torn:  # ends the incomplete line of an earlier write
            line = b"\n" + line
        try:
            written = _append(self._path, line)
            # A full disk can take a part of a line without an error.
            if written < len(line):
                self._torn = True
                raise OSError(f"wrote {written} of {len(line)} bytes")
            self._torn = False
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = "%s cannot be written (%s); training continues, and lines are lost until it can be written"
                logger.warning(text, self._path, error)


def _append(path: Path, line: bytes) -> int:
    # O_APPEND, so that lines of the trainer and of other writers do not overwrite each other.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
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
    """Rewind the file to ``step`` and return the number of dropped lines.

    Drops torn lines, and lines of training, evaluations, bad steps, plateaus and noise beyond ``step``, since the run
    will write them again. All other lines stay byte for byte. A changed file is replaced atomically (temporary file,
    fsync, rename). Main process only. Raises ``OSError`` if the file cannot be written.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        lines = file.readlines()
    kept = [line for line in lines if _is_valid_at(line, step)]
    repaired = [line.removesuffix(b"\n") + b"\n" for line in kept]  # the last line may lack its newline
    if repaired != lines:
        replace_file(path, b"".join(repaired))
    return len(lines) - len(kept)


def rewind(path: Path, step: int) -> None:
    """Truncate a file whose lines have rising steps to those up to ``step``. Main process only.

    Read from the end, because it may be large. An error is a warning: lines beyond ``step`` then stay in it.
    """
    try:
        if not path.exists() or not path.stat().st_size:
            return
        with path.open("r+b") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = len(content)
                while end:
                    begin = content.rfind(b"\n", 0, end - 1) + 1
                    if _is_valid_at(content[begin:end], step):
                        break
                    end = begin
            file.truncate(end)
    except OSError as error:
        logger.warning("%s could not be rewound (%s); lines beyond step %d stay in it", path, error, step)


def _is_valid_at(line: bytes, step: int) -> bool:
    record = _parse(line)
    if record is None:
        return False
    if record.get("event") not in REPEATED:
        return True
    line_step = record.get("step")
    return not isinstance(line_step, int) or line_step <= step


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return cast(dict[str, Any], record)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read every record in file order. Any process may call it, also while the run writes.

    Torn lines, left by a killed run or a full disk, are skipped. Non-finite numbers become floats again.
    """
    with Path(path).open("rb") as file:
        return parse_lines(file)


def parse_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the records of whole lines, as ``read_metrics`` does."""
    records = [record for record in map(_parse, lines) if record is not None]
    for record in records:
        for name, value in record.items():
            if isinstance(value, str) and value in NON_FINITE:
                record[name] = NON_FINITE[value]
    return records


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a small JSON file, such as ``evaluation.json``, atomically. Main process only."""
    replace_file(path, to_json(plain(values)).encode("utf-8", "replace"))


def evaluated_report(report: Path, step: int) -> Path | None:
    """Return ``report`` or else its folder of other data, whichever has an evaluation at ``step``, or None."""
    for folder in (report, report / OTHER_DATA):
        with suppress(OSError, ValueError):
            if strict_json.read_object(folder / EVALUATION_FILE).get("step") == step:
                return folder
    return None


def read_evaluation(report: Path) -> dict[str, float]:
    """Return the metrics in ``evaluation.json``, non-finite ones as floats again. Empty without that file."""
    path = report / EVALUATION_FILE
    if not path.is_file():
        return {}
    metrics: dict[str, float] = {}
    for name, value in json.loads(path.read_text(encoding="utf-8")).items():
        if isinstance(value, str):
            value = NON_FINITE.get(value)
        if name == "step" or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)):
            metrics[name] = float(value)
    return metrics


Records = Sequence[Mapping[str, Any]]


def last_pass(records: Records, event: str) -> list[Mapping[str, Any]]:
    """Return the lines of ``event`` by rising step. Of a step repeated after a restart, the last line counts."""
    lines: list[Mapping[str, Any]] = []
    for record in records:
        step = record.get("step")
        if record.get("event") == event and isinstance(step, int):
            while lines and lines[-1]["step"] >= step:
                lines.pop()
            lines.append(record)
    return lines
