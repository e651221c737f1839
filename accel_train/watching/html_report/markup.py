"""HTML elements for all sections of the page. All text from files is escaped."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from html import escape

# A dot or underscore between letters, not one in a number.
BREAKABLE = re.compile(r"(?<=[a-z])([_.])(?=[a-z])")


def section(title: str, parts: Sequence[str]) -> list[str]:
    """Return a section with a heading, or nothing if it has no parts."""
    if not parts:
        return []
    return ["<section>", f"<h2>{escape(title)}</h2>", *parts, "</section>"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table. If it is too wide, it scrolls by itself and the page does not."""
    parts = ['<div class="table">', "<table>", _row(head, "th")]
    parts += [_row(row, "td") for row in rows]
    return [*parts, "</table>", "</div>"]


def _row(cells: Sequence[str], tag: str) -> str:
    texts: list[str] = []
    for cell in cells:
        # A phone may break a long name of an option or metric here.
        text = BREAKABLE.sub(r"\1<wbr>", escape(cell))
        texts.append(f"<{tag}>{text}</{tag}>")
    return f"<tr>{''.join(texts)}</tr>"


def details(summary: str, parts: Sequence[str]) -> list[str]:
    """Return the parts, folded away behind the line ``summary``."""
    return [f"<details><summary>{escape(summary)}</summary>", *parts, "</details>"]


def command(text: str) -> str:
    """Return a command whose words are not broken: a browser would break a line inside ``--``."""
    words = [f"<span>{escape(word)}</span>" for word in text.split(" ")]
    return f"<code>{' '.join(words)}</code>"


def clock(seconds: float | None) -> str:
    """Format a time in UTC. Empty for None."""
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
