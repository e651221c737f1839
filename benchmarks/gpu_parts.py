"""G0, G5, G7 and G8: ceilings of the device, the optimizer, data wait, and optimizer state in host memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.speed.attention.selection import resolve_attention
from accel_train.speed.attention.table import AttentionNeeds, able, machine_of
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.health.evidence import Evidence
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard
from benchmarks.device import Machine
from benchmarks.gpu_contenders import Found, Options, Ours
from benchmarks.gpu_training import ratios
from benchmarks.method import Row, row
from benchmarks.sd3 import Shape

SD3_MEDIUM = 2_028_328_000
"""Parameters of diffusers' model."""
LATENT_BYTES, TEXT_BYTES = 131_072, 1_261_568
"""Bytes of a sample at SD3-medium's shape: 16 x 64 x 64 and 154 x 4096 values of 2 bytes."""


def g0(machine: Machine, rate: float, found: Found) -> None:
    """Measure the ceilings of the device (products, copies, attention), by which other rows are judged."""
    size = 128 if machine.tiny else 8192
    products = {f"{size} cubed": product_rate(machine, size, size, size)}
    shape = machine.large()
    length, h = shape.batch * (shape.image_tokens + shape.text_tokens), shape.width
    for columns, inner in ((h, h), (3 * h, h), (4 * h, h), (h, 4 * h)):
        products[f"{length} x {columns} x {inner}"] = product_rate(machine, length, columns, inner)
    found.details["products"] = products
    for name, value in products.items():
        found.add("G0", f"bf16 product {name}", value / 1e12, "TFLOP/s")
    found.rows += copies(machine)
    for name, kind in (("1024 + 154 tokens", machine.large()), ("4096 + 154 tokens", machine.long())):
        found.rows += attention_rates(machine, name, kind)


def product_rate(machine: Machine, m: int, n: int, k: int) -> float:
    """Return the FLOP/s of a bf16 product (m, k) x (k, n) of random numbers, by the median time."""
    a = torch.randn(m, k, device=machine.device, dtype=torch.bfloat16)
    b = torch.randn(k, n, device=machine.device, dtype=torch.bfloat16)
    seconds = machine.seconds(lambda: a @ b, 3 if machine.tiny else 20)
    return 2 * m * n * k / sorted(seconds)[len(seconds) // 2]


def copies(machine: Machine) -> list[Row]:
    """Return rows in GB/s of copies on the device, and between it and pageable and pinned host memory."""
    size = 1 << 16 if machine.tiny else 1 << 30
    device = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    other, host = torch.empty_like(device), torch.empty(size, dtype=torch.uint8)
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "copy on the device": (lambda: other.copy_(device), 2 * size),
        "pageable host memory to device": (lambda: device.copy_(host), size),
        "device to pageable host memory": (lambda: host.copy_(device), size),
    }
    if machine.device.type == "cuda":
        locked = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        ways["pinned host memory to device"] = (lambda: device.copy_(locked, non_blocking=True), size)
        ways["device to pinned host memory"] = (lambda: locked.copy_(device, non_blocking=True), size)
    rows = []
    for name, (work, moved) in ways.items():
        rows.append(row("G0", name, [moved / s / 1e9 for s in machine.seconds(work, 5)], "GB/s"))
    return rows


