"""A step whose loss terms have no weight: its mean is 0 / 0, and momentum and weight decay must not move anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.health.evidence import Evidence, NonFiniteError
from accel_train.training.health.options import HealthConfig
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepResult, resolve_step_guard
from benchmarks.reads import HostReads

pytestmark = pytest.mark.usefixtures("fresh")
SKIP, STOP = HealthConfig(non_finite="skip"), HealthConfig()
WHERE = pytest.mark.parametrize("on_device", [True, False])
TERMS = pytest.mark.parametrize("terms", [("main",), ("main", "aux")])


class Training:
    """A layer under AdamW with decay, and pixels of which a step may ignore all, in two micro-batches."""

    def __init__(self, health: HealthConfig, terms: tuple[str, ...], *, on_device: bool) -> None:
        AcceleratorState._reset_state(True)
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=True)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.guard, _ = resolve_step_guard(self.accelerator, self.optimizer, health, on_cpu=on_device)
        self.ema = Ema(EmaConfig(0.5), Shards(self.model, self.optimizer), self.guard)
        self.terms = terms

    def step(self, step: int, *, ignored: bool = False, untrained: float = 0.0) -> StepResult:
        """``untrained`` is the weight of a further term with coefficient 0."""
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        pixels = torch.tensor([5.0, 0.0, 2.0, 7.0]) * (not ignored)
        parts = [
            (
                {"x": x[rows], "sample": rows, "pixels": pixels[rows], "weight": torch.ones(2)},
                {**dict.fromkeys(self.terms, pixels[rows]), "off": torch.full((2,), untrained)},
            )
            for rows in (torch.tensor([0, 1]), torch.tensor([2, 3]))
        ]
        coefficients = {**dict.fromkeys(self.terms, 0.5), "off": 0.0}
        window = GradientWindow(self.accelerator, self.model, parts, coefficients, step, "auto", self.guard)
        for inputs in window:
            loss = self.model(inputs["x"])[:, 0].square()
            window.backward({**dict.fromkeys(self.terms, loss * inputs["pixels"]), "off": 0 * loss})
        result = window.finish(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(step)
        return result

    def state(self) -> list[Tensor]:
        return self.weights() + [shard.clone() for shard in self.ema.averages.values()]

    def weights(self) -> list[Tensor]:
        """Weights and the optimizer's state."""
        inner = self.optimizer.optimizer.state
        return [t.clone() for p in self.model.parameters() for t in (p.detach(), *inner.get(p, {}).values())]


@WHERE
@TERMS
def test_a_step_without_weight_is_skipped_as_one_that_is_not_finite(terms: tuple[str, ...], on_device: bool) -> None:
    training = Training(SKIP, terms, on_device=on_device)
    training.step(0)
    before = training.state()
    fields = training.step(1, ignored=True, untrained=3.0).fields()
    assert all(torch.equal(a, b) for a, b in zip(before, training.state(), strict=True))
    assert (fields["loss"], fields["grad_norm"], fields["skipped_steps"]) == (0.0, 0.0, 1)
    ((bad, skipped),) = training.guard.history.take_unreported()
    assert (bad.step, bad.reason, skipped, bad.samples) == (1, "weight", True, [[0, 1, 2, 3]])
    assert bad.finding == "no sample of step 2 has a weight above 0 in a loss term that the step trains"
    training.step(2).fields()
    assert not torch.equal(before[0], training.state()[0])


@WHERE
@TERMS
def test_a_step_without_weight_ends_the_run_that_stops_for_bad_ones(terms: tuple[str, ...], on_device: bool) -> None:
    training = Training(STOP, terms, on_device=on_device)
    training.step(0)
    before = training.weights()
    with pytest.raises(NonFiniteError, match=r"no sample of step 2 .* 0 / 0, .*give --health\.non_finite skip"):
        training.step(1, ignored=True).fields()
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))


class OwnGradient(torch.autograd.Function):
    """Adds a gradient of its own in the backward, as balancing losses of mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(())


@WHERE
def test_a_gradient_beside_that_of_the_loss_does_not_hide_it(on_device: bool) -> None:
    training = Training(SKIP, ("main",), on_device=on_device)
    head = training.model
    head.register_forward_hook(lambda module, _, output: OwnGradient.apply(output, module.weight.square().sum()))
    training.step(0)
    before = training.weights()
    fields = training.step(1, ignored=True).fields()
    assert fields["grad_norm"] > 0
    assert fields["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))


def test_weights_on_the_host_are_read_where_the_losses_are() -> None:
    """A recipe may make them there: of one process nothing else moves them."""
    sums = torch.zeros(1, device="meta")
    evidence = Evidence(0, ("main",), sums, None, (), (), quotient=torch.tensor(0.5))
    assert [found.device.type for found in evidence.must_be_finite(sums[0])] == ["meta"] * 3


def test_it_is_found_without_a_wait_for_the_device() -> None:
    training = Training(SKIP, ("main", "aux"), on_device=True)
    training.step(0)
    with HostReads() as reads:
        training.step(1, ignored=True)
        training.step(2)
    assert not reads.counts, reads.places


@WHERE
def test_a_gradient_of_0_with_a_weight_is_trained(on_device: bool) -> None:
    training = Training(STOP, ("main",), on_device=on_device)
    training.step(0)
    before = training.state()
    for parameter in training.model.parameters():
        parameter.data.zero_()  # the loss of all samples, and its gradient
    assert training.step(1).fields()["grad_norm"] == 0
    assert not torch.equal(before[1], training.state()[1])
    assert not training.guard.history.take_unreported()
