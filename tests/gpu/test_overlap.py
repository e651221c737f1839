"""What should happen beside the training does, by a trace of the device: copies of the next step, reductions of DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.data.loader import LoaderConfig, iterate_steps
from accel_train.data.sampler import Cut, StepSampler
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
    """Of the device's events of a category whose name has one of ``words``."""
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
    steps = iterate_steps(Rows(), sampler, Cut(0, 1, 64), start_step=0, max_steps=24, device=device, config=loader)
    trace = tmp_path / "trace.json"
    with torch.profiler.profile() as profile:
        for batches in steps:
            x = batches.micro_batches[0]["x"].view(-1, 4096)
            for _ in range(60):
                x = x @ weight / 64
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(trace))
    copies = spans(trace, "gpu_memcpy", "HtoD")[2:]  # the first two steps have nothing to hide behind
    assert hidden_share(copies, spans(trace, "kernel", "")) > 0.8


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_reductions_run_beside_the_backward(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", __file__, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=300)
    trace = tmp_path / "trace_0.json"
    reductions = spans(trace, "kernel", "ncclDevKernel_AllReduce", "ncclKernel_AllReduce")
    assert hidden_share(reductions, spans(trace, "kernel", "", without="nccl")) > 0.5


def trace_of_ddp(folder: Path) -> None:
    """One of two processes: a few steps of a deep model under DDP, the last of them traced."""
    torch.distributed.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    plain = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24))).cuda()
    model = nn.parallel.DistributedDataParallel(plain, device_ids=[rank], gradient_as_bucket_view=True)
    x = torch.randn(8192, 2048, device="cuda")
    for _ in range(3):
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        model(x).square().mean().backward()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / f"trace_{rank}.json"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    trace_of_ddp(Path(sys.argv[1]))
