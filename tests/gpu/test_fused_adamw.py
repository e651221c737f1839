"""Fused AdamW on a GPU: torch's bits, or one pass with the average; and no wait for the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def test_the_bits_are_those_of_torch_without_a_wait() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((300, 40), (7,), (64, 64), ())]
    theirs = copy.deepcopy(ours)
    fused = FusedAdamW([{"params": ours, "weight_decay": 0.1}], **SETTINGS)  # type: ignore[arg-type]
    reference = torch.optim.AdamW(theirs, **SETTINGS, weight_decay=0.1, fused=True)  # type: ignore[arg-type]
    scales = torch.tensor([1.0, 1.0, 3.0, 1.0], device="cuda")
    found = torch.tensor([0.0, 1.0, 0.0, 0.0], device="cuda")
    for number in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in (fused, reference):
            optimizer.grad_scale = scales[number].clone()  # type: ignore[union-attr]
            optimizer.found_inf = found[number].clone()  # type: ignore[union-attr]
        # The first step makes the state, which torch fills on the device as well.
        torch.cuda.set_sync_debug_mode("error")
        try:
            fused.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(value, reference.state[other][name]) for name, value in fused.state[one].items())


class Run:
    """A model whose optimizer and average work in one pass over memory, or one after the other."""

    def __init__(self, one_pass: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(300, 1001), nn.GELU(), nn.Linear(1001, 7)).cuda()
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
        self.optimizer: Any = FusedAdamW(groups, **SETTINGS, one_pass=one_pass)  # type: ignore[arg-type]
        self.optimizer.found_inf = torch.zeros((), device="cuda")
        self.optimizer.grad_scale = torch.ones((), device="cuda")
        self.average = Ema(EmaConfig(0.99), Shards(self.model, self.optimizer))

    def step(self, number: int, *, along: bool = True) -> None:
        generator = torch.Generator("cuda").manual_seed(number)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator)
        self.optimizer.grad_scale.fill_(1.0 + number % 3)
        if along:
            self.average.announce(number)
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.optimizer.step()
            self.average.update(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def values(self) -> list[torch.Tensor]:
        moments = [self.optimizer.state[p][key] for p in self.model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        return [*(p.detach() for p in self.model.parameters()), *moments, *self.average.averages.values()]


def test_one_pass_is_torchs_kernel_and_the_average_after_it() -> None:
    runs = [Run(one_pass) for one_pass in (True, False)]
    for number in range(6):
        for run in runs:
            run.step(number)
    for one, other in zip(*(run.values() for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)


def test_the_average_has_the_same_bits_along_and_apart() -> None:
    """Both forms of torch's lerp: the weight of the first steps is above a half."""
    runs = [Run(one_pass=True), Run(one_pass=True)]
    for number in range(20):
        runs[0].step(number)
        runs[1].step(number, along=False)
    assert all(torch.equal(one, other) for one, other in zip(*(run.values() for run in runs), strict=True))


def test_a_step_left_out_on_the_device_moves_nothing() -> None:
    run = Run(one_pass=True)
    run.step(0)
    before = [value.clone() for value in run.values()]
    run.optimizer.found_inf.fill_(1.0)
    run.step(1)
    assert run.optimizer.has_averaged
    assert all(torch.equal(one, other) for one, other in zip(before, run.values(), strict=True))


def test_the_trial_accepts_the_kernel_here() -> None:
    model = nn.Linear(30, 20).cuda()
    optimizer, notice = build_optimizer(model, OptimizerConfig(), torch.device("cuda"))
    assert getattr(optimizer, "one_pass", False), notice
    assert "one pass for weights and EMA" in notice
