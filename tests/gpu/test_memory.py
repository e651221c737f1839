"""Memory by category and the recording of allocations on a real device."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_train.metrics.profiling import memory_history
from accel_train.reporting.memory import MemoryReport
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.shards import Shards
from tests.reporting.test_memory import Log

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, ROWS = 1024, 4096
MATRIX = 4 * WIDTH * WIDTH
ACTIVATION = 4 * ROWS * WIDTH


def test_the_categories_and_the_rest_are_those_of_the_allocator() -> None:
    # cuBLAS keeps a workspace from its first product on.
    matrix = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)
    (torch.randn(ROWS, WIDTH, device="cuda") @ matrix).sum().backward()
    del matrix
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    report, log = MemoryReport(Ema(EmaConfig(0.9), Shards(model, optimizer)), torch.device("cuda")), Log()
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(ROWS, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    report.first_step(log, 1)  # type: ignore[arg-type]
    fields = log.events[0][2]
    held = fields["held_bytes"]
    assert (held["weights"], held["gradients"], held["ema"]) == (4 * MATRIX,) * 3
    assert held["optimizer_state"] == pytest.approx(8 * MATRIX, rel=1e-4)
    # Gone by now: the gradients and the activations.
    lasting = sum(held.values()) - held["gradients"] + before
    assert fields["allocated_bytes"] == pytest.approx(lasting, abs=MATRIX)
    # The inputs of four layers and what the loss keeps.
    assert fields["rest_of_peak_bytes"] >= 4 * ACTIVATION - 4 * MATRIX
    assert fields["peak_bytes"] <= fields["reserved_bytes"]


def test_a_snapshot_has_the_allocations_with_their_stacks(tmp_path: Path) -> None:
    memory_history.start()
    try:
        kept = torch.zeros(12345, device="cuda")
        assert memory_history.write(tmp_path / "snapshot.pickle")
    finally:
        memory_history.stop()
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"]
    assert any(event["size"] >= kept.nbytes and "test_memory.py" in str(event["frames"]) for event in events)
