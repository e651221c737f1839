"""A skipped step equals a step that was never taken, bit for bit. Spikes, limits and what a checkpoint keeps."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from accel_train.checkpoints import restore
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.checkpoints.saver import Saver
from accel_train.config import UsageError
from accel_train.hub.options import HubConfig
from accel_train.runtime.strategy import strategy_of
from accel_train.store import atomic_files, commit
from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.feedback.balance import LossBalance
from accel_train.training.feedback.options import BalanceConfig
from accel_train.training.gradients.sync import SyncPolicy
from accel_train.training.health.evidence import Evidence, NonFiniteError
from accel_train.training.health.options import HealthConfig, refuse_inexact
from accel_train.training.health.spikes import Spikes
from accel_train.training.optimizer_classes.offload import HostAdamW
from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_learning_rate
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard, StepResult, resolve_step_guard
from benchmarks.reads import HostReads
from tests.distributed.worker import GLOBAL_BATCH, Toy, Wide, loss_sums, micro_batches

pytestmark = pytest.mark.usefixtures("fresh")
SKIP = HealthConfig(non_finite="skip")
ROLLBACK = HealthConfig(non_finite="rollback")
FIXED = BalanceConfig()
STEPS = 8
MICRO_BATCH = 6
BAD_SAMPLE = 13
"""Sample whose micro-batch is spoiled, on the last process of several."""


class Counting(torch.optim.SGD):
    """An optimizer whose learning rate falls with the number of its own calls, gradient or not."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["lr"] /= group["calls"]
        return super().step(closure)


def spoil_sums(sums: dict[str, Tensor], how: str) -> None:
    """Make the loss NaN, or only its gradient, or its gradient large, or 0."""
    if how == "loss":
        # In a part without gradient: the gradient alone would not tell.
        sums["main"] = sums["main"] + float("nan")
    if how == "gradient":
        sums["main"].register_hook(lambda gradient: gradient * float("nan"))
    if how == "zero":
        sums.update({name: 0.0 * value for name, value in sums.items()})
    if how == "spike":
        sums["main"] = 1e4 * sums["main"]


