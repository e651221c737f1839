"""Which parameters a model trains: the same ones in every step, whatever the strategy.

A parameter that is frozen between two steps keeps DDP waiting for its gradient, ZeRO fills in zeros, and one process
leaves it as it is. One that is trained from a later step on is in no optimizer, but counts in the norm of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from accel_train.config import UsageError
from accel_train.training.parameters import was_chosen
from accel_train.wording import shortened


class TrainedParameters:
    """The parameters that a model trained in its first window."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizers: Iterable[Any]) -> None:
        _refuse_late_freezing(model, optimizers)
        self._were_trained = [p.requires_grad for p in parameters]
        self._gradients: int | None = None
        """Gradients of the last step that was examined."""

    def refuse_others(self, model: nn.Module, parameters: Sequence[nn.Parameter], gradients: int | None = None) -> None:
        """Raise ``UsageError`` if other parameters are trained by now.

        ``gradients`` is the number of parameters with a gradient in this step. Nothing is compared while it stays the
        same: walking a large model takes a millisecond.
        """
        if gradients is not None:
            if gradients == self._gradients:
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
    # Only such groups have a part. Another optimizer may hold parameters that were frozen from the beginning.
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "part" in group]
    frozen = {id(p) for group in groups for p in group["params"] if not p.requires_grad}
    # The groups of ZeRO hold flat tensors of its own, and FSDP2 replaces the parameters, without their marks.
    found = [name for name, p in model.named_parameters() if id(p) in frozen or (was_chosen(p) and not p.requires_grad)]
    _refuse(found, "frozen after the optimizer was built")


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
    model: nn.Module, parameters: Sequence[nn.Parameter], optimizers: Iterable[Any]
) -> TrainedParameters:
    """Return the ``TrainedParameters`` of a model, shared by all its windows. The first call looks at the model."""
    found = _TRAINED.get(model)
    if found is None:
        found = _TRAINED[model] = TrainedParameters(model, parameters, optimizers)
    return found
