"""A save that is not committed yet: its phases, and what the ranks tell each other about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

REDUCTIONS: Mapping[str, Callable[..., int]] = {
    "stop": max,  # 1 where a process has been asked to stop
    "written": min,  # number of the last save that this rank has written: counts when every rank has
    "failed": max,  # number of the last save that this rank could not write or commit
    "committed": max,  # number of the last save that the main process has committed
    "wanted": max,  # number of the save that the main process's clock asks for
}
"""What ranks tell each other after every step, and how it is reduced over them. Saves are numbered from 1, so that news
of one save, which arrives a step late, is never taken for news of another."""


class Phase(Enum):
    """Where a save is, in this order. Every rank enters a phase at the same step boundary, but the first two."""

    COPYING = "the snapshot is on its way from the device"
    WRITING = "each rank's writer writes its files"
    COMMITTING = "the main process's writer commits, then lets old checkpoints go"


@dataclass
class PendingSave:
    """A save that is not committed yet. The same on every rank but for what its writer says."""

    number: int
    step: int
    temporary: Path
    manifest: dict[str, Any]
    began: float
    needed_bytes: int
    job: dict[str, Any]
    """For the writer, once the snapshot is there."""
    phase: Phase = Phase.COPYING
    answer: dict[str, Any] | None = None
    """Of this rank's writer, to what it was given in this phase."""

    def news(self) -> str:
        """Name of the value in ``REDUCTIONS`` under which the rank's answer is told to the others."""
        assert self.answer is not None
        if "error" in self.answer:
            return "failed"
        return "committed" if self.phase is Phase.COMMITTING else "written"

    def may_advance(self, agreed: Mapping[str, int]) -> bool:
        """True once every rank has written, or the main process has committed, or a rank has failed."""
        awaited = "committed" if self.phase is Phase.COMMITTING else "written"
        return self.number in (agreed["failed"], agreed[awaited])
