"""One process: the window's gradient against fp64 of the whole batch, and what it refuses."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.training.accumulation import GradientWindow
from accel_train.training.gradients.sync import no_sync, resolve_sync, will_rebuild_buckets
from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_frozen
from accel_train.training.step_guard import NonFiniteError
from tests import zygote

WEIGHTS = {"main": 1.0, "aux": 0.3}


def batch(count: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(count, 6, generator=generator),
        torch.randn(count, 2, generator=generator),
        torch.randint(1, 5, (count, 1), generator=generator).float(),
    )


def sums(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    out = model(inputs["x"])
    return {"main": (out - inputs["y"]).square().sum(), "aux": (out.abs() * inputs["w"]).sum()}


def window_over(accelerator: Accelerator, model: nn.Module, size: int, **changes: float) -> GradientWindow:
    x, y, w = batch()
    parts = []
    for index in torch.arange(len(x)).split(size):
        inputs = {"x": x[index], "y": y[index], "w": w[index], "sample": index}
        parts.append((inputs, {"main": torch.tensor(float(len(index))), "aux": w[index].sum()}))
    return GradientWindow(accelerator, model, parts, {**WEIGHTS, **changes}, step=7)


@pytest.mark.parametrize("size", [13, 5, 4, 1])
def test_any_cut_gives_the_gradient_of_the_whole_batch(accelerator: Accelerator, size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y, w = (t.double() for t in batch())
    out = plain(x)
    loss = (out - y).square().sum() / len(x) + 0.3 * (out.abs() * w).sum() / w.sum()
    loss.backward()
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]

    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    window = window_over(accelerator, model, size)
    for inputs in window:
        window.backward(sums(model, inputs))
    result = window.finish(0.0)
    assert float(result.loss) == pytest.approx(loss.item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad.double(), gradient, rtol=1e-5, atol=1e-7)
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)


def test_a_frozen_part_counts_neither_in_the_norm_nor_in_the_clip(accelerator: Accelerator) -> None:
    """3 x + 1 is wrong by 3 at x = 2 and by 4 at x = 10: the mean square falls by (46, 7) for slope and intercept."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 3.0)
    nn.init.constant_(model.bias, 1.0)
    line, _ = build_optimizer(model, OptimizerConfig(), accelerator.device, {"slope": ["weight"]})
    model, line = accelerator.prepare(model, line)
    rows = [(2.0, 4.0), (10.0, 27.0)]
    inputs = [({"x": torch.tensor([[x]]), "y": torch.tensor([[y]])}, {"main": torch.ones(())}) for x, y in rows]
    for frozen, gradient in ((["slope"], (0.0, 7.0)), ([], (46.0, 7.0))):
        set_frozen(line, frozen)
        window = GradientWindow(accelerator, model, inputs, {"main": 1.0}, step=0)
        for part in window:
            window.backward({"main": (model(part["x"]) - part["y"]).square().sum()})
        norm = math.hypot(*gradient)
        assert float(window.finish(0.5).grad_norm) == pytest.approx(norm)
        found = [float(p.grad) for p in model.parameters() if p.grad is not None]
        assert found == pytest.approx([0.5 * value / norm for value in gradient], rel=1e-5)
        line.zero_grad()


