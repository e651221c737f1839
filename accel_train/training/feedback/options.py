"""Options of the parts that react to the loss: balancing of loss terms, and the learning rate on a plateau."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accel_train.config import (
    Fraction,
    FractionBelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UsageError,
    refuse_without_effect,
)

DECAY = 0.99
RATE = 0.01


@dataclass(frozen=True)
class BalanceConfig:
    """Balancing of the loss terms: a factor for each on top of its coefficient. For recipes with several terms."""

    kind: Literal["fixed", "ema", "uncertainty"] = "fixed"
    """fixed: the coefficients alone. ema: divide each term by the exponential moving average of its magnitude, so that
    terms count alike up to their coefficients. uncertainty: multiply each by exp(-s) with a log-variance s of its own,
    learned by the loss exp(-s) * term + s (arXiv:1705.07115), for terms above 0. Lines and curves show the loss without
    these factors."""

    decay: FractionBelowOne | None = None
    """ema: share of the average kept by each step that trains the term. None: 0.99."""

    lr: PositiveFloat | None = None
    """uncertainty: learning rate of the log-variances, with Adam. No schedule changes it. None: 0.01."""

    def __post_init__(self) -> None:
        readers = {"decay": "ema", "lr": "uncertainty"}
        for name, kind in readers.items():
            if self.kind != kind:
                because = f"with balance.kind: {self.kind}"
                refuse_without_effect(self, "balance", [name], because, f"give --balance.kind {kind}")

    @property
    def is_on(self) -> bool:
        """True if terms have factors beside their coefficients."""
        return self.kind != "fixed"

    def refuse_single_term(self, terms: int) -> None:
        """Raise ``UsageError`` if there is nothing to balance."""
        if self.is_on and terms < 2:
            raise UsageError(
                f"balance.kind: {self.kind}: at least 2 loss terms are required, and this run trains {terms}; leave it "
                "out (the default is fixed)"
            )


@dataclass(frozen=True)
class PlateauConfig:
    """Learning rate factor on top of the schedule's, lowered when the training loss stops improving."""

    factor: PositiveFloat = 1.0
    """Multiply the learning rate by this at a plateau, for the rest of the run. 1 = off. Try 0.5."""

    steps: PositiveInt = 500
    """Optimizer steps of a window, whose mean loss is compared with the best window so far. Steps that were skipped do
    not count. Where steps train different terms, each kind of step is compared with its own. Choose it large enough
    that every window has each task and many draws of each mode."""

    min_improvement: FractionBelowOne = 0.001
    """A window is better if its mean loss is lower by more than this share of the best."""

    patience: PositiveInt = 3
    """Windows in a row without an improvement that make a plateau."""

    cooldown: NonNegativeInt = 0
    """Windows after a plateau that do not count towards the next."""

    min_factor: Fraction = 0.01
    """Lowest product of the factors. Beyond it, plateaus change nothing."""

    def __post_init__(self) -> None:
        # No annotated type has this upper bound, and annotations do not check a config built in Python.
        if not 0 < self.factor <= 1:
            raise UsageError(
                f"plateau.factor: {self.factor}: more than 0 and at most 1 is required, because the learning rate is "
                "multiplied by it; try 0.5, or 1 to switch it off"
            )
        if self.is_on:
            self._refuse_high_floor()
            return
        names = ("steps", "min_improvement", "patience", "cooldown", "min_factor")
        refuse_without_effect(self, "plateau", names, "with plateau.factor: 1", "give --plateau.factor 0.5")

    def _refuse_high_floor(self) -> None:
        if self.min_factor >= 1:
            raise UsageError(
                f"plateau.min_factor: {self.min_factor}: less than 1 is required, or no plateau changes the learning "
                "rate; try 0.01, or 0 for no limit"
            )

    @property
    def is_on(self) -> bool:
        """True if a plateau changes the learning rate."""
        return self.factor < 1

    @property
    def first_change(self) -> int:
        """Earliest step after which the learning rate may fall: one window to compare with, then ``patience`` more."""
        return self.steps * (1 + self.patience)

    def notices(self, max_steps: int) -> list[str]:
        """Return a notice for a run that ends before any plateau could change it."""
        if not self.is_on or self.first_change < max_steps:
            return []
        return [
            f"plateau.factor: {self.factor:g}: has no effect in this run of {max_steps:,} steps, because with "
            f"plateau.steps {self.steps} and plateau.patience {self.patience} the learning rate falls after step "
            f"{self.first_change:,} at the earliest"
        ]
