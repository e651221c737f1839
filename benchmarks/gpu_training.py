"""G1, G2, G4 and G6: training steps of SD3's model, ours and the peers'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.speed.blocks import blocks_of
from accel_train.speed.compile import apply_compile
from accel_train.speed.device_peaks import peak_of
from accel_train.speed.float8 import refuse_float8
from accel_train.speed.options import CompileConfig
from benchmarks.device import GIB, Machine
from benchmarks.gpu_contenders import (
    Found,
    Options,
    Ours,
    Step,
    autocast,
    has_diffusers,
    in_words,
    peer,
    speed_up,
    strong,
    usual,
)
from benchmarks.method import ROOT, largest, largest_difference
from benchmarks.sd3 import SD3, Shape, batch_of, copy_model, diffusers_model, loss_sum, theirs_call

PEERS: dict[str, Callable[[Shape, Machine], Step]] = {"usual": usual, "strong": strong}
DRY_PEAK = 1e12
"""Peak in FLOP/s for the dry run, because a CPU has none in the table. It only shows that the row is made."""
APART = "<= 1e-3"
"""Target for the relative difference of two bf16 losses after a few steps. Only the order of sums differs."""


def add_mfu(
    found: Found, machine: Machine, name: str, shape: Shape, seconds: list[float], target: str, goal: str
) -> None:
    """Add a row of the MFU, relative to the data sheet's bf16 peak. If the peak is unknown, add it to ``absent``."""
    peak = peak_of(machine.device, "bf16")
    if peak is None and not machine.tiny:
        device = torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else machine.device.type
        found.absent[f"MFU, {name}"] = f"the bf16 peak of {device} is not in accel_train/speed/device_peaks.py"
        return
    words = "MFU" if peak is not None else "share of 1 TFLOP/s, the dry run's stand-in for a peak"
    rates = [shape.train_flops() * shape.batch / s for s in seconds]
    found.add("G1", f"{name}: {words}", [rate / (peak or DRY_PEAK) for rate in rates], "MFU", target, goal)


def timed(machine: Machine, build: Callable[[], Step], steps: int) -> list[float]:
    """Build a contender, return the seconds of each of ``steps`` steps, and free its memory."""
    step = build()
    seconds = machine.seconds(step, steps, warm_up=2 if machine.tiny else 5)
    del step
    machine.release()
    return seconds


def ratios(over: list[float], under: list[float]) -> list[float]:
    """Return ``over`` / ``under`` by step. The contenders ran one after the other: they do not fit together."""
    return [a / b for a, b in zip(over, under, strict=True)]


def g1_large(machine: Machine, rate: float, found: Found) -> None:
    """G1a: SD3-medium's shape; also G2 with the same model. Ours runs first, so that a peer that does not fit costs
    none of our rows."""
    same_model(machine, found)
    shape, steps = machine.large(), 3 if machine.tiny else 20
    ours = Ours(shape, machine, Options())
    with ours.whole() as step:
        seconds = machine.seconds(step, steps, warm_up=2 if machine.tiny else 5)
    found.details |= {"seconds": {"ours": seconds}, "loss": ours.loss(), "notices": ours.notices}
    size = f"2 B parameters, {shape.image_tokens} + {shape.text_tokens} tokens, {shape.batch} rows"
    add_mfu(found, machine, size, shape, seconds, ">= 0.45", ">= 0.48")
    reached = [shape.train_flops() * shape.batch / s / rate for s in seconds]
    found.add("G1", f"{size}: share of this device's own matrix product rate", reached)
    against_raw(machine, ours, found, "at SD3-medium's shape", "<= 1.003")
    del ours, step
    machine.release()
    for name, words, target in (("strong", "a strong loop", ">= 1.08"), ("usual", "the usual script", ">= 1.3")):
        add_peer(machine, found, name, f"{size}: speed over {words} on {peer()}", shape, target)


def add_peer(machine: Machine, found: Found, name: str, text: str, shape: Shape, target: str) -> None:
    """Time one peer and add our speed over it as a row, or the reason if it fails. Ours has already been timed."""
    own = found.details["seconds"]["ours"]
    try:
        seconds = timed(machine, lambda: PEERS[name](shape, machine), len(own))
    except Exception as error:  # usually out of memory; our own rows are complete
        found.fails(text, in_words(error))
        # The frames of the traceback hold tensors of the peer.
        traceback.clear_frames(error.__traceback__)
        machine.release()
        return
    found.details["seconds"][name] = seconds
    found.add("G1", text, ratios(seconds, own), "x", target)


