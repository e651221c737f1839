"""C10: communication of gradients: each option of DDP against its default, on two processes with gloo.

    python -m benchmarks.exchange --output benchmarks/results/exchange_cpu.json

The model of C8 (9 M parameters, 37 MB of gradients) with one micro-batch per step, wrapped by Accelerate as in a
recipe, once per option. Times are wall times; all variants alternate in the same processes, with one thread each.

Exact values come from separate models: all-reduces and bytes that one step requests; memory, which is the storages of
the gradients, of their buckets and of what a hook keeps for the next step; and whether gradients equal those of the
default bit for bit. Both processes are on one machine, whose link is faster than any between two machines. What a hook
would save between machines is the share of the bytes; what it costs is the time measured here. PowerSGD uses one bucket
for all gradients and is compared with the default in one bucket: torch's hook starts collectives in callbacks, and with
gloo those of several buckets come in no fixed order.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from accel_train.runtime.distributed_options import DistributedConfig, ddp_handlers, verify_ddp
from benchmarks.accumulation import Task, run, step_of
from benchmarks.method import Row, in_turns, row

DEFAULT, COPIES, ONE_BUCKET = "default", "gradient_as_bucket_view false", "bucket_cap_mb 100"
OPTIONS = {
    DEFAULT: DistributedConfig(),
    COPIES: DistributedConfig(gradient_as_bucket_view=False),
    "bucket_cap_mb 1": DistributedConfig(bucket_cap_mb=1),
    ONE_BUCKET: DistributedConfig(bucket_cap_mb=100),
    "static_graph": DistributedConfig(static_graph=True),
    "powersgd, rank 1": DistributedConfig(
        bucket_cap_mb=100, comm_hook="powersgd", powersgd_rank=1, powersgd_start_step=2
    ),
    "powersgd, rank 4": DistributedConfig(
        bucket_cap_mb=100, comm_hook="powersgd", powersgd_rank=4, powersgd_start_step=2
    ),
}
NOT_HERE = "not yet measured (needs a GPU): "
ABSENT = {
    "fsdp2_prefetch": NOT_HERE + "on CPU processes no gather runs beside the computation",
    "comm_hook bf16": NOT_HERE + "torch's hook raises on gloo",
    "attention tune": NOT_HERE + "it chooses among kernels of GPUs; a CPU has next to none",
    "compile.optimize reduce-overhead": NOT_HERE + "it replays CUDA graphs",
}
STEPS_BEFORE = 4
"""Steps before a measurement. DDP rebuilds its buckets after the first, and PowerSGD compresses from the third on."""


def wrapped(config: DistributedConfig, width: int, depth: int) -> tuple[Accelerator, Any]:
    """Return an accelerator and a DDP model with these options, nonzero gradients and inputs that differ by rank."""
    handlers = ddp_handlers(config, "ddp", on_device=False, accumulation_steps=1)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[*handlers])
    task = Task(width, depth)
    for parameter in task.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=width**-0.5)
    torch.manual_seed(1 + accelerator.process_index)
    task.tokens = [torch.randn_like(x) for x in task.tokens]
    model: Any = accelerator.prepare(task)
    verify_ddp(model, accelerator.ddp_handler)
    return accelerator, model


@contextmanager
def record_all_reduces() -> Generator[list[int]]:
    """Record the bytes of every all-reduce that Python code requests in the body, as DDP hooks do."""
    sizes: list[int] = []
    real = dist.all_reduce

    def reduce(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return real(tensor, *arguments, **named)

    with patch.object(dist, "all_reduce", reduce):
        yield sizes


def counted(config: DistributedConfig, width: int, depth: int) -> tuple[dict[str, int], list[Tensor]]:
    """Return count and bytes of a step's all-reduces, its memory in bytes, and copies of its gradients. Collective."""
    _, model = wrapped(config, width, depth)
    buckets: list[Tensor] = []

    def reduce(group: Any, bucket: Any) -> Any:
        buckets.append(bucket.buffer())
        return allreduce_hook(group, bucket)

    if (
        config.comm_hook == "none"
    ):  # DDP allows one hook; with another one the buckets are the storages of the gradients
        model.register_comm_hook(None, lambda group, bucket: reduce(group, bucket))  # DDP refuses other annotations
    for _ in range(STEPS_BEFORE):
        model.zero_grad()
        model().backward()
    model.zero_grad()
    buckets.clear()
    with record_all_reduces() as sizes:
        model().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = [*gradients, *buckets, *(x for _, state in model._comm_hooks for x in tensors_kept_by(state))]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    counts = {"reductions": len(sizes), "bytes": sum(sizes), "memory": sum(storages.values())}
    return counts, [g.clone() for g in gradients]


