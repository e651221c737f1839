"""Initial weights of FSDP2 on one host: built by one process and mapped by the others, beside built by each.

    python -m benchmarks.host_weights --output benchmarks/results/host_weights_cpu.json

Four processes, 1 GiB of weights in linear layers, in turns. Memory is how far the memory available on the host fell
while the model was built, at its lowest, so the machine must do nothing else. Time is until every process has its
model. On two cores four processes that build wait for each other; with a core for each the times would be alike.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from accel_train.runtime import rehearsal
from accel_train.speed.memory import per_host
from benchmarks.accumulation import answer, on_processes
from benchmarks.method import Row, parser_of, row, write_results

PROCESSES = 4
WIDTH, LAYERS = 2048, 64


@contextmanager
def lowest() -> Generator[list[int]]:
    """Bytes of the host's available memory meanwhile: at the start, and from then on the least."""
    found = [psutil.virtual_memory().available] * 2
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            found[1] = min(found[1], psutil.virtual_memory().available)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def work(width: int, layers: int, rounds: int) -> dict[str, Any]:
    """What one process measures; the same on each."""
    torch.set_num_threads(1)
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    rehearsal.connect("fsdp", timedelta(minutes=10))
    accelerator = Accelerator()
    weight_bytes = 4 * layers * width * width

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def once() -> nn.Module:
        model = per_host.build(accelerator, make)
        per_host.load(accelerator, model, None)
        return model

    ways: dict[str, Callable[[], nn.Module]] = {"once": once, "each": make}
    found: dict[str, Any] = {name: {"memory": [], "seconds": []} for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            gc.collect()
            accelerator.wait_for_everyone()
            with lowest() as memory:
                accelerator.wait_for_everyone()
                began = time.perf_counter()
                model = way()
                accelerator.wait_for_everyone()
                seconds = time.perf_counter() - began
            found[name]["memory"].append((memory[0] - memory[1]) / weight_bytes)
            found[name]["seconds"].append(seconds)
            del model
    return found | {"rank": accelerator.process_index, "weight_bytes": weight_bytes}


def rows_of(found: dict[str, Any]) -> list[Row]:
    """Those of the first process, which sees the memory of all."""
    times = [b / a for a, b in zip(found["once"]["seconds"], found["each"]["seconds"], strict=True)]
    of = f"{PROCESSES} processes of a host"
    return [
        row("host_weights", f"memory of {of} over the weights, built by one", found["once"]["memory"], target="<= 1.5"),
        row("host_weights", f"memory of {of} over the weights, built by each", found["each"]["memory"]),
        row("host_weights", "time until all have the model, built by each over built by one", times),
    ]


def main() -> int:
    """Start the processes and write what the first one found."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    options = parser.parse_args()
    width, layers, rounds = (64, 2, 2) if options.tiny else (WIDTH, LAYERS, options.rounds)
    if options.worker:
        answer(work(width, layers, rounds))
    arguments = ["--rounds", str(options.rounds), *(["--tiny"] if options.tiny else [])]
    found = on_processes("benchmarks.host_weights", arguments, PROCESSES)
    return 0 if write_results(options.output, "Initial weights once per host", rows_of(found), found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
