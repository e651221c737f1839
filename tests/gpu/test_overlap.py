"""What should happen beside the training does, by a trace: copies of the next step, reductions of gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.strategy import verify_prepared
from accel_train.training.accumulation import GradientWindow
from tests.distributed.launching import ROOT, environment

Span = tuple[float, float]
"""Begin and end in microseconds."""


def hidden_share(beside: list[Span], work: list[Span]) -> float:
    """Of the time in ``beside``, the share in which something of ``work`` ran as well."""
    merged: list[Span] = []
    for begin, end in sorted(work):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    hidden = sum(max(0.0, min(b, end) - max(a, begin)) for a, b in beside for begin, end in merged)
    return hidden / sum(b - a for a, b in beside)


def spans(trace: Path, category: str, *words: str, without: str = "\0") -> list[Span]:
    """Of the events of a category whose name has one of ``words``."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == category and any(w in e["name"] for w in words) and without not in e["name"]
    ]


def test_the_share_of_hidden_time() -> None:
    assert hidden_share([(0, 10)], [(20, 30)]) == 0
    assert hidden_share([(0, 10)], [(2, 4), (3, 6), (9, 20)]) == pytest.approx(0.5)
    assert hidden_share([(0, 10), (20, 30)], [(0, 10)]) == 0.5


class Rows:
    """Samples of half a megabyte, so that a copy takes long enough to be seen."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((131072,), float(index))}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_next_step_is_copied_while_this_one_trains(tmp_path: Path) -> None:
    device, weight = torch.device("cuda"), torch.randn(4096, 4096, device="cuda")
    sampler, loader = StepSampler(4096, 64, seed=0), LoaderConfig(num_workers=2)
    steps = iterate_steps(
        Rows(), sampler, BatchShard(0, 1, 64), start_step=0, max_steps=24, device=device, config=loader
    )
    trace = tmp_path / "trace.json"
    with torch.profiler.profile(acc_events=True) as profile:
        for batches in steps:
            x = batches.micro_batches[0]["x"].view(-1, 4096)
            for _ in range(60):
                x = x @ weight / 64
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(trace))
    copies = spans(trace, "gpu_memcpy", "HtoD")[2:]  # the first two steps have nothing to hide behind
    assert hidden_share(copies, spans(trace, "kernel", "")) > 0.8


@dataclass(frozen=True)
class Traced:
    """The micro-batches of one optimizer step under DDP, without the small reductions before and after them."""

    trace: Path
    buckets: int
    """In which DDP sends the gradients, once it has seen in which order they come."""


MICRO_BATCHES = 3


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_reductions_run_beside_the_backward(tmp_path: Path) -> None:
    traced = traced_step(tmp_path, width=2048, depth=24, rows=8192)
    reductions = spans(traced.trace, "kernel", "ncclDevKernel_AllReduce", "ncclKernel_AllReduce")
    assert len(reductions) == traced.buckets > 1  # once a step, not once a micro-batch
    assert hidden_share(reductions, spans(traced.trace, "kernel", "", without="nccl")) > 0.5


@pytest.mark.slow
@pytest.mark.distributed
def test_reductions_begin_within_the_last_backward_on_cpu(tmp_path: Path) -> None:
    traced = traced_step(tmp_path, width=1024, depth=16, rows=64, ACCELERATE_USE_CPU="true")
    reductions = sorted(spans(traced.trace, "user_annotation", "gloo:all_reduce"))
    *_, last = sorted(spans(traced.trace, "user_annotation", "micro-batch"))
    assert len(reductions) == traced.buckets > 1
    assert all(begin > last[0] for begin, _ in reductions)
    products = [begin for begin, _ in spans(traced.trace, "cpu_op", "aten::mm") if begin > reductions[0][0]]
    assert products, "the first reduction waited for the whole backward"


def traced_step(folder: Path, width: int, depth: int, rows: int, **extra: str) -> Traced:
    """Train in two processes as a recipe does; what rank 0 has recorded of the last step."""
    sizes = [str(size) for size in (width, depth, rows)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--module", "tests.gpu.test_overlap", str(folder), *sizes]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**extra), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["settings"].startswith("ddp: 2 process(es)"), facts
    return Traced(folder / "trace.json", facts["buckets"])


def train(folder: Path, width: int, depth: int, rows: int) -> None:
    """One of two processes: a few steps of a deep model with accumulation, the last of them traced."""
    accelerator = build_accelerator(
        precision="fp32", global_batch_size=2 * MICRO_BATCHES * rows, micro_batch_size=rows, max_grad_norm=1.0
    )
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    model: Any
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))
    settings = verify_prepared(accelerator, model, 1.0)
    x = torch.randn(rows, width, device=accelerator.device)
    micro_batches = [({"x": x}, {"main": torch.tensor(float(rows), device=accelerator.device)})] * MICRO_BATCHES
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    profile: Any = nullcontext()
    for step in range(4):
        window = GradientWindow(accelerator, model, micro_batches, {"main": 1.0}, step)
        wait()  # its reduction of the weights is not to be in the trace
        profile = torch.profiler.profile(acc_events=True) if step == 3 else nullcontext()
        with profile:
            for inputs in window:
                with torch.profiler.record_function("micro-batch"):
                    window.backward({"main": model(inputs["x"]).square().mean(1).sum()})
            wait()
        window.finish(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        profile.export_chrome_trace(str(folder / "trace.json"))
        sizes: str = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        facts = {"settings": settings, "buckets": len(sizes.split(","))}
        (folder / "facts.json").write_text(json.dumps(facts))
    accelerator.end_training()


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
