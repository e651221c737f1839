"""Weights of a recorded checkpoint against those of its replay."""

from __future__ import annotations

import math
from pathlib import Path

from accel_train.commands import diff
from accel_train.rerun.agreement import SIDES, Sides, Weights
from accel_train.store import commit


def compare_weights(step: int, recorded: Path, replayed: Path, sides: Sides = SIDES) -> Weights:
    """Compare every collection of two checkpoints by the canonical names of their tensors, one tensor at a time.

    ``sides`` names the two. A damaged recorded checkpoint counts as different.
    """
    # A file that has changed since the save is no evidence of what was saved.
    try:
        commit.verify(recorded)
    except ValueError as error:
        return Weights(step, recorded.name, [f"damaged: {error}"], identical=False, relative=math.inf)
    a = diff.collections_of(recorded)
    b = diff.collections_of(replayed)
    lines: list[str] = []
    identical = True
    distance = 0.0
    for name in sorted(a.keys() | b.keys(), key=diff.display_order):
        if name not in a or name not in b:
            lines.append(f"{name}: only in the {sides[name not in a]} checkpoint")
            identical = False
            continue
        compared = diff.compare(a[name], b[name])
        lines.append(f"{name}: {diff.summary(compared)}")
        identical = identical and compared.equal
        # Optimizer state is not held to the tolerance: moments of a rare gradient may differ by half of their size.
        if name == "model":
            distance = _distance(compared)
            if compared.first is not None:
                lines.append(f"  first by name, A {sides[0]}, B {sides[1]}: {compared.first}")
    return Weights(step, recorded.name, lines, identical, distance)


def _distance(compared: diff.Comparison) -> float:
    """Return the relative distance of two collections, infinite if they do not hold the same tensors."""
    if compared.equal:
        return 0.0
    unlike = compared.only_in_a or compared.only_in_b or compared.shapes or compared.types
    if unlike or math.isnan(compared.relative):
        return math.inf
    return compared.relative