def attention_rates(machine: Machine, name: str, shape: Shape) -> list[Row]:
    """Return rows in TFLOP/s of forward and backward of every attention kernel that can run at ``shape``."""
    length = shape.image_tokens + shape.text_tokens
    needs = AttentionNeeds(
        machine.device, torch.bfloat16, shape.head_width, shape.heads, length, shape.batch, mask=False
    )
    size = (shape.batch, shape.heads, length, shape.head_width)
    q, k, v = (torch.randn(size, device=machine.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weight = torch.randn_like(q)
    work = 3.5 * 4 * shape.batch * shape.heads * length**2 * shape.head_width  # what the flash kernels execute
    rows: list[Row] = []
    for kernel in able(needs, machine_of(machine.device)):
        if kernel == "sdpa_math" and not machine.tiny:
            continue  # its scores alone would take tens of GB here
        try:
            attend, _ = resolve_attention(kernel, needs)
        except (RuntimeError, UsageError) as error:  # the table lists the kernel as able: report it and continue
            print(f"attention {kernel}: {error}", flush=True)
            continue

        def step(attend: Any = attend) -> object:
            return torch.autograd.grad(attend(q, k, v, None), (q, k, v), weight)

        rate = [work / s / 1e12 for s in machine.seconds(step, 3 if machine.tiny else 10)]
        rows.append(row("G0", f"attention {kernel}, {name}: forward and backward", rate, "TFLOP/s"))
    return rows


class Parameters(nn.Module):
    """Parameters with gradients and no forward: nearly as many values as SD3-medium, in the shapes of its blocks."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        width, count = (32, 2) if machine.tiny else (1536, SD3_MEDIUM // (36 * 1536**2))
        shapes = [(6 * width, width), (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * 2
        self.blocks = nn.ModuleList()
        for _ in range(count):
            block = nn.Module()
            for i, shape in enumerate(shapes):
                parameter = nn.Parameter(torch.randn(shape, device=machine.device) * 0.02)
                parameter.grad = torch.randn_like(parameter) * 1e-3
                block.register_parameter(f"w{i}", parameter)
            self.blocks.append(block)


def g5(machine: Machine, rate: float, found: Found) -> None:
    """Measure AdamW with norm, clip and EMA, and torch's own kernels of AdamW for comparison."""
    model = Parameters(machine)
    parameters = list(model.parameters())
    values = sum(p.numel() for p in parameters)
    repeats = 3 if machine.tiny else 10
    times: dict[str, list[float]] = {}
    for name, flags in {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **flags)
        times[name] = machine.seconds(optimizer.step, repeats, warm_up=2)
        del optimizer
        machine.release()
    optimizer, _ = build_optimizer(model, OptimizerConfig(fused=True), machine.device)
    guard, average = StepGuard(optimizer, machine.device), Ema(EmaConfig(0.999), Shards(model, optimizer))
    gradients, total = [p.grad for p in parameters], torch.ones(1, device=machine.device)
    numbers = count(1000)

    def whole() -> None:
        norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(gradients))))
        guard.watch(Evidence(0, ("loss",), total, None, (), ()), norm, 1e-3)
        number = next(numbers)
        average.announce(number)
        optimizer.step()
        average.update(number)

    times["norm, clip, step, average"] = machine.seconds(whole, repeats, warm_up=2)
    found.details |= times
    text = f"{values / 1e9:.2f} B values"
    milliseconds = [1e3 * s for s in times["norm, clip, step, average"]]
    target, goal = (f"<= {limit * values / SD3_MEDIUM:.3g}" for limit in (23, 21))
    found.add("G5", f"{text}: norm, clip, AdamW, average", milliseconds, "ms", target, goal)
    moved = bytes_a_value(optimizer)
    rates = [moved * values / s * 1e3 / 1e9 for s in milliseconds]
    found.add("G5", f"{text}: traffic of {moved} bytes a value", rates, "GB/s")
    for name in ("for-loop", "foreach"):
        found.add("G5", f"{text}: speed of fused AdamW over {name}", ratios(times[name], times["fused"]))


def bytes_a_value(optimizer: Any) -> int:
    """Return the bytes that norm, step and EMA move per value: 4 for the norm, and 36 in one kernel or 44 in two."""
    return 40 if getattr(optimizer, "one_pass", False) else 48


