"""C6: compiling block by block against compiling the whole model: compile time, and speed of a step.

    python -m benchmarks.compile --output benchmarks/results/compile_cpu.json

An MMDiT of 6 blocks, forward and backward on one thread in fp32. Each variant compiles in a process of its own with an
empty cache (cold) and one compilation thread; the smallest size compiles again in a second process with the cache of
the first (warm). Compile time is the processor time of apply and first step, with that of the compilers they start,
which other processes disturb less than wall time. Steps are timed eager and compiled in turns in one process. The whole
model is compiled at the first size only. The last size also tries `compile.optimize max-autotune-no-cudagraphs`, and
`compile.dynamic` with three lengths of text per step against one compilation for each length.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.domains.models.mmdit import MMDiT, MMDiTConfig
from accel_train.speed.compile import CompiledBlocks, apply_compile
from accel_train.speed.options import CompileConfig
from benchmarks.method import ROOT, Row, in_turns, largest, parser_of, row, write_results

WAYS = {
    "regional": CompileConfig("on"),
    "autotune": CompileConfig("on", optimize="max-autotune-no-cudagraphs"),
    "dynamic": CompileConfig("on", dynamic=True),
    "full": None,
}
"""Options for compiling block by block, by variant. None: compile the whole model."""
TEXTS = (77, 61, 45)
"""Numbers of text tokens. Only the first is used where shapes do not vary."""
SIZES = {"15M": (256, ">= 1.03"), "2M": (96, ">= 1.15")}
"""Width, and target for the speed of a compiled step over eager, by name."""


def build(width: int, depth: int, texts: int = 1) -> tuple[MMDiT, Callable[[nn.Module], list[Tensor]]]:
    """Return a model with random weights, and a step with one forward for each of the first ``texts`` of `TEXTS`.

    A step returns the detached loss and the gradients of all parameters.
    """
    torch.manual_seed(0)
    model = MMDiT(MMDiTConfig(width, depth, heads=4))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=width**-0.5)
    image, text = (torch.randn(2, length, width, requires_grad=True) for length in (256, max(TEXTS)))
    conditioning, weights = torch.randn(2, width), [torch.randn_like(x) for x in (image, text)]

    def step(model: nn.Module) -> list[Tensor]:
        loss = torch.zeros(())
        for length in TEXTS[:texts]:
            outputs = model([image, text[:, :length].contiguous()], conditioning, None)
            loss = sum(((x * w[:, : x.shape[1]]).mean() for x, w in zip(outputs, weights, strict=True)), loss)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    return model, step


def processor_seconds() -> float:
    """Return user and system seconds of this process and of all children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def compile_once(way: str, width: int, depth: int, rounds: int, texts: int = 1) -> dict[str, Any]:
    """Compile in this process, then time steps against eager ones for ``rounds`` rounds (0: none). Once per process."""
    eager, step = build(width, depth, texts)
    model, _ = build(width, depth, texts)
    expected = step(eager)
    watch: CompiledBlocks | None = None
    wall, cpu = time.perf_counter(), processor_seconds()
    if (config := WAYS[way]) is not None:
        watch = apply_compile(model, config, torch.device("cpu"))
    else:
        model.compile(fullgraph=True, dynamic=False)
    results = step(model)
    result: dict[str, Any] = {
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": processor_seconds() - cpu,
        "loss_difference": float((results[0] - expected[0]).abs() / expected[0].abs()),
        "gradient_difference": largest(
            float((a - b).norm() / b.norm()) for a, b in zip(results[1:], expected[1:], strict=True)
        ),
    }
    if rounds:
        ways = {"eager": lambda: step(eager), "compiled": lambda: step(model)}
        result["step_speedups"] = in_turns(ways, rounds, warm_up=1).ratios("eager", "compiled")
    result["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    if watch is not None:
        result |= watch.fields()
    return result


def in_own_process(way: str, width: int, depth: int, rounds: int, cache: str, texts: int = 1) -> dict[str, Any]:
    """Run `compile_once` in a fresh process with ``cache`` as the compiler's cache directory; return its result."""
    flags = {"width": width, "depth": depth, "rounds": rounds, "texts": texts}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile", "--way", way, *words],
        capture_output=True, text=True, env=environment, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def cold(way: str, width: int, depth: int, rounds: int, warm: bool = False, texts: int = 1) -> list[dict[str, Any]]:
    """Compile with an empty cache and, if ``warm``, again with the cache that this left; return one or two results."""
    with tempfile.TemporaryDirectory() as cache:
        results = [in_own_process(way, width, depth, rounds, cache, texts)]
        return results + ([in_own_process(way, width, depth, 0, cache)] if warm else [])


def options_of(name: str, depth: int, rounds: int, usual: dict[str, Any]) -> tuple[list[Row], dict[str, Any]]:
    """Measure `compile.optimize` and `compile.dynamic` at one size; ``usual`` is the result with neither of them."""
    width, many = SIZES[name][0], len(TEXTS)
    (tuned,) = cold("autotune", width, depth, rounds)
    (each,), (dynamic,) = (cold(way, width, depth, rounds, texts=many) for way in ("regional", "dynamic"))
    chosen, varied = f"{name}, max-autotune-no-cudagraphs", f"{name}, {many} lengths"
    share, other = tuned["cpu_seconds"] / usual["cpu_seconds"], dynamic["cpu_seconds"] / each["cpu_seconds"]
    rows = [
        row("C6", f"{chosen}: speed of a step over eager", tuned["step_speedups"]),
        row("C6", f"{chosen}: cold compile over the default's", share),
        row("C6", f"{varied}: graphs with compile.dynamic", dynamic["compile_graphs"], "count", f"<= {many - 1}"),
        row("C6", f"{varied}: graphs without", each["compile_graphs"], "count"),
        row("C6", f"{varied}: cold compile with compile.dynamic over without", other),
        row("C6", f"{varied}: speed of a step over eager with compile.dynamic", dynamic["step_speedups"]),
        row("C6", f"{varied}: speed of a step over eager without", each["step_speedups"]),
    ]
    return rows, {"autotune": [tuned], "each length": [each], "dynamic": [dynamic]}


def measure(sizes: list[str], depth: int, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Measure every size block by block, the first also as a whole model, the last also at twice the depth."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for name in sizes:
        width, faster = SIZES[name]
        details[name] = cold("regional", width, depth, rounds, warm=name == sizes[-1])
        first = details[name][0]
        rows += [
            row("C6", f"{name}: speed of a step over eager", first["step_speedups"], target=faster),
            row("C6", f"{name}: cold compile, block by block", first["cpu_seconds"], "s"),
            row("C6", f"{name}: graphs for {depth} blocks", first["compile_graphs"], "count", "<= 1"),
            row("C6", f"{name}: graph breaks", first["graph_breaks"], "count", "<= 0"),
            row("C6", f"{name}: recompilations", first["compile_recompilations"], "count", "<= 0"),
            row("C6", f"{name}: relative difference of gradients", first["gradient_difference"], target="<= 1e-5"),
        ]
    again = details[sizes[-1]][1]
    rows.append(row("C6", f"{sizes[-1]}: warm compile, block by block", again["cpu_seconds"], "s"))
    width, _ = SIZES[sizes[0]]
    (whole,) = details["full"] = cold("full", width, depth, max(2, rounds // 3))
    share = details[sizes[0]][0]["cpu_seconds"] / whole["cpu_seconds"]
    rows.append(row("C6", f"{sizes[0]}: cold compile, block by block over the whole model", share, target="<= 0.7"))
    rows.append(row("C6", f"{sizes[0]}: speed of a step over eager, whole model", whole["step_speedups"]))
    width, _ = SIZES[sizes[-1]]
    (deep,) = details["twice the depth"] = cold("regional", width, 2 * depth, 0)
    flat = deep["cpu_seconds"] / details[sizes[-1]][0]["cpu_seconds"]
    rows.append(row("C6", f"{sizes[-1]}: cold compile, block by block, twice the depth over once", flat))
    option_rows, option_details = options_of(sizes[-1], depth, rounds, details[sizes[-1]][0])
    return rows + option_rows, details | option_details


def main() -> int:
    """Measure every size and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--way", choices=WAYS, help="compile once in this process and print JSON")
    parser.add_argument("--width", type=int, help="with --way")
    parser.add_argument("--texts", type=int, default=1, help="with --way: lengths of text in a step")
    options = parser.parse_args()
    if options.tiny:
        options.depth, options.sizes, options.rounds = 1, ["2M"], 2
    torch.set_num_threads(1)
    if options.way:
        print(json.dumps(compile_once(options.way, options.width, options.depth, options.rounds, options.texts)))
        return 0
    rows, details = measure(options.sizes, options.depth, options.rounds)
    return 0 if write_results(options.output, "C6: compiling", rows, details) else 1


if __name__ == "__main__":
    sys.exit(main())
