"""Initial weights of FSDP2 on one host: built by one process and mapped by the others, against built by each.

    python -m benchmarks.host_weights --output benchmarks/results/host_weights_cpu.json

Each measurement starts four new processes, the two variants alternate, and the model is 1 GiB of linear layers. Memory
is the peak of all processes while the model is built, private and shared. Time is until every process has its model.
Four processes that build at once on two cores wait for each other. With a core for each they would take about as long
as one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from accel_train import initial_weights
from accel_train.runtime import rehearsal
from benchmarks.accumulation import exit_with_result, on_processes
from benchmarks.method import Row, parser_of, row, write_results

PROCESSES = 4
WIDTH, LAYERS = 2048, 64
WAYS = ("once", "each")
MODULE = "benchmarks.host_weights"


def read_kib(path: str, field: str) -> int:
    """Return the KiB of ``field`` in a file with lines such as `RssAnon: 12 kB`. Raises LookupError without it."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(f"{path} has no {field}")


def held_bytes(processes: Sequence[int]) -> int:
    """Return the bytes of private memory of these processes, plus all shared memory of the machine."""
    own = sum(read_kib(f"/proc/{process}/status", "RssAnon") for process in processes)
    return 1024 * (own + read_kib("/proc/meminfo", "Shmem"))


@contextmanager
def sampled_memory(processes: Sequence[int]) -> Generator[list[int]]:
    """Sample `held` every 5 ms in the body. Yields a list of the bytes at the start and the peak since then."""
    memory = [held_bytes(processes)] * 2
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            memory[1] = max(memory[1], held_bytes(processes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        ended.set()
        thread.join()


def work(way: str, width: int, layers: int) -> dict[str, Any]:
    """Measure on this process. Collective: every process runs it and returns its own results."""
    torch.set_num_threads(1)
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    rehearsal.connect("fsdp", timedelta(minutes=10))
    accelerator = Accelerator()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    processes = gather_object([os.getpid()])
    with sampled_memory(processes) as memory:
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        model = make() if way == "each" else initial_weights.build_once_per_host(accelerator, make)
        accelerator.wait_for_everyone()
        seconds = time.perf_counter() - began
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    share = (memory[1] - memory[0]) / weight_bytes
    accelerator.wait_for_everyone()
    return {"memory": share, "seconds": seconds, "rank": accelerator.process_index}


def rows_of(once: Sequence[dict[str, Any]], each: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows from the results of rank 0, which measures the memory of all processes."""
    memory = f"memory of {PROCESSES} processes of a host over the weights"
    times = [b["seconds"] / a["seconds"] for a, b in zip(once, each, strict=True)]
    return [
        row("host_weights", f"{memory}, built by one", [found["memory"] for found in once], target="<= 1.1"),
        row("host_weights", f"{memory}, built by each", [found["memory"] for found in each]),
        row("host_weights", "time until all have the model, built by each over built by one", times),
    ]


def main() -> int:
    """Measure both variants in turns and write the results of rank 0. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--worker", choices=WAYS, help="be one of the processes")
    options = parser.parse_args()
    if options.worker:
        exit_with_result(work(options.worker, *((64, 2) if options.tiny else (WIDTH, LAYERS))))
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    # New processes each time, because one that has built a model keeps freed memory for the next.
    for _ in range(2 if options.tiny else options.rounds):
        for way, rounds in results.items():
            rounds.append(on_processes(MODULE, [way, *(["--tiny"] if options.tiny else [])], PROCESSES))
    rows = rows_of(results["once"], results["each"])
    return 0 if write_results(options.output, "Initial weights once per host", rows, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
