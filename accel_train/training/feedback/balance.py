"""Balancing of loss terms: factors on top of their coefficients, derived from the losses of earlier steps.

A step's loss is ``sum_k c_k * f_k * L_k`` with ``L_k = S_k / W_k`` over the global batch. The factors ``f_k`` are known
before the first forward, so they are the same for any division into micro-batches and processes.

``ema``: ``f_k = 1 / m_k``, where ``m_k`` is the moving average of ``|L_k|``, corrected for its start at 0. The mean of
each term is then about 1 before its coefficient.

``uncertainty``: ``f_k = exp(-s_k)``, where the log-variances of Kendall, Gal and Cipolla (arXiv:1705.07115) minimise
``sum_k c_k * (exp(-s_k) * L_k + s_k)``. The coefficient is in front of both summands, so that the optimum is
``exp(s_k) = L_k``, and ``c_k / L_k`` multiplies the term there. In front of the first alone, ``exp(s_k)`` would become
``c_k * L_k``, and the coefficient would cancel out. The gradient is ``c_k * (1 - exp(-s_k) * L_k)``, and each ``s_k``
follows torch's Adam with betas of 0.9 and 0.999.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.training.feedback.factors import constants, term_factor
from accel_train.training.feedback.options import DECAY, RATE, BalanceConfig

SMALLEST = 1e-8
"""Smallest magnitude that a term is divided by."""
BETAS = (0.9, 0.999)
EPSILON = 1e-8
ROWS = {"ema": 2, "uncertainty": 5}
"""Rows of state, one number per term each."""


class LossBalance:
    """Factors of the loss terms, and the state that they follow from. Every rank has one, all with the same values.

    The state lives on the device. Nothing here waits for it, and nothing is a collective, because the sums of the terms
    are reduced already. A term with coefficient 0 or without weight in a step keeps its state.
    """

    def __init__(self, config: BalanceConfig) -> None:
        assert config.is_on, "fixed coefficients need no factors"
        self.config = config
        self._decay: float = DECAY
        if config.decay is not None:
            self._decay = config.decay
        self._terms: tuple[str, ...] = ()
        self._state = torch.zeros(ROWS[config.kind], 0)
        """(R, K). ema: the average, then the same average of a constant 1. uncertainty: s, then Adam's two averages,
        each followed by the same average of 1. Dividing by the average of 1 corrects for the start at 0."""
        self._saved: Mapping[str, list[float]] = {}

    def factors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``f_k`` of the coming step for the terms of ``weights``, on their device.

        Raises ``UsageError`` for a single term, and for terms that differ from those of the step before.
        """
        if set(weights) != set(self._terms):
            self._begin(weights)
        if self.config.kind == "uncertainty":
            factors = torch.exp(-self._state[0])
        else:
            average, ones = self._state
            # 1 for a term that no step has trained yet.
            factors = torch.where(ones > 0, 1 / (average / ones).clamp(min=SMALLEST), 1.0)
        return dict(zip(self._terms, factors.unbind(), strict=True))

    def _begin(self, weights: Mapping[str, Tensor]) -> None:
        """Create the state of these terms on their device, with the values of a checkpoint where it has them."""
        self.config.refuse_single_term(len(weights))
        if self._terms:
            raise UsageError(
                f"balance.kind: {self.config.kind}: the loss terms were {sorted(self._terms)} so far and are "
                f"{sorted(weights)} in this step; name every term in every step, with coefficient 0 in steps that do "
                "not train it"
            )
        self._terms = tuple(weights)
        device = next(iter(weights.values())).device
        rows = ROWS[self.config.kind]
        columns = [self._saved.get(name, [0.0] * rows) for name in self._terms]
        self._state = torch.zeros(rows, len(columns), device=device)
        # Copying from the host waits, so do it only after a resume.
        if self._saved:
            self._state.copy_(torch.tensor(columns).T)

    def update(
        self, coefficients: Mapping[str, float], sums: Tensor, weights: Mapping[str, Tensor], trained: Tensor | None
    ) -> None:
        """Update after a step that the host has not left out. ``sums`` are ``S_k``, (K,), in the coefficients' order.

        ``trained`` is 0 where the device leaves out the step, None if the host knows that it is trained.
        """
        shares = torch.stack([term_factor(1.0, weights[name]) for name in self._terms])
        by_term = dict(zip(coefficients, sums.unbind(), strict=True))
        losses = torch.stack([by_term[name] for name in self._terms]) * shares
        factors = constants(tuple(coefficients[name] for name in self._terms), sums.device)
        moves = (factors != 0) & (shares > 0)
        if trained is not None:
            moves &= trained > 0
        if self.config.kind == "uncertainty":
            moved = self._after_adam(factors, losses)
        else:
            target = torch.stack([losses.abs(), torch.ones_like(losses)])
            moved = self._state.lerp(target, 1 - self._decay)
        # Selected instead of multiplied by 0, because 0 * NaN is NaN.
        self._state = torch.where(moves, moved, self._state)

    def _after_adam(self, coefficients: Tensor, losses: Tensor) -> Tensor:
        s, first, first_ones, second, second_ones = self._state
        gradient = coefficients * (1 - torch.exp(-s) * losses)
        one = torch.ones_like(s)
        rest1, rest2 = (1 - beta for beta in BETAS)
        first = first.lerp(gradient, rest1)
        first_ones = first_ones.lerp(one, rest1)
        second = second.lerp(gradient.square(), rest2)
        second_ones = second_ones.lerp(one, rest2)
        rate = self.config.lr or RATE
        s = s - rate * (first / first_ones) / ((second / second_ones).sqrt() + EPSILON)
        return torch.stack([s, first, first_ones, second, second_ones])

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, by term. Waits for the device."""
        terms = dict(self._saved)
        if self._terms:
            terms = dict(zip(self._terms, self._state.T.tolist(), strict=True))
        return {"kind": self.config.kind, "terms": terms}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state of another kind, possible only with ``--allow``, is ignored."""
        if saved.get("kind") == self.config.kind:
            self._saved = {name: list(map(float, rows)) for name, rows in saved["terms"].items()}