def tensors_kept_by(state: Any) -> list[Tensor]:
    """Return the tensors that the state of a PowerSGD hook keeps between steps. Empty for other hooks."""
    names = ("error_dict", "p_memory_dict", "q_memory_dict")
    return [x for name in names for x in getattr(state, name, {}).values()]


def work(width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Measure on this process. Collective: every process runs it and returns its own results."""
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    different: list[str] = []
    expected: list[Tensor] = []
    for name, config in OPTIONS.items():
        counts[name], gradients = counted(config, width, depth)
        expected = expected or gradients
        same = all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        if config.comm_hook == "none" and not same:
            different.append(name)
    made = {name: wrapped(config, width, depth) for name, config in OPTIONS.items()}
    ways = {name: step_of(accelerator, model, "auto", 1) for name, (accelerator, model) in made.items()}
    times = in_turns(ways, rounds, warm_up=STEPS_BEFORE, clock=time.perf_counter)
    accelerator, _ = made[DEFAULT]
    accelerator.wait_for_everyone()
    speeds = {name: times.ratios(DEFAULT, name) for name in OPTIONS}
    seconds = times.summary()
    rank = accelerator.process_index
    return {"counted": counts, "different": different, "speeds": speeds, "seconds": seconds, "rank": rank}


def rows_of(found: dict[str, Any]) -> list[Row]:
    """Return the rows from the results of rank 0. Counts are exact; times are those of rank 0."""
    counts, usual = found["counted"], found["counted"][DEFAULT]
    one, speeds = found["speeds"][ONE_BUCKET], found["speeds"]
    over_one = {name: [a / b for a, b in zip(speed, one, strict=True)] for name, speed in speeds.items()}
    bits = "options whose gradients differ from the default's in a bit, powersgd aside"
    views, share = "gradient_as_bucket_view", usual["memory"] / counts[COPIES]["memory"]
    rows = [
        row("C10", bits, len(found["different"]), "count", "<= 0"),
        row("C10", f"{views}: memory of gradients and buckets over that without", share, target="<= 0.5"),
        row("C10", f"{views}: speed over without", [1 / s for s in speeds[COPIES]]),
        row("C10", "bucket_cap_mb 25, the default: reductions per step", usual["reductions"], "count"),
    ]
    for name in list(OPTIONS)[2:]:
        if name.startswith("bucket"):
            rows.append(row("C10", f"{name}: reductions per step", counts[name]["reductions"], "count"))
        if name.startswith("powersgd"):
            rows.append(row("C10", f"{name}: bytes over whole gradients", counts[name]["bytes"] / usual["bytes"]))
            rows.append(row("C10", f"{name}: memory over the default's", counts[name]["memory"] / usual["memory"]))
            rows.append(row("C10", f"{name}: speed over whole gradients in one bucket", over_one[name]))
        else:
            rows.append(row("C10", f"{name}: speed over the default", speeds[name]))
    return rows


def main() -> int:
    """Run C10."""
    return run(__doc__, "benchmarks.exchange", "C10: how gradients travel", work, rows_of, 20, ABSENT)


if __name__ == "__main__":
    raise SystemExit(main())
