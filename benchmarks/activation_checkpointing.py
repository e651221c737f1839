"""C5: what each mode of activation checkpointing costs in time and saves in memory.

    python -m benchmarks.activation_checkpointing --output benchmarks/results/activation_checkpointing_cpu.json

An MMDiT of 8 blocks of width 256, 256 + 77 tokens, 8 rows: one step of forward and backward on one thread. Losses and
gradients are first compared bit for bit. Time is thread time, and the modes alternate within a round. Memory is
measured in three ways:

- `kept`: bytes that the forward allocated and that are alive at its end, counted exactly from the tensors' storages.
- `peak`: the most bytes alive at any operator of the step, gradients of the weights included, counted in the same way.
- `rss`: growth of the process's peak over its memory before the step, the smallest of some fresh processes per mode
  (freed tensors go back to the system at once). It includes what libraries allocate for themselves, which no mode
  reduces, so the relative saving is smaller, and smaller still with fewer rows.

`peak` and `rss` have the same targets. `hf_full` is one `checkpoint` call per block, as in Hugging Face models.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from accel_train.domains.models.mmdit import MMDiT, MMDiTConfig
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.blocks import blocks_of
from accel_train.speed.options import ActivationCheckpointingConfig
from benchmarks.method import ROOT, Rounds, Row, in_turns, parser_of, row, write_results

MODES = ("none", "selective", "attention", "ffn", "half", "full", "hf_full")
TOKENS = (256, 77)
RSS_MODES = ("none", "selective", "full", "hf_full")
TARGETS = {"full": ("<= 1.36", "<= 0.5"), "selective": ("<= 1.14", "<= 0.8")}
"""Targets for time and for peak memory (`peak` and `rss`), relative to no checkpointing."""


class Task:
    """A model in one mode of activation checkpointing, with fixed inputs."""

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
            config = ActivationCheckpointingConfig(mode)  # type: ignore[arg-type]
            if mode == "half":
                config = ActivationCheckpointingConfig("full", blocks=depth // 2)
            apply_activation_checkpointing(self.model, config)
        self.tokens = [torch.randn(rows, length, width, requires_grad=True) for length in TOKENS]
        self.conditioning = torch.randn(rows, width)
        self.weights = [torch.randn_like(x) for x in self.tokens]

    def forward(self) -> Tensor:
        """Return the loss, a scalar with a graph."""
        outputs = zip(self.model(self.tokens, self.conditioning, None), self.weights, strict=True)
        return sum(((x * weight).mean() for x, weight in outputs), torch.zeros(()))

    def step(self) -> list[Tensor]:
        """Return the loss and the gradients of all parameters. ``.grad`` stays empty."""
        loss = self.forward()
        return [loss, *torch.autograd.grad(loss, list(self.model.parameters()))]


class Memory(TorchDispatchMode):
    """Count the bytes of live storages that operators allocated: ``now``, and ``peak`` since the start."""

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
    """Return the bytes kept after the forward and the peak bytes of the step."""
    with Memory() as memory:
        loss = task.forward()
        gc.collect()
        kept = memory.now
        torch.autograd.grad(loss, list(task.model.parameters()))
    return {"kept": kept, "peak": memory.peak}


def rss_growth(task: Task) -> int:
    """Return the growth of this process's peak memory in bytes during a step. Valid once per process."""
    small = Task("none", 64, 1, 1)
    small.step()  # loads libraries and thread pools
    gc.collect()
    before = psutil.Process().memory_info().rss
    task.step()
    # Not ru_maxrss: that begins with the peak of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


def in_own_process(mode: str, shape: list[str], repeats: int) -> int:
    """Return the smallest `rss_growth` of ``repeats`` fresh processes, in bytes."""
    command = [sys.executable, "-m", "benchmarks.activation_checkpointing", "--rss_of", mode, *shape]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # tensors go back to the system when they are freed
    runs = [subprocess.run(command, check=True, capture_output=True, env=environment, cwd=ROOT) for _ in range(repeats)]
    return min(int(run.stdout) for run in runs)


def measure(width: int, depth: int, rows: int, rounds: int, repeats: int) -> tuple[list[Row], dict[str, Any]]:
    """Compare results, time and memory of every mode; return rows and details."""
    tasks = {mode: Task(mode, width, depth, rows) for mode in MODES}
    expected = tasks["none"].step()
    different: list[str] = []
    for mode, task in tasks.items():
        if not all(torch.equal(a, b) for a, b in zip(task.step(), expected, strict=True)):
            different.append(mode)
    times = in_turns({mode: task.step for mode, task in tasks.items()}, rounds, warm_up=1)
    shape = [*("--width", str(width)), *("--depth", str(depth)), *("--rows", str(rows))]
    bytes_of: dict[str, dict[str, int]] = {mode: exact_bytes(task) for mode, task in tasks.items()}
    for mode in RSS_MODES if repeats else ():
        bytes_of[mode]["rss"] = in_own_process(mode, shape, repeats)
    details = {"bytes": bytes_of, "different": different, **times.summary()}
    return rows_of(times, bytes_of, different), details


def rows_of(times: Rounds, bytes_of: dict[str, dict[str, int]], different: list[str]) -> list[Row]:
    """Return rows of the time and memory of each mode, relative to mode ``none``."""
    rows = [row("C5", "modes whose loss or gradients differ in a bit", len(different), "count", "<= 0")]
    none = bytes_of["none"]
    for mode in MODES[1:]:
        of_time, of_memory = TARGETS.get(mode, (None, None))
        rows.append(row("C5", f"{mode}: time", times.ratios(mode, "none"), target=of_time))
        rows.append(row("C5", f"{mode}: peak of its tensors", bytes_of[mode]["peak"] / none["peak"], target=of_memory))
        if "rss" in bytes_of[mode]:
            grown = bytes_of[mode]["rss"] / none["rss"]
            rows.append(row("C5", f"{mode}: growth of the process's peak", grown, target=of_memory))
        rows.append(row("C5", f"{mode}: memory kept for the backward", bytes_of[mode]["kept"] / none["kept"]))
    return rows


def main() -> int:
    """Measure every mode, print and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2, help="processes per mode that measure its growth; 0: none")
    parser.add_argument("--rss_of", choices=MODES, help="print the growth of this mode in bytes and stop")
    options = parser.parse_args()
    if options.tiny:
        options.width, options.depth, options.rows, options.rounds, options.repeats = 32, 2, 1, 2, 0
    torch.set_num_threads(1)
    if options.rss_of:
        print(rss_growth(Task(options.rss_of, options.width, options.depth, options.rows)))
        return 0
    rows, details = measure(options.width, options.depth, options.rows, options.rounds, options.repeats)
    return 0 if write_results(options.output, "C5: activation checkpointing", rows, details) else 1


if __name__ == "__main__":
    sys.exit(main())
