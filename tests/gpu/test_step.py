"""One optimizer step of the trainer on a GPU: nothing waits for the device between two log points."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.health.options import HealthConfig
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards
from accel_train.training.step_guard import resolve_step_guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPIKES = HealthConfig(non_finite="skip", spike_factor=10.0)


@contextmanager
def no_waits() -> Generator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Trainer:
    """Two micro-batches a step, clipped, guarded and averaged."""

    def __init__(self, health: HealthConfig) -> None:
        self.accelerator = Accelerator(mixed_precision="bf16")
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
        optimizer, _ = build_optimizer(plain.cuda(), OptimizerConfig(lr=1e-3), self.accelerator.device)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = self.accelerator.prepare(plain, optimizer)
        self.guard, _ = resolve_step_guard(self.accelerator, self.optimizer, health)
        assert self.guard is not None
        assert self.guard.on_device
        self.average = Ema(EmaConfig(0.99), Shards(self.model, self.optimizer), self.guard)
        self.rows = torch.randn(2, 32, 64, device="cuda")
        self.count = torch.tensor(32.0, device="cuda")

    def step(self, number: int, factor: float = 1.0) -> Any:
        micro_batches = [({"x": rows * factor}, {"main": self.count}) for rows in self.rows]
        window = GradientWindow(self.accelerator, self.model, micro_batches, {"main": 1.0}, number, "auto", self.guard)
        for inputs in window:
            window.backward({"main": self.model(inputs["x"]).float().square().mean(1).sum()})
        result = window.finish(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(number)
        return result

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("health", [HealthConfig(), SPIKES], ids=["stop", "skip"])
def test_nothing_waits(health: HealthConfig) -> None:
    trainer = Trainer(health)
    first = trainer.step(1).fields()["loss"]
    with no_waits():
        for number in range(2, 40):
            result = trainer.step(number)
    assert result.fields()["loss"] < first


def test_a_step_that_is_not_finite_changes_nothing_and_nothing_waits() -> None:
    trainer = Trainer(SPIKES)
    assert trainer.guard is not None
    trainer.step(1)
    before = trainer.weights()
    with no_waits():
        trainer.step(2, factor=float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.weights(), strict=True))
    trainer.guard.check()
    assert trainer.guard.history.skipped == 1
    with no_waits():
        trainer.step(3)
    assert not any(torch.equal(a, b) for a, b in zip(before, trainer.weights(), strict=True))
