"""What a start of a run recorded about its machine and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
"""One line of ``metrics.jsonl``."""


@dataclass(frozen=True)
class Start:
    """What one start of a run recorded before its first step."""

    environment: Line
    options: Line
    """The nested config."""
