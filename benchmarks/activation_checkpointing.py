"""C5: what each mode of activation checkpointing costs in time and saves in memory.

    python benchmarks/activation_checkpointing.py --output benchmarks/results/activation_checkpointing.json

MMDiT of 8 blocks of width 256, 256 + 77 tokens, 8 rows, one step of forward and backward on one thread. Losses and
gradients are compared bit for bit first. Time is that of the thread, rounds alternate between the modes. Memory three
ways: `kept`, bytes that the forward made and that live at its end; `peak`, the most bytes alive at any operator of the
step, gradients of weights included as they come; both counted exactly from the tensors' storages; `rss`, growth of the
process's peak over what it had before the step, in a fresh process for each mode, smallest of the repeats (freed
tensors go back to the system at once; what libraries allocate for themselves is in it). `hf_full` is the usual call
per block, as in Hugging Face models.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from accel_train.metrics.bootstrap import estimate
from accel_train.metrics.environment import command_line, cpu_name, git_commit, package_versions
from accel_train.metrics.records import write_json
from accel_train.models.activation_checkpointing import (
    ActivationCheckpointingConfig,
    apply_activation_checkpointing,
    blocks_of,
)
from accel_train.models.mmdit import MMDiT, MMDiTConfig

MODES = ("none", "selective", "attention", "ffn", "every_nth", "full", "hf_full")
TOKENS = (256, 77)


class Task:
    """One model in one mode, and its step."""

    def __init__(self, mode: str, width: int, depth: int, rows: int) -> None:
        torch.manual_seed(0)
        self.model = MMDiT(MMDiTConfig(width, depth, heads=4))
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=width**-0.5)
        if mode == "hf_full":
            for block in blocks_of(self.model):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        else:
            apply_activation_checkpointing(self.model, ActivationCheckpointingConfig(mode))  # type: ignore[arg-type]
        self.tokens = [torch.randn(rows, length, width, requires_grad=True) for length in TOKENS]
        self.conditioning = torch.randn(rows, width)
        self.weights = [torch.randn_like(x) for x in self.tokens]

    def forward(self) -> Tensor:
        """The loss."""
        outputs = zip(self.model(self.tokens, self.conditioning, None), self.weights, strict=True)
        return sum(((x * weight).mean() for x, weight in outputs), torch.zeros(()))

    def step(self) -> list[Tensor]:
        """The loss and the gradients, which are dropped when it returns."""
        loss = self.forward()
        return [loss, *torch.autograd.grad(loss, list(self.model.parameters()))]


class Memory(TorchDispatchMode):
    """Bytes of storages that operators made and that are alive: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = self.peak = 0

    def _gone(self, key: int, _reference: Any) -> None:
        self.now -= self.alive.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and id(storage) not in before and id(storage) not in self.alive:
                reference = weakref.ref(storage, partial(self._gone, id(storage)))
                self.alive[id(storage)] = (reference, storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return made


def exact_bytes(task: Task) -> dict[str, int]:
    """Kept after the forward; most at any time of the step."""
    with Memory() as memory:
        loss = task.forward()
        gc.collect()
        kept = memory.now
        torch.autograd.grad(loss, list(task.model.parameters()))
    return {"kept": kept, "peak": memory.peak}


def rss_growth(task: Task) -> int:
    """Growth of this process's peak in bytes; once per process."""
    small = Task("none", 64, 1, 1)
    small.step()  # libraries and thread pools load
    gc.collect()
    before = psutil.Process().memory_info().rss
    task.step()
    # Not ru_maxrss: that begins with the peak of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


def seconds_of(step: Callable[[], object]) -> float:
    """Time of this thread."""
    started = time.thread_time()
    step()
    return time.thread_time() - started


def in_own_process(mode: str, shape: list[str], repeats: int) -> int:
    """The smallest growth of some fresh processes."""
    command = [sys.executable, __file__, "--rss_of", mode, *shape]
    given = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # tensors go back to the system when they are freed
    return min(int(subprocess.run(command, check=True, capture_output=True, env=given).stdout) for _ in range(repeats))


def measure(width: int, depth: int, rows: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Every mode: equality, time, memory."""
    tasks = {mode: Task(mode, width, depth, rows) for mode in MODES}
    expected = tasks["none"].step()
    for mode, task in tasks.items():
        found = task.step()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"{mode}: other numbers"
        del found
    times = [{mode: seconds_of(task.step) for mode, task in tasks.items()} for _ in range(rounds)]
    shape = [*("--width", str(width)), *("--depth", str(depth)), *("--rows", str(rows))]
    memory = {mode: exact_bytes(task) for mode, task in tasks.items()}
    rss = {mode: in_own_process(mode, shape, repeats) for mode in MODES}
    result: dict[str, Any] = {}
    for mode in MODES:
        ratio = estimate([t[mode] / t["none"] for t in times])
        result[mode] = {
            "seconds": statistics.median(t[mode] for t in times),
            "time_ratio": ratio.median,
            "time_interval": [ratio.low, ratio.high],
            "kept_mib": memory[mode]["kept"] / 2**20,
            "peak_mib": memory[mode]["peak"] / 2**20,
            "rss_mib": rss[mode] / 2**20,
        }
        for name in ("kept", "peak", "rss"):
            result[mode][f"{name}_ratio"] = result[mode][f"{name}_mib"] / result["none"][f"{name}_mib"]
    return result


def main() -> None:
    """Measure and print a line for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rss_of", choices=MODES, help="print the growth of this mode in bytes and stop")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: at least 2, for an interval")
    torch.set_num_threads(1)
    if options.rss_of:
        print(rss_growth(Task(options.rss_of, options.width, options.depth, options.rows)))
        return
    rows = measure(options.width, options.depth, options.rows, options.rounds, options.repeats)
    for mode, row in rows.items():
        low, high = row["time_interval"]
        print(
            f"{mode:10} time {row['time_ratio']:.3f} ({low:.3f} to {high:.3f})   kept {row['kept_mib']:7.1f} MiB "
            f"{row['kept_ratio'] - 1:+.0%}   peak {row['peak_mib']:7.1f} MiB {row['peak_ratio'] - 1:+.0%}   "
            f"rss {row['rss_mib']:7.1f} MiB {row['rss_ratio'] - 1:+.0%}"
        )
    if options.output:
        facts = {"processor": cpu_name(), "versions": package_versions(), "command": command_line(sys.argv)}
        write_json(options.output, facts | {"git_commit": git_commit(Path(__file__).parent), "rows": rows})
    else:
        print(json.dumps({mode: round(row["seconds"], 4) for mode, row in rows.items()}))


if __name__ == "__main__":
    main()
