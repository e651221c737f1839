"""Row C3: fused AdamW against torch's for-loop, and what a whole step costs: norm, clip, step, moving average.

    python benchmarks/optimizer.py [--threads 1] [--rounds 12] [--json results.json]

Thread time with one thread (other programs hardly move it), rounds interleaved, medians of the ratio in each round
with a bootstrap 95 % interval. A gate fails only if its interval lies outside the target.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.offload import HostAdamW
from accel_train.training.optimizers import OptimizerConfig, build_optimizer
from accel_train.training.shards import Shards

CPU = torch.device("cpu")
WORKLOADS = {"74M values in 80 tensors": ([962, 962], 80), "1.25M values in 600 tensors": ([2083], 600)}
FUSED_TARGET, WHOLE_TARGET = 4.5, 1.6


class Tensors(nn.Module):
    """Parameters with gradients, and nothing to compute."""

    def __init__(self, shape: list[int], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))
        for block in self.blocks:
            block.weight = nn.Parameter(torch.randn(shape))
            block.weight.grad = torch.randn(shape) * 1e-3
            block.bias = None


def thread_seconds(work: Callable[[], object], probe: Callable[[], float]) -> float:
    start = probe()
    work()
    return probe() - start


def interleave(ways: dict[str, Callable[[], object]], rounds: int, probe: Callable[[], float]) -> dict[str, np.ndarray]:
    """Seconds of each way in each round, after two rounds of warm-up."""
    times = [[thread_seconds(work, probe) for work in ways.values()] for _ in range(rounds + 2)][2:]
    return dict(zip(ways, np.array(times).T, strict=True))


def ratio(over: np.ndarray, under: np.ndarray) -> dict[str, Any]:
    """Median of the ratio in each round, its bootstrap interval, and the ratio of the fastest rounds."""
    each = over / under
    picks = np.random.default_rng(0).integers(0, len(each), (2000, len(each)))
    low, high = np.percentile(np.median(each[picks], axis=1), [2.5, 97.5])
    fastest = float(over.min() / under.min())
    return {"median": float(np.median(each)), "interval": [float(low), float(high)], "fastest": fastest}


def ways_of(shape: list[int], count: int) -> dict[str, Callable[[], object]]:
    """The fused step, the for-loop, and the parts of a whole step as the library does them."""
    torch.manual_seed(0)
    model, other = Tensors(shape, count), Tensors(shape, count)
    fused, _ = build_optimizer(model, OptimizerConfig(fused=True), CPU)
    loop = torch.optim.AdamW(other.parameters(), lr=1e-4, foreach=False, fused=False)
    foreach = torch.optim.AdamW(Tensors(shape, count).parameters(), lr=1e-4, foreach=True)
    for p in (p for group in foreach.param_groups for p in group["params"]):
        p.grad = torch.randn(shape) * 1e-3
    average = Ema(EmaConfig(0.999), Shards(model, fused))
    gradients = [p.grad for p in model.parameters()]

    def norm() -> torch.Tensor:  # GradientWindow.finish
        return torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(gradients))))

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

    return {
        "fused": fused.step,
        "loop": loop.step,
        "foreach": foreach.step,
        "norm": norm,
        "clip": lambda: clip(torch.tensor(1.0)),
        "average": lambda: average.update(1000),
        "norm, step, average": within,
        "norm, clip, step, average": clipped,
    }


def measure(name: str, rounds: int, probe: Callable[[], float]) -> dict[str, Any]:
    shape, count = WORKLOADS[name]
    times = interleave(ways_of(shape, count), rounds, probe)
    values = int(np.prod(shape)) * count
    fused = times["fused"]
    return {
        "workload": name,
        "milliseconds": {way: float(np.median(t)) * 1e3 for way, t in times.items()},
        "fused_gb_per_second": 28 * values / float(np.median(fused)) / 1e9,
        "loop_over_fused": ratio(times["loop"], fused),
        "foreach_over_fused": ratio(times["foreach"], fused),
        "within_limit_over_fused": ratio(times["norm, step, average"], fused),
        "clipped_over_fused": ratio(times["norm, clip, step, average"], fused),
    }


def others(rounds: int, probe: Callable[[], float]) -> dict[str, Any]:
    """The other optimizers on 4 matrices of 512 x 512, as multiples of fused AdamW. 5 rounds at most: Muon is long."""
    ways: dict[str, Callable[[], object]] = {}
    configs = {
        "adamw": {},
        "muon in fp32": {"name": "muon"},
        "muon in bf16": {"name": "muon", "muon_precision": "bf16"},
    }
    if find_spec("bitsandbytes"):
        configs["adamw8bit"] = {"name": "adamw8bit"}
    for name, options in configs.items():
        model = Tensors([512, 512], 4)
        ways[name] = build_optimizer(model, OptimizerConfig(**options), CPU)[0].step
    groups = [{"params": list(Tensors([512, 512], 4).parameters()), "lr": 1e-4}]
    for p in groups[0]["params"]:
        p.grad = torch.randn(512, 512) * 1e-3
    ways["adamw_offload (on CPU tensors: its copies alone)"] = HostAdamW(groups, betas=(0.9, 0.95), eps=1e-8).step
    times = interleave(ways, min(rounds, 5), probe)
    return {way: ratio(t, times["adamw"]) for way, t in times.items() if way != "adamw"}


def gates(rows: list[dict[str, Any]]) -> list[str]:
    """Targets that the intervals exclude."""
    missed: list[str] = []
    for row in rows:
        if row["loop_over_fused"]["interval"][1] < FUSED_TARGET:
            missed.append(f"{row['workload']}: fused is less than {FUSED_TARGET} x the for-loop")
        for name, label in (("within_limit_over_fused", "within the limit"), ("clipped_over_fused", "clipped")):
            if row[name]["interval"][0] > WHOLE_TARGET:
                missed.append(f"{row['workload']}: a whole step, {label}, is more than {WHOLE_TARGET} x the fused step")
    return missed


def show(value: dict[str, Any]) -> str:
    low, high = value["interval"]
    return f"{value['median']:.2f} ({low:.2f} to {high:.2f}), fastest rounds {value['fastest']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="more than one is measured by the clock on the wall")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    probe = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.threads} thread(s)")
    rows = [measure(name, options.rounds, probe) for name in WORKLOADS]
    for row in rows:
        print(f"{row['workload']}: fused {row['milliseconds']['fused']:.2f} ms, {row['fused_gb_per_second']:.0f} GB/s")
        for key in ("loop_over_fused", "foreach_over_fused", "within_limit_over_fused", "clipped_over_fused"):
            print(f"  {key.replace('_', ' ')}: {show(row[key])}")
        print("  " + ", ".join(f"{way} {ms:.2f} ms" for way, ms in row["milliseconds"].items()))
    multiples = others(options.rounds, probe)
    print("4 matrices of 512 x 512, as multiples of fused AdamW:")
    for way, value in multiples.items():
        print(f"  {way}: {show(value)}")
    missed = gates(rows)
    print("\n".join(f"MISSED {line}" for line in missed) or "every target is met or within its interval")
    if options.json:
        result = {
            "command": " ".join(sys.argv),
            "machine": platform.platform(),
            "torch": torch.__version__,
            "threads": options.threads,
            "rounds": options.rounds,
            "rows": rows,
            "others": multiples,
            "missed": missed,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
