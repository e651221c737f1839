"""A step that is not finite moves nothing, and finite steps wait for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from accel_train.training.accumulation import GradientWindow
from accel_train.training.step_guard import NonFiniteError, StepResult, resolve_step_guard
from benchmarks.reads import HostReads

pytestmark = pytest.mark.usefixtures("fresh")


class Training:
    """A toy with two loss terms, one of which some steps leave out, cut into micro-batches of 4, 4 and 2."""

    def __init__(self, guarded: bool, max_grad_norm: float = 0.5) -> None:
        AcceleratorState._reset_state(True)
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2))
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=True)
        )
        self.guard = resolve_step_guard(self.accelerator, self.optimizer, on_cpu=True)[0] if guarded else None
        self.max_grad_norm = max_grad_norm

    def step(self, step: int, spoil: str | None = None) -> StepResult:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(10, 6, generator=generator), torch.randn(10, 2, generator=generator)
        if spoil == "loss":
            x[5, 0] = float("nan")
        parts = [
            ({"x": x[i], "y": y[i], "sample": i}, {"main": torch.tensor(float(len(i))), "aux": torch.tensor(len(i))})
            for i in torch.arange(10).split(4)
        ]
        coefficients = {"aux": 0.1 if step % 2 else 0.0, "main": 100.0}
        window = GradientWindow(self.accelerator, self.model, parts, coefficients, step, "auto", self.guard)
        hook = self.model[0].weight.register_hook(lambda g: g * (float("inf") if spoil == "gradient" else 1.0))
        for inputs in window:
            out = self.model(inputs["x"])
            window.backward({"main": (out - inputs["y"]).square().sum(), "aux": out.abs().sum()})
        hook.remove()
        result = window.finish(self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def state(self) -> list[Tensor]:
        inner = self.optimizer.optimizer.state
        return [t.clone() for p in self.model.parameters() for t in (p.detach(), *inner.get(p, {}).values())]


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_guarded_training_is_that_without_a_guard(max_grad_norm: float) -> None:
    plain, guarded = Training(False, max_grad_norm), Training(True, max_grad_norm)
    norms = []
    for step in range(12):
        expected, found = plain.step(step).fields(), guarded.step(step).fields()
        assert found == pytest.approx(expected, rel=1e-4)
        norms.append(expected["grad_norm"])
    assert max(norms) > 1.0  # 0.5 clips
    for a, b in zip(guarded.state(), plain.state(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    if max_grad_norm != 0.5:  # the division by 1 leaves every bit
        assert all(torch.equal(a, b) for a, b in zip(guarded.state(), plain.state(), strict=True))


def test_a_step_reads_nothing_and_a_log_point_does() -> None:
    training = Training(True)
    training.step(0)
    with HostReads() as reads:
        for step in range(1, 5):
            result = training.step(step)
    assert not reads.counts
    with HostReads() as reads:
        result.fields()
    assert reads.counts.total() == 2  # the guard's flag, the figures


def test_without_a_guard_every_step_waits() -> None:
    training = Training(False)
    training.step(0)
    with HostReads() as reads:
        training.step(1)
    assert reads.counts == {"tolist": 1}


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nothing_moves_from_the_step_on_that_is_not_finite(where: str) -> None:
    training = Training(True)
    for step in range(3):
        training.step(step)
    before = training.state()
    training.step(3, spoil=where)
    training.step(4)
    training.step(5, spoil="loss")
    assert all(torch.equal(a, b) for a, b in zip(training.state(), before, strict=True))
    samples = r"\[4, 5, 6, 7\]" if where == "loss" else r"\[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\]"
    assert training.guard is not None
    for _ in range(2):  # it is not forgotten
        with pytest.raises(NonFiniteError, match=rf"{where} of step 4 is not finite .*rank 0: {samples}"):
            training.guard.check()


def test_a_log_point_raises_before_it_reports() -> None:
    training = Training(True)
    training.step(0)
    result = training.step(1, spoil="loss")
    with pytest.raises(NonFiniteError, match=r"loss of step 2[\s\S]*, or lengthen the warm-up$"):
        result.fields()


def test_a_check_that_has_passed_lets_go_of_its_steps() -> None:
    training = Training(True)
    for step in range(3):
        training.step(step)
    assert training.guard is not None
    assert len(training.guard._unread) == 3
    training.guard.check()
    assert not training.guard._unread


@pytest.mark.parametrize(
    ("build", "scaler", "because"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), False, None),
        (lambda p: torch.optim.Adam(p, fused=True), False, None),
        (lambda p: torch.optim.AdamW(p, fused=False), False, "AdamW cannot skip a step on the device"),
        (lambda p: torch.optim.SGD(p, lr=1.0), False, "SGD cannot skip a step on the device"),
        (lambda p: torch.optim.AdamW(p, fused=True), True, "loss scale is decided on the host"),
    ],
)
def test_what_can_be_guarded_and_why_not(build: Any, scaler: bool, because: str | None) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = accelerator.prepare(build(model.parameters()))
    if scaler:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    guard, reason = resolve_step_guard(accelerator, optimizer, on_cpu=True)
    if because is None:
        assert guard.on_device
        assert reason == "steps wait for the device at log points and saves only"
    else:
        assert not guard.on_device
        assert because in reason
        assert reason.startswith("every step waits for the device")


def test_a_window_takes_a_prepared_module_and_weighs_every_term() -> None:
    training = Training(False)
    parts = [({"x": torch.ones(1, 6)}, {"main": torch.tensor(1.0)})]
    with pytest.raises(TypeError, match=r"accelerator\.prepare"):
        GradientWindow(training.accelerator, nn.Linear(6, 2), parts, {"main": 1.0}, 0)
    with pytest.raises(ValueError, match="aux"):
        GradientWindow(training.accelerator, training.model, parts, {"main": 1.0, "aux": 1.0}, 0)
