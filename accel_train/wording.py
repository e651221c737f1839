"""Parts of messages: a name that was probably meant, shortened lists, readable values. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

FILE_ONLY = "file_only"
"""Attribute of a log record for the log file only, not for the console."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar known name, ignoring case. None if no similarity reaches ``cutoff`` (0 to 1)."""
    # difflib would count each letter of another case as a difference.
    by_lower = {one.lower(): one for one in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(meant: str | None, *, bare: bool = False) -> str:
    """Return `` (did you mean 'seed'?)`` to append to a refusal. No parentheses if ``bare``, empty for None."""
    if not meant:
        return ""
    question = f"did you mean {meant!r}?"
    return question if bare else f" ({question})"


def words_of(name: str) -> list[str]:
    """Split a name into lower-case words at anything but letters and digits: ``val/F1`` has ``val`` and ``f1``."""
    return re.findall(r"[^\W_]+", name.lower())


def declared_of(metric: str, declared: Mapping[str, T]) -> T | None:
    """Return what is declared for a metric by its name, or else by its last words: ``f1`` or ``F1`` for ``val/F1``."""
    if metric in declared:
        return declared[metric]
    words = words_of(metric)
    fitting = [key for key in declared if (last := words_of(key)) and words[-len(last) :] == last]
    # A recipe with several tasks has a metric for each, as burgers_nrmse.
    return declared[max(fitting, key=len)] if fitting else None


def shortened(names: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Return the first ``limit`` names, as in ``a, b and 3 more``. Returns ``nothing`` without names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (separator.join(names[:limit]) or "nothing") + more


def shown(value: object) -> str:
    """Return ``repr``, of a sha256 its first 12 digits: enough to tell two apart, and to find one in a log."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return repr(value[:12])
    return repr(value)


def readable_size(size_bytes: float) -> str:
    """Format bytes with a decimal unit: ``402 MB``, ``4.2 GB``."""
    size = size_bytes
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            # The limit keeps 99.96 from being shown as 100.0, with a fourth digit.
            digits = 0 if size >= 99.95 or unit == "B" else 1
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def binary_size(size_bytes: int) -> str:
    """Format bytes in whole MiB, or in KiB below 1 MiB."""
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.0f} KiB"
