"""AdamW and the moving average in one pass: on a CPU by Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.training.ema import Ema, EmaConfig, decay_at
from accel_train.training.health.options import HealthConfig
from accel_train.training.optimizer_classes import trial
from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard

KERNEL = "accel_train.training.optimizer_classes.adamw_kernel"
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """The kernel, read anew for the interpreter, which is chosen when it is defined."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    yield
    sys.modules.pop(KERNEL, None)


class Reference(ModuleType):
    """A stand-in for the kernel's module: the same interface, computed by torch in fp64."""

    class Rates:
        def __init__(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
            self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay

    class Chunks:
        launches = 0

        def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
            self.sizes = sizes

        def step(self, columns: Any, counts: Tensor, rates: Any, scale: Any, found: Any, weight: float | None) -> None:
            type(self).launches += 1
            assert [tensor.numel() for tensor in columns[0]] == list(self.sizes)
            assert (len(columns) == 5) == (weight is not None)
            if found is not None and float(found):
                return
            beta1, beta2 = rates.betas
            for place, count in enumerate(counts.double()):
                p, g, m, v = (column[place].double() for column in columns[:4])
                g = g / (1.0 if scale is None else scale.double())
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g * g
                p = p * (1 - rates.lr * rates.weight_decay)
                p -= rates.lr / (1 - beta1**count) * m / (v.sqrt() / (1 - beta2**count).sqrt() + rates.eps)
                for column, value in ((0, p), (2, m), (3, v)):
                    columns[column][place].copy_(value)
                if weight is not None:
                    columns[4][place].lerp_(columns[0][place], weight)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> type[Reference.Chunks]:
    monkeypatch.setitem(sys.modules, KERNEL, Reference(KERNEL))
    Reference.Chunks.launches = 0
    monkeypatch.setattr(Reference, "__getattr__", lambda self, name: getattr(type(self), name), raising=False)
    return Reference.Chunks


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 500), nn.Linear(500, 9), nn.LayerNorm(9))