@torch.no_grad()
def same_model(machine: Machine, found: Found) -> None:
    """Add a row of the output difference, in fp32, of our model to diffusers' with the same weights, at two blocks."""
    if not has_diffusers():
        return
    shape = replace(machine.large(), depth=2, batch=2)
    torch.manual_seed(0)
    with torch.device(machine.device):
        theirs, ours = diffusers_model(shape), SD3(shape)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=shape.width**-0.5)
    copy_model(ours, theirs)
    batch = batch_of(shape, machine.device)
    inputs = [batch[name] for name in ("latents", "text", "pooled", "time")]
    a, (b,) = ours(*inputs), theirs_call(theirs)(*inputs)
    name = "relative difference of our output to diffusers' with its weights, fp32"
    found.add("G1", name, float((a - b).norm() / b.norm()), "x", "<= 1e-5")


def against_raw(machine: Machine, ours: Ours, found: Found, where: str, target: str) -> None:
    """G2: the recipes' whole step against raw loops around the same model, in turns, after a check that their losses
    agree; and its waits. The loop with a target clips and updates the EMA in AdamW's kernel, as the trainer does."""
    same_losses(ours, found, where)
    rounds, repeats = (2, 1) if machine.tiny else (6, 5)
    times: dict[str, list[float]] = {"trainer": [], "raw": [], "by hand": []}
    with ours.whole() as whole:
        for _ in range(rounds):
            for name, in_kernel in RAW.items():
                with ours.raw(in_kernel) as step:
                    times[name].append(sum(machine.seconds(step, repeats, warm_up=1)))
            times["trainer"].append(sum(machine.seconds(whole, repeats, warm_up=1)))
        waits = machine.waits(whole)
    text = "trainer over a raw loop with clip and average in the kernel"
    found.add("G2", f"{text}, {where}", ratios(times["trainer"], times["raw"]), "x", target)
    found.add("G2", f"trainer over a hand-written loop, {where}", ratios(times["trainer"], times["by hand"]))
    found.add("G2", f"waits for the device in a step that does not log, {where}", len(waits), "count", "<= 0")
    found.details |= {**times, "waits": waits}


RAW = {"raw": True, "by hand": False}
"""Raw loops by name. True: clip and EMA run in the kernel of AdamW."""


def same_losses(ours: Ours, found: Found, where: str, steps: int = 4) -> None:
    """Compare losses from equal weights. The first tests the forward, the others gradient, clip and optimizer."""
    weights = ours.weights()
    ours.begin_again(weights)
    losses = {"trainer": [(ours.step(), ours.loss())[1] for _ in range(steps)]}
    for name, in_kernel in RAW.items():
        ours.begin_again(weights)
        with ours.raw(in_kernel) as step:
            losses[name] = [float(step()) for _ in range(steps)]
    apart = largest(largest_difference(losses["trainer"], losses[name]) for name in RAW)
    name = f"largest relative difference of a loss to the raw loop, {steps} steps from the same weights, {where}"
    found.add("G2", name, apart, "x", APART)
    found.details["losses"] = losses


def g1_long(machine: Machine, rate: float, found: Found) -> None:
    """G1b: 4096 image tokens, then heads of width 128. Raises TimeoutError if too little time is left for these."""
    cases = (
        ("4096 + 154 tokens", machine.long(), ">= 0.42", ">= 0.45", 0),
        ("heads of 128: 1024 + 154 tokens", machine.wide_heads(), ">= 0.45", ">= 0.50", 60),
    )
    for name, shape, target, goal, needed in cases:
        if machine.left < needed:
            raise TimeoutError(f"{name}: {machine.left:.0f} s were left, it needs {needed}")
        seconds = timed(machine, lambda s=shape: Ours(s, machine, Options()).step, 2 if machine.tiny else 10)
        found.details[name] = seconds
        add_mfu(found, machine, f"{name}, {shape.batch} rows", shape, seconds, target, goal)


def g1_small(machine: Machine, rate: float, found: Found) -> None:
    """G1c, and G2 at a launch-bound step."""
    shape, steps = machine.small(), 3 if machine.tiny else 40
    script = timed(machine, lambda: usual(shape, machine), steps)
    ours = Ours(shape, machine, Options("reduce-overhead"))
    with ours.whole() as step:
        seconds = machine.seconds(step, steps, warm_up=2 if machine.tiny else 8)
    text = f"launch-bound, 12 x 768, {shape.batch} rows: speed over the usual script on {peer()}"
    found.add("G1", text, ratios(script, seconds), "x", ">= 3", ">= 5")
    found.details |= {"usual": script, "ours": seconds}
    against_raw(machine, ours, found, "at a step of milliseconds", "<= 1.02")


