"""Which parameters a model trains: the same ones in every step, whatever the strategy.

A parameter that is frozen between two steps keeps DDP waiting for its gradient, ZeRO fills in zeros, and one process
leaves it as it is. One that is trained from a later step on is in no optimizer, but counts in the norm of the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from accel_train.config import UsageError
from accel_train.training.parameters import was_chosen
from accel_train.wording import shortened

INTERVAL = 16
"""Windows between two comparisons."""


class TrainedParameters:
    """The parameters that a model trained in its first window."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizers: Sequence[Any]) -> None:
        _refuse_late_freezing(model, optimizers)
        self._were_trained = [p.requires_grad for p in parameters]
        # Weak: this must not keep the state of an optimizer in memory that a later stage of training replaces.
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._gradients: int | None = None
        self._windows = 0

    def is_of(self, optimizers: Sequence[Any]) -> bool:
        """Return True if the model is still trained by the same optimizers."""
        return [known() for known in self._optimizers] == [*optimizers]

    def refuse_others(self, model: nn.Module, parameters: Sequence[nn.Parameter], gradients: int | None = None) -> None:
        """Raise ``UsageError`` if other parameters are trained by now. Called once in each window.

        With the number of parameters that have a gradient, ``gradients``, they are compared if it has changed, and else
        in every 16th window: for 600 parameters it takes as long as the rest of a step on the host.
        """
        self._windows += 1
        if gradients is not None and gradients == self._gradients and self._windows % INTERVAL:
            return
        self._gradients = gradients
        are_trained = [p.requires_grad for p in parameters]
        if are_trained == self._were_trained:
            return
        pairs = zip(are_trained, self._were_trained, model.named_parameters(), strict=True)
        names = [(is_trained, name) for is_trained, was_trained, (name, _) in pairs if is_trained != was_trained]
        _refuse([name for is_trained, name in names if not is_trained], "frozen after the first step")
        _refuse([name for is_trained, name in names if is_trained], "still frozen in the first step")


def _refuse_late_freezing(model: nn.Module, optimizers: Iterable[Any]) -> None:
    """Raise ``UsageError`` for parameters that ``build_optimizer`` was given to train and that are frozen by now."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # Only groups of `build_optimizer` have a part. Others may hold parameters that were frozen from the beginning.
    late = {id(p) for group in groups if "part" in group for p in group["params"] if not p.requires_grad}
    stepped = {id(p) for group in groups for p in group["params"]}
    named = list(model.named_parameters())
    # The groups of ZeRO hold flat tensors of its own.
    if not any(id(p) in stepped for _, p in named):
        late = {id(p) for _, p in named if was_chosen(p) and not p.requires_grad}
    _refuse([name for name, p in named if id(p) in late], "frozen after the optimizer was built")


def _refuse(names: Sequence[str], what: str) -> None:
    if names:
        shown = [name.removeprefix("module.") for name in names]  # without the wrapper of DDP or DeepSpeed
        raise UsageError(
            f"requires_grad: {len(shown)} parameter(s) ({shortened(shown, 3)}) were {what}: the same ones are required "
            "in every step; set requires_grad before build_optimizer or preparation.prepare, or choose set_frozen for "
            "a part that is frozen in some steps only"
        )


_TRAINED: WeakKeyDictionary[nn.Module, TrainedParameters] = WeakKeyDictionary()


def trained_parameters(
    model: nn.Module, parameters: Sequence[nn.Parameter], optimizers: Sequence[Any]
) -> TrainedParameters:
    """Return the ``TrainedParameters`` of a model and its optimizers, shared by all windows. The first call looks."""
    found = _TRAINED.get(model)
    # One process prepares a model for a second stage of training without a new wrapper.
    if found is None or not found.is_of(optimizers):
        found = _TRAINED[model] = TrainedParameters(model, parameters, optimizers)
    return found
