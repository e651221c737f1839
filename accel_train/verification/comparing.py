"""Two runs compared: losses and gradient norms step by step, tensors of their last checkpoints by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accel_train.precision import nan_as_infinite
from accel_train.verification.facts import Outcome

if TYPE_CHECKING:
    from accel_train.commands.diff import Comparison
    from accel_train.store.weights import TensorInfo

TOLERANCES: Mapping[str, float] = {"loss": 1e-5, "grad_norm": 1e-4, "weights": 1e-4, "state": 1e-3}
"""Largest relative differences explained by the order of floating-point sums, in fp32 over a few steps.

Losses and gradient norms of a step are relative to their largest in the run, tensors to the norm of their collection.
State of the optimizer is wider: a second moment has twice the error of the gradient.
"""

Tensors = dict[str, "TensorInfo"]


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity."""

    quantity: str
    value: float
    tolerance: float
    place: str = ""
    """Place of the largest difference, such as ``step 3``."""

    @property
    def exceeds(self) -> bool:
        return not self.value <= self.tolerance  # also NaN

    @property
    def short(self) -> str:
        """The quantity and its difference."""
        return f"{self.quantity} {self.value:.1e}" if self.value else "0"

    def __str__(self) -> str:
        return f"{self.short} ({self.place})" if self.place else self.short


def within_rounding(reference: Outcome, other: Outcome, step: int) -> list[Difference]:
    """Return the difference of each quantity, with tolerances for another order of sums. Tensors are of ``step``."""
    return [*_lines(reference, other, 0), *_tensors(reference, other, step)]


def bit_for_bit(reference: Outcome, other: Outcome, step: int, after: int = 0) -> list[Difference]:
    """Return the difference of each quantity with tolerance 0: log lines after step ``after``, tensors of ``step``."""
    found: list[Difference] = []
    for line in _lines(reference, other, after):
        exact = replace(line, tolerance=0.0)
        found.append(exact)
    for name, compared in _compared(reference, other, step).items():
        value = 0.0
        if not compared.equal:
            # Equal values with other bits, and other names or shapes, have no distance.
            value = compared.relative or math.inf
        found.append(Difference(name, value, 0.0))
    return found


def _lines(reference: Outcome, other: Outcome, after: int) -> Iterator[Difference]:
    """Yield the largest differences of the loss, each of its terms and the gradient norm."""
    steps = [step for step in reference.losses if step > after]
    lines = [run.losses.get(step, {}) for run in (reference, other) for step in steps]
    names = dict.fromkeys(name for line in lines for name in line)
    for name in names:
        pairs = {step: _pair(reference, other, step, name) for step in steps}
        sizes = [abs(a) for a, _ in pairs.values() if math.isfinite(a)]
        # The largest of the run: next to a loss near 0, rounding would look large. A term that stays 0 has no scale.
        scale = max(sizes, default=0.0) or 1.0
        distances = {step: _distance(a, b) / scale for step, (a, b) in pairs.items()}
        worst = max(distances, key=lambda step: distances[step])
        kind = "grad_norm" if name == "grad_norm" else "loss"
        quantity = name.replace("_", " ")
        yield Difference(quantity, distances[worst], TOLERANCES[kind], f"step {worst}")


def _pair(reference: Outcome, other: Outcome, step: int, name: str) -> tuple[float, float]:
    expected = reference.losses[step]
    found = other.losses.get(step, {})
    # A term without weight in a step is in neither line.
    return expected.get(name, math.nan), found.get(name, math.nan)


def _distance(a: float, b: float) -> float:
    # Two infinities would subtract to NaN.
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return nan_as_infinite(abs(a - b))


def _tensors(reference: Outcome, other: Outcome, step: int) -> Iterator[Difference]:
    for name, compared in _compared(reference, other, step).items():
        value = compared.relative
        # Tensors without a counterpart are not part of the relative norm.
        if compared.only_in_a or compared.only_in_b or compared.shapes:
            value = math.inf
        elif math.isnan(value):  # all values of the reference are 0
            value = 0.0 if not compared.differing else math.inf
        kind = "weights" if name in ("weights", "EMA") else "state"
        yield Difference(name, value, TOLERANCES[kind])


def _compared(reference: Outcome, other: Outcome, step: int) -> dict[str, Comparison]:
    """Compare each collection by its name: the weights, their EMA, each part of the optimizer's state."""
    # Here, because it imports torch, which a usage error should not wait for.
    from accel_train.commands.diff import collections_of, compare

    mine = _by_part(collections_of(reference.checkpoint(step)))
    theirs = _by_part(collections_of(other.checkpoint(step)))
    compared: dict[str, Comparison] = {}
    for name in dict.fromkeys((*mine, *theirs)):
        # A collection of one run alone is compared with nothing, so that its tensors are named as missing.
        compared[name] = compare(mine.get(name, {}), theirs.get(name, {}))
    return compared


def _by_part(found: dict[str, Tensors]) -> dict[str, Tensors]:
    shown = {"model": "weights", "ema": "EMA"}
    parts: dict[str, Tensors] = {}
    for name, tensors in found.items():
        if name != "optimizer":
            parts[shown.get(name, name)] = tensors
    for name, tensor in found.get("optimizer", {}).items():
        # Each part by itself, since first and second moments differ in size.
        key = name.partition("/")[0]
        parts.setdefault(key, {})[name] = tensor
    return parts
