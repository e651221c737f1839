"""Scaling: efficiency relative to the smallest number of processes, and the number up to which more of them pay.

Strong scaling, as a run has it: the global batch is part of the experiment, and more processes have smaller shares of
it. Weak scaling: each process has the same micro-batches, and the global batch grows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PAYS = 0.5
"""Smallest gain in samples per second for which doubling the processes pays. An ideal doubling gains 1."""


@dataclass(frozen=True)
class Point:
    """Time of a step at one number of processes."""

    processes: int
    global_batch_size: int
    seconds: float
    is_another: bool = False
    """True for a global batch other than the config's, which a start with so many processes would refuse."""

    @property
    def samples_per_second(self) -> float:
        return self.global_batch_size / self.seconds


@dataclass(frozen=True)
class Scaling:
    """Points, the fewest processes first."""

    points: Sequence[Point]
    is_weak: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", sorted(self.points, key=lambda point: point.processes))

    @property
    def kind(self) -> str:
        return "weak" if self.is_weak else "strong"

    def efficiency(self, point: Point) -> float:
        """Return the samples per second of one process over those at the smallest number of processes."""
        first = self.points[0]
        return point.samples_per_second / point.processes / (first.samples_per_second / first.processes)

    def is_another(self, point: Point) -> bool:
        """Return True for another experiment: under strong scaling one with another global batch."""
        return point.is_another and not self.is_weak

    def compared(self) -> list[Point]:
        """Return the points of one experiment, the fewest processes first."""
        return [point for point in self.points if not self.is_another(point)]

    def pays_up_to(self) -> tuple[Point, Point | None, float] | None:
        """Return the last point up to which more processes pay, the next one if there is one, and the gain to it.

        None if there is no point of the experiment itself.
        """
        compared = self.compared()
        if not compared:
            return None
        for point, following in itertools.pairwise(compared):
            gained = gain(point, following)
            if gained < PAYS:
                return point, following, gained
        return compared[-1], None, math.nan

    def describe(self) -> str:
        """Return a line with the number of processes that pay."""
        pays = self.pays_up_to()
        if pays is None:
            return "what pays: unknown, as each of these numbers is larger than the global batch of the config"
        last, following, found = pays
        if following is None:
            return f"pays up to {last.processes:,} processes, the most that were compared"
        return (
            f"pays up to {last.processes:,} processes: beyond, doubling them gains less than {PAYS:.0%} in samples per "
            f"second (from {last.processes:,} to {following.processes:,} {found:+.0%} per doubling)"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the number of processes up to which more pay. Without ``next``, all compared numbers pay."""
        pays = self.pays_up_to()
        if pays is None:
            return {"kind": self.kind, "pays_up_to": None, "least_gain": PAYS}
        last, following, found = pays
        tree: dict[str, Any] = {"kind": self.kind, "pays_up_to": last.processes, "least_gain": PAYS}
        if following is not None:
            tree |= {"next": following.processes, "gain_of_doubling": found}
        return tree


def gain(fewer: Point, more: Point) -> float:
    """Return by how much each doubling from ``fewer`` to ``more`` processes raises samples per second; 1 is ideal."""
    doublings = math.log2(more.processes / fewer.processes)
    return (more.samples_per_second / fewer.samples_per_second) ** (1 / doublings) - 1
