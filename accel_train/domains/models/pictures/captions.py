"""Captions as training reads them, and as sampling is given them."""

from __future__ import annotations


def on_one_line(text: str) -> str:
    """Return a text with single spaces in place of line breaks and all other space."""
    # Runs of them would be tokens of their own.
    return " ".join(text.split())