class Run:
    """A model with AdamW and EMA as the loop uses them: the step, then the update of the average."""

    def __init__(self, one_pass: bool, decay: float = 0.99) -> None:
        self.model = small()
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = FusedAdamW(groups, **SETTINGS, one_pass=one_pass)
        self.guard = StepGuard(self.optimizer, torch.device("cpu"), HealthConfig(non_finite="skip"))
        self.ema = Ema(EmaConfig(decay), Shards(self.model, self.optimizer), self.guard)

    def step(self, number: int, *, without: str = "", found: float = 0.0, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(number)
        for name, parameter in self.model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if name == without else gradient
        self.guard.found_inf.fill_(found)
        self.guard.grad_scale.fill_(scale)
        self.ema.announce(number)
        self.optimizer.step()
        self.ema.update(number)

    def values(self) -> list[Tensor]:
        moments = [self.optimizer.state[p][key] for p in self.model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        counts = [self.optimizer.state[p]["step"] for p in self.model.parameters()]
        return [*(p.detach() for p in self.model.parameters()), *moments, *counts, *self.ema.averages.values()]

    def check(self, other: Run) -> None:
        for mine, theirs in zip(self.values(), other.values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-7)


STEPS: list[dict[str, Any]] = [{}, {"scale": 3.0}, {"found": 1.0}, {"without": "0.bias"}, {}, {"scale": 0.5}, {}]
"""Clipped, left out, one parameter without a gradient."""


def both() -> None:
    runs = [Run(one_pass) for one_pass in (True, False)]
    for number, options in enumerate(STEPS):
        for run in runs:
            run.step(number, **options)
    runs[0].check(runs[1])


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_computes_what_torch_and_the_average_do() -> None:
    both()


@pytest.mark.usefixtures("interpreted")
def test_unaligned_tensors_and_a_beta_of_zero() -> None:
    memory = torch.randn(5, 3001).abs()
    before = memory.clone()
    rows = [[row[1:2000]] for row in memory]
    expected = [[tensor.clone() for tensor in row] for row in rows]
    from accel_train.training.optimizer_classes.adamw_kernel import Chunks, Rates

    rates = Rates(0.01, (0.0, 0.9), 1e-8, 0.1)
    Chunks((1999,), torch.device("cpu")).step(rows, torch.tensor([2.0]), rates, None, None, 0.25)
    Reference.Chunks((1999,), torch.device("cpu")).step(expected, torch.tensor([2.0]), rates, None, None, 0.25)
    for row, reference in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, reference, rtol=2e-6, atol=2e-7)
    assert torch.equal(memory[:, :1], before[:, :1])
    assert torch.equal(memory[:, 2000:], before[:, 2000:])


@pytest.mark.usefixtures("interpreted")
def test_an_unaligned_tensor_costs_the_others_no_wide_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the gradients of a bucket of DDP are, behind one whose size is odd."""
    from accel_train.training.optimizer_classes import adamw_kernel

    launches: list[tuple[bool, list[int]]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launch = kernel[grid]

            def run(table: Tensor, counts: Tensor, chunks: Tensor, **named: Any) -> None:
                assert len(chunks) == grid[0]
                launches.append((named["ALIGNED"], chunks[:, 0].tolist()))
                launch(table, counts, chunks, **named)

            return run

    kernel: Any = adamw_kernel.adamw_one_pass
    monkeypatch.setattr(adamw_kernel, "adamw_one_pass", Counted())
    sizes = (40, adamw_kernel.CHUNK + 4, 37)
    columns = [[torch.rand(size) for size in sizes] for _ in range(5)]
    expected = [[tensor.clone() for tensor in column] for column in columns]
    rates, chunks = adamw_kernel.Rates(0.01, (0.9, 0.99), 1e-8, 0.1), adamw_kernel.Chunks(sizes, torch.device("cpu"))
    reference = Reference.Chunks(sizes, torch.device("cpu"))
    unaligned = torch.rand(41)[1:]
    for number, gradient in enumerate((columns[1][0], unaligned, columns[1][0])):
        columns[1][0] = gradient
        expected[1][0] = gradient.clone()
        counts = torch.full((3,), number + 1.0)
        chunks.step(columns, counts, rates, None, None, 0.25)
        reference.step(expected, counts, rates, None, None, 0.25)
        for column, others in zip(columns, expected, strict=True):
            torch.testing.assert_close(column, others, rtol=2e-6, atol=2e-7)
    whole = (True, [0, 1, 1, 2])
    assert launches == [whole, (True, [1, 1, 2]), (False, [0]), whole]


def test_the_average_moves_once_in_every_step(stood_in: type[Reference.Chunks]) -> None:
    """By the optimizer, or beside it: a parameter without a gradient, a step that is left out."""
    both()
    assert stood_in.launches == 2 * len(STEPS)


def test_the_optimizer_takes_the_average_along(stood_in: type[Reference.Chunks]) -> None:
    run, moved = Run(one_pass=True), []
    run.ema._move = moved.append  # type: ignore[method-assign]
    for number, options in enumerate(STEPS):
        run.step(number, **options)
    # One parameter had no gradient in it.
    assert moved == [3]


def test_a_step_that_the_host_leaves_out_moves_nothing(stood_in: type[Reference.Chunks]) -> None:
    run = Run(one_pass=True)
    run.step(0)
    run.step(1)
    before = copy.deepcopy(run.values())
    run.guard.skips_this_step = True
    run.step(2, found=1.0)
    assert all(torch.equal(one, other) for one, other in zip(before, run.values(), strict=True))
    run.guard.skips_this_step = False
    twin = copy.deepcopy(run.ema.averages)
    run.step(3)
    for name, parameter in run.model.named_parameters():
        expected = twin[name].lerp(parameter.detach(), 1 - decay_at(0.99, 3))
        torch.testing.assert_close(run.ema.averages[name], expected)


def test_a_gradient_that_is_not_contiguous_runs_torchs_kernel(stood_in: type[Reference.Chunks]) -> None:
    runs = [Run(one_pass) for one_pass in (True, False)]
    for number in range(3):
        for run in runs:
            run.step(number)
    launches = stood_in.launches
    for run in runs:
        for parameter in run.model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        weight: Any = run.model.get_parameter("0.weight")
        weight.grad = torch.ones(37, 500).t()
        run.ema.announce(3)
        run.optimizer.step()
        run.ema.update(3)
    assert stood_in.launches == launches
    runs[0].check(runs[1])


def test_a_step_of_another_number_than_announced_is_an_error(stood_in: type[Reference.Chunks]) -> None:
    run = Run(one_pass=True)
    run.step(0)
    run.ema.announce(1)
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"ema\.update\(7\) was called instead of prepared\.ema\.update\(1\)"):
        run.ema.update(7)


def test_an_announcement_is_for_one_step(stood_in: type[Reference.Chunks]) -> None:
    runs = [Run(one_pass) for one_pass in (True, False)]
    for run in runs:
        run.step(0)
        run.ema.announce(1)
        run.ema.announce(2)  # the step before did not come to its end
        run.optimizer.step()
        run.ema.update(2)
        run.optimizer.step()
    runs[0].check(runs[1])


def test_without_an_average_there_is_one_pass_all_the_same(stood_in: type[Reference.Chunks]) -> None:
    runs = [Run(one_pass, decay=0.0) for one_pass in (True, False)]
    for number in range(3):
        for run in runs:
            run.step(number)
    assert stood_in.launches == 6
    runs[0].check(runs[1])


def test_a_cpu_keeps_the_bits_of_torch() -> None:
    optimizer, notice = build_optimizer(small(), OptimizerConfig(), torch.device("cpu"))
    assert isinstance(optimizer, FusedAdamW)
    assert not optimizer.one_pass
    assert "one pass" not in notice


def test_the_trial_finds_a_kernel_that_fails_or_computes_something_else(
    stood_in: type[Reference.Chunks], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    assert trial._failure(cpu) is None
    right = stood_in.step

    def wrong(self: Any, columns: Any, *arguments: Any) -> None:
        right(self, columns, *arguments)
        columns[4 if len(columns) == 5 else 0][0][1] += 0.01

    monkeypatch.setattr(stood_in, "step", wrong)
    assert "differs from torch's kernel" in str(trial._failure(cpu))

    def failing(self: Any, *arguments: Any) -> None:
        raise RuntimeError("no C compiler\nfound")

    monkeypatch.setattr(stood_in, "step", failing)
    assert trial._failure(cpu) == "a trial failed: RuntimeError: no C compiler found"