def test_the_backward_for_ddp_s_buckets_counts_nowhere(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch norm moves its statistics in each forward, and a resumed run has one more such backward."""

    def norm_after_a_step() -> nn.Module:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = accelerator.prepare(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)))
        window = window_over(accelerator, model, 5)
        for inputs in window:
            # As a recipe may, from any generator.
            factor = random.random() + np.random.random() + float(torch.rand(()))
            window.backward({name: factor * value for name, value in sums(model, inputs).items()})
        window.finish(0.0)
        return model

    expected = norm_after_a_step()
    monkeypatch.setattr("accel_train.training.accumulation.will_rebuild_buckets", lambda *_: True)
    found = norm_after_a_step()
    for (name, before), after in zip(expected.named_buffers(), found.buffers(), strict=True):
        assert torch.equal(before, after), name
    for before, after in zip(expected.parameters(), found.parameters(), strict=True):
        assert before.grad is not None
        assert after.grad is not None
        assert torch.equal(before.grad, after.grad)


@pytest.mark.parametrize(
    ("processes", "has_rebuilt", "expected"), [(1, False, False), (2, False, False), (3, False, True), (3, True, False)]
)
def test_ddp_s_buckets_cost_a_backward_only_where_their_order_matters(
    processes: int, has_rebuilt: bool, expected: bool
) -> None:
    """A sum of two numbers has no order."""

    class Ddp(nn.parallel.DistributedDataParallel):
        _has_rebuilt_buckets = has_rebuilt

    assert will_rebuild_buckets(Ddp.__new__(Ddp), processes) == expected
    assert not will_rebuild_buckets(nn.Linear(1, 1), processes)


def test_the_norm_is_clipped_and_reported_as_it_was(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 4)
    for inputs in window:
        window.backward(sums(model, inputs))
    result = window.finish(0.01)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(result.grad_norm) > 0.1
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)


def test_a_printed_result_shows_no_weights(accelerator: Accelerator) -> None:
    """A user's own loop prints it. The parameters behind the norm would fill the terminal."""
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 4)
    for inputs in window:
        window.backward(sums(model, inputs))
    shown = repr(window.finish(max_grad_norm=1.0))
    assert "grad_norm" in shown
    assert "Parameter" not in shown
    assert len(shown) < 500


def test_a_term_without_coefficient_or_weight_adds_nothing(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 4, aux=0.0)
    for inputs in window:
        window.backward(sums(model, inputs))
    result = window.finish(0.0)
    assert set(result.terms) == {"main"}
    assert float(result.loss) == pytest.approx(result.terms["main"].item(), rel=1e-6)
    assert set(result.fields()) == {"loss", "loss_main", "grad_norm"}

    nothing = {"main": torch.tensor(1.0), "aux": torch.tensor(0.0)}
    x, y, w = batch(2)
    empty = GradientWindow(accelerator, model, [({"x": x, "y": y, "w": w * 0}, nothing)], WEIGHTS, 0)
    for inputs in empty:
        empty.backward(sums(model, inputs))
    assert torch.isfinite(empty.finish(0.0).loss)


def test_a_non_finite_loss_names_step_and_samples(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 4)
    window.inputs[1]["x"][0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"loss of step 8 .*\[4, 5, 6, 7\]"):
        for inputs in window:
            window.backward(sums(model, inputs))
        window.finish(1.0)


