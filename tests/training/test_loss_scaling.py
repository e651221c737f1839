"""fp16's loss scale on CPU: torch's own GradScaler over fp32 weights, whose gradients overflow as those of fp16 do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from accel_train.metrics.progress import LogConfig
from accel_train.metrics.recorder import Recorder
from accel_train.metrics.records import TRAIN_FIELDS, read_metrics
from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.shards import Shards
from accel_train.training.step_guard import NonFiniteError, read_loss_scale, write_loss_scale

TOO_HIGH = 2.0**127
"""The largest power of two in fp32: a loss above 1 overflows, and halving it changes no digit of a gradient."""


pytestmark = pytest.mark.usefixtures("fresh")


def build(scale: float | None, fused: bool = True) -> tuple[Accelerator, Any, Any]:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    if scale is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused))
    return accelerator, model, optimizer


def window(accelerator: Accelerator, model: nn.Module, step: int, spoil: float = 1.0) -> GradientWindow:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(10, 6, generator=generator), torch.randn(10, 2, generator=generator)
    x[0, 0] *= spoil
    parts = [
        ({"x": x[i], "y": y[i], "sample": i}, {"main": torch.tensor(float(len(i)))}) for i in torch.arange(10).split(4)
    ]
    return GradientWindow(accelerator, model, parts, {"main": 100.0}, step)


def sums(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"main": (model(inputs["x"]) - inputs["y"]).square().sum()}


def train(scale: float | None, steps: int, fused: bool = True) -> tuple[list[list[float]], int, dict[str, Tensor]]:
    """Losses and norms of each step, attempts thrown away, and weights, average and optimizer state at the end."""
    accelerator, model, optimizer = build(scale, fused)
    average = Ema(EmaConfig(0.5), Shards(model, optimizer))
    figures, overflows = [], 0
    for step in range(steps):
        attempt = window(accelerator, model, step)
        for inputs in attempt:
            attempt.backward(sums(model, inputs))
        result = attempt.finish(1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)
        overflows += result.overflows
        assert result.fields().get("overflows") == (None if scale is None else overflows)  # of the run so far
        figures.append([float(result.loss), float(result.grad_norm)])
    view = average.shards
    state = {f"model/{n}": view.master(n) for n in view.parameters}
    state |= {f"{key}/{n}": view.state(n, key) for key, names in view.state_names().items() for n in names}
    state |= {f"step/{n}": optimizer.state[p]["step"] for n, p in view.parameters.items()}
    return figures, overflows, state | {f"ema/{n}": t for n, t in average.averages.items()}


@pytest.mark.parametrize("fused", [True, False])
def test_a_scale_that_is_too_high_costs_attempts_and_no_step(fused: bool) -> None:
    """Schedule, average and step follow the loop's own count, so equal counters and bits mean that none has moved."""
    expected, none, state = train(None, 12, fused)
    figures, overflows, scaled = train(TOO_HIGH, 12, fused)
    assert (none, overflows > 5) == (0, True)
    assert figures == expected
    assert scaled.keys() == state.keys()
    assert all(torch.equal(scaled[key], state[key]) for key in state)
    assert all(float(value) == 12 for key, value in scaled.items() if key.startswith("step/"))


def test_a_scale_that_fits_repeats_nothing() -> None:
    assert train(2.0**4, 3)[1] == 0


def test_overflows_so_far_are_in_the_lines_of_a_run(tmp_path: Path) -> None:
    """A log point every third step says how many there were before it, those of the steps between as well."""
    accelerator, model, optimizer = build(TOO_HIGH)
    seen: list[int] = []
    rest = dict.fromkeys(TRAIN_FIELDS, 0.0)
    with Recorder(accelerator, tmp_path, LogConfig(log_every=3, progress_bar="off"), max_steps=15) as log:
        for step in range(15):
            attempt = window(accelerator, model, step)
            for inputs in attempt:
                attempt.backward(sums(model, inputs))
            result = attempt.finish(1.0)
            assert type(result.all_overflows) is int  # on the host already
            optimizer.step()
            optimizer.zero_grad()
            seen.append(result.overflows)
            if log.due(step + 1):
                log.train(step + 1, rest | result.fields())
    lines = {r["step"]: r["overflows"] for r in read_metrics(tmp_path / "metrics.jsonl") if r["event"] == "train"}
    assert lines == {step: sum(seen[:step]) for step in (1, 3, 6, 9, 12, 15)}
    assert lines[15] > lines[1] > 0  # the scale grows again, every fifth step


def test_every_model_has_a_count_of_its_own() -> None:
    for _ in range(2):
        accelerator, model, _optimizer = build(TOO_HIGH)
        attempt = window(accelerator, model, 0)
        for inputs in attempt:
            attempt.backward(sums(model, inputs))
        result = attempt.finish(1.0)
        assert result.all_overflows == result.overflows > 0


def test_a_norm_beyond_fp32_lowers_the_scale_although_each_value_is_finite() -> None:
    """Unscaling finds no infinity, so the scaler alone would keep its scale for ever."""
    accelerator, model, optimizer = build(2.0)
    attempt = window(accelerator, model, 0)
    hook = model[0].weight.register_hook(
        lambda g: torch.full_like(g, 3e38 if accelerator.scaler.get_scale() > 1 else 1)
    )
    attempt.inputs = attempt.inputs[:1]  # the hook's value is of each backward, and two would be infinite
    for inputs in attempt:
        attempt.backward(sums(model, inputs))
    hook.remove()
    assert attempt.finish(1.0).overflows == 1
    assert accelerator.scaler.get_scale() == 1.0
    optimizer.step()


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    accelerator, model, _ = build(2.0**10)
    attempt = window(accelerator, model, 0, float("nan"))
    attempts = 0
    with pytest.raises(NonFiniteError, match=r"loss of step 1 .*\[0, 1, 2, 3\]"):
        for inputs in attempt:
            attempts += 1
            attempt.backward(sums(model, inputs))
        attempt.finish(1.0)
    assert attempts == 3


def test_a_gradient_that_no_scale_mends_stops_the_run() -> None:
    accelerator, model, optimizer = build(2.0**3)
    model[0].weight.register_hook(lambda g: g * float("inf"))
    before = [p.detach().clone() for p in model.parameters()]
    attempt = window(accelerator, model, 0)
    with pytest.raises(NonFiniteError, match="gradient of step 1"):
        for inputs in attempt:
            attempt.backward(sums(model, inputs))
        attempt.finish(1.0)
        optimizer.step()
    assert accelerator.scaler.get_scale() == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_deepspeed_s_counters_are_stored_as_torch_counts() -> None:
    """DeepSpeed grows its scale after ``cur_iter - last_overflow_iter - 1`` good steps, torch after as many counted."""
    accelerator: Any = SimpleNamespace(scaler=None, mixed_precision="fp16")
    scaler = SimpleNamespace(cur_scale=1024.0, cur_iter=12, last_overflow_iter=7)
    model: Any = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    saved = read_loss_scale(accelerator, model)
    assert saved == {"scale": 1024.0, "steps": 4}
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 2.0, 3, -1  # of a start
    write_loss_scale(accelerator, model, saved)
    assert read_loss_scale(accelerator, model) == saved
    assert scaler.last_overflow_iter == -1
