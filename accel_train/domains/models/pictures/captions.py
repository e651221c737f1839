"""Normalisation of captions, the same in training and in sampling."""

from __future__ import annotations


def on_one_line(text: str) -> str:
    """Return a text with single spaces in place of line breaks and all other space."""
    # Runs of spaces and line breaks would be tokens of their own.
    return " ".join(text.split())