def test_the_norm_of_offloaded_gradients_is_where_the_losses_are(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read together, and torch stacks no tensors of two devices."""
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 13)
    for inputs in window:
        window.backward(sums(model, inputs))
    monkeypatch.setattr(window, "_totals", torch.zeros(2, device="meta"))
    assert window._measure().device.type == "meta"


def test_terms_must_be_complete(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 13)
    with pytest.raises(
        UsageError,
        match=r"'aux' \(step 8\): it is in the coefficients .* not in the sums given to window.backward; add",
    ):
        for inputs in window:
            window.backward({"main": sums(model, inputs)["main"]})


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (
            {"main": 1.0},
            r"'aux' \(step 4\): it is in the coefficients .* but not in the weights given to the window; add",
        ),
        ({"main": 1.0, "aux": 1.0, "tokens": 9.0}, r"'tokens' \(step 4\): it is in the weights .* not in the coeff"),
    ],
)
def test_weights_must_name_the_terms(accelerator: Accelerator, weights: dict[str, float], says: str) -> None:
    """A window is refused when it is built: a count among the weights, or a term without one."""
    model = accelerator.prepare(nn.Linear(6, 2))
    x, y, _ = batch()
    wrong = {name: torch.tensor(value) for name, value in weights.items()}
    with pytest.raises(UsageError, match=says):
        GradientWindow(accelerator, model, [({"x": x, "y": y}, wrong)], WEIGHTS, 3)


def test_no_sync_takes_one_prepared_module(accelerator: Accelerator) -> None:
    model, other = accelerator.prepare(nn.Linear(6, 2)), nn.Linear(6, 2)
    with no_sync(accelerator, model):
        assert not accelerator.sync_gradients
    assert accelerator.sync_gradients
    for wrong in ([model], other):
        with pytest.raises(TypeError, match=r"accelerator\.prepare"), no_sync(accelerator, wrong):
            pass


def test_the_policy_says_why(accelerator: Accelerator) -> None:
    assert resolve_sync("auto", accelerator)[0] == "last"
    assert resolve_sync("every", accelerator) == (
        "every",
        "as requested: gradients are reduced on every micro-batch",
    )


def test_a_loss_of_one_term_is_named_by_its_coefficient_alone(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    x, y, _ = batch()
    named = [({"x": x, "y": y}, {"main": torch.tensor(13.0)})]
    plain = [({"x": x, "y": y}, torch.tensor(13.0))]
    losses = []
    for parts, wrap in ((named, lambda v: {"main": v}), (plain, lambda v: v)):
        window = GradientWindow(accelerator, model, parts, {"main": 1.0}, step=0)
        for inputs in window:
            window.backward(wrap((model(inputs["x"]) - inputs["y"]).square().sum()))
        losses.append(float(window.finish(0.0).loss))
    assert losses[0] == losses[1]
    two = GradientWindow(accelerator, model, plain, WEIGHTS, step=0)
    for _ in two:
        with pytest.raises(UsageError, match=r"one tensor for the loss terms \['aux', 'main'\]; give a dict"):
            two.backward(torch.tensor(1.0, requires_grad=True))


def test_sums_and_weights_of_many_micro_batches_lose_nothing_to_rounding(accelerator: Accelerator) -> None:
    """1 beside 2 ** 24 is lost in fp32."""
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    values = [2.0**24, 1.0, 1.0]
    parts = [({"s": torch.tensor(value)}, {"main": torch.tensor(value)}) for value in values]
    window = GradientWindow(accelerator, model, parts, {"main": 1.0}, step=0)
    for inputs in window:
        window.backward({"main": inputs["s"] + 0 * model.weight.sum()})
    result = window.finish(0.0)
    assert float(result.sums[0]) == 2.0**24 + 2
    assert float(result.weights["main"]) == 2.0**24 + 2


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("break", r"step 8: window\.backward was called 1 times for 4 micro-batches, and the loop .* left early"),
        ("break at the last", r"4 times for 4 micro-batches, and the loop over the window was left early"),
        ("continue", r"called 3 times for 4 micro-batches, so the gradient is not that of the global batch"),
        ("twice", r"called 5 times for 4 micro-batches, so .* call window\.backward once for each"),
    ],
)
def test_a_step_takes_the_backward_of_each_micro_batch_once(accelerator: Accelerator, mistake: str, says: str) -> None:
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 4)
    for i, inputs in enumerate(window):
        if mistake == "continue" and i == 1:
            continue
        for _ in range(2 if mistake == "twice" and i == 1 else 1):
            window.backward(sums(model, inputs))
        if (mistake, i) in (("break", 0), ("break at the last", 3)):
            break
    with pytest.raises(RuntimeError, match=says):
        window.finish(1.0)


def test_a_window_is_finished_once(accelerator: Accelerator) -> None:
    """The second time the norm would be that of the clipped gradient."""
    model = accelerator.prepare(nn.Linear(6, 2))
    window = window_over(accelerator, model, 4)
    for inputs in window:
        window.backward(sums(model, inputs))
    window.finish(1e-3)
    with pytest.raises(RuntimeError, match=r"step 8: window\.finish was called twice"):
        window.finish(1e-3)


class InItsGradients(torch.optim.SGD):
    """Keeps values of its own in the gradients, as those without a schedule do. Its base class has hooks as well."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_([p.grad for p in group["params"]], 0.5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, InItsGradients])
@pytest.mark.parametrize("zeroed", ["never", "to None", "to zero", "by the model", "before the step"])
def test_a_step_begins_without_the_gradient_of_the_one_before(accelerator: Accelerator, zeroed: str, kind: Any) -> None:
    model = nn.Linear(6, 2)
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=1e-3))

    def train() -> None:
        window = window_over(accelerator, model, 4)
        if zeroed == "before the step":
            optimizer.zero_grad()
        for inputs in window:
            window.backward(sums(model, inputs))
        window.finish(1e-3)  # clips
        optimizer.step()
        if zeroed == "by the model":
            model.zero_grad(set_to_none=False)
        elif zeroed.startswith("to"):
            optimizer.zero_grad(set_to_none=zeroed == "to None")

    train()
    if zeroed == "never":
        with pytest.raises(
            RuntimeError, match=r"step 8: the gradient of the previous step.* call optimizer\.zero_grad"
        ):
            train()
    else:
        train()
        train()


