"""G1, G2, G4 and G6: training steps of SD3's model, ours and the peers'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn

from accel_train.models.activation_checkpointing import ActivationCheckpointingConfig
from accel_train.models.attention_table import AttentionNeeds
from accel_train.models.compile import CompileConfig
from accel_train.models.float8 import Float8, refuse_float8
from accel_train.models.flops import peak_of
from accel_train.models.speed import SpeedOptions, apply_speed_options
from accel_train.runtime.lookups import remember_lookups
from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards
from accel_train.training.step_guard import resolve_step_guard
from benchmarks.device import GIB, Machine
from benchmarks.method import ROOT, Row, row
from benchmarks.sd3 import SD3, Shape, batch_of, diffusers_model, loss_sum, theirs_call

Step = Callable[[], object]
Found = tuple[list[Row], dict[str, Any]]
DECAY = 0.999


def autocast(machine: Machine) -> AbstractContextManager[Any]:
    return torch.autocast(machine.device.type, torch.bfloat16)


def new_accelerator(machine: Machine) -> Accelerator:
    """In bf16, whatever was built before."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    return Accelerator(cpu=machine.device.type == "cpu", mixed_precision="bf16")


def plain_model(shape: Shape, machine: Machine) -> tuple[nn.Module, Callable[..., Any]]:
    """diffusers' model where it is installed, else ours, on torch's own attention; and how it is called."""
    torch.manual_seed(0)
    with torch.device(machine.device):
        model: Any = diffusers_model(shape) if has_diffusers() else SD3(shape)
    return model, theirs_call(model) if has_diffusers() else model


def has_diffusers() -> bool:
    return find_spec("diffusers") is not None


def peer() -> str:
    """Whose model the peers train."""
    return "diffusers' model" if has_diffusers() else "our model, for diffusers is not installed"


# ------------------------------------------------------------------------------------------------------- the peers
def usual(shape: Shape, machine: Machine) -> Step:
    """What many scripts do: eager bf16 autocast, foreach AdamW, an average per parameter, three waits a step."""
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
    """A tuned loop without any trainer: blocks compiled, cuDNN attention first, fused AdamW, foreach average."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, call = plain_model(shape, machine)
    if not machine.tiny:
        compile_blocks(model)
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


def compile_blocks(model: Any) -> None:
    """diffusers' own regional compilation, or the same by hand."""
    if hasattr(model, "compile_repeated_blocks"):
        model.compile_repeated_blocks(fullgraph=True, dynamic=False)
        return
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False)


# ------------------------------------------------------------------------------------------------------------ ours
@dataclass(frozen=True)
class Options:
    """Of our own run."""

    compile: Literal["default", "reduce-overhead", "off"] = "default"
    checkpointing: Any = "none"
    optimizer: Any = "adamw"
    float8: Float8 = "none"
    micro_batches: int = 1


