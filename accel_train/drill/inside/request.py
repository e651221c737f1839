"""Request for a fault: the parent writes it, and the process of the recipe injects the fault."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "ACCEL_TRAIN_DRILL"
"""Environment variable with the request. Not a flag, because a resume takes the same command."""

Action = Literal[
    "nothing",
    "kill",
    "hang",
    "stop",
    "stop_in_evaluation",
    "raise_in_evaluation",
    "failpoint",
    "hub_down",
]


@dataclass(frozen=True)
class Request:
    """One fault of one start."""

    events: str
    """File of JSON lines, appended to by every process."""
    sent: str
    """File created by the parent after its part of the fault: a signal, or the end of the Hub."""
    action: Action = "nothing"
    step: int = 0
    """Optimizer steps done when the fault happens. A fault in an evaluation happens in the one after these steps."""
    failpoint: str = ""
    """Place and action for ``store.failpoints``, without the number of the passage."""
    patience_seconds: float = 30.0
    """Longest time that a signal may take from the launcher to the processes."""

    def variables(self) -> dict[str, str]:
        """Return the environment for the processes, with the request in it."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls) -> Request:
        """Read the request from the environment."""
        # The same in every process: launchers pass on their environment.
        return cls(**json.loads(os.environ[VARIABLE]))


@dataclass(frozen=True)
class Event:
    """One line of the file of events."""

    name: str
    rank: int
    at: float
    """Time of the system-wide monotonic clock, in seconds."""
    step: int
    """Optimizer steps done, or begun for ``begin``."""
    seconds: float = 0.0


def read_events(path: Path) -> list[Event]:
    """Read the events written so far."""
    if not path.is_file():
        return []
    events: list[Event] = []
    # A process may be killed within a line, and only the last one can be incomplete.
    for line in path.read_bytes().split(b"\n")[:-1]:
        values: dict[str, Any] = json.loads(line)
        events.append(Event(**values))
    return events
