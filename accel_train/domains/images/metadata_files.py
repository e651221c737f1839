"""Captions in ``metadata.jsonl`` or ``metadata.csv``, as in the ImageFolder of ``datasets``.

Rows name pictures below the folder of their file, by ``file_name``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unicodedata import normalize

from accel_train.config import UsageError
from accel_train.data.tables.json_rows import RepeatedKeyError, parse_json
from accel_train.domains.images.sources import (
    SHOWN_NAMES,
    Entry,
    FileBytes,
    LeftOut,
    Listing,
    Source,
    caption_of_row,
    choice_notices,
    read_regular,
)
from accel_train.wording import shortened


class _Rows:
    """Pictures and omissions of the files of rows of one tree."""

    def __init__(self, folder: Path, pictures: Sequence[Path], source: Source) -> None:
        self.folder = folder
        self.source = source
        self.known = set(pictures)
        # macOS writes an accent as a character of its own, and most programs do not.
        self.composed = {normalize("NFC", str(picture)): picture for picture in pictures}
        self.entries: list[Entry] = []
        self.left_out: list[LeftOut] = []
        self.named_by: dict[Path, Path] = {}
        self.twice: list[str] = []
        """Rows whose picture another file names."""
        self.fields: set[str] = set()

    def add(self, file: Path, place: str, row: Mapping[str, Any]) -> None:
        """Add a row of ``file``, unless another file has named its picture."""
        self.fields |= row.keys()
        name = _file_name(row, place, self.source)
        picture = self._picture(file.parent / name)
        if not _is_inside(name):
            self.left_out.append(LeftOut(place, "file_name leaves the folder", repr(name)[:80]))
        elif picture is None:
            self.left_out.append(LeftOut(place, "caption without a picture", f"no {name[:80]}"))
        elif self.named_by.setdefault(picture, file) != file:
            self.twice.append(place)
        else:
            option = self.source.options.get("caption_column")
            caption = caption_of_row(row, self.source.caption_column, place, option)
            if isinstance(caption, LeftOut):
                self.left_out.append(caption)
            else:
                self.entries.append(Entry(picture.relative_to(self.folder).as_posix(), caption, FileBytes(picture)))

    def _picture(self, path: Path) -> Path | None:
        return path if path in self.known else self.composed.get(normalize("NFC", str(path)))

    def notices(self) -> list[str]:
        """Return a line for each choice among rows."""
        lines = choice_notices(self.fields, self.source)
        if self.twice:
            lines.append(
                f"{len(self.twice):,} rows name pictures that a file in a folder above also names; that one is read: "
                f"{shortened(self.twice, SHOWN_NAMES)}"
            )
        return lines


def list_rows(folder: Path, metadata: Sequence[Path], pictures: Sequence[Path], source: Source) -> Listing:
    """List the pictures that rows name. Pictures below the folder of a file that no row names are left out.

    ``metadata`` are the files, outer folders first. A picture belongs to the first file that names it.
    """
    rows = _Rows(folder, pictures, source)
    for file in metadata:
        for place, row in _rows(file, file.relative_to(folder).as_posix(), source, rows.left_out):
            rows.add(file, place, row)
    by_folder = {file.parent: file for file in metadata}
    for picture in pictures:
        if picture not in rows.named_by:
            nearest = next(by_folder[parent] for parent in picture.parents if parent in by_folder)
            rows.left_out.append(LeftOut(picture.relative_to(folder).as_posix(), f"not named in {nearest.name}"))
    return Listing(rows.entries, rows.left_out, rows.notices())


def _rows(file: Path, named: str, source: Source, left_out: list[LeftOut]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (file:line, row). Raises ``UsageError`` for an unreadable file."""
    try:
        content = read_regular(file).removeprefix(b"\xef\xbb\xbf")
        if file.suffix == ".csv":
            # As a list, so that errors in the file are found before the first row is used.
            yield from list(_csv_rows(content.decode(), named, left_out))
        else:
            yield from _json_rows(content, named, left_out)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{source.named}: {file} cannot be read: {error}. Correct or remove it.") from None


def _json_rows(content: bytes, named: str, left_out: list[LeftOut]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows of JSONL. Lines other than JSON objects are left out."""
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{named}:{number}"
        try:
            row: Any = parse_json(line.decode("utf-8", "surrogatepass"))
        except RepeatedKeyError as error:
            left_out.append(LeftOut(place, "a key given twice", str(error)[:80]))
            continue
        # Also UnicodeDecodeError, which is a ValueError. A long line of brackets exhausts the stack.
        except (ValueError, RecursionError) as error:
            left_out.append(LeftOut(place, "not JSON", str(error)[:80]))
            continue
        if isinstance(row, dict):
            yield place, cast("dict[str, Any]", row)
        else:
            left_out.append(LeftOut(place, "not a JSON object"))


def _csv_rows(text: str, named: str, left_out: list[LeftOut]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield rows of CSV below its header. Rows whose number of values differs from that of columns are left out."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = next(reader, [])
    if len(set(header)) < len(header):
        raise csv.Error(f"two columns have the same name: {header}")
    for values in reader:
        place = f"{named}:{reader.line_num}"
        if len(values) == len(header):
            yield place, dict(zip(header, values, strict=True))
        elif values:
            detail = f"{len(values)} values, {len(header)} columns; put a text with commas in double quotes"
            left_out.append(LeftOut(place, "not as many values as columns", detail))


def _file_name(row: Mapping[str, Any], place: str, source: Source) -> str:
    name = row.get("file_name")
    if not isinstance(name, str):
        raise UsageError(
            f"{source.named}: {place} has no text in 'file_name'; its fields are {sorted(row)}. Each row must name its "
            "picture below the folder."
        )
    # Prefixed to names by `find` and some tools.
    return name.removeprefix("./")


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts
