"""Check that the loop makes every required call in each step. A missing one would silently train something else."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from accel_train.config import UsageError
from accel_train.training.parameters import frozen_groups, local_of, unwrapped
from accel_train.wording import shortened

logger = logging.getLogger(__name__)

FINISHED = "result = window.finish(config.optimizer.max_grad_norm)"
REQUIRED = ("training.report", "training.save_if_due")

_FACTOR = "_accel_train_learning_rate_factor"
"""Attribute of an optimizer: the factor of its learning rates in the present step, None until it is set."""


_AWAITS_GRADIENT = "_accel_train_awaits_gradient"
"""Attribute of an optimizer: True from the begin of a step until ``window.finish`` has clipped its gradient."""


def note_learning_rates(optimizer: Any, factor: float) -> None:
    """Note that ``set_learning_rate`` was called for the coming step of ``optimizer``."""
    setattr(unwrapped(optimizer), _FACTOR, factor)


def note_gradient(optimizers: Iterable[Any]) -> None:
    """Note that the gradient of the coming step of ``optimizers`` is checked and clipped."""
    for optimizer in optimizers:
        setattr(unwrapped(optimizer), _AWAITS_GRADIENT, False)


class StepCalls:
    """Records the calls of each step, those of the optimizer through hooks.

    DeepSpeed's engine steps by itself, in the backward, so for its optimizer only the learning rates are required.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = unwrapped(optimizer)
        self._counts_steps = isinstance(self._optimizer, torch.optim.Optimizer)
        self._called: set[str] = set()
        self._steps = 0
        self._depth = 0
        self._rates: list[float] | None = None
        """Learning rates of the groups after the optimizer's step, in which an optimizer may change its own."""
        self._has_begun = False
        self._compares_rates = False
        """Compare the learning rates with those of ``set_learning_rate`` before the optimizer's step."""
        if self._counts_steps:
            self._optimizer.register_step_pre_hook(self._enter)
            self._optimizer.register_step_post_hook(self._leave)

    # The hooks run nested for a step that calls the step of its base class.
    def _enter(self, *_: object) -> None:
        self._depth += 1
        # The guard's flag and factor would still be those of the step before.
        if getattr(self._optimizer, _AWAITS_GRADIENT, False):
            raise RuntimeError(
                "optimizer.step was called before window.finish, so the gradient is neither checked nor clipped; call "
                f"{FINISHED} after the loop over the window, and optimizer.step after it"
            )
        # Compared before the step, because an optimizer may change its own rates in it.
        if self._compares_rates and self._depth == 1:
            self._refuse_replaced_rates()

    def _leave(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._steps += 1
            self._rates = [group["lr"] for group in self._optimizer.param_groups]

    @contextmanager
    def alone(self, model: nn.Module) -> Generator[None]:
        """Raise ``RuntimeError`` in the body if another optimizer of torch steps a parameter that this one trains.

        Raised before that step. Its state would be in no checkpoint, and its learning rate in no record.
        """
        others: WeakSet[torch.optim.Optimizer] = WeakSet()

        def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
            # An inner optimizer may do the work within a step of this one. DeepSpeed's optimizer steps its own copies.
            if optimizer is self._optimizer or self._depth or optimizer in others:
                return
            _refuse_second(optimizer, model)
            others.add(optimizer)

        hook = register_optimizer_step_pre_hook(refuse)
        try:
            yield
        finally:
            hook.remove()

    def begin(self) -> None:
        """Forget the calls of the previous step."""
        self._called.clear()
        self._steps = 0
        self._rates = None
        self._compares_rates = not self._has_begun
        setattr(self._optimizer, _FACTOR, None)
        setattr(self._optimizer, _AWAITS_GRADIENT, True)

    def compare_rates(self) -> None:
        """Have the learning rates of the current step compared, as in the first step. For steps that are logged."""
        self._compares_rates = True

    def _refuse_replaced_rates(self) -> None:
        factor = getattr(self._optimizer, _FACTOR, None)
        # A factor that was never set has its own message, in `require`.
        if factor is None:
            return
        for group in self._optimizer.param_groups:
            before = 0.0
            if not group["frozen"]:
                before = group["base_lr"] * factor
            if group["lr"] != before:
                raise RuntimeError(
                    f"the learning rate {before:g} of set_learning_rate has become {group['lr']:g} before "
                    "optimizer.step; call set_learning_rate(prepared.optimizer, factor) with a factor of your own, or "
                    "choose --optimizer.lr_factors for modules with another rate"
                )

    def note(self, name: str) -> None:
        """Note a call of one of ``REQUIRED``."""
        self._called.add(name)

    def save(self, result: object) -> None:
        """Note ``training.save_if_due``. Raises ``UsageError`` unless it was given a result."""
        if not hasattr(result, "evidence"):
            _refuse_type("training.save_if_due(result)", result, FINISHED)
        self.note("training.save_if_due")

    def report(self, batches: object, result: object) -> None:
        """Note ``training.report``. Raises unless ``result`` is that of the step of ``batches``."""
        self.note("training.report")
        step: int | None = getattr(batches, "step", None)
        if step is None:
            _refuse_type("training.report(batches, result)", batches, "the StepBatches of `for batches in training`")
        # A loop without `window.finish` may give None, or still hold the result of the step before.
        evidence = getattr(result, "evidence", None)
        if evidence is None or evidence.step != step:
            given = "no result" if evidence is None else f"the result of step {evidence.step + 1}"
            raise RuntimeError(
                f"step {step + 1}: training.report was given {given}, so the gradient was neither checked nor clipped; "
                f"call {FINISHED} after the loop over the window, before "
                "optimizer.step, and pass its result to training.report and training.save_if_due"
            )
        _refuse_other_samples(step, evidence.rows, getattr(batches, "micro_batches", ()))

    def require(self, step: int, *, updates: bool) -> None:
        """Raise ``RuntimeError`` if a call of step ``step`` (from 1) is missing, or the optimizer stepped twice.

        ``updates`` is False for a step that must not move the weights. The optimizer's step may then be missing.
        """
        for name in REQUIRED:
            if name not in self._called:
                raise RuntimeError(f"step {step}: the loop did not call {name}; add the call")
        if getattr(self._optimizer, _FACTOR, None) is None:
            raise RuntimeError(
                f"step {step}: the loop did not call set_learning_rate, so --schedule has no effect on it; call "
                "set_learning_rate(prepared.optimizer, opened.learning_rate_factor(batches.step)) before "
                "optimizer.step, or with a factor of your own"
            )
        self.refuse_other_rates(step)
        if self._counts_steps and updates and self._steps != 1:
            raise RuntimeError(
                f"step {step}: optimizer.step was called {self._steps} times between two steps of the loop; call it "
                "once, after window.finish"
            )

    def refuse_other_rates(self, step: int) -> None:
        """Raise ``RuntimeError`` if anything but ``set_learning_rate`` sets the learning rates.

        Such a rate has no effect, because the next step sets its own. A log line would show it nevertheless.
        """
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if rates != self._rates:
            # If no step was seen, as under ZeRO, the rates used are those of set_learning_rate, if it was called.
            factor = getattr(self._optimizer, _FACTOR, None)
            used = self._rates or ([] if factor is None else [group["base_lr"] * factor for group in groups])
            for group, now, before in zip(groups, rates, used, strict=False):
                # A group may be frozen for the coming step already.
                if now != before and not group["frozen"]:
                    _refuse_scheduler(step, f"the learning rate {before:g} of this step has become {now:g}")
        # torch's schedulers put it into the groups when they are built, before they change a rate.
        if not self._has_begun and groups and "initial_lr" in groups[0]:
            _refuse_scheduler(step, "a scheduler of torch was built for the optimizer")
        self._has_begun = True


def _refuse_other_samples(step: int, rows: Sequence[Mapping[str, Any]], batches: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``RuntimeError`` for a window without some micro-batches of the step, or with one of them twice."""
    are_different = len({id(row.get("sample", row)) for row in rows}) == len(rows)
    # Equally many on every process, so that all of them raise.
    if len(rows) == len(batches) and are_different:
        return
    of_window, of_step = _samples(rows), _samples(batches)
    # A loop may divide them further.
    if of_step is not None and of_window == of_step:
        return
    raise RuntimeError(
        f"step {step + 1}: prepared.window was given {len(rows)} micro-batches, and the step has {len(batches)}, with "
        "other samples, so the gradient is not that of the global batch; pass all of batches.micro_batches, each once"
    )


def _samples(batches: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the numbers of the samples in order. None if a batch of a recipe's own has none."""
    if not all("sample" in batch for batch in batches):
        return None
    return sorted(number for batch in batches for number in batch["sample"].tolist())


def _refuse_type(call: str, given: object, required: str) -> NoReturn:
    raise UsageError(f"{call}: {type(given).__name__}: this type is not accepted; pass {required}")


def _refuse_second(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # Parameters of the model as it is now: FSDP2 may replace them.
    found = [name for name, p in model.named_parameters() if p.requires_grad and id(p) in stepped]
    names = [name.removeprefix("module.") for name in found]  # without the wrapper of DDP or DeepSpeed
    if names:
        raise RuntimeError(
            f"a second optimizer, a {type(optimizer).__name__}, steps parameters that prepared.optimizer trains "
            f"({shortened(names, 3)}), and its state would be in no checkpoint; leave it out, and choose "
            "--optimizer.name, which also takes a class of your own, and --optimizer.lr_factors for modules with "
            "another rate"
        )


def _refuse_scheduler(step: int, finding: str) -> NoReturn:
    raise RuntimeError(
        f"step {step}: {finding}, which has no effect, because set_learning_rate sets the rate of each step; leave the "
        "scheduler out, and choose --schedule.kind, or call set_learning_rate(prepared.optimizer, factor) with a "
        "factor of your own"
    )


class Leftovers:
    """Finds gradients that are not of a model's window: of a step before, or of a backward beside the window."""

    def __init__(self) -> None:
        self.is_first = True
        """No window of the model has finished yet. Some checks cost too much for every step."""
        self.in_backward = False
        """Within the window's own backward."""
        self.has_named_unused = False
        """The warning of ``find_unused`` was given. A first step may be repeated, in fp16 or for want of memory."""
        self._witness: nn.Parameter | None = None
        self._optimizers: list[Any] = []
        self._sees_zeros = False
        self._hooks: list[RemovableHandle] = []

    def choose(self, parameters: list[nn.Parameter], optimizers: list[Any]) -> None:
        """Choose a stepped parameter with a gradient as a witness for all of them, unless there is one already."""
        self.is_first = False
        while self._hooks:
            self._hooks.pop().remove()
        if self._witness is not None:
            return
        self._optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        stepped = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        self._witness = next((p for p in parameters if p.grad is not None and id(p) in stepped), None)

    def watch(self, parameters: list[nn.Parameter], step: int) -> None:
        """Raise ``RuntimeError`` for a gradient from before the first window, and in a backward beside it.

        A backward within ``in_backward`` passes.
        """
        # A backward that raised, such as one out of memory, has left it True.
        self.in_backward = False
        # Gradients of 0 add nothing.
        if any(p.grad is not None and bool(local_of(p.grad).any()) for p in parameters):
            _refuse_backward(step)

        def refuse(_: Tensor) -> None:
            if not self.in_backward:
                _refuse_backward(step)

        trained = [p for p in parameters if p.requires_grad]
        self._hooks += [p.register_post_accumulate_grad_hook(refuse) for p in trained]

    def refuse(self, step: int) -> None:
        """Raise ``RuntimeError`` if the gradients of the step before ``step`` are not cleared.

        Costs nothing where they are None. Zeros of ``zero_grad(set_to_none=False)`` pass. The first steps of such a
        loop wait for the device to see them. Later it is enough that the gradient has changed since the optimizer's
        step.
        """
        if self._witness is None or self._witness.grad is None:
            return
        gradient = self._witness.grad
        if self._sees_zeros and getattr(gradient, _STEPPED, None) not in (None, gradient._version):
            return
        # Operators on lists of sharded tensors, and those on `.data`, change values without a new version.
        if bool(local_of(gradient).any()):
            raise RuntimeError(
                f"step {step + 1}: the gradient of the previous step, or of a backward of your own before the window, "
                "is still there, and this step would add to it; call optimizer.zero_grad() after every "
                f"optimizer.step(), and {_ADD_LOSS}"
            )
        if not self._sees_zeros:
            self._sees_zeros = True
            for optimizer in self._optimizers:
                if isinstance(optimizer, torch.optim.Optimizer):
                    # After the step: some optimizers use the gradient as memory for their own values.
                    optimizer.register_step_post_hook(self._note_version)

    def _note_version(self, *_: object) -> None:
        assert self._witness is not None
        if self._witness.grad is not None:
            setattr(self._witness.grad, _STEPPED, self._witness.grad._version)


_ADD_LOSS = "add a loss of your own to the sums given to window.backward, as a further term"


def _refuse_backward(step: int) -> NoReturn:
    raise RuntimeError(
        f"step {step + 1}: a backward outside of window.backward has added to the gradients of the model, and its "
        f"share is not divided by a weight; {_ADD_LOSS}, or use torch.autograd.grad, which adds to no gradient"
    )


def find_unused(model: nn.Module, optimizers: Iterable[Any], step: int) -> None:
    """Warn once of trained parameters without a gradient, other than frozen parts. Under DDP raise ``RuntimeError``.

    DDP has then reduced a part of the gradients only, and torch refuses the next forward without their names. With a
    static graph it has found by itself which parameters take part, and waits for no others.
    """
    waits_for_all = isinstance(model, nn.parallel.DistributedDataParallel) and not model.static_graph
    optimizers = list(optimizers)
    frozen: set[int] = set()
    # DDP waits for those of frozen parts as well.
    if not waits_for_all:
        frozen = {id(p) for group in frozen_groups(optimizers) for p in group["params"]}
    found = model.named_parameters()
    names = [
        name.removeprefix("module.") for name, p in found if p.requires_grad and p.grad is None and id(p) not in frozen
    ]
    if not names:
        return
    finding = f"step {step + 1}: no gradient for {len(names)} trained parameter(s) ({shortened(names, 3)})"
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    outside = [name.removeprefix("module.") for name, p in model.named_parameters() if id(p) not in stepped]
    if added := [name for name in names if name in outside]:
        finding += f", of which {shortened(added, 3)} is in no optimizer: add modules before prepare"
    remedy = (
        "let the loss depend on each in every step, if only through a term with coefficient 0, or call "
        "requires_grad_(False) on them before prepare"
    )
    if waits_for_all:
        raise RuntimeError(
            f"{finding}, and DDP requires one for each in every step; {remedy}, or, if no step uses them and a step is "
            "one micro-batch, give --distributed.static_graph"
        )
    leftovers = leftovers_of(model)
    if not leftovers.has_named_unused:
        leftovers.has_named_unused = True
        logger.warning(
            "%s: they do not train in this step, nor at all if no later step uses them, and DDP would refuse them "
            "without --distributed.static_graph; %s",
            finding,
            remedy,
        )


_STEPPED = "_accel_train_version_when_stepped"
_LEFTOVERS: WeakKeyDictionary[nn.Module, Leftovers] = WeakKeyDictionary()


def leftovers_of(model: nn.Module) -> Leftovers:
    """Return the ``Leftovers`` of a model, shared by all its windows."""
    leftovers = _LEFTOVERS.get(model)
    if leftovers is None:
        leftovers = _LEFTOVERS[model] = Leftovers()
    return leftovers