@pytest.mark.parametrize("place", ["before the window", "in the loop", "before finish", "none"])
def test_a_backward_beside_the_window_is_refused_in_the_first_step(accelerator: Accelerator, place: str) -> None:
    model = nn.Linear(6, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def regularise(here: str) -> None:
        if here == place:
            (model.weight.square().sum() + model.bias.square().sum()).backward()

    def train() -> None:
        regularise("before the window")
        window = window_over(accelerator, model, 4)
        for inputs in window:
            regularise("in the loop")
            window.backward(sums(model, inputs))
        regularise("before finish")
        # It adds to no gradient.
        torch.autograd.grad(model.bias.square().sum(), model.bias)
        window.finish(1.0)
        optimizer.step()
        optimizer.zero_grad()

    if place == "none":
        train()
        # No later step pays for the hooks.
        assert not model.bias._post_accumulate_grad_hooks
        place = "before the window"
        with pytest.raises(
            RuntimeError, match=r"the previous step, or of a backward of your own before the window, is still there"
        ):
            train()
    else:
        with pytest.raises(RuntimeError, match=r"step 8: a backward outside of window\.backward .* a further term"):
            train()


class Spare(nn.Module):
    """Uses neither its table nor its frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.table, self.frozen, self.base = (nn.Linear(6, 2) for _ in range(4))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_parameters_that_the_loss_does_not_use_are_named_in_the_first_step(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    module = Spare()
    trained = [*module.used.parameters(), *module.table.parameters()]
    groups = [{"params": module.frozen.parameters(), "frozen": True}, {"params": trained}]
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(groups, lr=1e-3))
    for _ in range(2):
        window = window_over(accelerator, model, 4)
        for inputs in window:
            window.backward(sums(model, inputs))
        window.finish(1.0)
        optimizer.step()
        optimizer.zero_grad()
    (said,) = [record.getMessage() for record in caplog.records if "no gradient" in record.getMessage()]
    finding = "step 8: no gradient for 2 trained parameter(s) (table.weight, table.bias)"
    assert (
        f"{finding}: they do not train in this step, nor at all if no later step uses them, and DDP would refuse them "
        "without --distributed.static_graph" in said
    )


def test_parameters_without_a_gradient_are_named_once_however_often_the_first_step_is_repeated(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = accelerator.prepare(Spare())
    # As in fp16, whose first step may overflow several times.
    overflows = iter([True, True, False, False])
    monkeypatch.setattr(GradientWindow, "_overflowed", lambda self: next(overflows))
    # The second window repeats the step of a first one that ran out of memory, so that none has finished.
    for attempts in (3, 1):
        done = 0
        for inputs in (window := window_over(accelerator, model, 4)):
            window.backward(sums(model, inputs))
            done += 1
        assert done == attempts * len(window.inputs)
        model.zero_grad()
    assert sum("no gradient" in record.getMessage() for record in caplog.records) == 1


def test_parameters_that_only_the_last_micro_batch_uses_have_a_gradient(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    model = accelerator.prepare(Spare())
    window = window_over(accelerator, model, 4)
    for done, inputs in enumerate(window):
        found = sums(model, inputs)
        if done + 1 == len(window.inputs):
            for layer in (model.table, model.frozen):
                found["main"] = found["main"] + 0 * layer(inputs["x"]).sum()
        window.backward(found)
    assert len(window.inputs) > 1
    assert not [record for record in caplog.records if "no gradient" in record.getMessage()]


UNUSED = """
import torch
import torch.distributed as dist
from torch import nn
from accel_train.training.step_calls import find_unused
from tests.training.test_accumulation import Spare

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(Spare())
model(torch.ones(2, 6)).sum().backward()
try:
    find_unused(model, [], 0)
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


def test_ddp_refuses_unused_parameters_by_name() -> None:
    done = zygote.run([sys.executable, "-c", UNUSED])
    assert done.returncode == 0, done.stdout
    assert "4 trained parameter(s) (table.weight, table.bias, frozen.weight and 1 more)" in done.stdout
    assert "DDP requires one for each in every step" in done.stdout


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from accel_train.training.step_calls import leftovers_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
# One operator on a list of tensors, which tells only their local parts of the change.
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
leftovers = leftovers_of(model)
for zeroes in (True, True, False):
    leftovers.refuse(0)
    model(torch.ones(2, 4)).sum().backward()
    leftovers.choose(list(model.parameters()), [optimizer])
    optimizer.step()
    if zeroes:
        optimizer.zero_grad(set_to_none=False)
try:
    leftovers.refuse(0)
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


def test_sharded_gradients_may_be_set_to_zero() -> None:
    done = zygote.run([sys.executable, "-c", SHARDED])
    assert done.returncode == 0, done.stdout
    assert "step 1: the gradient of the previous step, or of a backward" in done.stdout


class TwoNetworks(nn.Module):
    """The second learns to tell the first's output from data, and the first to deceive it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(6, 2), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: Tensor, real: Tensor) -> dict[str, Tensor]:
        fake = self.g(noise)
        fixed = {name: parameter.detach() for name, parameter in self.d.named_parameters()}
        told = nn.functional.softplus(-self.d(real)) + nn.functional.softplus(self.d(fake.detach()))
        deceived = nn.functional.softplus(-torch.func.functional_call(self.d, fixed, (fake,)))
        return {"d": told.squeeze(-1), "g": deceived.squeeze(-1)}


def test_two_networks_in_one_module_get_the_gradients_of_two_losses(accelerator: Accelerator) -> None:
    """As docs/recipes.md says of networks that train against each other."""
    x, y, _ = batch()
    reference = TwoNetworks()
    for name, loss in reference(x, y).items():
        part = getattr(reference, name)
        for parameter, gradient in zip(
            part.parameters(), torch.autograd.grad(loss.mean(), part.parameters()), strict=True
        ):
            parameter.grad = gradient

    model = accelerator.prepare(TwoNetworks())
    parts = []
    for index in torch.arange(len(x)).split(5):
        count = torch.tensor(float(len(index)))
        parts.append(({"x": x[index], "y": y[index], "sample": index}, {"d": count, "g": count}))
    window = GradientWindow(accelerator, model, parts, {"d": 1.0, "g": 1.0}, step=0)
    for inputs in window:
        window.backward(model(inputs["x"], inputs["y"]))
    window.finish(0.0)
    for (name, expected), parameter in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-7, msg=name)