class Training:
    """A toy of the workers, in micro-batches, with EMA, schedule and the optimizer of ``options``."""

    def __init__(
        self,
        options: OptimizerConfig,
        health: HealthConfig = SKIP,
        *,
        on_device: bool = False,
        scale: float = 0.0,
        accelerator: Accelerator | None = None,
        sync: SyncPolicy = "auto",
        resume: Run | None = None,
        balance: BalanceConfig = FIXED,
    ) -> None:
        if accelerator is None:
            AcceleratorState._reset_state(True)
            accelerator = Accelerator(cpu=True)
        self.accelerator, self.sync, self.max_grad_norm = accelerator, sync, 0.5
        if scale:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        torch.manual_seed(0)
        model: nn.Module = Toy(Wide)
        if resume is not None:
            restore.load_initial_weights(model, resume)
        if options.name == "adamw_offload":  # refused on a CPU, where it saves nothing; its arithmetic is the same
            plain, _ = build_optimizer(model, OptimizerConfig(), torch.device("cpu"))
            built: Any = HostAdamW(plain.param_groups, betas=options.betas, eps=options.eps)
        else:
            built, _ = build_optimizer(model, options, torch.device("cpu"), strategy=strategy_of(accelerator))
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = self.accelerator.prepare(model, built)
        self.guard, _ = resolve_step_guard(self.accelerator, self.optimizer, health, on_cpu=on_device)
        assert self.guard.on_device == on_device
        if balance.is_on:
            self.guard.balance = LossBalance(balance)
        self.shards = Shards(self.model, self.optimizer)
        self.average = Ema(EmaConfig(0.5), self.shards, self.guard)
        if resume is not None:
            restore.restore(resume, accelerator, self.shards, self.average)

    def step(self, step: int, spoil: str = "") -> StepResult:
        batches = micro_batches(self.accelerator, step, MICRO_BATCH)
        set_learning_rate(self.optimizer, 1 / (1 + step))
        coefficients = {"main": 1.0, "aux": 0.5}
        window = GradientWindow(self.accelerator, self.model, batches, coefficients, step, self.sync, self.guard)
        share = GLOBAL_BATCH // self.accelerator.num_processes
        place = BAD_SAMPLE - share * self.accelerator.process_index
        for inputs in window:
            sums = loss_sums(self.model, inputs)
            # Reckoned, because a look at the sample numbers would be a read of the device.
            is_bad = 0 <= place < share and inputs is batches[place // MICRO_BATCH][0]
            if is_bad or spoil == "zero":
                spoil_sums(sums, spoil)
            window.backward(sums)
        result = window.finish(self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(step)
        return result

    def train(self, steps: Sequence[int] = range(STEPS), spoil: str = "", at: Sequence[int] = (3,)) -> Training:
        for step in steps:
            self.step(step, spoil if step in at else "")
        return self

    def state(self) -> dict[str, Any]:
        """Everything that a step may move, in the optimizer's own form: counters, codes of 8 bits, numbers."""
        found: dict[str, Any] = {f"weight {name}": p.detach().clone() for name, p in self.shards.parameters.items()}
        found |= {f"ema {name}": shard.clone() for name, shard in self.average.averages.items()}
        inner = self.optimizer.optimizer
        for name, parameter in self.shards.parameters.items():
            state = inner.state.get(parameter, {})
            found |= {f"{key} {name}": value for key, value in state.items() if value is not None}
        for group in inner.param_groups:
            numbers = {key: v for key, v in group.items() if isinstance(v, (int, float)) and key != "lr"}
            found |= {f"{key} of {group['name']}": number for key, number in numbers.items()}
        return found


def same(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names whose values differ."""
    assert a.keys() == b.keys()
    pairs = [(name, torch.as_tensor(value), torch.as_tensor(b[name])) for name, value in a.items()]
    return [name for name, x, y in pairs if not torch.equal(x, y)]


OPTIMIZERS: dict[str, tuple[OptimizerConfig, bool]] = {
    "fused AdamW, on the device": (OptimizerConfig(lr=1e-2, fused=True), True),
    "fused AdamW": (OptimizerConfig(lr=1e-2, fused=True), False),
    "AdamW": (OptimizerConfig(lr=1e-2, fused=False), False),
    "Muon": (OptimizerConfig(name="muon", lr=1e-2), False),
    "AdamW in 8 bits": (OptimizerConfig(name="adamw8bit", lr=1e-2), False),
    "AdamW in host memory": (OptimizerConfig(name="adamw_offload", lr=1e-2), False),
    "a class": (OptimizerConfig(name="torch.optim:NAdam", lr=1e-2), False),
    "a class that counts its calls": (OptimizerConfig(name=f"{__name__}:Counting", lr=1e-2), False),
}


@pytest.mark.fault(
    "F53", injected="NaN in a loss or in a gradient, skip, every optimizer", outcome="equals a run without that step"
)
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_equals_one_that_was_never_taken(name: str, where: str) -> None:
    options, on_device = OPTIMIZERS[name]
    if options.name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    spoiled = Training(options, on_device=on_device).train(spoil=where)
    without = Training(options, on_device=on_device).train([step for step in range(STEPS) if step != 3])
    usual = Training(options, HealthConfig(), on_device=on_device).train([s for s in range(STEPS) if s != 3])
    assert not same(spoiled.state(), without.state())
    assert not same(spoiled.state(), usual.state())  # the option changes no bit of a good step
    spoiled.guard.check()
    ((bad, skipped),) = spoiled.guard.history.take_unreported()
    assert (bad.step, bad.reason, skipped, spoiled.guard.history.skipped) == (3, where, True, 1)
    assert bad.samples == ([[12, 13, 14, 15]] if where == "loss" else [list(range(16))])


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("at", [(0,), (STEPS - 1,), (2, 3, 4)])
def test_the_first_the_last_and_several_steps(at: tuple[int, ...], on_device: bool) -> None:
    options = OptimizerConfig(lr=1e-2, fused=True)
    spoiled = Training(options, on_device=on_device).train(spoil="gradient", at=at)
    without = Training(options, on_device=on_device).train([step for step in range(STEPS) if step not in at])
    assert not same(spoiled.state(), without.state())
    spoiled.guard.check()
    assert spoiled.guard.history.skipped == len(at)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**127])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_skipped_step_leaves_the_loss_scale_as_it_was(where: str, scale: float) -> None:
    """fp16 lowers its scale for a gradient that overflows. One that is NaN at any scale gives the scale back."""
    options = OptimizerConfig(lr=1e-2)
    spoiled, without = Training(options, scale=scale), Training(options, scale=scale)
    for step in range(STEPS):
        if step == 3:
            scaler: Any = spoiled.accelerator.scaler
            before = scaler.state_dict()
            spoiled.step(step, where)
            assert scaler.state_dict() == before
        else:
            spoiled.step(step)
            without.step(step)
    assert not same(spoiled.state(), without.state())


def test_no_step_waits_where_the_device_decides() -> None:
    health = HealthConfig(non_finite="skip", spike_factor=50.0, spike="skip", spike_window=4)
    training = Training(OptimizerConfig(lr=1e-2, fused=True), health, on_device=True).train(range(5))
    with HostReads() as reads:
        result = training.step(5)
        training.step(6, "gradient")
        training.step(7, "spike")
        result = training.step(8)
    assert not reads.counts, reads.places
    assert not training.guard.history.skipped  # not known before a log point
    assert result.fields()["skipped_steps"] == 2


@pytest.mark.fault("F53", injected="more steps in a row than max_skipped", outcome="exit 1 with the sample numbers")
@pytest.mark.parametrize("on_device", [True, False])
def test_more_in_a_row_than_allowed_end_the_run_with_the_samples(on_device: bool) -> None:
    health = HealthConfig(non_finite="skip", max_skipped=2)
    training = Training(OptimizerConfig(fused=True), health, on_device=on_device)
    training.train(range(6), spoil="loss", at=(0, 1, 3, 4))  # a good step starts the count over
    training.guard.check()
    training.step(6, "loss")
    training.step(7, "loss")
    with pytest.raises(NonFiniteError) as raised:
        training.step(8, "loss")
        training.guard.check()
    assert str(raised.value).startswith("3 steps in a row were skipped, and health.max_skipped allows 2;")
    for step in (6, 7, 8):
        assert f"loss of step {step + 1} is not finite" in str(raised.value)
    assert str(raised.value).count("rank 0: [12, 13, 14, 15]") == 3


@pytest.mark.parametrize("window", [4, 5])
def test_a_spike_is_more_than_the_factor_times_the_median(window: int) -> None:
    """Against Python's ``median_low``, over norms that the ring holds, in a random order."""
    norms = torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist()
    spikes = Spikes(1.5, window, torch.device("cpu"))
    found: list[bool] = []
    expected: list[bool] = []
    for number, norm in enumerate(norms):
        found.append(bool(torch.tensor(norm) > spikes.limit()))
        last = norms[max(0, number - window) : number]
        expected.append(number >= window and norm > 1.5 * statistics.median_low(last))
        spikes.add(torch.tensor(norm))
    assert found == expected
    assert 3 < sum(found) < 30
    assert spikes.read() == pytest.approx(norms[-window:], abs=0, rel=1e-7)


def test_a_norm_at_the_limit_is_no_spike() -> None:
    guard = StepGuard(None, torch.device("cpu"), HealthConfig(spike_factor=2.0, spike_window=2))
    for step, norm in enumerate((1.0, 1.0, 2.0, 2.5)):
        measured = torch.tensor(norm)
        evidence = Evidence(
            step, ("main",), totals=torch.zeros(1), norm=measured, losses=[], rows=[], precision="no", weights=[]
        )
        guard.watch(evidence, measured, 0.0)
    assert [bad.step for bad, _ in guard.history.take_unreported()] == [3]


def test_a_step_to_go_back_from_is_still_known_after_good_ones() -> None:
    """The device has no reason to forget it: the run goes back at the next check, whatever came in between."""
    training = Training(OptimizerConfig(lr=1e-2, fused=True), ROLLBACK, on_device=True).train(range(3))
    before = {name: value for name, value in training.state().items() if name.startswith("weight ")}
    training.train(range(3, 6), spoil="loss", at=(3,))
    after = training.state()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    with pytest.raises(NonFiniteError, match="loss of step 4 is not finite"):
        training.guard.check()


@pytest.mark.parametrize("on_device", [True, False])
def test_a_spike_is_skipped_and_its_norm_does_not_count(on_device: bool) -> None:
    health = HealthConfig(spike_factor=50.0, spike="skip", spike_window=3)
    options = OptimizerConfig(lr=1e-2, fused=True)
    spoiled = Training(options, health, on_device=on_device).train(spoil="spike", at=(5, 6))
    without = Training(options, health, on_device=on_device).train([s for s in range(STEPS) if s not in (5, 6)])
    assert not same(spoiled.state(), without.state())
    spoiled.guard.check()
    bad = [(each.step, each.reason, skipped) for each, skipped in spoiled.guard.history.take_unreported()]
    assert bad == [(5, "spike", True), (6, "spike", True)]
    assert spoiled.guard.state()["grad_norms"] == without.guard.state()["grad_norms"]
    with pytest.raises(NonFiniteError):  # a NaN is another matter: `non_finite` is stop
        spoiled.step(8, "gradient")
        spoiled.guard.check()


@pytest.mark.parametrize("on_device", [True, False])
def test_a_spike_that_is_only_reported_is_trained(on_device: bool) -> None:
    options = OptimizerConfig(lr=1e-2, fused=True)
    warned = Training(options, HealthConfig(spike_factor=50.0, spike_window=3), on_device=on_device)
    plain = Training(options, HealthConfig(), on_device=on_device)
    warned.train(spoil="spike", at=(5,))
    plain.train(spoil="spike", at=(5,))
    assert not same(warned.state(), plain.state())
    warned.guard.check()
    ((bad, skipped),) = warned.guard.history.take_unreported()
    assert (bad.step, bad.reason, skipped, warned.guard.history.skipped) == (5, "spike", False, 0)
    assert bad.grad_norm is not None
    assert bad.grad_norm > 50


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e9])
def test_a_clipped_spike_has_the_gradient_of_the_factor_times_the_median(max_grad_norm: float, on_device: bool) -> None:
    """Unless the option clips it further; and that norm, not the spike's, counts for the median."""
    options = OptimizerConfig(lr=1e-2, fused=True)
    health = HealthConfig(spike_factor=50.0, spike="clip", spike_window=3)
    clipped = Training(options, health, on_device=on_device)
    twin = Training(options, HealthConfig(), on_device=on_device)
    clipped.max_grad_norm = twin.max_grad_norm = max_grad_norm
    for training in (clipped, twin):
        training.train(range(5))
    assert not same(clipped.state(), twin.state())
    limit = 50.0 * statistics.median_low(clipped.guard.state()["grad_norms"])
    twin.max_grad_norm = min(limit, max_grad_norm or math.inf)
    clipped.step(5, "spike")
    twin.step(5, "spike")
    assert not [name for name in same(clipped.state(), twin.state()) if not close(clipped, twin, name)]
    clipped.guard.check()
    ((bad, skipped),) = clipped.guard.history.take_unreported()
    assert (bad.step, bad.reason, skipped) == (5, "spike", False)
    assert bad.grad_norm is not None
    assert bad.grad_norm > 2 * limit
    assert clipped.guard.state()["grad_norms"][-1] == pytest.approx(limit, rel=1e-6)
    clipped.step(6)
    twin.max_grad_norm = max_grad_norm
    twin.step(6)
    assert not [name for name in same(clipped.state(), twin.state()) if not close(clipped, twin, name)]


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("spike", ["clip", "skip"])
def test_after_steps_without_a_gradient_no_step_is_a_spike(spike: Literal["clip", "skip"], on_device: bool) -> None:
    """Neither one with a gradient, nor another without, whose scale would be 0 / 0."""
    options = OptimizerConfig(lr=1e-2, fused=True)
    watched = Training(options, HealthConfig(spike_factor=50.0, spike=spike, spike_window=3), on_device=on_device)
    plain = Training(options, HealthConfig(), on_device=on_device)
    for training in (watched, plain):
        training.train(range(5), spoil="zero", at=range(4))
        training.guard.check()
    assert watched.guard.state()["grad_norms"][:2] == [0.0, 0.0]
    assert not same(watched.state(), plain.state())
    assert not watched.guard.history.take_unreported()


def close(a: Training, b: Training, name: str) -> bool:
    """Rounding apart: the limit is computed in fp32 on the device, and in fp64 here."""
    x, y = (torch.as_tensor(each.state()[name]) for each in (a, b))
    return torch.allclose(x, y, rtol=1e-5, atol=1e-9)


def saver_of(training: Training, folder: Path) -> tuple[Run, Saver]:
    run = Run(folder, "toy", None, "", {"experiment": {"global_batch_size": 16}, "resolved": {}})
    if training.accelerator.is_main_process:
        run.checkpoints.mkdir(parents=True)
        atomic_files.write_json_in_place(folder / "run.json", {})
    training.accelerator.wait_for_everyone()

    def write_extras(place: Path) -> None:
        (place / "config.json").write_text("{}")

    config = CheckpointConfig(keep_last=0)
    return run, Saver(
        training.accelerator, run, training.average, config, HubConfig(), write_extras, epoch=lambda step: 0.0
    )


def resumed_from(run: Run, step: int) -> Run:
    """The run as the next start finds it."""
    saved = commit.verify(run.checkpoints / f"checkpoint_{step:08d}")
    return Run(run.directory, "toy", saved, "", {"experiment": {}, "resolved": {}})


@pytest.mark.parametrize("name", ["fused AdamW, on the device", "Muon", "AdamW in 8 bits", "a class"])
def test_a_resume_after_a_skip_is_the_same_as_no_interruption(name: str, tmp_path: Path) -> None:
    """The optimizer's own count is behind the run's by the skipped steps, and bias correction reads it."""
    options, on_device = OPTIMIZERS[name]
    if options.name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    health = HealthConfig(non_finite="skip", max_skipped=3, spike_factor=50.0, spike="skip", spike_window=3)
    whole = Training(options, health, on_device=on_device).train(range(5), spoil="gradient", at=(1, 4))
    run, saver = saver_of(whole, tmp_path / "run")
    with saver:
        saver.save(5)
    index = run.checkpoints / "checkpoint_00000005" / "optimizer" / "index.json"
    assert json.loads(index.read_text())["step"] == 3
    other = Training(options, health, on_device=on_device, resume=resumed_from(run, 5))
    for training in (whole, other):
        training.train(range(5, 12), spoil="spike", at=(7,))
        training.guard.check()
    assert not same(whole.state(), other.state())
    assert whole.guard.state() == other.guard.state()
    assert whole.guard.history.skipped == 3
    assert [bad.step for bad, _ in other.guard.history.take_unreported()] == [7]


def test_a_row_of_skips_is_counted_over_a_resume(tmp_path: Path) -> None:
    health = HealthConfig(non_finite="skip", max_skipped=2)
    first = Training(OptimizerConfig(), health).train(range(3), spoil="loss", at=(1, 2))
    run, saver = saver_of(first, tmp_path / "run")
    with saver:
        saver.save(3)
    second = Training(OptimizerConfig(), health, resume=resumed_from(run, 3))
    with pytest.raises(NonFiniteError, match=r"3 steps in a row were skipped \(2 of them before the resume\)"):
        second.step(3, "loss")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    ("health", "model", "strategy", "precision", "hook", "because"),
    [
        (SKIP, nn.Linear(2, 2), "zero2", "fp16", "none", r"non_finite: skip under zero2 with precision: fp16"),
        (ROLLBACK, nn.Linear(2, 2), "zero1", "fp16", "none", r"non_finite: rollback under zero1 with precision: fp16"),
        (SKIP, nn.Linear(2, 2), "ddp", "bf16", "powersgd", r"comm_hook: powersgd: the hook carries"),
        (SKIP, Normed(), "ddp", "bf16", "none", r"running statistics \(norm\)"),
        (HealthConfig(spike_factor=9, spike="skip"), nn.Linear(2, 2), "zero1", "bf16", "none", r"spike: skip: under"),
        (HealthConfig(spike_factor=9, spike="clip"), nn.Linear(2, 2), "zero2", "bf16", "none", r"spike: clip: under"),
    ],
)
def test_where_a_step_cannot_be_left_out_exactly(
    health: HealthConfig, model: nn.Module, strategy: str, precision: str, hook: str, because: str
) -> None:
    with pytest.raises(UsageError, match=because):
        refuse_inexact(health, model, strategy, precision, hook)
    refuse_inexact(HealthConfig(), model, strategy, precision, hook)
    refuse_inexact(SKIP, nn.Linear(2, 2), "zero2", "bf16", "bf16")


@pytest.mark.parametrize(
    ("make", "because"),
    [
        (lambda: HealthConfig(spike_factor=0.5), r"health\.spike_factor: 0\.5: more than 1"),
        (lambda: HealthConfig(spike="skip"), r"health\.spike: skip: .* switches spike detection off"),
        (lambda: HealthConfig(spike="clip"), r"health\.spike: clip: .* switches spike detection off"),
    ],
)
def test_options_without_sense_are_refused(make: Callable[[], HealthConfig], because: str) -> None:
    with pytest.raises(UsageError, match=because):
        make()


def test_an_update_by_a_weight_on_the_device_has_the_bits_of_the_usual_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for decay in (0.2, 0.5, 0.9, 0.9999):
        for size in (1, 7, 1000):
            average, master = torch.randn(2, size, generator=generator)
            usual: list[Tensor] = [average.clone()]
            torch._foreach_lerp_(usual, [master], 1 - decay)
            assert torch.equal(average.clone().lerp_(master, torch.ones(()) * (1 - decay)), usual[0])
            assert torch.equal(average.clone().lerp_(master, torch.zeros(()) * (1 - decay)), average)
