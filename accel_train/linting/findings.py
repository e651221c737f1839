"""Rules of the linter, and their findings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from accel_train.linting.facts import Facts

Severity = Literal["error", "warning"]
Stage = Literal["start", "data", "model"]
"""When the facts of a rule are complete: at the start, once the data are open, or once the model is counted."""


@dataclass(frozen=True)
class Finding:
    """The finding of a rule."""

    option: str
    """Dotted option, environment variable, key of the launch file, or property of the host."""
    value: object
    reason: str
    """The consequence, with the numbers."""
    remedy: str
    change: tuple[str, object] | None = None
    """Dotted option and new value, if the remedy is another value in the recipe's YAML."""


@dataclass(frozen=True)
class Rule:
    """A rule with its stable name."""

    name: str
    severity: Severity
    source: str
    """Upstream issue, page of this documentation, or manual."""
    find: Callable[[Facts], Finding | None]
    """Its docstring explains the rule."""
    stage: Stage = "start"

    @property
    def explanation(self) -> str:
        """Explanation of the rule, as one paragraph."""
        return " ".join((inspect.getdoc(self.find) or "").split())
