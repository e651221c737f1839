"""Listing of a source of pictures: pictures with captions, and omissions with their reasons.

A listing reads no picture. ``scanning`` reads each file once and leaves out unusable ones.
"""

from __future__ import annotations

import math
import re
import stat
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from accel_train.config import UsageError
from accel_train.domains.models.pictures.captions import on_one_line
from accel_train.wording import did_you_mean, nearest, shortened

CAPTION_COLUMNS = ("text", "caption")

OPTIONS = {name: f"--data.{name}" for name in ("split", "image_column", "caption_column", "caption_extension")}
"""Fields of a source and their options, in messages."""

NO_CAPTION = "picture without a caption"
"""Reason for leaving a picture out."""
CLASS_FOLDERS = (
    "If each class has a folder, its name can be the caption: write a metadata.csv with the columns file_name and text."
)
"""Remedy for pictures without captions."""

SHOWN_NAMES = 3
"""Number of names shown in a notice of omissions."""
KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
"""Descriptions of values of rows that are not text."""
NOT_REGULAR = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
"""Descriptions of paths that are not regular files."""


@dataclass(frozen=True)
class Source:
    """Location of pictures and captions."""

    path: str
    """Folder, parquet files, a folder of ``dataset.save_to_disk``, or a Hub id."""
    split: str = "train"
    """Split of a saved or Hub dataset."""
    image_column: str | None = None
    """Column of a table with the pictures. None: the only one that holds pictures."""
    caption_column: str | None = None
    """Column of a table, ``metadata.jsonl`` or ``metadata.csv`` with the captions. None: ``text`` or ``caption``."""
    caption_extension: str = ".txt"
    """Extension of the text file beside a picture, with the dot."""
    option: str = "--data.path"
    """Name of the path in messages."""
    options: Mapping[str, str] = field(default_factory=OPTIONS.copy)
    """Names of the other fields as options, in messages. Fields without an option are not in it."""

    @property
    def named(self) -> str:
        """The option and its value."""
        return f"{self.option} {self.path!r}"


class Bytes(Protocol):
    """Location of a picture's bytes. Can be pickled, for the workers of a loader."""

    def read(self) -> bytes: ...


@dataclass(frozen=True)
class FileBytes:
    """A file of its own."""

    path: Path

    def read(self) -> bytes:
        """Read the file. Raises ``OSError``."""
        return read_regular(self.path)


class Entry(NamedTuple):
    """A picture as its source lists it."""

    name: str
    """Path below the folder, or file and row of a table."""
    caption: str | None
    content: Bytes


class LeftOut(NamedTuple):
    """An unused picture or caption."""

    name: str
    reason: str
    """Why it is left out, in the same words for every case of the kind."""
    detail: str = ""


@dataclass(frozen=True)
class Listing:
    """Contents of a source."""

    entries: Sequence[Entry]
    left_out: Sequence[LeftOut] = ()
    notices: Sequence[str] = ()
    """Further lines for the log."""


def read_regular(path: Path) -> bytes:
    """Read a regular file. Raises ``OSError``, also for a named pipe, which would wait until somebody writes to it."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise OSError(f"{NOT_REGULAR.get(kind, 'something else')}, and a regular file is required")
    return path.read_bytes()


def caption_of_row(
    row: Mapping[str, Any], column: str | None, place: str, option: str | None = OPTIONS["caption_column"]
) -> str | LeftOut | None:
    """Return the caption of a row, from `column`, or from ``text`` or ``caption`` if `column` is None.

    Returns None if there is no caption: the value is null, or NaN, as tables write a missing text. Returns ``LeftOut``
    for a value that is not text, and for a text that no tokenizer takes.
    Raises ``UsageError`` for a `column` missing from the row.
    """
    if column is not None and column not in row:
        hint = did_you_mean(nearest(column, row))
        raise UsageError(f"{option} {column!r}: {place} has the fields {sorted(row)}{hint}. Name one of them.")
    columns = CAPTION_COLUMNS if column is None else (column,)
    for name in columns:
        value = row.get(name)
        if isinstance(value, str) and _has_surrogate(value):
            return LeftOut(place, "its caption is not text", f"{name!r} contains half of a surrogate pair")
        if isinstance(value, str):
            return on_one_line(value)
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            kind = KINDS.get(type(value), f"a {type(value).__name__}")
            return LeftOut(place, "its caption is not text", f"{name!r} is {kind}; text is required")
    return None


def _has_surrogate(text: str) -> bool:
    # Escapes in JSON can spell half of a surrogate pair.
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def choice_notices(fields: Collection[str], source: Source, *, one_column: bool = False) -> list[str]:
    """Return a line if two `fields` may hold captions and no column is chosen.

    With ``one_column`` only the first is read. Otherwise a row without a value there takes that of the second.
    """
    found = [name for name in CAPTION_COLUMNS if name in fields]
    if source.caption_column is not None or len(found) < 2:
        return []
    # A source without an option for the column has nothing to propose.
    option = source.options.get("caption_column")
    other = "" if option is None else f"; {option} chooses another"
    first, second = found
    if one_column:
        return [f"captions come from {first!r}; those of {second!r} are not read{other}"]
    return [f"captions come from {first!r}, and in rows without one from {second!r}{other}"]


def refuse_extension(extension: str, option: str) -> None:
    """Raise ``UsageError`` for an extension of caption files that is not a dot and one word."""
    if not re.fullmatch(r"\.[^./]+", extension):
        raise UsageError(
            f"{option} {extension!r}: a dot and one word are required, such as .txt or .caption. The caption of a.png "
            "is in a.txt."
        )


def is_saved_dataset(folder: Path) -> bool:
    """Return True for a folder of ``dataset.save_to_disk``."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def left_out_notices(left_out: Sequence[LeftOut]) -> list[str]:
    """Return a line for each reason, with its count and the first names. The most frequent first."""
    notices: list[str] = []
    counts = Counter(item.reason for item in left_out)
    for reason, count in counts.most_common():
        names = [_described(item) for item in left_out if item.reason == reason]
        notices.append(f"{count:,} left out, {reason}: {shortened(names, SHOWN_NAMES)}")
    return notices


def _described(item: LeftOut) -> str:
    return f"{item.name} ({item.detail})" if item.detail else item.name
