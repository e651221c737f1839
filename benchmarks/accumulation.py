"""C8: gradients reduced once per step against once per micro-batch: two processes, DDP, gloo, accumulation 4.

    python -m benchmarks.accumulation --output benchmarks/results/accumulation_cpu.json

An MMDiT of 7 blocks of width 192 (9 M parameters), 64 + 32 tokens, 2 rows. The two policies of `GradientWindow`
alternate in the same processes, with one thread each. A communication hook of DDP counts how often each gradient is
reduced. It is registered on separate models, so that the timed ones run without a hook.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from accel_train.domains.models.mmdit import MMDiT, MMDiTConfig
from accel_train.training.accumulation import GradientWindow
from accel_train.training.gradients.sync import SyncPolicy
from benchmarks.method import ROOT, Row, in_turns, parser_of, row, write_results

PROCESSES, MICRO_BATCHES = 2, 4
POLICIES: tuple[SyncPolicy, ...] = ("auto", "every")


class Task(nn.Module):
    """An MMDiT with fixed inputs. Its forward returns the sum of the squared outputs as the loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MMDiT(MMDiTConfig(width, depth, heads=4))
        self.tokens = [torch.randn(2, length, width) for length in (64, 32)]
        self.conditioning = torch.randn(2, width)

    def forward(self) -> Tensor:
        return sum((x.square().sum() for x in self.model(self.tokens, self.conditioning, None)), torch.zeros(()))


def step_of(
    accelerator: Accelerator, model: Any, policy: SyncPolicy, micro_batches: int = MICRO_BATCHES
) -> Callable[[], object]:
    """Return a function that computes and then clears the gradient of one optimizer step."""
    count = torch.tensor(2.0)

    def step() -> object:
        window = GradientWindow(accelerator, model, [({}, {"main": count})] * micro_batches, {"main": 1.0}, 0, policy)
        for _ in window:
            window.backward({"main": model()})
        result = window.finish(0.0)
        model.zero_grad()
        return result

    return step


def without_reduction(model: Any, micro_batches: int = MICRO_BATCHES) -> Callable[[], object]:
    """Return the same forwards and backwards without any reduction: the limit of what fewer reductions can save."""

    def step() -> None:
        for _ in range(micro_batches):
            model().backward()
        model.zero_grad()

    return step


def reduction_alone(model: Any) -> Callable[[], object]:
    """Return a function with one all-reduce of as many fp32 values as ``model`` has parameters, in a single tensor."""
    values = torch.zeros(sum(p.numel() for p in model.parameters()))
    return lambda: dist.all_reduce(values)


def reductions(accelerator: Accelerator, width: int, depth: int, policy: SyncPolicy) -> dict[str, Any]:
    """Count one step: how often each gradient is reduced (distinct values), and the number of collectives and bytes."""
    model: Any = accelerator.prepare(Task(width, depth))
    seen: Counter[int] = Counter()
    sizes: list[int] = []

    def reduce(group: Any, bucket: Any) -> Any:
        seen.update(id(p) for p in bucket.parameters())
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, lambda group, bucket: reduce(group, bucket))  # DDP refuses other annotations
    step = step_of(accelerator, model, policy)
    step()  # DDP rebuilds its buckets after the first step
    seen.clear()
    sizes.clear()
    step()
    trained = [p for p in model.parameters() if p.requires_grad]
    each = sorted({seen[id(p)] for p in trained})
    return {"of_each_gradient": each, "collectives": len(sizes), "bytes": sum(sizes)}


def work(width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Measure on this process. Collective: every process of `on_processes` runs it and returns its own results."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == PROCESSES
    counted = {policy: reductions(accelerator, width, depth, policy) for policy in POLICIES}
    ways: dict[str, Callable[[], object]] = {
        p: step_of(accelerator, accelerator.prepare(Task(width, depth)), p) for p in POLICIES
    }
    ways["none"] = without_reduction(Task(width, depth))
    ways["reduction"] = reduction_alone(Task(width, depth))
    wall = in_turns(ways, rounds, clock=time.perf_counter)
    used = in_turns(ways, max(2, rounds // 3), warm_up=0, clock=time.process_time)
    accelerator.wait_for_everyone()
    steps = zip(wall.seconds["every"], wall.seconds["none"], wall.seconds["reduction"], strict=True)
    return {
        "counted": counted,
        "wall": wall.ratios("every", "auto"),
        "without": wall.ratios("every", "none"),
        "bound": [every / (none + reduction) for every, none, reduction in steps],
        "processor": used.ratios("every", "auto"),
        "seconds": wall.summary(),
        "rank": accelerator.process_index,
    }


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Return the rows from the results of rank 0. Counts are exact; times are those of rank 0."""
    once, each = result["counted"]["auto"], result["counted"]["every"]
    most, least = max(once["of_each_gradient"]), min(once["of_each_gradient"])
    return [
        row("C8", "reductions of each gradient per step, most", most, "count", "<= 1"),
        row("C8", "reductions of each gradient per step, least", least, "count", ">= 1"),
        row("C8", "the same with a reduction on every micro-batch", max(each["of_each_gradient"]), "count"),
        row("C8", "bytes reduced with a reduction on every micro-batch over once", each["bytes"] / once["bytes"]),
        row("C8", "speed of one reduction per step over one per micro-batch", result["wall"], target=">= 1.4"),
        row("C8", "the same in processor time", result["processor"]),
        row("C8", "speed without any reduction, each process by itself", result["without"]),
        row(
            "C8",
            "speed of that with gloo's one sum behind it: the bound, as no core is idle in a backward",
            result["bound"],
        ),
    ]


def on_processes(module: str, arguments: Sequence[str], processes: int = PROCESSES) -> dict[str, Any]:
    """Run ``module`` with `--worker` under torchrun on CPU; return the results of rank 0. RuntimeError without any."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    completed = subprocess.run(
        [*command, "-m", module, "--worker", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    lines = [line for line in completed.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(completed.stderr[-3000:])
    return json.loads(lines[-1].removeprefix("RESULT "))


def exit_with_result(result: dict[str, Any]) -> NoReturn:
    """Exit this process of `on_processes`. Rank 0 first prints its results as one RESULT line."""
    if result["rank"] == 0:
        print(f"RESULT {json.dumps(result)}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the end of the interpreter


def run(
    doc: str | None,
    module: str,
    title: str,
    work: Callable[[int, int, int], dict[str, Any]],
    rows_of: Callable[[dict[str, Any]], list[Row]],
    rounds: int,
    absent: dict[str, str] | None = None,
) -> int:
    """Run a benchmark on several processes and write the results of rank 0. Returns the exit code."""
    parser = parser_of(doc, rounds=rounds)
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    options = parser.parse_args()
    width, depth = (32, 2) if options.tiny else (192, 7)
    if options.worker:
        exit_with_result(work(width, depth, 2 if options.tiny else options.rounds))
    result = on_processes(module, ["--rounds", str(options.rounds), *(["--tiny"] if options.tiny else [])])
    return 0 if write_results(options.output, title, rows_of(result), result, absent) else 1


def main() -> int:
    """Run C8."""
    return run(__doc__, "benchmarks.accumulation", "C8: gradient accumulation", work, rows_of, 12)


if __name__ == "__main__":
    raise SystemExit(main())
