"""Rows of plain text, of prompt and completion, and of chat messages, from files, saved datasets and the Hub.

Every error names its place: file:line, or the row's index in a dataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accel_train.config import UsageError, expand_path
from accel_train.data.tables import text_sources
from accel_train.data.tables.text_sources import (
    TABLE_FILES,
    BadRows,
    content_key,
    hub_dataset,
    is_saved_dataset,
    json_rows,
    saved_dataset,
    table,
)
from accel_train.wording import nearest

SampleBy = Literal["line", "paragraph", "document"]
DEMO_FILE = Path(__file__).parents[1] / "text" / "demo" / "shakespeare.txt"
JSON_FILES = (".jsonl", ".ndjson")
FILES = (*JSON_FILES, ".txt", *TABLE_FILES)


@dataclass(frozen=True)
class Row:
    """One row: exactly one of plain text, a pair of prompt and completion, or messages is given."""

    place: str
    """file:line, or the index in a dataset."""
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    first_trained: int = 0
    """Messages before this one are never trained: the prompt, if prompt and completion are lists of messages."""
    tools: Sequence[Any] | None = None

    @property
    def content(self) -> str:
        """All of its words as one string: what the held-out split hashes and a tokenizer is trained on."""
        if self.text is not None:
            return self.text
        if self.prompt is not None:
            return f"{self.prompt}{self.completion}"
        return "\n".join(str(message.get("content") or "") for message in self.messages)


def read_rows(path: str, *, split: str, text_column: str, sample_by: SampleBy, bad: BadRows) -> list[Row]:
    """Read all usable rows of ``path`` into memory, in order. Unusable ones are counted in ``bad``.

    A row is chat if it has ``messages``, a pair if it has ``prompt`` and ``completion`` (texts or lists of messages),
    else its text is in ``text_column``. ``split`` names a split of a saved or Hub dataset.
    """
    rows: list[Row] = []
    for place, fields in _source(path, split, text_column, sample_by, bad):
        row = _row(place, fields, text_column)
        if isinstance(row, str):
            bad.add(place, row)
        else:
            rows.append(row)
    if not rows:
        raise UsageError(
            f"--data.path {path!r} holds no usable row ({bad.count} bad rows). At least one row with messages, with "
            f"prompt and completion, or with text in {text_column!r} is required: check the path, --data.split and "
            "--data.text_column."
        )
    return rows


def _row(place: str, fields: Mapping[str, Any], text_column: str) -> Row | str:
    """Return the row, or what is wrong with it."""
    # Tables fill the columns that a row does not have with None.
    fields = {name: value for name, value in fields.items() if value is not None}
    tools = fields.get("tools")
    if "messages" in fields:
        return _messages_fault(fields["messages"]) or Row(place, messages=fields["messages"], tools=tools)
    if "prompt" in fields and "completion" in fields:
        return _pair(place, fields["prompt"], fields["completion"], tools)
    if text_column not in fields:
        near = nearest(text_column, fields) or next(iter(fields), None)
        hint = f"; set --data.text_column {near}" if near else ""
        return f"no field {text_column!r}, 'messages', or 'prompt' and 'completion' among {sorted(fields)}{hint}"
    return _text_fault(text_column, fields[text_column]) or Row(place, text=fields[text_column].strip())


def _pair(place: str, prompt: Any, completion: Any, tools: Any) -> Row | str:
    if isinstance(prompt, str) and isinstance(completion, str):
        # A prompt may be empty, and the space between the two belongs to one of them.
        return _text_fault("completion", completion) or Row(place, prompt=prompt, completion=completion)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        return (
            f"'prompt' is {type(prompt).__name__} and 'completion' is {type(completion).__name__}; two texts or two "
            "lists of messages are required"
        )
    messages = [*prompt, *completion]
    return _messages_fault(messages) or Row(place, messages=messages, first_trained=len(prompt), tools=tools)


def _text_fault(name: str, text: object) -> str | None:
    if not isinstance(text, str):
        return f"{name!r} is {type(text).__name__}, text is required"
    if not text.strip():
        return f"{name!r} is empty"
    return None


def _messages_fault(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"'messages' is {messages!r}; a list of messages is required"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or "role" not in message:
            return f"message {number} is {message!r}; an object with 'role' and 'content' is required"
    if not any(message["role"] == "assistant" for message in messages):
        return "no message has the role 'assistant', so there is nothing to learn"
    return None


def _source(
    path: str, split: str, text_column: str, sample_by: SampleBy, bad: BadRows
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, fields) of each row of any source."""
    if path == "demo":
        return _text_rows(DEMO_FILE, text_column, sample_by)
    if is_hub_id(path):
        return _dataset_rows(hub_dataset(path, split), path)
    source = expand_path(path)
    if not source.exists():
        raise UsageError(f"--data.path {path!r}: {source} does not exist. Give a file or folder that exists.")
    if is_saved_dataset(source):
        return _dataset_rows(saved_dataset(source, split), path)
    if split != "train":
        raise UsageError(f"--data.split {split!r} has no effect with --data.path {path!r}: files have no splits.")
    return _rows_of_files(_files(source), text_column, sample_by, bad)


def is_hub_id(path: str) -> bool:
    """Return True for owner/name or owner/name:configuration that is no path here."""
    return text_sources.is_hub_id(path, FILES)


def _files(source: Path) -> list[Path]:
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    known = [file for file in files if file.suffix in FILES and file.is_file()]
    if not known:
        raise UsageError(
            f"--data.path {str(source)!r} is no source of rows: required is 'demo', a file or a folder of files ending "
            f"in {', '.join(FILES)}, a folder made by dataset.save_to_disk, or a Hub id. Convert the data to JSONL."
        )
    return known


def _rows_of_files(
    files: Sequence[Path], text_column: str, sample_by: SampleBy, bad: BadRows
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        if file.suffix == ".txt":
            yield from _text_rows(file, text_column, sample_by)
        elif file.suffix in TABLE_FILES:
            yield from _dataset_rows(table(file), str(file))
        else:
            yield from json_rows(_lines(file), bad)


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data.path: {file} cannot be read as UTF-8 ({error}). Convert it first.") from None


def _text_rows(file: Path, text_column: str, sample_by: SampleBy) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = _read_text(file)
    if sample_by == "document":
        parts = [text]
    elif sample_by == "paragraph":
        parts = re.split(r"\n\s*\n", text)
    else:
        parts = text.splitlines()
    for number, part in enumerate(parts, 1):
        if part.strip():
            yield f"{file}:{sample_by} {number}", {text_column: part}


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    # Not `splitlines`: JSON may hold other characters that end a line for Python.
    for number, line in enumerate(_read_text(file).split("\n"), 1):
        if line.strip():
            yield f"{file}:{number}", line


def _dataset_rows(dataset: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, fields in enumerate(dataset):
        yield f"row {index} of {name}", fields


def split_heldout(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Return (training, held-out) rows. A row is held out if the hash of its words is below ``fraction``.

    The split of a row depends on its words alone, and equal rows are on the same side. Held-out rows are sorted by
    hash, so the first n are a fair sample.
    """
    train: list[Row] = []
    heldout: list[tuple[bytes, int, Row]] = []
    for number, row in enumerate(rows):
        key = content_key(row.content)
        if int.from_bytes(key[:8], "big") < fraction * 2**64:
            heldout.append((key, number, row))
        else:
            train.append(row)
    heldout.sort(key=lambda item: item[:2])
    return train, [row for _, _, row in heldout]
