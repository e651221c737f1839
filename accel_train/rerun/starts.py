"""The record of a start of a run: its machine and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
"""One line of ``metrics.jsonl``."""


@dataclass(frozen=True)
class Start:
    """The record of one start, made before its first step."""

    environment: Line
    options: Line
    """The nested config."""