def g1_float8(machine: Machine, rate: float, found: Found) -> None:
    """G1d: the large step in float8 against bf16. Raises if the device has no float8."""
    refuse_float8("tensorwise", machine.device, "bf16", "single")
    shape, steps = machine.large(), 3 if machine.tiny else 10
    plain = timed(machine, lambda: Ours(shape, machine, Options()).step, steps)
    eight = timed(machine, lambda: Ours(shape, machine, Options(float8="tensorwise")).step, steps)
    found.add("G1", "float8 over bf16: speed", ratios(plain, eight), "x", ">= 1.12")
    found.details |= {"bf16": plain, "fp8": eight}


KERNELS = {
    "matrix products": ("nvjet", "gemm", "cutlass"),
    "attention": ("cudnn", "fmha", "flash"),
    "AdamW": ("FusedOptimizer", "adamw_one_pass"),
    "gradient norm": ("LpNorm",),
    "moving average": ("multi_tensor_apply",),
    "compiled elementwise kernels": ("triton_poi",),
    "compiled reductions": ("triton_red", "triton_per"),
}
"""Kinds of kernels, with substrings of their names. The first match counts."""


TRACED_STEPS = 2


def trace(machine: Machine, rate: float, found: Found) -> None:
    """Add rows of the time of G1's large step by kind of kernel, and of the gain by our compiler heuristics."""
    if machine.device.type != "cuda":
        found.absent["trace"] = "kernels are those of a GPU"
        return
    seconds, kernels = traced(machine)
    kinds = dict.fromkeys([*KERNELS, "other kernels"], 0.0)
    for name, milliseconds in kernels.items():
        kinds[kind_of(name)] += milliseconds
    for kind, milliseconds in kinds.items():
        found.add("G1", f"large step: {kind}", milliseconds, "ms")
    idle = 1e3 * sorted(seconds)[len(seconds) // 2] - sum(kinds.values())
    found.add("G1", "large step: the rest, no kernel runs", idle, "ms")
    found.details |= {"seconds": seconds, "kernels": longest(kernels)}
    machine.release()
    with torch_heuristics():
        theirs, their_kernels = traced(machine)
    found.add("G1", "large step with torch's own heuristics of the compiler, over ours", ratios(theirs, seconds))
    reductions = "compiled reductions"
    milliseconds = sum(ms for name, ms in their_kernels.items() if kind_of(name) == reductions)
    found.add("G1", f"large step with torch's own heuristics: {reductions}", milliseconds, "ms")
    found.details["with torch's own heuristics"] = {"seconds": theirs, "kernels": longest(their_kernels)}


def traced(machine: Machine) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of eight steps, and the milliseconds per step of each kernel in the steps after them."""
    ours = Ours(machine.large(), machine, Options())
    seconds = machine.seconds(ours.step, 8, warm_up=5)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(TRACED_STEPS):
            ours.step()
        machine.wait()
    kernels: dict[str, float] = {}
    for event in profile.events():
        # A "#" marks a range of the host's program, which the trace repeats for the device.
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name:
            kernels[event.name] = kernels.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / TRACED_STEPS
    return seconds, kernels


def longest(kernels: dict[str, float]) -> dict[str, float]:
    """Return the 40 kernels that take the most time, longest first, with names cut to 200 characters."""
    return {name[:200]: ms for name, ms in sorted(kernels.items(), key=lambda item: -item[1])[:40]}


@contextmanager
def torch_heuristics() -> Generator[None]:
    """Compile in the body with torch's defaults, without `accel_train.speed.inductor`."""
    import torch._inductor.config as settings
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    before = V.choices
    # torch's own defaults.
    own = {"realize_reads_threshold": 4, "realize_acc_reads_threshold": 8, "inductor_choices_class": None}
    with settings.patch(own), unittest.mock.patch("accel_train.speed.inductor.set_heuristics"):
        V.set_choices_handler(InductorChoices())
        try:
            yield
        finally:
            V.set_choices_handler(before)


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, a key of `KERNELS` or "other kernels"."""
    for kind, words in KERNELS.items():
        if any(word in kernel for word in words):
            return kind
    return "other kernels"


G4_TARGETS: dict[str, tuple[str | None, str]] = {"selective": ("<= 0.5", "<= 1.12"), "full": (None, "<= 1.28")}


def g4(machine: Machine, rate: float, found: Found) -> None:
    """Measure memory and time of each mode of activation checkpointing: forward and backward of the long shape.

    Activation memory is what the forward keeps for the backward, bf16 copies of the weights included. The peak of a
    step also includes gradients.
    """
    none = found.details["none"] = activations(machine, "none")
    machine.release()
    found.add("G4", "none: activation memory", none["kept"] / GIB, "GiB")
    for mode, (less, slower) in G4_TARGETS.items():
        this = found.details[mode] = activations(machine, mode)
        machine.release()
        found.add("G4", f"{mode}: activation memory over none", this["kept"] / none["kept"], "x", less)
        found.add("G4", f"{mode}: peak of a step, with gradients, over none", this["peak"] / none["peak"], "x")
        found.add("G4", f"{mode}: time over none", ratios(this["seconds"], none["seconds"]), "x", slower)


def activations(machine: Machine, mode: str) -> dict[str, Any]:
    """Return the seconds of each forward and backward in one mode, and its bytes kept and at the peak."""
    ours = Ours(machine.long(), machine, Options(checkpointing=mode))
    held, kept = machine.held_bytes(), [0]

    def step() -> Tensor:
        with autocast(machine):
            loss = loss_sum(ours.model, ours.batch)
        kept.append(machine.held_bytes() - held)
        loss.backward()
        ours.model.zero_grad(set_to_none=True)
        return loss

    seconds = machine.seconds(step, 2 if machine.tiny else 5, warm_up=2)
    return {"seconds": seconds, "kept": max(*kept, 1), "peak": max(machine.peak_bytes() - held, 1)}


def g6(machine: Machine, rate: float, found: Found) -> None:
    """Measure compile times in processes of their own with an empty cache; block by block also with a warm one."""
    shape = compiled_shape(machine)
    text = f"{shape.depth} blocks" + (f", a dry run with {machine.backend}" if machine.tiny else "")
    with tempfile.TemporaryDirectory() as cache:
        cold = found.details["cold"] = in_own_process("regional", cache, machine)
        found.add("G6", f"{text}, cold compile, block by block", cold["seconds"], "s", "<= 25")
        warm = found.details["warm"] = in_own_process("regional", cache, machine)
        found.add("G6", f"{text}, warm compile, block by block", warm["seconds"], "s", "<= 5")
    if machine.left < 120:
        raise TimeoutError(f"the whole model: {machine.left:.0f} s were left, it needs 120")
    with tempfile.TemporaryDirectory() as cache:
        whole = found.details["whole"] = in_own_process("full", cache, machine)
    times = whole["seconds"] / cold["seconds"]
    found.add("G6", f"{text}, cold compile of the whole model over blocks", times, "x", ">= 4")
    found.add("G6", f"{text}, step, block by block over the whole", cold["step"] / whole["step"], "x", "<= 1.02")


def compiled_shape(machine: Machine) -> Shape:
    """Return the large shape with two rows. Compile times do not depend on the number of rows."""
    return replace(machine.large(), batch=2)


def in_own_process(way: str, cache: str, machine: Machine) -> dict[str, Any]:
    """Run ``compile_once`` in a fresh process with ``cache`` as the compiler's cache directory; return its result."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--compile_once", way, "--directory", cache]
    command += ["--tiny"] if machine.tiny else []
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=1200)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return json.loads(done.stdout.splitlines()[-1])


def compile_once(way: str, machine: Machine) -> dict[str, Any]:
    """Return the seconds of the first forward and backward, which compile, and of later ones; and the graph count.

    Both variants use the attention and the compiler heuristics of our runs.
    """
    from torch._dynamo.utils import counters

    shape = compiled_shape(machine)
    with torch.device(machine.device):
        model = SD3(shape)
    speed_up(model, shape, machine, Options())
    if way == "full":
        for block in blocks_of(model):
            block._compiled_call_impl = None  # one graph for all of them instead
        model.compile(fullgraph=True, dynamic=False, backend=machine.backend)
    elif machine.tiny:
        apply_compile(model, CompileConfig("on"), machine.device, backend=machine.backend)
    batch = batch_of(shape, machine.device)

    def step() -> None:
        with autocast(machine):
            loss = loss_sum(model, batch)
        loss.backward()
        model.zero_grad(set_to_none=True)

    graphs, began = counters["stats"]["unique_graphs"], time.perf_counter()
    step()
    machine.wait()
    first = time.perf_counter() - began
    later = min(machine.seconds(step, 10))
    return {"seconds": first, "step": later, "graphs": counters["stats"]["unique_graphs"] - graphs}
