"""Contenders of the GPU suite: the usual script, a strong loop and this project's step; and the results of a part."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn

from accel_train.runtime.step_overhead import remember_lookups
from accel_train.speed.apply import SpeedOptions, apply_speed_options
from accel_train.speed.attention.table import AttentionNeeds
from accel_train.speed.options import ActivationCheckpointingConfig, CompileConfig, Float8
from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.optimizer_classes.offload import HostAdamW
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards
from accel_train.training.step_guard import resolve_step_guard
from benchmarks.device import Machine
from benchmarks.method import Row, row
from benchmarks.recipe_step import after_steps
from benchmarks.sd3 import SD3, Shape, batch_of, diffusers_model, loss_sum, theirs_call

Step = Callable[[], object]
DECAY = 0.999


@dataclass
class Found:
    """Results of one part so far, so that a part that stops early keeps what it has measured."""

    rows: list[Row] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Measurements that are not possible here, with the reason."""
    failed: list[str] = field(default_factory=list)
    """Keys of ``absent`` that should have been measured. They leave the part incomplete."""

    def fails(self, what: str, reason: str) -> None:
        """Record a measurement that should have been made and was not."""
        self.absent[what] = reason
        self.failed.append(what)

    def add(
        self,
        id: str,
        name: str,
        values: float | Sequence[float],
        unit: str = "x",
        target: str | None = None,
        goal: str | None = None,
    ) -> None:
        """Add a row, with the arguments of `benchmarks.method.row`."""
        self.rows.append(row(id, name, values, unit, target, goal))


def in_words(error: BaseException) -> str:
    """Return an error as one line of at most 400 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def autocast(machine: Machine) -> AbstractContextManager[Any]:
    return torch.autocast(machine.device.type, torch.bfloat16)


def new_accelerator(machine: Machine) -> Accelerator:
    """Return an accelerator in bf16, after a reset of Accelerate's global state."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    return Accelerator(cpu=machine.device.type == "cpu", mixed_precision="bf16")


def plain_model(shape: Shape, machine: Machine) -> tuple[nn.Module, Callable[..., Any]]:
    """Return diffusers' model if installed, else ours, with torch's own attention; and a function that calls it."""
    torch.manual_seed(0)
    with torch.device(machine.device):
        model: Any = diffusers_model(shape) if has_diffusers() else SD3(shape)
    return model, theirs_call(model) if has_diffusers() else model


def has_diffusers() -> bool:
    return find_spec("diffusers") is not None


def peer() -> str:
    """Return the name of the model that the peers train."""
    return "diffusers' model" if has_diffusers() else "our model, for diffusers is not installed"


# ------------------------------------------------------------------------------------------------------- the peers
def usual(shape: Shape, machine: Machine) -> Step:
    """Return the step of a typical script: eager, bf16, foreach AdamW, EMA by parameter, three waits for the device."""
    accelerator = new_accelerator(machine)
    plain, _ = plain_model(shape, machine)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4, foreach=True))
    call = theirs_call(model) if has_diffusers() else model
    average = [p.detach().clone() for p in model.parameters()]
    batch = batch_of(shape, machine.device)

    def step() -> None:
        with accelerator.accumulate(model):
            loss = loss_sum(call, batch) / shape.batch
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - DECAY)
        for value in (loss, norm, loss):
            accelerator.gather(value.detach().float().reshape(1)).mean().item()

    return step


