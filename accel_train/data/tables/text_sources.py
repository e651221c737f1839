"""Sources of text rows: JSON lines, tables, saved datasets and the Hub, with a count of their bad rows.

Every error names its place: file:line, or the source.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.data.tables.json_rows import parse_row

TABLE_FILES = (".parquet", ".csv")
BAD_ROWS_SHOWN = 5
"""Number of bad rows that a log shows with their places."""


class BadRows:
    """Counter of unusable rows. The first row beyond the limit raises ``UsageError``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.first: list[str] = []
        """Place and reason of the first ``BAD_ROWS_SHOWN`` rows."""

    def add(self, place: str, reason: str, option: str = "--data.path") -> None:
        """Count one row, or raise with its place and the reason. ``option`` names its source, if there are several."""
        self.count += 1
        if self.count > self.limit:
            before = ""
            if self.limit:
                before = f" ({self.limit} bad rows before it were left out)"
            raise UsageError(
                f"{option}: {place}: {reason}{before}. Correct the row, or raise --data.max_bad_rows "
                f"(now {self.limit}) to leave bad rows out."
            )
        self.first += [f"{place}: {reason}"][: BAD_ROWS_SHOWN - len(self.first)]

    def include(self, count: int, first: Sequence[str]) -> None:
        """Count rows that an earlier pass left out, the ``first`` of them with place and reason."""
        self.count += count
        self.first += first[: BAD_ROWS_SHOWN - len(self.first)]


def bad_row_notices(count: int, first: Sequence[str]) -> list[str]:
    """Return lines for the log: the number of rows left out, and where and why for the ``first`` of them."""
    if not count:
        return []
    lines = [f"{count:,} bad rows left out", *(f"bad row: {row}" for row in first)]
    # A cache may have been written without places.
    if first and count > len(first):
        lines.append(f"and {count - len(first):,} more bad rows")
    return lines


def is_saved_dataset(folder: Path) -> bool:
    """Return True for a folder written by ``save_to_disk`` of `datasets`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def has_saved_splits(folder: Path) -> bool:
    """Return True for a saved dataset with several splits, one of which must be named."""
    return (folder / "dataset_dict.json").is_file()


def json_rows(lines: Iterable[tuple[str, str]], bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) of each (place, line) that holds a JSON object. The others are counted in ``bad``."""
    for place, line in lines:
        row = parse_row(line)
        if isinstance(row, str):
            bad.add(place, row)
        else:
            yield place, row


def saved_dataset(folder: Path, split: str, option: str = "--data.path") -> Any:
    """Load a dataset written by ``save_to_disk``. If it has several splits, load the one named ``split``.

    One without splits is read whole: callers refuse a ``split`` that no source has (``has_saved_splits``).
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        # Damaged Arrow files raise half a dozen types.
        raise UsageError(
            f"{option} {str(folder)!r} cannot be read as a saved dataset ({type(error).__name__}: "
            f"{error}). Save it again with dataset.save_to_disk."
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise UsageError(
            f"{option}, --data.split {split!r}: {folder} has the splits {sorted(loaded)}. Name one of them."
        )
    return loaded[split]


def table(file: Path, texts: Sequence[str] = (), option: str = "--data.path") -> Any:
    """Read a whole table into a `datasets.Dataset`. In a CSV file, the columns in ``texts`` are read as text."""
    # Not with `datasets.load_dataset`: its cache is keyed by path and time, not by content.
    import datasets
    from pyarrow import parquet

    try:
        rows: Any = _csv_table(file, texts) if file.suffix == ".csv" else parquet.read_table(file)
        return datasets.Dataset(rows)
    except Exception as error:
        # Damaged files raise half a dozen types.
        raise UsageError(
            f"{option} {str(file)!r} cannot be read ({type(error).__name__}: {error}). "
            "Write it again, or convert it to JSONL."
        ) from None


def _csv_table(file: Path, texts: Sequence[str]) -> Any:
    import pyarrow
    from pyarrow import compute, csv

    # A quoted cell may hold line breaks, and one at the end of a piece that pyarrow reads must not end its row.
    parsing = csv.ParseOptions(newlines_in_values=True)
    # Without a given type, a column of numbers or dates would not be text.
    converting = csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
    rows: Any = csv.read_csv(file, parse_options=parsing, convert_options=converting)
    functions: Any = compute
    for number, name in enumerate(rows.column_names):
        # A column without any value becomes null, as it would without a given type.
        if name in texts and not functions.any(functions.not_equal(rows[name], "")).as_py():
            rows = rows.set_column(number, name, pyarrow.nulls(len(rows)))
    return rows


def content_key(text: str) -> bytes:
    """Hash the words alone. Texts that differ in case, space or punctuation have the same key."""
    # A text of punctuation alone has no words.
    words = " ".join(re.findall(r"\w+", text.casefold())) or text
    # Half a surrogate pair, which JSON can spell, has no UTF-8 of its own.
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()


def split_key(text: str) -> int:
    """Return 64 bits that decide the side of a text, and show if it repeats another.

    The upper half hashes the words, as `content_key`: texts that differ in signs alone are on the same side. The lower
    half also hashes the signs and the combining marks, in which words of Hindi or Thai differ: texts repeat each other
    if they differ in case, space or punctuation at most.
    """
    pattern = ASCII_SIGNS
    if not text.isascii():
        # An accent may be a separate character that looks the same.
        text = unicodedata.normalize("NFC", text)
        pattern = _signs()
    signs = " ".join(pattern.findall(text.casefold())) or text
    digest = hashlib.sha256(signs.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(content_key(text)[:4] + digest[:4], "big")


def held_out_below(fraction: float) -> int:
    """Return the bound below which `split_key` holds a text out, for a ``fraction`` of the texts."""
    return math.ceil(fraction * 2**32) << 32


MINUS_AND_NOT = r"-(?=\d)|(?<=\s)-(?=\s)|!(?==)|(?<!\w)!(?=[\w(])"
"""Hyphens and exclamation marks that are signs of formulas and code."""
ASCII_SIGNS = re.compile(rf"(?:[\w#%@&*/\\$+<=>^`|~]|{MINUS_AND_NOT})+")
"""Matches the same in ASCII text as `_signs`, in half the time, because it has no ranges."""


@cache
def _signs() -> re.Pattern[str]:
    """Match runs of word characters, combining marks, symbols and the marks of formulas and code."""
    return re.compile(rf"(?:[\w#%@&*/\\{characters_of('MS')}]|{MINUS_AND_NOT})+")


@cache
def characters_of(categories: str) -> str:
    """Return the characters of these categories of Unicode, such as M for marks, as ranges of a regular expression."""
    codes = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in categories]
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in ranges)


def text_key(text: str) -> bytes:
    """Hash a text with runs of white space as one space. Texts that differ in a sign, as code does, differ in key."""
    return hashlib.sha256(" ".join(text.split()).encode("utf-8", "surrogatepass")).digest()


def texts_hash(texts: Iterable[str]) -> str:
    """Hash all texts in order with sha256."""
    digest = hashlib.sha256()
    for text in texts:
        # A digest per text marks its end: "a", "bc" must not equal "ab", "c".
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()
