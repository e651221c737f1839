"""The calls of a training loop in one step. Without one of them a run goes on in silence, and trains something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from accel_train.training.parameters import local_of

if TYPE_CHECKING:
    from accel_train.training.step_guard import StepResult

REQUIRED = ("training.report", "training.save_if_due")

_RATED = "_accel_train_learning_rates_set"
"""Attribute of an optimizer whose learning rates were set in the present step."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrapper, and any other as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def note_learning_rates(optimizer: Any) -> None:
    """Note that ``set_learning_rate`` was called for the coming step of ``optimizer``."""
    setattr(unwrapped(optimizer), _RATED, True)


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
        setattr(self._optimizer, _RATED, False)

    def note(self, name: str) -> None:
        """Note one of ``REQUIRED``."""
        self._called.add(name)

    def report(self, result: StepResult, step: int) -> None:
        """Note ``training.report``. Raises ``RuntimeError`` unless ``result`` is that of ``step``, from 0."""
        self.note("training.report")
        # A loop without `window.finish` may give None, or still hold the result of the step before.
        evidence = getattr(result, "evidence", None)
        if evidence is None or evidence.step != step:
            given = "no result" if evidence is None else f"the result of step {evidence.step + 1}"
            raise RuntimeError(
                f"step {step + 1}: training.report was given {given}, so the gradient was neither checked nor clipped; "
                "call result = window.finish(config.optimizer.max_grad_norm) after the loop over the window, before "
                "optimizer.step, and pass its result to training.report and training.save_if_due"
            )

    def require(self, step: int, *, updates: bool) -> None:
        """Raise ``RuntimeError`` if a call of step ``step`` (from 1) is missing, or the optimizer stepped twice.

        ``updates`` is False for a step that is to move nothing: the optimizer's may be missing then.
        """
        for name in REQUIRED:
            if name not in self._called:
                raise RuntimeError(f"step {step}: the loop did not call {name}; add the call")
        if not getattr(self._optimizer, _RATED, False):
            raise RuntimeError(
                f"step {step}: the loop did not call set_learning_rate, so --schedule has no effect on it; call "
                "set_learning_rate(prepared.optimizer, opened.learning_rate_factor(batches.step)) before "
                "optimizer.step, or with a factor of your own"
            )
        if self._counts_steps and updates and self._steps != 1:
            raise RuntimeError(
                f"step {step}: optimizer.step was called {self._steps} times between two steps of the loop, and once "
                "is required; call it after window.finish"
            )


class Leftovers:
    """Finds gradients that a loop has not removed after a step: those of the next one would be added to them."""

    def __init__(self) -> None:
        self._witness: nn.Parameter | None = None
        self._optimizers: list[Any] = []
        self._sees_zeros = False

    def choose(self, parameters: list[nn.Parameter], optimizers: list[Any]) -> None:
        """Choose a parameter that has a gradient and is stepped, unless there is one: it tells what became of all."""
        if self._witness is not None:
            return
        self._optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        stepped = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        self._witness = next((p for p in parameters if p.grad is not None and id(p) in stepped), None)

    def refuse(self, step: int) -> None:
        """Raise ``RuntimeError`` if the gradients of the step before ``step`` are still there.

        Costs nothing where they are removed. Zeros of ``zero_grad(set_to_none=False)`` pass. To see them a device is
        waited for, in the first steps of such a loop: later, a change since the optimizer's step tells of them.
        """
        if self._witness is None or self._witness.grad is None:
            return
        gradient = self._witness.grad
        if self._sees_zeros and getattr(gradient, _STEPPED, None) not in (None, gradient._version):
            return
        # Operators on lists of sharded tensors, and those on `.data`, change values and no version.
        if bool(local_of(gradient).any()):
            raise RuntimeError(
                f"step {step + 1}: the gradient of the step before is still there, and this one would be added to it; "
                "call optimizer.zero_grad() after every optimizer.step()"
            )
        if not self._sees_zeros:
            self._sees_zeros = True
            for optimizer in self._optimizers:
                if isinstance(optimizer, torch.optim.Optimizer):
                    # Behind the step: some optimizers use the gradient as memory for their own values.
                    optimizer.register_step_post_hook(self._note_version)

    def _note_version(self, *_: object) -> None:
        assert self._witness is not None
        if self._witness.grad is not None:
            setattr(self._witness.grad, _STEPPED, self._witness.grad._version)


_STEPPED = "_accel_train_version_when_stepped"
_LEFTOVERS: WeakKeyDictionary[nn.Module, Leftovers] = WeakKeyDictionary()


def leftovers_of(model: nn.Module) -> Leftovers:
    """Return that of a model, whose windows share it."""
    found = _LEFTOVERS.get(model)
    if found is None:
        found = _LEFTOVERS[model] = Leftovers()
    return found
