"""C6: compiling block by block against compiling the whole model: time to compile, and what a step gains.

    python benchmarks/compile.py --output benchmarks/results/compile.json

An MMDiT of 6 blocks, forward and backward on one thread in fp32. Each way compiles in a process of its own with an
empty cache (cold) and again in a second one (warm); one compilation thread. `cpu_seconds` is the processor time of the
first step with that of the compilers it starts: less disturbed by other processes than `wall_seconds`. The step: eager
and compiled in turns in one process, time of the thread, median of the ratios with its interval.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.metrics.bootstrap import estimate
from accel_train.metrics.environment import command_line, cpu_name, git_commit, package_versions
from accel_train.metrics.records import write_json
from accel_train.models.compile import CompileConfig, CompiledBlocks, apply_compile
from accel_train.models.mmdit import MMDiT, MMDiTConfig

WAYS = ("regional", "full")
SIZES = {"15M": 256, "2M": 96}


def build(width: int, depth: int) -> tuple[MMDiT, Callable[[nn.Module], list[Tensor]]]:
    """A model away from its start, and a step of it."""
    torch.manual_seed(0)
    model = MMDiT(MMDiTConfig(width, depth, heads=4))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=width**-0.5)
    tokens = [torch.randn(2, length, width, requires_grad=True) for length in (256, 77)]
    conditioning, weights = torch.randn(2, width), [torch.randn_like(x) for x in tokens]

    def step(model: nn.Module) -> list[Tensor]:
        outputs = zip(model(tokens, conditioning, None), weights, strict=True)
        loss = sum(((x * weight).mean() for x, weight in outputs), torch.zeros(()))
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    return model, step


def processor_seconds() -> float:
    """Of this process and of all it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def compile_once(way: str, width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Compile in this process, then time steps against eager ones. For a process of its own."""
    eager, step = build(width, depth)
    model, _ = build(width, depth)
    expected = step(eager)
    watch: CompiledBlocks | None = None
    wall, cpu = time.perf_counter(), processor_seconds()
    if way == "regional":
        watch = apply_compile(model, CompileConfig("on"), torch.device("cpu"))
    else:
        model.compile(fullgraph=True, dynamic=False)
    found = step(model)
    result: dict[str, Any] = {
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": processor_seconds() - cpu,
        "loss_difference": float((found[0] - expected[0]).abs() / expected[0].abs()),
        "gradient_difference": max(
            float((a - b).norm() / b.norm()) for a, b in zip(found[1:], expected[1:], strict=True)
        ),
    }
    if rounds:
        ratio = estimate([seconds_of(lambda: step(eager)) / seconds_of(lambda: step(model)) for _ in range(rounds)])
        result |= {"step_speedup": ratio.median, "step_interval": [ratio.low, ratio.high]}
    if watch is not None:
        result |= watch.fields()
    return result


def seconds_of(step: Callable[[], object]) -> float:
    """Time of this thread for three steps."""
    started = time.thread_time()
    for _ in range(3):
        step()
    return time.thread_time() - started


def in_own_process(way: str, width: int, depth: int, rounds: int, cache: str) -> dict[str, Any]:
    """`compile_once` with this directory as the compiler's cache."""
    numbers = ["--width", str(width), "--depth", str(depth), "--rounds", str(rounds)]
    given = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--way", way, *numbers], capture_output=True, text=True, env=given, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def measure(width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Both ways, cold and warm."""
    result: dict[str, Any] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as cache:
            cold = in_own_process(way, width, depth, rounds, cache)
            warm = in_own_process(way, width, depth, 0, cache)
        result[way] = {"cold": cold, "warm": warm}
        print(f"  {way:8} {describe(cold)}; warm {warm['cpu_seconds']:.1f} s", flush=True)
    for clock in ("cpu_seconds", "wall_seconds"):
        result[f"cold_regional_over_full_{clock}"] = result["regional"]["cold"][clock] / result["full"]["cold"][clock]
    return result


def describe(cold: dict[str, Any]) -> str:
    """One line of a result."""
    low, high = cold["step_interval"]
    graphs = ""
    if "compile_graphs" in cold:
        graphs = f", {cold['compile_graphs']} graph, {cold['compile_recompilations']} recompilations"
    return (
        f"cold {cold['cpu_seconds']:.1f} s of processor time ({cold['wall_seconds']:.1f} s), "
        f"step {cold['step_speedup']:.3f} ({low:.3f} to {high:.3f}) x eager, gradients within "
        f"{cold['gradient_difference']:.0e}{graphs}"
    )


def main() -> None:
    """Measure every size, and whether regional compilation is flat in depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--way", choices=WAYS, help="compile once in this process and print JSON")
    parser.add_argument("--width", type=int, help="with --way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way:
        print(json.dumps(compile_once(options.way, options.width, options.depth, options.rounds)))
        return
    rows: dict[str, Any] = {}
    for name in options.sizes:
        print(name)
        rows[name] = measure(SIZES[name], options.depth, options.rounds)
        ratios = [rows[name][f"cold_regional_over_full_{clock}"] for clock in ("cpu_seconds", "wall_seconds")]
        print(f"  cold, regional over full: {ratios[0]:.2f} of processor time, {ratios[1]:.2f} of wall time")
    width = SIZES[options.sizes[-1]]
    depths = (2, options.depth, 2 * options.depth)
    flat: list[float] = []
    for depth in depths:
        with tempfile.TemporaryDirectory() as cache:
            flat.append(in_own_process("regional", width, depth, 0, cache)["cpu_seconds"])
    print(f"regional, {' / '.join(map(str, depths))} blocks: {' / '.join(f'{s:.1f}' for s in flat)} s")
    rows["regional_cold_cpu_seconds_by_depth"] = dict(zip(map(str, depths), flat, strict=True))
    rows["flatness"] = statistics.fmean(flat[1:]) / flat[0]
    if options.output:
        facts = {"processor": cpu_name(), "versions": package_versions(), "command": command_line(sys.argv)}
        write_json(options.output, facts | {"git_commit": git_commit(Path(__file__).parent), "rows": rows})


if __name__ == "__main__":
    main()
