"""Learning rates that something else than ``set_learning_rate`` sets are refused before they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.training.accumulation import GradientWindow
from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_frozen, set_learning_rate
from accel_train.training.step_calls import StepCalls, note_gradient

CPU = torch.device("cpu")
PARTS = {"first": ["0"]}


def optimizer_over(model: nn.Module) -> torch.optim.Optimizer:
    optimizer, _ = build_optimizer(model, OptimizerConfig(lr=0.1), CPU, PARTS)
    return optimizer


def step(
    calls: StepCalls,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    after: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
) -> None:
    """One step of a loop, as ``loop.training`` checks it. ``after`` follows the optimizer's step."""
    calls.begin()
    set_learning_rate(optimizer, 0.5)
    model(torch.ones(1, 2)).sum().backward()
    note_gradient([optimizer])
    before()
    optimizer.step()
    optimizer.zero_grad()
    after()
    calls.note("training.report")
    calls.note("training.save_if_due")
    calls.require(1, updates=True)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_a_scheduler_of_torch_is_refused_in_the_first_step(model: nn.Module) -> None:
    optimizer = optimizer_over(model)
    calls = StepCalls(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)  # its first change is far away
    with pytest.raises(RuntimeError, match=r"step 1: a scheduler of torch .* leave the scheduler out"):
        step(calls, optimizer, model, scheduler.step)


def test_a_rate_that_changes_after_the_step_is_refused(model: nn.Module) -> None:
    optimizer = optimizer_over(model)
    calls = StepCalls(optimizer)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
    for _ in range(2):
        step(calls, optimizer, model, lambda: plateau.step(1.0))
    with pytest.raises(RuntimeError, match=r"learning rate 0\.05 of this step has become 0\.005, which has no effect"):
        step(calls, optimizer, model, lambda: plateau.step(1.0))
    # A log point asks before it writes the line.
    with pytest.raises(RuntimeError, match=r"has become 0\.005"):
        calls.refuse_other_rates(3)


def test_a_rate_is_compared_with_the_one_set_where_no_step_is_seen(model: nn.Module) -> None:
    """DeepSpeed's optimizer has no hooks."""
    optimizer = optimizer_over(model)
    calls = StepCalls(optimizer)
    calls.begin()
    calls.refuse_other_rates(1)  # that `set_learning_rate` is missing has a message of its own
    set_learning_rate(optimizer, 0.5)
    calls.refuse_other_rates(1)
    optimizer.param_groups[-1]["lr"] = 0.04
    with pytest.raises(RuntimeError, match=r"learning rate 0\.05 of this step has become 0\.04"):
        calls.refuse_other_rates(1)


def test_a_rate_that_changes_before_the_step_is_refused_in_the_first_step_and_in_logged_ones(model: nn.Module) -> None:
    optimizer = optimizer_over(model)
    calls = StepCalls(optimizer)

    def change() -> None:
        optimizer.param_groups[-1]["lr"] = 0.04

    refused = pytest.raises(RuntimeError, match=r"rate 0\.05 of set_learning_rate has become 0\.04 before optimizer")
    with refused:
        step(calls, optimizer, model, lambda: None, before=change)
    optimizer = optimizer_over(model)
    calls = StepCalls(optimizer)
    step(calls, optimizer, model, lambda: None)
    step(calls, optimizer, model, lambda: None, before=change)
    with refused:
        step(calls, optimizer, model, lambda: None, before=lambda: (calls.compare_rates(), change()))


def test_a_step_before_the_gradient_is_clipped_is_refused(model: nn.Module) -> None:
    """Also where the optimizer is wrapped, has hooks of its own, and was in order in the step before."""
    prepared = Accelerator(cpu=True).prepare(optimizer_over(model))
    prepared.optimizer.register_step_pre_hook(lambda *_: None)
    calls = StepCalls(prepared)
    prepared.step()  # outside of a loop, as when a state is restored
    step(calls, prepared, model, lambda: None)
    before = next(model.parameters()).clone()
    calls.begin()
    set_learning_rate(prepared, 0.5)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.step was called before window\.finish"):
        prepared.step()
    assert torch.equal(next(model.parameters()), before)


def test_frozen_parts_and_rates_set_before_the_step_pass(model: nn.Module) -> None:
    optimizer = optimizer_over(model)
    calls = StepCalls(optimizer)
    for frozen in (["first"], [], []):
        # The parts of the next step, before its rate.
        step(calls, optimizer, model, lambda parts=frozen: set_frozen(optimizer, parts))


def test_a_second_optimizer_of_the_trained_parameters_is_refused_before_its_step(model: nn.Sequential) -> None:
    optimizer = optimizer_over(model)
    calls = StepCalls(optimizer)
    weight = next(model[1].parameters())
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with calls.alone(model):
        for _ in range(2):
            step(calls, optimizer, model, other.step)  # of a model that is trained beside
        before = weight.clone()
        loss: Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()
        for second in (head, Accelerator(cpu=True).prepare(head)):
            with pytest.raises(RuntimeError, match=r"second optimizer, a SGD, steps .* \(1\.weight, 1\.bias\)"):
                second.step()
        assert torch.equal(weight, before)
    head.step()  # after the training
    assert not torch.equal(weight, before)


class Delegating(torch.optim.SGD):
    """Has another optimizer do the work."""

    inner: torch.optim.Optimizer

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_the_inner_optimizer_of_the_prepared_one_passes(model: nn.Module) -> None:
    groups = [{"params": list(model.parameters()), "lr": 0.1, "base_lr": 0.1, "frozen": False}]
    optimizer = Delegating(groups, lr=0.1)
    optimizer.inner = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = StepCalls(Accelerator(cpu=True).prepare(optimizer))
    with calls.alone(model):
        step(calls, optimizer, model, lambda: None)


