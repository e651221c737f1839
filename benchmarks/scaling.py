"""Scaling of a step: collectives, bytes and efficiency with 1, 2 and 4 processes, and on two hosts.

    python -m benchmarks.scaling --output benchmarks/results/scaling_cpu.json

All layouts run once per round, in turns. Efficiency is the median over the rounds, from the median step of each. All
layouts run the same optimizer step: 8 rows of 64 + 32 tokens through an MMDiT of 7 blocks of width 192, AdamW. Several
processes are a rehearsal of the launch file: gloo, one thread per process. Collectives and bytes are per process, from
the profiler's gloo events in one step; FSDP2's reduce-scatter is an all-reduce there. Efficiency by wall time is the
time on one process over the number of processes times the time here, so it cannot be good with more processes than
cores. Efficiency of work is the processor time on one process over that of all processes here. Two hosts are two
network namespaces of this machine, which need root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.metrics.bootstrap import estimate
from benchmarks.method import ROOT, Row, largest, largest_difference, parser_of, row, write_results

CONFIGS = ROOT / "accelerate_configs"
GLOBAL_BATCH, MICRO_BATCH = 8, 2
ADDRESSES = ("10.231.78.1", "10.231.78.2")


@dataclass(frozen=True)
class Layout:
    """Strategy and number of processes and hosts of a step."""

    strategy: str
    processes: int
    hosts: int = 1


LAYOUTS = (
    Layout("single", 1),
    Layout("ddp", 2),
    Layout("ddp", 4),
    Layout("fsdp2", 2),
    Layout("fsdp2", 4),
    Layout("ddp", 2, hosts=2),
)


class Model(nn.Module):
    """An MMDiT whose forward returns the sum of the squared outputs over ``rows``, (B, 1, width)."""

    _no_split_modules = ("MMDiTBlock",)

    def __init__(self, width: int, depth: int) -> None:
        from accel_train.domains.models.mmdit import MMDiT, MMDiTConfig

        super().__init__()
        torch.manual_seed(0)
        self.transformer = MMDiT(MMDiTConfig(width, depth, heads=4))
        self.width = width

    def forward(self, rows: Tensor) -> Tensor:
        tokens = [rows.expand(-1, length, -1) for length in (64, 32)]
        outputs = self.transformer(tokens, rows[:, 0], None)
        return sum((x.float().square().sum() for x in outputs), torch.zeros(()))


def work(width: int, depth: int, steps: int) -> dict[str, Any]:
    """Measure steps on this process of a layout. Collective: every process runs it and returns its own results."""
    from accel_train.runtime.accelerator import build_accelerator
    from accel_train.training.accumulation import GradientWindow

    torch.set_num_threads(1)
    accelerator = build_accelerator(
        precision="fp32", global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, max_grad_norm=1.0
    )
    plain = Model(width, depth)
    parameters = sum(p.numel() for p in plain.parameters())
    optimizer: Any
    model: Any
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    share = torch.randn(GLOBAL_BATCH, 1, width).tensor_split(accelerator.num_processes)[accelerator.process_index]
    count = torch.tensor(float(MICRO_BATCH))

    def step() -> float:
        batches = [({"x": rows}, {"main": count}) for rows in share.split(MICRO_BATCH)]
        window = GradientWindow(accelerator, model, batches, {"main": 1.0}, 0)
        for inputs in window:
            window.backward({"main": model(inputs["x"])})
        result = window.finish(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(result.loss)

    losses = [step(), step()]
    wall, used = [], []
    for _ in range(steps):
        accelerator.wait_for_everyone()
        began, spent = time.perf_counter(), time.process_time()
        losses.append(step())
        wall.append(time.perf_counter() - began)
        used.append(time.process_time() - spent)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    exchanged = [4 * elements(event.input_shapes) for event in profile.events() if event.name.startswith("gloo:")]
    total = torch.tensor(statistics.median(used))
    summed: Any = accelerator.reduce(total, "sum")
    return {
        "parameters": parameters,
        "collectives": len([size for size in exchanged if size > 0]),
        "bytes": sum(exchanged),
        "seconds": statistics.median(wall),
        "processor_seconds": float(summed),
        "losses": losses,
        "rank": accelerator.process_index,
    }


def elements(shapes: Any) -> int:
    """Return the number of elements of a shape, or the sum over a nested list of shapes."""
    if not shapes:
        return 0
    if isinstance(shapes[0], (list, tuple)):
        return sum(elements(shape) for shape in shapes)
    return int(torch.Size(shapes).numel())


def command(layout: Layout, folder: Path, worker: list[str], host: int = 0) -> list[str]:
    """Return the command of a host: plain Python for strategy single, else a rehearsal of the launch file."""
    if layout.strategy == "single":
        return [sys.executable, str(Path(__file__)), "--worker", *worker]
    file = folder / f"{layout.strategy}{layout.hosts}.yaml"
    if layout.hosts == 1:
        file.write_text((CONFIGS / f"{layout.strategy}.yaml").read_text())
    else:
        text = (CONFIGS / "multi_node.yaml").read_text()
        file.write_text(text.replace("num_processes: 16", f"num_processes: {layout.processes}"))
    words = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(file)]
    if layout.hosts == 1:
        words += ["--num_processes", str(layout.processes)]
    else:
        words += ["--machine_rank", str(host), "--main_process_ip", ADDRESSES[0]]
    return [*words, str(Path(__file__)), "--worker", *worker]


@contextmanager
def namespaces() -> Iterator[list[tuple[str, str]]]:
    """Yield the name and interface of two network namespaces joined by a veth pair. They are deleted on exit."""
    tag = uuid.uuid4().hex[:6]
    hosts = [(f"bench-{tag}-{side}", f"v{side}{tag}") for side in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name, _ in hosts:
            ip("netns", "add", name)
        (a, one), (b, two) = hosts
        ip("link", "add", one, "netns", a, "type", "veth", "peer", "name", two, "netns", b)
        for (name, device), address in zip(hosts, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name, _ in hosts:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run(layout: Layout, folder: Path, worker: list[str]) -> dict[str, Any]:
    """Run one layout in new processes; return the result of rank 0. Raises RuntimeError if there is none."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    if layout.hosts == 1:
        processes = [start(command(layout, folder, worker), environment)]
        texts = [process.communicate()[0] for process in processes]
    else:
        with namespaces() as hosts:
            processes = [
                start(
                    ["ip", "netns", "exec", name, *command(layout, folder, worker, host)],
                    environment | {"GLOO_SOCKET_IFNAME": device},
                )
                for host, (name, device) in enumerate(hosts)
            ]
            texts = [process.communicate()[0] for process in processes]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{layout}: {texts[0][-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def measure(
    layouts: tuple[Layout, ...], worker: list[str], rounds: int
) -> tuple[list[Row], dict[str, Any], dict[str, str]]:
    """Run every layout once per round, in turns, and compare their losses; return rows, details and absences."""
    absent: dict[str, str] = {}
    kept = list(layouts)
    if shutil.which("ip") is None or os.geteuid() != 0:
        kept = [layout for layout in layouts if layout.hosts == 1]
    if len(kept) < len(layouts):
        absent["two hosts"] = "needs root and iproute2"
    found: dict[Layout, list[dict[str, Any]]] = {layout: [] for layout in kept}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for layout in kept:
                found[layout].append(run(layout, Path(folder), worker))
    alone = found[kept[0]]
    described = [describe(layout, runs, alone) for layout, runs in found.items()]
    apart = largest(largest_difference(f["losses"], alone[0]["losses"]) for runs in found.values() for f in runs)
    rows = [row("scaling", "largest relative difference of a loss to one process", apart, target="<= 1e-5")]
    return rows, {"layouts": described, "cores": os.cpu_count(), "rounds": rounds}, absent


def describe(layout: Layout, runs: list[dict[str, Any]], alone: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a layout with the results of its last run, and median and interval of its efficiencies over the rounds."""
    pairs = list(zip(alone, runs, strict=True))
    found = asdict(layout) | runs[-1]
    for name, ratios in {
        "efficiency": [a["seconds"] / (layout.processes * b["seconds"]) for a, b in pairs],
        "efficiency_of_work": [a["processor_seconds"] / b["processor_seconds"] for a, b in pairs],
    }.items():
        estimated = estimate(ratios)
        found |= {name: estimated.median, f"{name}_interval": (estimated.low, estimated.high)}
    return found


def main() -> int:
    """Run every layout and write the rows, or be a process of one. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=5, help="steps of each layout in a round")
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    options = parser.parse_args()
    if options.worker:
        width, depth = (32, 1) if options.tiny else (192, 7)
        found = work(width, depth, options.steps)
        if found["rank"] == 0:
            print(f"RESULT {json.dumps(found)}", flush=True)
        sys.stdout.flush()
        os._exit(0)  # gloo's threads race with the end of the interpreter
    steps, rounds = (2, 1) if options.tiny else (options.steps, options.rounds)
    worker = ["--steps", str(steps), *(["--tiny"] if options.tiny else [])]
    layouts = (Layout("single", 1), Layout("ddp", 2), Layout("fsdp2", 2)) if options.tiny else LAYOUTS
    rows, details, absent = measure(layouts, worker, rounds)
    for f in details["layouts"]:
        where = f"{f['processes']} processes" + (f" on {f['hosts']} hosts" if f["hosts"] > 1 else "")
        print(
            f"{f['strategy']:6} {where:22} {f['collectives']:3} collectives {f['bytes'] / 1e6:8.1f} MB "
            f"{1e3 * f['seconds']:8.1f} ms  efficiency {f['efficiency']:.2f}, of work {f['efficiency_of_work']:.2f}"
        )
    return 0 if write_results(options.output, "Scaling", rows, details, absent) else 1


if __name__ == "__main__":
    sys.exit(main())
