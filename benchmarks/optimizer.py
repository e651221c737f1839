"""C3: fused AdamW against torch's for-loop, and the cost of a whole step: norm, clip, step, EMA.

    python -m benchmarks.optimizer --output benchmarks/results/optimizer_cpu.json

All ways run in turns on one thread. A whole step is that of this package: norm, clip in the fused kernel, step, EMA.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import nn

from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.health.evidence import Evidence
from accel_train.training.optimizer_classes.offload import HostAdamW
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard
from benchmarks.method import Row, in_turns, parser_of, row, write_results

CPU = torch.device("cpu")
WORKLOADS = {"74M values in 80 tensors": ([962, 962], 80), "1.25M values in 600 tensors": ([2083], 600)}
STEP = 28
"""Bytes per value of fused AdamW: weight, two moments, each read and written, and the gradient read."""
WHOLE = STEP + 4 + 12
"""Bytes per value of a whole step: plus 4 to read the gradient for its norm, and 12 to update the EMA."""
TINY = {"2K values in 2 tensors": ([32, 32], 2)}


class Tensors(nn.Module):
    """``count`` parameters of one shape, with gradients and no forward."""

    def __init__(self, shape: list[int], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))
        for block in self.blocks:
            block.weight = nn.Parameter(torch.randn(shape))
            block.weight.grad = torch.randn(shape) * 1e-3
            block.bias = None


def ways_of(shape: list[int], count: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time: steps of AdamW, the EMA, and whole steps as this package takes them."""
    torch.manual_seed(0)
    model, other = Tensors(shape, count), Tensors(shape, count)
    fused, _ = build_optimizer(model, OptimizerConfig(fused=True), CPU)
    loop = torch.optim.AdamW(other.parameters(), lr=1e-4, foreach=False, fused=False)
    foreach = torch.optim.AdamW(Tensors(shape, count).parameters(), lr=1e-4, foreach=True)
    for p in (p for group in foreach.param_groups for p in group["params"]):
        p.grad = torch.randn(shape) * 1e-3
    flat, _ = build_optimizer(Tensors([prod(shape) * count], 1), OptimizerConfig(fused=True), CPU)
    average = Ema(EmaConfig(0.999), Shards(model, fused))
    gradients = [p.grad for p in model.parameters()]

    guarded, held = Tensors(shape, count), [torch.ones(1)]
    clipping, _ = build_optimizer(guarded, OptimizerConfig(fused=True), CPU)
    guard, smoothed = StepGuard(clipping, CPU), Ema(EmaConfig(0.999), Shards(guarded, clipping))

    def norm(of: list[torch.Tensor | None] = gradients) -> torch.Tensor:  # GradientWindow.finish
        return torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(of))))

    def clip(value: torch.Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), float(value) * (1 - 1e-6), value)

    def within() -> None:
        norm()
        fused.step()
        average.update(1000)

    def clipped() -> None:
        clip(norm())
        fused.step()
        average.update(1000)

    def in_kernel() -> None:
        value = norm([p.grad for p in guarded.parameters()])
        guard.watch(Evidence(0, ("loss",), held[0], None, (), ()), value, float(value) * (1 - 1e-6))
        clipping.step()
        smoothed.update(1000)

    return {
        "fused": fused.step,
        "loop": loop.step,
        "foreach": foreach.step,
        "one tensor": flat.step,
        "average": lambda: average.update(1000),
        "norm, step, average": within,
        "norm, clip, step, average": clipped,
        "norm, step that clips, average": in_kernel,
    }


def measure(name: str, shape: list[int], count: int, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Measure one workload: ``count`` parameters of this shape; return rows and details."""
    times = in_turns(ways_of(shape, count), rounds, clock=clock())
    values = prod(shape) * count
    rows = [
        row("C3", f"{name}: fused AdamW, {STEP} bytes a value", STEP * values / times.median("fused") / 1e9, "GB/s"),
        row("C3", f"{name}: speed of fused AdamW over the for-loop", times.ratios("loop", "fused"), target=">= 4.5"),
        row("C3", f"{name}: speed of fused AdamW over foreach", times.ratios("foreach", "fused")),
    ]
    bound = f"{name}: for-loop over fused AdamW of as many values in one tensor: the bound of joining them"
    rows.append(row("C3", bound, times.ratios("loop", "one tensor")))
    rows.append(row("C3", f"{name}: {WHOLE} bytes of norm, step and average over those of the step", WHOLE / STEP))
    texts = {
        "norm, step, average": "norm, step, average over the step alone",
        "norm, step that clips, average": "norm, clip in the step, average over the step alone",
        "norm, clip, step, average": "the same with a clip of its own",
    }
    for way, text in texts.items():
        target = None if way == "norm, clip, step, average" else "<= 1.6"
        rows.append(row("C3", f"{name}: {text}", times.ratios(way, "fused"), target=target))
    return rows, times.summary()


def clock() -> Callable[[], float]:
    """Return thread time with one thread, which other programs hardly affect, and wall time otherwise."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def others(rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Time the other optimizers over fused AdamW on 4 matrices of 512 x 512; return rows and absent optimizers.

    At most 5 rounds, because Muon is slow.
    """
    ways: dict[str, Callable[[], object]] = {}
    configs: dict[str, dict[str, Any]] = {
        "adamw": {},
        "muon in fp32": {"name": "muon"},
        "muon in bf16": {"name": "muon", "muon_precision": "bf16"},
    }
    absent: dict[str, str] = {}
    if find_spec("bitsandbytes"):
        configs["adamw8bit"] = {"name": "adamw8bit"}
    else:
        absent["adamw8bit"] = 'bitsandbytes is not installed; pip install -e ".[bitsandbytes]"'
    for name, options in configs.items():
        model = Tensors([512, 512], 4)
        ways[name] = build_optimizer(model, OptimizerConfig(**options), CPU)[0].step
    groups = [{"params": list(Tensors([512, 512], 4).parameters()), "lr": 1e-4}]
    for p in groups[0]["params"]:
        p.grad = torch.randn(512, 512) * 1e-3
    ways["adamw_offload (on CPU tensors: its copies alone)"] = HostAdamW(groups, betas=(0.9, 0.95), eps=1e-8).step
    times = in_turns(ways, min(rounds, 5), clock=clock())
    rows = [
        row("C3", f"4 matrices of 512 x 512: {n} over AdamW", times.ratios(n, "adamw")) for n in ways if n != "adamw"
    ]
    return rows, absent


def main() -> int:
    """Measure every workload and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=10)
    parser.add_argument(
        "--threads", type=int, default=1, help="number of threads; wall time is measured with more than one"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.tiny:
        options.rounds = 2
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for name, (shape, count) in (TINY if options.tiny else WORKLOADS).items():
        more_rows, details[name] = measure(name, shape, count, options.rounds)
        rows += more_rows
    more_rows, absent = others(options.rounds)
    return 0 if write_results(options.output, "C3: optimizers", rows + more_rows, details, absent) else 1


if __name__ == "__main__":
    sys.exit(main())