class Own(torch.optim.SGD):
    """Has its own idea of the learning rate, in its step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] /= 2
        return super().step(closure)


def test_an_optimizer_may_change_its_rate_in_its_step(model: nn.Module) -> None:
    groups = [{"params": model.parameters(), "lr": 0.1, "base_lr": 0.1, "frozen": False}]
    optimizer = Own(groups, lr=0.1)
    calls = StepCalls(optimizer)
    for _ in range(3):
        step(calls, optimizer, model, lambda: None)


def window_over(model: nn.Module, accelerator: Accelerator) -> None:
    window = GradientWindow(accelerator, model, [({}, torch.ones(1))], {"main": 1.0}, step=0)
    for _ in window:
        window.backward(model(torch.ones(1, 2)).sum(1))
    window.finish(0)


def test_a_parameter_frozen_before_the_optimizer_was_built_passes(
    accelerator: Accelerator, model: nn.Sequential
) -> None:
    model[0].requires_grad_(False)
    prepared, _ = accelerator.prepare(model, optimizer_over_all(model))
    window_over(prepared, accelerator)


def optimizer_over_all(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimizerConfig(lr=0.1), CPU)[0]


def test_a_parameter_frozen_late_is_refused(accelerator: Accelerator, model: nn.Sequential) -> None:
    prepared, _ = accelerator.prepare(model, optimizer_over_all(model))
    prepared[0].requires_grad_(False)
    with pytest.raises(UsageError, match=r"2 parameter\(s\) \(0\.weight, 0\.bias\) were frozen after the optimizer"):
        window_over(prepared, accelerator)


@pytest.mark.parametrize("trained", [False, True])
def test_a_parameter_frozen_or_trained_from_a_later_step_on_is_refused(
    accelerator: Accelerator, model: nn.Sequential, trained: bool
) -> None:
    model[0].requires_grad_(trained)
    prepared, optimizer = accelerator.prepare(model, optimizer_over_all(model))
    for _ in range(2):
        window_over(prepared, accelerator)
        optimizer.zero_grad()
    prepared[0].requires_grad_(not trained)
    what = "frozen after the first step" if trained else "still frozen in the first step"
    with pytest.raises(UsageError, match=rf"2 parameter\(s\) \(0\.weight, 0\.bias\) were {what}: .* choose set_frozen"):
        window_over(prepared, accelerator)


def test_a_parameter_frozen_late_is_refused_although_it_keeps_a_gradient_of_zero(
    accelerator: Accelerator, model: nn.Sequential
) -> None:
    prepared, optimizer = accelerator.prepare(model, optimizer_over_all(model))
    for _ in range(2):
        window_over(prepared, accelerator)
        optimizer.zero_grad(set_to_none=False)
    prepared[0].requires_grad_(False)
    with pytest.raises(UsageError, match="were frozen after the first step"):
        for _ in range(16):
            window_over(prepared, accelerator)
            optimizer.zero_grad(set_to_none=False)


def test_as_many_other_parameters_are_refused(accelerator: Accelerator) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    prepared, optimizer = accelerator.prepare(model, optimizer_over_all(model))
    with pytest.raises(UsageError, match="were frozen after the first step"):
        for step in range(18):
            window_over(prepared, accelerator)
            optimizer.zero_grad()
            if step == 0:
                model[0].requires_grad_(False)
                model[1].requires_grad_(True)


@pytest.mark.parametrize("own", [False, True])
def test_a_second_stage_may_train_other_parameters(accelerator: Accelerator, model: nn.Sequential, own: bool) -> None:
    """One process prepares the same object again, where DDP makes a new wrapper."""
    model[0].requires_grad_(False)
    prepared, optimizer = accelerator.prepare(model, optimizer_over_all(model))
    window_over(prepared, accelerator)
    optimizer.zero_grad()
    accelerator.free_memory()
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    second = torch.optim.SGD(model[0].parameters(), 0.1) if own else optimizer_over_all(model)
    prepared, _ = accelerator.prepare(model, second)
    window_over(prepared, accelerator)


def test_a_model_may_be_frozen_for_its_second_optimizer(accelerator: Accelerator, model: nn.Sequential) -> None:
    optimizer_over_all(model)
    model[0].requires_grad_(False)
    prepared, _ = accelerator.prepare(model, optimizer_over_all(model))
    window_over(prepared, accelerator)


def test_micro_batches_may_be_divided_but_neither_left_out_nor_repeated() -> None:
    calls = StepCalls(optimizer_over(nn.Sequential(nn.Linear(2, 2))))
    whole = [{"sample": torch.tensor([4, 7])}, {"sample": torch.tensor([5, 6])}]
    halves = [{"sample": part} for batch in whole for part in batch["sample"].split(1)]

    def report(rows: list[dict[str, Tensor]]) -> None:
        result = SimpleNamespace(evidence=SimpleNamespace(step=0, rows=rows))
        calls.report(SimpleNamespace(step=0, micro_batches=whole), result)

    report(whole)
    report(halves)
    for rows in (whole[:1], whole * 2, whole[:1] * 2, halves[:3], [*halves, halves[0]], [{}] * 3):
        with pytest.raises(RuntimeError, match=r"window was given \d micro-batches, and the step has 2"):
            report(rows)


def test_a_module_added_after_prepare_is_said_to_be_in_no_optimizer(
    accelerator: Accelerator, model: nn.Sequential, caplog: pytest.LogCaptureFixture
) -> None:
    prepared, _ = accelerator.prepare(model, optimizer_over_all(model))
    prepared[1].more = nn.Linear(1, 1, bias=False)
    window_over(prepared, accelerator)
    assert "of which 1.more.weight is in no optimizer: add modules before prepare" in caplog.text