def strong(shape: Shape, machine: Machine) -> Step:
    """Return the step of a tuned loop: compiled blocks, cuDNN attention first, fused AdamW, foreach EMA, no waits."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, call = plain_model(shape, machine)
    compile_blocks(model, machine.backend)
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    average = [p.detach().clone() for p in parameters]
    batch = batch_of(shape, machine.device)

    def step() -> None:
        with sdpa_kernel(order, set_priority=True), autocast(machine):
            loss = loss_sum(call, batch) / shape.batch
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - DECAY)

    return step


def compile_blocks(model: Any, backend: str) -> None:
    """Compile each block in place. diffusers' ``compile_repeated_blocks`` (0.42.1) does not find SD3's blocks."""
    for block in getattr(model, "transformer_blocks", None) or model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)


# ------------------------------------------------------------------------------------------------------------ ours
@dataclass(frozen=True)
class Options:
    """Options of our run."""

    compile: Literal["default", "reduce-overhead", "off"] = "default"
    checkpointing: Any = "none"
    optimizer: Any = "adamw"
    float8: Float8 = "none"
    micro_batches: int = 1


class Ours:
    """Our training step around our model, and raw loops around the same model and kernels."""

    def __init__(self, shape: Shape, machine: Machine, options: Options) -> None:
        remember_lookups()
        self.machine, self.shape, self.options = machine, shape, options
        self.accelerator = new_accelerator(machine)
        torch.manual_seed(0)
        with torch.device(machine.device):
            model = SD3(shape)
        self.notices = speed_up(model, shape, machine, options)
        if options.optimizer == "adamw_offload" and machine.device.type == "cpu":
            plain = host_adamw(model, machine)
        else:
            plain, _ = build_optimizer(model, OptimizerConfig(name=options.optimizer), machine.device)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = self.accelerator.prepare(model, plain)
        self.inner: Any = plain
        self.guard, _ = resolve_step_guard(self.accelerator, self.optimizer, on_cpu=True)
        self.average = Ema(EmaConfig(DECAY), Shards(self.model, self.optimizer))
        self.batch = batch_of(shape, machine.device)
        self.count = torch.tensor(float(shape.batch), device=machine.device)
        self.steps = 0

    def step(self) -> None:
        """Take one optimizer step as the recipes do between two log points. The result is in ``result``."""
        self.steps += 1
        micro_batches = [(self.batch, {"main": self.count})] * self.options.micro_batches
        window = GradientWindow(
            self.accelerator, self.model, micro_batches, {"main": 1.0}, self.steps, "auto", self.guard
        )
        for inputs in window:
            window.backward({"main": loss_sum(self.model, inputs)})
        self.result = window.finish(1.0)
        self.average.announce(self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(self.steps)
        if self.guard is not None and self.steps % 50 == 0:
            self.guard.check()

    @contextmanager
    def whole(self) -> Generator[Step]:
        """Yield the step with everything that the recipes' loop does after it between two log points, as in C1."""
        with (
            TemporaryDirectory() as folder,
            after_steps(self.accelerator, self.average, Path(folder) / "run", self.shape.batch) as after,
        ):

            def step() -> None:
                self.step()
                after(self.result)

            yield step

    @contextmanager
    def raw(self, in_kernel: bool) -> Generator[Callable[[], Tensor]]:
        """Yield a hand-written step around the same model, optimizer and EMA.

        In the body the step guard is detached from the optimizer. ``in_kernel``: AdamW's kernel clips, and updates the
        EMA where it can, as in our step. Otherwise clip and EMA are separate passes.
        """
        held = {name: getattr(self.inner, name) for name in ("found_inf", "grad_scale") if hasattr(self.inner, name)}
        for name in held:
            delattr(self.inner, name)
        parameters = list(self.model.parameters())
        masters = [self.average.shards.master(name) for name in self.average.averages]
        averages = list(self.average.averages.values())
        along = {self.average.shards.parameters[name]: shard for name, shard in self.average.averages.items()}

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            self.inner.step()
            torch._foreach_lerp_(averages, masters, 1 - DECAY)

        def update_in_kernel() -> None:
            norms = torch._foreach_norm([p.grad for p in parameters])
            self.inner.grad_scale = torch.linalg.vector_norm(torch.stack(norms)).clamp(min=1.0)
            self.inner.average_next(along, 1 - DECAY)
            self.inner.step()
            if not self.inner.has_averaged:
                torch._foreach_lerp_(averages, masters, 1 - DECAY)

        def step() -> Tensor:
            with autocast(self.machine):
                loss = loss_sum(self.model, self.batch) / self.shape.batch
            loss.backward()
            with torch.no_grad():
                (update_in_kernel if in_kernel else update)()
            self.inner.zero_grad(set_to_none=True)
            return loss.detach()

        try:
            yield step
        finally:
            if hasattr(self.inner, "grad_scale"):
                del self.inner.grad_scale
            for name, tensor in held.items():
                setattr(self.inner, name, tensor)

    def loss(self) -> float:
        """Return the loss of the last step, computed from the weights before its update. Waits for the device."""
        return self.result.fields()["loss"]

    def weights(self) -> list[Tensor]:
        """Return copies of the weights in host memory; the device has no room for a copy beside 2 B in training."""
        return [p.detach().to("cpu", copy=True) for p in self.model.parameters()]

    @torch.no_grad()
    def begin_again(self, weights: list[Tensor]) -> None:
        """Load these weights and zero the state of the optimizer, in place. The EMA is left as it is."""
        torch._foreach_copy_(list(self.model.parameters()), weights)
        for state in self.inner.state.values():
            for tensor in state.values():
                tensor.zero_()


def speed_up(model: nn.Module, shape: Shape, machine: Machine, options: Options) -> Sequence[str]:
    """Apply the speed options of our run to ``model`` and return the notices. The dry run compiles nothing."""
    length = shape.image_tokens + shape.text_tokens
    needs = AttentionNeeds(
        machine.device, torch.bfloat16, shape.head_width, shape.heads, length, shape.batch, mask=False, cross=True
    )
    compilation: Any = CompileConfig()
    if options.compile != "off" and not machine.tiny:
        compilation = CompileConfig("on", optimize=options.compile)
    checkpointing = ActivationCheckpointingConfig(options.checkpointing)
    asked = SpeedOptions("auto", checkpointing, compilation, options.float8)
    return apply_speed_options(model, asked, machine.device, "bf16", needs, options.micro_batches).notices


def host_adamw(model: nn.Module, machine: Machine) -> HostAdamW:
    """Return HostAdamW on CPU tensors for the dry run. The option ``adamw_offload`` is refused on a CPU."""
    groups = build_optimizer(model, OptimizerConfig(), machine.device)[0].param_groups
    kept = [{name: group[name] for name in ("params", "lr", "weight_decay")} for group in groups]
    return HostAdamW(kept, betas=OptimizerConfig().betas, eps=OptimizerConfig().eps)
