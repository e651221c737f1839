"""Rows of JSONL: one object per line, with each key once."""

from __future__ import annotations

import json
from typing import Any


def parse_row(line: str) -> dict[str, Any] | str:
    """Return the object of a line, or its fault. A key that occurs twice, at any depth, is a fault."""
    try:
        row = parse_json(line)
    except RepeatedKeyError as error:
        return f"{error}, so it is unclear which value is meant; each key may appear only once"
    # The parser recurses, so a long line of brackets exhausts the stack.
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); one object per line is required"
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}, not an object; one object per line is required"
    return row


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice, where `json.loads` would keep the last value."""


def parse_json(text: str) -> Any:
    """Parse a JSON value. Raises ``ValueError``, such as ``RepeatedKeyError``, and ``RecursionError``."""
    return _DECODER.decode(text)


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"the key {repeated!r} is given twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_with_each_key_once)
"""Made once, because making one takes longer than parsing a short row."""