class OnDisk:
    """Random samples in one memory-mapped file. ``sizes``: bytes of latent and of text features per sample."""

    def __init__(self, path: Path, count: int, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        values = np.random.default_rng(0).integers(0, 255, (count, sum(sizes)), dtype=np.uint8)
        values.tofile(path)
        self.table = np.memmap(path, dtype=np.uint8, mode="r", shape=values.shape)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        whole = torch.from_numpy(np.array(self.table[index]))
        latent, text = whole.split(self.sizes)
        return {"latent": latent, "text": text}


def g7(machine: Machine, rate: float, found: Found) -> None:
    """Measure how long a loop of about 90 samples per second waits for data from a file in the page cache."""
    batch, count, steps = (2, 8, 4) if machine.tiny else (32, 1024, 40)
    sizes = (64, 128) if machine.tiny else (LATENT_BYTES, TEXT_BYTES)
    size = 64 if machine.tiny else 8192
    a = torch.randn(size, size, device=machine.device, dtype=torch.bfloat16)
    products = 1 if machine.tiny else max(1, round(rate * batch / 90 / (2 * size**3)))
    with tempfile.TemporaryDirectory() as folder:
        dataset = OnDisk(Path(folder) / "samples", count, sizes)
        arguments: Any = {"start_step": 0, "max_steps": steps, "device": machine.device, "config": LoaderConfig()}
        batches = iterate_steps(dataset, StepSampler(count, batch, 0), BatchShard(0, 1, batch), **arguments)
        waited, seconds = wait_of(machine, batches, a, products)
    found.add("G7", f"data wait as a share of a step, {batch / seconds:.0f} samples a second", waited, "x", "<= 0.003")
    found.details |= {"step_seconds": seconds, "products_per_step": products}


def wait_of(machine: Machine, batches: Generator[Any], a: Tensor, products: int) -> tuple[list[float], float]:
    """Return the share of data wait of each step, and the median seconds of a step. Drops the first quarter."""
    shares: list[float] = []
    taken: list[float] = []
    with closing(batches):
        began = time.perf_counter()
        for step in batches:
            for _ in range(products):
                a @ a
            machine.wait()
            now = time.perf_counter()
            shares.append(step.data_wait_seconds / (now - began))
            taken.append(now - began)
            began = now
    skip = len(shares) // 4
    return shares[skip:], sorted(taken[skip:])[len(taken[skip:]) // 2]


def g8(machine: Machine, rate: float, found: Found) -> None:
    """Measure AdamW's state in host memory: device memory saved and time lost, at accumulation 1 and 8."""
    shape, steps = machine.large(), 2 if machine.tiny else 3
    where = "" if machine.device.type == "cuda" else ", a dry run of HostAdamW on CPU tensors"
    for pieces, target in ((1, "<= 1.2"), (8, "<= 1.05")):
        here, there = (state_on(machine, found, name, pieces, shape, steps) for name in ("adamw", "adamw_offload"))
        slower = ratios(there["seconds"], here["seconds"])
        text = f"time over state on the device, {shape.batch} rows, accumulation {pieces}{where}"
        found.add("G8", text, slower, "x", target)
        if pieces > 1:
            continue
        if machine.device.type == "cuda":
            found.add("G8", "memory of the device saved", (here["bytes"] - there["bytes"]) / 1e9, "GB", ">= 16.2")
        else:
            found.absent["G8, memory of the device"] = "a CPU has none to save"


def state_on(machine: Machine, found: Found, name: str, pieces: int, shape: Shape, steps: int) -> dict[str, Any]:
    """Return seconds of each step and peak bytes with one optimizer. Raises TimeoutError with under 60 s left."""
    if machine.left < 60:
        raise TimeoutError(f"{name} at accumulation {pieces}: {machine.left:.0f} s were left, it needs 60")
    ours = Ours(shape, machine, Options("off", optimizer=name, micro_batches=pieces))
    seconds = machine.seconds(ours.step, steps, warm_up=1)
    measured = {"seconds": seconds, "bytes": machine.peak_bytes(), "optimizer": type(ours.inner).__name__}
    found.details[f"{name} {pieces}"] = measured
    del ours
    machine.release()
    return measured
