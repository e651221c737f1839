"""The calls of a training loop in one step. Without one of them a run goes on in silence, and trains something else."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from accel_train.training.parameters import local_of

REQUIRED = ("training.report", "training.save_if_due")

_RATED: WeakSet[Any] = WeakSet()
"""Optimizers whose learning rates were set since their last step."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrapper, and any other as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def note_learning_rates(optimizer: Any) -> None:
    """Note that ``set_learning_rate`` was called for the coming step of ``optimizer``."""
    _RATED.add(unwrapped(optimizer))


class StepCalls:
    """Collects the calls of each step, those of the optimizer by its hooks.

    DeepSpeed's engine steps by itself, in the backward: of its optimizer only the learning rates are required.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = unwrapped(optimizer)
        self._counts_steps = isinstance(self._optimizer, torch.optim.Optimizer)
        self._called: set[str] = set()
        self._steps = 0
        self._depth = 0
        if self._counts_steps:
            self._optimizer.register_step_pre_hook(self._enter)
            self._optimizer.register_step_post_hook(self._leave)

    # A step that calls that of its base class has the hooks run within each other.
    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._steps += 1

    def begin(self) -> None:
        """Forget the calls of the step before."""
        self._called.clear()
        self._steps = 0
        _RATED.discard(self._optimizer)

    def note(self, name: str) -> None:
        """Note one of ``REQUIRED``."""
        self._called.add(name)

    def require(self, step: int, *, updates: bool) -> None:
        """Raise ``RuntimeError`` if a call of step ``step`` (from 1) is missing, or the optimizer stepped twice.

        ``updates`` is False for a step that is to move nothing: the optimizer's may be missing then.
        """
        for name in REQUIRED:
            if name not in self._called:
                raise RuntimeError(f"step {step}: the loop did not call {name}; add the call")
        if self._optimizer not in _RATED:
            raise RuntimeError(
                f"step {step}: the loop did not call set_learning_rate, so --schedule has no effect on it; call "
                "set_learning_rate(prepared.optimizer, opened.learning_rate_factor(batches.step)) before "
                "optimizer.step, or with a factor of your own"
            )
        if self._counts_steps and updates and self._steps != 1:
            raise RuntimeError(
                f"step {step}: optimizer.step was called {self._steps} times between two steps of the loop, and once "
                "is required; call it behind window.finish"
            )


_TAKEN = "_accel_train_taken"
_WITNESSES: WeakKeyDictionary[nn.Module, nn.Parameter] = WeakKeyDictionary()
"""By model, a parameter that the optimizer steps and that has a gradient: one tells what became of all."""


def note_taken(model: nn.Module, parameters: list[nn.Parameter], optimizers: list[Any]) -> None:
    """Note that the gradients of ``parameters`` are complete, and belong to the coming step of ``optimizers``."""
    if model not in _WITNESSES:
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        found = next((p for p in parameters if p.grad is not None and id(p) in stepped), None)
        if found is None:
            return
        _WITNESSES[model] = found
        for optimizer in map(unwrapped, optimizers):
            if isinstance(optimizer, torch.optim.Optimizer):
                # Once more behind the step: some optimizers use the gradient as memory for their own values.
                optimizer.register_step_post_hook(lambda *_: _mark(found))
    _mark(_WITNESSES[model])


def _mark(witness: nn.Parameter) -> None:
    if witness.grad is not None:
        setattr(witness.grad, _TAKEN, witness.grad._version)


def refuse_taken(model: nn.Module, step: int) -> None:
    """Raise ``RuntimeError`` if the gradients of the step before are still there: those of ``step`` would be added.

    The version of one tensor tells it without its values, for which a device is waited for. Zeros of
    ``zero_grad(set_to_none=False)`` are a change and pass, as does any other change in place behind the step.
    """
    witness = _WITNESSES.get(model)
    if witness is None or witness.grad is None or getattr(witness.grad, _TAKEN, None) != witness.grad._version:
        return
    # Operators on lists of sharded tensors, and those on `.data`, change values and no version.
    if bool(local_of(witness.grad).any()):
        raise RuntimeError(
            f"step {step + 1}: the gradient of the step before is still there, and this one would be added to it; call "
            "optimizer.zero_grad() after every optimizer.step()"
        )
