"""Learning rate on a plateau of the training loss: a factor on top of the schedule's, from mean losses of windows.

The rule is that of ``torch.optim.lr_scheduler.ReduceLROnPlateau`` with a relative threshold and a ``patience`` of one
less. There, the schedule would overwrite the learning rate in the next step. Here, the factor is kept separately, and
``Experiment.learning_rate_factor`` multiplies the schedule's by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_train.training.feedback.options import PlateauConfig
from accel_train.training.parameters import widest

if TYPE_CHECKING:
    from accel_train.training.step_guard import StepResult

Kind = tuple[str, ...]
"""Names of the terms that a step trains."""
SMALLEST = 1e-12
"""Smallest magnitude of the best mean that an improvement is divided by."""


@dataclass(frozen=True)
class Change:
    """A reduction of the learning rate."""

    factor: float
    """Product of all factors from now on."""
    windows: int
    """Windows in a row without an improvement."""
    improvement: float
    """Relative improvement of the last window over the best one. Negative if it was worse."""


class Plateau:
    """Factor of the learning rate, and the means that it follows from. Every rank has one, all with the same values.

    The losses are those of the global batch, so all ranks decide alike. A window is ``plateau.steps`` optimizer steps,
    counted from the start of the run, so a resume does not shift it. The sums stay on the device, and the host waits
    for it at the end of a window only.

    Losses of steps that train different terms are not comparable, and the share of each kind varies between windows. So
    each kind of step, identified by its terms, has a mean and a best mean of its own. The improvement of a window is
    the mean over its steps of the improvement of their kinds. With one kind it is that of the loss.
    """

    def __init__(self, config: PlateauConfig) -> None:
        assert config.is_on, "a factor of 1 changes nothing"
        self.config = config
        self.factor = 1.0
        """Product of the factors so far."""
        self._bad = 0
        self._cooldown = 0
        self._best: dict[Kind, float] = {}
        self._window: dict[Kind, Tensor] = {}
        """(2,) of each kind: sum of the losses, number of steps."""

    def follow(self, result: StepResult, done: int) -> Change | None:
        """Count step ``done``, counted from 1, unless it was left out. Returns the change of the rate after it, if any.

        Waits for the device at the end of a window only. All ranks call it. Raises ``NonFiniteError``.
        """
        guard = result.guard
        assert guard is not None, "a training loop has a guard"
        if not guard.skips_this_step:
            self.add(result.coefficients, result.loss, guard.weight_of_step)
        if not self.ends_window(done):
            return None
        # After a step that ends the run, the losses come from steps without an update.
        result.check()
        return self.end_window()

    def describe(self, change: Change) -> str:
        """Return the change and its reason, for the log."""
        return (
            f"a plateau: {change.windows} windows of {self.config.steps} steps in a row have not lowered the best mean "
            f"loss by more than {self.config.min_improvement:.2%} (the last: {change.improvement:.2%}); from here on "
            f"the learning rate is {change.factor:.3g} times that of the schedule"
        )

    def add(self, coefficients: Mapping[str, float], loss: Tensor, trained: Tensor | None) -> None:
        """Count a step that the host has not left out. Does not wait for the device.

        ``trained`` is 0 where the device leaves out the step, None if the host knows that it is trained.
        """
        kind = tuple(sorted(name for name, coefficient in coefficients.items() if coefficient != 0))
        if not kind:
            return
        row = torch.stack([widest(loss), widest(torch.ones_like(loss))])
        if trained is not None:
            # Selected instead of multiplied by 0, because 0 * NaN is NaN.
            row = torch.where(trained > 0, row, 0.0)
        before = self._window.get(kind)
        # A restored sum is on the host.
        if before is not None:
            row = row + before.to(row)
        self._window[kind] = row

    def ends_window(self, done: int) -> bool:
        """Return True if a window ends with step ``done``, counted from 1. It depends on the step alone."""
        return done % self.config.steps == 0

    def end_window(self) -> Change | None:
        """Compare the window with the best so far, and begin the next. Waits for the device.

        Returns the change, if there is one. Follows torch's ``ReduceLROnPlateau.step``.
        """
        sums = self._read()
        self._window = {}
        if not sums:  # every step was left out
            return None
        improvement = self._improvement(sums)
        is_better = improvement is None or improvement > self.config.min_improvement
        for kind, (total, steps) in sums.items():
            if is_better or kind not in self._best:
                self._best[kind] = total / steps
        self._bad = 0 if is_better else self._bad + 1
        if self._cooldown > 0:
            self._cooldown -= 1
            self._bad = 0
        if self._bad < self.config.patience or improvement is None:
            return None
        windows = self._bad
        self._bad = 0
        self._cooldown = self.config.cooldown
        lower = max(self.factor * self.config.factor, self.config.min_factor)
        if lower >= self.factor:
            return None
        self.factor = lower
        return Change(lower, windows, improvement)

    def _improvement(self, sums: Mapping[Kind, tuple[float, float]]) -> float | None:
        """Return the mean relative improvement of a window's steps over the best. None if there is no best yet."""
        compared = {kind: sums[kind] for kind in sums if kind in self._best}
        if not compared:
            return None
        better = 0.0
        for kind, (total, steps) in compared.items():
            best = self._best[kind]
            better += steps * (best - total / steps) / max(abs(best), SMALLEST)
        return better / sum(steps for _, steps in compared.values())

    def _read(self) -> dict[Kind, tuple[float, float]]:
        """Return (sum of losses, number of steps) for each kind with a trained step. Waits for the device."""
        sums: dict[Kind, tuple[float, float]] = {}
        for kind, window in self._window.items():
            total, steps = window.tolist()
            if steps > 0:
                sums[kind] = (total, steps)
        return sums

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Waits for the device."""
        return {
            "factor": self.factor,
            "bad": self._bad,
            "cooldown": self._cooldown,
            "best": [[list(kind), best] for kind, best in self._best.items()],
            "window": [[list(kind), *sums] for kind, sums in self._read().items()],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        if not saved:
            return
        self.factor = float(saved["factor"])
        self._bad = int(saved["bad"])
        self._cooldown = int(saved["cooldown"])
        self._best = {tuple(kind): float(best) for kind, best in saved["best"]}
        for kind, total, steps in saved["window"]:
            self._window[tuple(kind)] = torch.tensor([total, steps], dtype=torch.float64)