class Ours:
    """The trainer's step around our model, and a raw loop around the same model and kernels."""

    def __init__(self, shape: Shape, machine: Machine, options: Options) -> None:
        remember_lookups()
        self.machine, self.shape, self.options = machine, shape, options
        self.accelerator = new_accelerator(machine)
        torch.manual_seed(0)
        with torch.device(machine.device):
            model = SD3(shape)
        length = shape.image_tokens + shape.text_tokens
        needs = AttentionNeeds(
            machine.device, torch.bfloat16, shape.head_width, shape.heads, length, shape.batch, mask=False, cross=True
        )
        compiling = options.compile != "off" and not machine.tiny
        compilation: Any = CompileConfig("on", optimize=options.compile) if compiling else CompileConfig()
        checkpointing = ActivationCheckpointingConfig(options.checkpointing)
        asked = SpeedOptions("auto", checkpointing, compilation, options.float8)
        applied = apply_speed_options(model, asked, machine.device, "bf16", needs, options.micro_batches)
        self.notices = applied.notices
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
        """As the recipes do between two log points."""
        self.steps += 1
        micro_batches = [(self.batch, {"main": self.count})] * self.options.micro_batches
        window = GradientWindow(
            self.accelerator, self.model, micro_batches, {"main": 1.0}, self.steps, "auto", self.guard
        )
        for inputs in window:
            window.backward({"main": loss_sum(self.model, inputs)})
        self.result = window.finish(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(self.steps)
        if self.guard is not None and self.steps % 50 == 0:
            self.guard.check()

    @contextmanager
    def raw(self) -> Iterator[Step]:
        """A loop by hand around the same model, optimizer and average. In the body the guard is off the optimizer."""
        held = {name: getattr(self.inner, name) for name in ("found_inf", "grad_scale") if hasattr(self.inner, name)}
        for name in held:
            delattr(self.inner, name)
        parameters = list(self.model.parameters())
        masters = [self.average.view.master(name) for name in self.average.shards]
        averages = list(self.average.shards.values())

        def step() -> None:
            with autocast(self.machine):
                loss = loss_sum(self.model, self.batch) / self.shape.batch
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            self.inner.step()
            self.inner.zero_grad(set_to_none=True)
            torch._foreach_lerp_(averages, masters, 1 - DECAY)

        try:
            yield step
        finally:
            for name, tensor in held.items():
                setattr(self.inner, name, tensor)

    def loss(self) -> float:
        """Of the last step."""
        return self.result.fields()["loss"]


# ------------------------------------------------------------------------------------------------------------ rows
def mfu(machine: Machine, shape: Shape, seconds: list[float]) -> list[float]:
    """Share of the data sheet's peak; of 1 TFLOP/s where it is not known, as on a CPU."""
    peak = peak_of(machine.device, "bf16") or 1e12
    return [shape.train_flops() * shape.batch / s / peak for s in seconds]


def timed(machine: Machine, build: Callable[[], Step], steps: int) -> list[float]:
    """Build, time and let go of one contender."""
    step = build()
    seconds = machine.seconds(step, steps, warm_up=2 if machine.tiny else 5)
    del step
    machine.release()
    return seconds


def ratios(over: list[float], under: list[float]) -> list[float]:
    """Of steps in order: the contenders do not fit on the device at once, so they are not in turns."""
    return [a / b for a, b in zip(over, under, strict=True)]


def g1_large(machine: Machine, rate: float) -> Found:
    """G1a: SD3-medium's shape. Also G2, on the trainer while it is there."""
    shape, steps = machine.large(), 3 if machine.tiny else 20
    peers = {name: timed(machine, lambda b=build: b(shape, machine), steps) for name, build in PEERS.items()}
    ours = Ours(shape, machine, Options())
    seconds = machine.seconds(ours.step, steps, warm_up=2 if machine.tiny else 5)
    loss = ours.loss()
    rows, details = against_raw(machine, ours, "at SD3-medium's shape", "<= 1.003")
    share = mfu(machine, shape, seconds)
    reached = [shape.train_flops() * shape.batch / s / rate for s in seconds]
    size = f"2 B parameters, {shape.image_tokens} + {shape.text_tokens} tokens, {shape.batch} rows"
    rows += [
        row("G1", f"{size}: MFU", share, "MFU", ">= 0.45", ">= 0.48"),
        row("G1", f"{size}: share of this device's own matrix product rate", reached),
        row("G1", f"{size}: speed over a strong loop on {peer()}", ratios(peers["strong"], seconds), "x", ">= 1.08"),
        row("G1", f"{size}: speed over the usual script on {peer()}", ratios(peers["usual"], seconds), "x", ">= 1.3"),
    ]
    details |= {"seconds": peers | {"ours": seconds}, "loss": loss, "notices": ours.notices}
    del ours
    machine.release()
    return rows, details


PEERS: dict[str, Callable[[Shape, Machine], Step]] = {"usual": usual, "strong": strong}


def against_raw(machine: Machine, ours: Ours, where: str, target: str) -> Found:
    """G2: the trainer's step over a raw loop around the same model, in turns; waits of a step."""
    rounds, repeats = (2, 1) if machine.tiny else (6, 5)
    trainer: list[float] = []
    raw: list[float] = []
    for _ in range(rounds):
        with ours.raw() as step:
            raw.append(sum(machine.seconds(step, repeats, warm_up=1)))
        trainer.append(sum(machine.seconds(ours.step, repeats, warm_up=1)))
    waits = machine.waits(ours.step)
    rows = [
        row("G2", f"trainer over a raw loop, {where}", ratios(trainer, raw), "x", target),
        row("G2", f"waits for the device in a step that does not log, {where}", waits, "count", "<= 0"),
    ]
    return rows, {"trainer": trainer, "raw": raw}


def g1_long(machine: Machine, rate: float) -> Found:
    """G1b: 4096 image tokens, and heads of 128."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for name, shape, target in (("4096 + 154 tokens", machine.long(), ">= 0.42"), *heads_of_128(machine)):
        seconds = timed(machine, lambda s=shape: Ours(s, machine, Options()).step, 2 if machine.tiny else 10)
        rows.append(row("G1", f"{name}: MFU", mfu(machine, shape, seconds), "MFU", target))
        details[name] = seconds
    return rows, details


def heads_of_128(machine: Machine) -> list[tuple[str, Shape, str | None]]:
    """Only where there is time for it."""
    return [("heads of 128: 1024 + 154 tokens", machine.wide_heads(), None)] if machine.left > 300 else []


def g1_small(machine: Machine, rate: float) -> Found:
    """G1c and the small half of G2: a step bound by launches."""
    shape, steps = machine.small(), 3 if machine.tiny else 40
    script = timed(machine, lambda: usual(shape, machine), steps)
    ours = Ours(shape, machine, Options("reduce-overhead"))
    seconds = machine.seconds(ours.step, steps, warm_up=2 if machine.tiny else 8)
    text = f"launch-bound, 12 x 768, {shape.batch} rows: speed over the usual script on {peer()}"
    rows = [row("G1", text, ratios(script, seconds), "x", ">= 3", ">= 5")]
    more, details = against_raw(machine, ours, "at a step of milliseconds", "<= 1.02")
    del ours
    machine.release()
    return rows + more, details | {"usual": script, "ours": seconds}


def g1_float8(machine: Machine, rate: float) -> Found:
    """G1d: the same in float8."""
    refuse_float8("tensorwise", machine.device, "bf16", "single")
    shape, steps = machine.large(), 3 if machine.tiny else 10
    plain = timed(machine, lambda: Ours(shape, machine, Options()).step, steps)
    eight = timed(machine, lambda: Ours(shape, machine, Options(float8="tensorwise")).step, steps)
    return [row("G1", "float8 over bf16: speed", ratios(plain, eight), "x", ">= 1.12")], {"bf16": plain, "fp8": eight}


def g4(machine: Machine, rate: float) -> Found:
    """Memory and time of each mode, forward and backward of the long shape.

    What the forward leaves for the backward is what is called activation memory; it holds bf16 copies of weights too.
    At its peak a step also holds gradients.
    """
    shape, steps = machine.long(), 2 if machine.tiny else 5
    found: dict[str, dict[str, Any]] = {}
    for mode in ("none", "selective", "full"):
        ours = Ours(shape, machine, Options(checkpointing=mode))
        held, kept = machine.held_bytes(), [0]

        def step(ours: Ours = ours, held: int = held, kept: list[int] = kept) -> Tensor:
            with autocast(machine):
                loss = loss_sum(ours.model, ours.batch)
            kept.append(machine.held_bytes() - held)
            loss.backward()
            ours.model.zero_grad(set_to_none=True)
            return loss

        seconds = machine.seconds(step, steps, warm_up=2)
        found[mode] = {"seconds": seconds, "kept": max(*kept, 1), "peak": max(machine.peak_bytes() - held, 1)}
        del ours, step
        machine.release()
    targets = {"selective": ("<= 0.5", "<= 1.12"), "full": (None, "<= 1.28")}
    rows: list[Row] = []
    for mode, (less, slower) in targets.items():
        kept, peak = (found[mode][which] / found["none"][which] for which in ("kept", "peak"))
        rows.append(row("G4", f"{mode}: activation memory over none", kept, "x", less))
        rows.append(row("G4", f"{mode}: peak of a step, with gradients, over none", peak, "x"))
        rows.append(
            row("G4", f"{mode}: time over none", ratios(found[mode]["seconds"], found["none"]["seconds"]), "x", slower)
        )
    rows.append(row("G4", "none: activation memory", found["none"]["kept"] / GIB, "GiB"))
    return rows, found


def g6(machine: Machine, rate: float) -> Found:
    """Compile times, each in a process of its own with an empty cache; block by block also with a full one."""
    if machine.tiny:
        return [row("G6", "cold compile, block by block", 0.0, "s")], {}
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        cold, warm = (in_own_process("regional", a) for _ in range(2))
        whole = in_own_process("full", b) if machine.left > 120 else None
    rows = [
        row("G6", "24 blocks, cold compile, block by block", cold["seconds"], "s", "<= 25"),
        row("G6", "24 blocks, warm compile, block by block", warm["seconds"], "s", "<= 5"),
    ]
    if whole is not None:
        rows.append(
            row("G6", "cold compile of the whole model over blocks", whole["seconds"] / cold["seconds"], "x", ">= 4")
        )
        rows.append(row("G6", "step, block by block over the whole", cold["step"] / whole["step"], "x", "<= 1.02"))
    return rows, {"cold": cold, "warm": warm, "whole": whole}


def in_own_process(way: str, cache: str) -> dict[str, float]:
    """``compile_once`` with this directory as the compiler's cache."""
    given = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--compile_once", way],
        capture_output=True, text=True, check=False, cwd=ROOT, env=given, timeout=200,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return json.loads(done.stdout.splitlines()[-1])


def compile_once(way: str, machine: Machine) -> dict[str, float]:
    """Time of the first forward and backward of SD3-medium's shape with two rows, and of later ones."""
    shape = Shape(batch=2)
    with torch.device(machine.device):
        model = SD3(shape)
    if way == "regional":
        compile_blocks(model)
    else:
        model.compile(fullgraph=True, dynamic=False)
    batch = batch_of(shape, machine.device)

    def step() -> None:
        with autocast(machine):
            loss = loss_sum(model, batch)
        loss.backward()
        model.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    machine.wait()
    first = time.perf_counter() - began
    return {"seconds": first, "step": min(machine.seconds(step, 10))}
