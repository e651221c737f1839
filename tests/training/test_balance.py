"""Balance of the loss terms: against fp64 with real parameters, what moves it, and no wait for the device."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.options.loading import load_config
from accel_train.training.accumulation import GradientWindow
from accel_train.training.feedback.balance import LossBalance
from accel_train.training.feedback.options import BalanceConfig
from accel_train.training.health.options import HealthConfig
from accel_train.training.optimizers import OptimizerConfig
from accel_train.training.step_guard import StepGuard, StepResult
from benchmarks.reads import HostReads
from recipes import causal_lm, lora, mmdit
from tests.conftest import forget
from tests.distributed.launching import ROOT
from tests.training.test_health import SKIP, STEPS, Training, resumed_from, same, saver_of

pytestmark = pytest.mark.usefixtures("fresh")
Kind = Literal["ema", "uncertainty"]
KINDS: tuple[Kind, ...] = ("ema", "uncertainty")
each_kind = pytest.mark.parametrize("kind", KINDS)
SAMPLES = 13
RATE = 0.02


def rows(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 2, generator=generator)
    return x, y, torch.randint(1, 5, (SAMPLES, 1), generator=generator).float()


def coefficients(step: int) -> dict[str, float]:
    """Terms of very different size, of which some steps train only one."""
    return {"main": 0.0 if step % 6 == 3 else 1.0, "aux": 0.0 if step % 3 == 1 else 0.3}


def sums(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> dict[str, Tensor]:
    out = model(x)
    return {"main": 50.0 * (out - y).square().sum(), "aux": 0.1 * (out.square() * w).sum()}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def window_of(
    accelerator: Accelerator, model: nn.Module, guard: StepGuard, step: int, size: int = 5, **changes: float
) -> GradientWindow:
    x, y, w = rows(step)
    parts = []
    for i in torch.arange(SAMPLES).split(size):
        weights = {"main": torch.tensor(float(len(i))), "aux": w[i].sum() * changes.get("aux_weight", 1.0)}
        parts.append(({"x": x[i], "y": y[i], "w": w[i], "sample": i}, weights))
    return GradientWindow(accelerator, model, parts, coefficients(step), step, guard=guard)


class Trained:
    """A small model trained with a balance, in micro-batches of uneven sizes."""

    def __init__(self, accelerator: Accelerator, config: BalanceConfig, size: int = 5) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.accelerator, self.size = accelerator, size
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.guard = StepGuard()
        self.balance = self.guard.balance = LossBalance(config)

    def step(self, step: int) -> StepResult:
        window = window_of(self.accelerator, self.model, self.guard, step, self.size)
        for inputs in window:
            window.backward(sums(self.model, inputs["x"], inputs["y"], inputs["w"]))
        result = window.finish(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def weights(self) -> Tensor:
        return torch.cat([p.detach().double().flatten() for p in self.model.parameters()])


class Reference:
    """The same in fp64 on whole batches, by autograd of the loss that is written in the paper."""

    def __init__(self) -> None:
        self.model = build().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.losses: dict[str, list[float]] = {"main": [], "aux": []}
        """Of the steps that trained the term."""

    def terms(self, step: int) -> dict[str, Tensor]:
        x, y, w = (t.double() for t in rows(step))
        by_term = sums(self.model, x, y, w)
        return {"main": by_term["main"] / SAMPLES, "aux": by_term["aux"] / w.sum()}

    def descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def numbers(factors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(factor) for name, factor in factors.items()}


@pytest.mark.parametrize("size", [13, 5, 1])
def test_uncertainty_equals_log_variances_trained_by_autograd(accelerator: Accelerator, size: int) -> None:
    ours, reference = Trained(accelerator, BalanceConfig("uncertainty", lr=0.05), size), Reference()
    variances = {name: nn.Parameter(torch.zeros((), dtype=torch.float64)) for name in ("main", "aux")}
    adam = torch.optim.Adam(variances.values(), lr=0.05)
    for step in range(60):
        expected = {name: math.exp(-s.item()) for name, s in variances.items()}
        active = {name: c for name, c in coefficients(step).items() if c}
        terms = reference.terms(step)
        # Without a gradient, Adam leaves a parameter and its counts as they are.
        adam.zero_grad(set_to_none=True)
        balanced = [c * (torch.exp(-variances[n]) * terms[n] + variances[n]) for n, c in active.items()]
        reference.descend(torch.stack(balanced).sum())
        adam.step()
        result = ours.step(step)
        assert numbers(result.balance) == pytest.approx(expected, rel=1e-4), step
        assert result.fields()["loss"] == pytest.approx(sum(c * terms[n].item() for n, c in active.items()), rel=1e-4)
    assert torch.allclose(ours.weights(), reference.weights(), rtol=1e-4, atol=1e-5)
    # The scales are 50 and 0.1, so that the log-variances must have gone apart.
    assert variances["main"].item() - variances["aux"].item() > 2


@pytest.mark.parametrize("size", [13, 5, 1])
@pytest.mark.parametrize("decay", [0.0, 0.9, None])
def test_ema_divides_by_the_weighted_mean_of_earlier_losses(
    accelerator: Accelerator, size: int, decay: float | None
) -> None:
    ours, reference = Trained(accelerator, BalanceConfig("ema", decay=decay), size), Reference()
    beta = 0.99 if decay is None else decay
    for step in range(40):
        expected: dict[str, float] = {}
        for name, losses in reference.losses.items():
            weights = [beta**age for age in reversed(range(len(losses)))]
            total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
            expected[name] = sum(weights) / total if losses else 1.0
        terms = reference.terms(step)
        active = {name: c for name, c in coefficients(step).items() if c}
        for name in active:
            reference.losses[name].append(abs(terms[name].item()))
        reference.descend(torch.stack([c * expected[n] * terms[n] for n, c in active.items()]).sum())
        assert numbers(ours.step(step).balance) == pytest.approx(expected, rel=1e-4), step
    assert torch.allclose(ours.weights(), reference.weights(), rtol=1e-4, atol=1e-5)


def test_a_negative_loss_is_divided_by_its_size() -> None:
    """Such as the logarithm of a density."""
    balance = LossBalance(BalanceConfig(kind="ema"))
    weights = {"below": torch.tensor(2.0), "above": torch.tensor(2.0)}
    balance.factors(weights)
    balance.update({"below": 1.0, "above": 1.0}, torch.tensor([-6.0, 6.0]), weights, None)
    assert [float(factor) for factor in balance.factors(weights).values()] == pytest.approx([1 / 3, 1 / 3])


@each_kind
def test_lines_have_the_factors_of_the_terms_that_the_step_trains(accelerator: Accelerator, kind: Kind) -> None:
    trained = Trained(accelerator, BalanceConfig(kind))
    names = [sorted(name for name in trained.step(step).fields() if name.startswith("balance_")) for step in range(4)]
    assert names == [
        ["balance_aux", "balance_main"],
        ["balance_main"],
        ["balance_aux", "balance_main"],
        ["balance_aux"],
    ]


@each_kind
def test_a_term_without_coefficient_or_weight_keeps_its_state(accelerator: Accelerator, kind: Kind) -> None:
    trained = Trained(accelerator, BalanceConfig(kind))
    trained.step(0)
    before = trained.balance.state()["terms"]
    trained.step(1)  # no coefficient of aux
    after = trained.balance.state()["terms"]
    assert after["aux"] == before["aux"]
    assert after["main"] != before["main"]
    window = window_of(accelerator, trained.model, trained.guard, 2, aux_weight=0.0)
    for inputs in window:
        window.backward(sums(trained.model, inputs["x"], inputs["y"], inputs["w"]))
    window.finish(1.0)
    assert trained.balance.state()["terms"]["aux"] == before["aux"]
    assert trained.balance.state()["terms"]["main"] != after["main"]


@each_kind
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("spoil", ["loss", "gradient", "spike"])
def test_a_skipped_step_moves_no_factor(kind: Kind, spoil: str, on_device: bool) -> None:
    health, options = SKIP, OptimizerConfig(lr=1e-2, fused=True)
    if spoil == "spike":
        health = HealthConfig(spike_factor=50.0, spike="skip", spike_window=3)
    spoiled = Training(options, health, on_device=on_device, balance=BalanceConfig(kind)).train(spoil=spoil, at=(5, 6))
    without = Training(options, health, on_device=on_device, balance=BalanceConfig(kind))
    without.train([step for step in range(STEPS) if step not in (5, 6)])
    spoiled.guard.check()
    assert spoiled.guard.history.skipped == 2
    assert spoiled.guard.state()["balance"] == without.guard.state()["balance"]
    assert not same(spoiled.state(), without.state())
    fixed = Training(options, health, on_device=on_device).train([s for s in range(STEPS) if s not in (5, 6)])
    assert same(fixed.state(), without.state())


@each_kind
def test_a_step_that_is_only_measured_moves_no_factor(kind: Kind) -> None:
    training = Training(OptimizerConfig(lr=1e-2), balance=BalanceConfig(kind)).train(range(2))
    before = training.guard.state()
    training.guard.leaves_out = True
    training.step(2)
    assert training.guard.state() == before


@each_kind
def test_attempts_that_overflow_move_no_factor(kind: Kind) -> None:
    """fp16 repeats a step with a lower scale. Halving it changes no digit, so the states have the same bits."""
    states, overflows = [], []
    for scale in (None, 2.0**127):
        forget()
        accelerator = Accelerator(cpu=True)
        if scale is not None:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trained = Trained(accelerator, BalanceConfig(kind))
        overflows.append(sum(trained.step(step).overflows for step in range(STEPS)))
        states.append(trained.guard.state())
    assert overflows[0] == 0 < overflows[1]
    assert states[0] == states[1]


@each_kind
def test_nothing_waits_for_the_device(kind: Kind) -> None:
    training = Training(OptimizerConfig(lr=1e-2, fused=True), on_device=True, balance=BalanceConfig(kind))
    training.train(range(3))
    with HostReads() as reads:
        training.step(3)
        training.step(4, "gradient")
        training.step(5)
    assert not reads.counts, reads.places


@each_kind
def test_a_resume_has_the_same_bits(kind: Kind, tmp_path: Path) -> None:
    options, balance = OptimizerConfig(lr=1e-2), BalanceConfig(kind)
    whole = Training(options, balance=balance).train(range(5), "loss", at=(2,))
    run, saver = saver_of(whole, tmp_path / "run")
    with saver:
        saver.save(5)
    other = Training(options, balance=balance, resume=resumed_from(run, 5))
    assert other.guard.state() == whole.guard.state()  # also before its first step, if it is saved there
    for training in (whole, other):
        training.train(range(5, 10))
    assert not same(whole.state(), other.state())
    assert whole.guard.state() == other.guard.state()
    # What only --allow makes possible.
    without = Training(options, resume=resumed_from(run, 5)).train(range(5, 7))
    assert "balance" not in without.guard.state()
    another: Kind = "ema" if kind == "uncertainty" else "uncertainty"
    fresh = Training(options, balance=BalanceConfig(another), resume=resumed_from(run, 5))
    assert numbers(fresh.step(5).balance) == {"main": 1.0, "aux": 1.0}


@each_kind
def test_a_state_is_found_by_the_names_of_the_terms(kind: Kind) -> None:
    """After JSON, in another order, and with a term that is new."""
    weights = {"a": torch.ones(()), "b": torch.ones(())}
    before = LossBalance(BalanceConfig(kind))
    before.factors(weights)
    before.update({"a": 1.0, "b": 2.0}, torch.tensor([3.0, 0.1]), weights, None)
    again = LossBalance(BalanceConfig(kind))
    again.load(json.loads(json.dumps(before.state())))
    found = numbers(again.factors({"new": torch.ones(()), "b": torch.ones(()), "a": torch.ones(())}))
    assert found == {"new": 1.0, **numbers(before.factors(weights))}


@each_kind
def test_a_single_term_and_terms_that_come_and_go_are_refused(kind: Kind) -> None:
    one = torch.ones(())
    with pytest.raises(UsageError, match=rf"balance.kind: {kind}: at least 2 loss terms are required, .* trains 1"):
        LossBalance(BalanceConfig(kind)).factors({"main": one})
    balance = LossBalance(BalanceConfig(kind))
    balance.factors({"main": one, "aux": one})
    with pytest.raises(UsageError, match=r"were \['aux', 'main'\] so far and are \['main', 'other'\]"):
        balance.factors({"main": one, "other": one})


@pytest.mark.parametrize("flags", [("--balance.kind", "ema"), ("--balance.kind", "uncertainty")])
@pytest.mark.parametrize("recipe", [causal_lm, lora])
def test_recipes_with_one_term_refuse_it_at_once(recipe: Any, flags: tuple[str, str]) -> None:
    presets = ROOT / "recipes" / "presets"
    with pytest.raises(UsageError, match="at least 2 loss terms are required"):
        load_config(recipe.Config, flags, presets=presets, default_preset=recipe.DEFAULT_PRESET)
    assert load_config(mmdit.Config, flags, presets=presets).config.balance.kind == flags[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "ema", "lr": 0.1}, "balance.lr: 0.1: has no effect with balance.kind: ema"),
        ({"kind": "uncertainty", "decay": 0.5}, "balance.decay: 0.5: has no effect with balance.kind: uncertainty"),
        ({"decay": 0.5}, "with balance.kind: fixed; give --balance.kind ema, or leave it out"),
    ],
)
def test_an_option_that_the_kind_does_not_read_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        BalanceConfig(**options)
