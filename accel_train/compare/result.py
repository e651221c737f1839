"""A comparison before it runs, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_train.compare.figures import Effect, Observations, Window
    from accel_train.compare.rounds import Rounds
    from accel_train.compare.runs import Variant
    from accel_train.metrics.gates import Decision


@dataclass(frozen=True)
class Plan:
    """A comparison before it runs."""

    recipe: str
    variants: Sequence[Variant]
    """The first is the reference for all others."""
    key: str | None
    """The varied option."""
    rounds: int
    tolerance: float
    seeds: Sequence[int] = ()
    """Seed of each round. Empty if all have that of the configs."""

    @property
    def is_ablation(self) -> bool:
        """True if each variant in between is the first one with a single option taken from the last."""
        return self.key is None and len(self.variants) > 2

    def of_rounds(self, count: int) -> Plan:
        """Return the plan with its first ``count`` rounds alone."""
        return replace(self, rounds=count, seeds=self.seeds[:count])

    def differences(self) -> dict[str, list[Any]]:
        """Return the values of each option differing between variants, except ``output_dir``."""
        names = dict.fromkeys(name for variant in self.variants for name in variant.config)
        # Each run has its own directory, which is not a difference of the experiment.
        names.pop("output_dir", None)
        if self.seeds:
            names.pop("seed", None)
        differing: dict[str, list[Any]] = {}
        for name in names:
            values = [variant.config.get(name) for variant in self.variants]
            if any(value != values[0] for value in values):
                differing[name] = values
        return differing


@dataclass(frozen=True)
class Result:
    """Outcome of a comparison. Lists follow the variants. ``effects`` and ``decisions`` leave out the first."""

    plan: Plan
    rounds: Rounds
    window: Window
    values: Sequence[Observations]
    effects: Sequence[Sequence[Effect]]
    decisions: Sequence[Sequence[Decision]]
