"""Events of memory: after the first step, and after running out. CUDA's numbers by stand-ins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.metrics.profiling import memory_history
from accel_train.reporting import memory
from accel_train.reporting.memory import MemoryReport
from accel_train.training.memory.held import held, held_gradients
from accel_train.wording import FILE_ONLY
from tests.training.test_held_memory import CPU, MATRIX, WIDTH, backward, build

CUDA = torch.device("cuda")


class Log:
    """Takes the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []

    def record(self, event: str, fields: dict[str, Any], *, step: int) -> None:
        self.events.append((event, step, fields))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The allocator's numbers. Tensors of the CPU count as those of the device."""
    numbers = {"peak": 0, "allocated": 3000, "reserved": 4096}
    monkeypatch.setattr(memory, "held", lambda ema, _: held(ema, CPU))
    monkeypatch.setattr(memory, "held_gradients", lambda shards, _: held_gradients(shards, CPU))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: numbers["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: numbers.update(peak=0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: numbers["allocated"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: numbers["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda _: "| a table |")
    return numbers


def test_the_first_step_of_a_start_and_no_other_has_an_event() -> None:
    model, optimizer, ema = build()
    report, log = MemoryReport(ema, CPU), Log()
    for step in (7, 8, 9):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        report.first_step(log, step)  # type: ignore[arg-type]
    ((event, step, fields),) = log.events
    assert (event, step) == ("memory", 7)
    assert fields["held_bytes"]["gradients"] == MATRIX, "counted before they were gone"
    assert fields["held_bytes"]["optimizer_state"] == 2 * MATRIX + 4
    assert fields["process_rss_bytes"] > 10**8
    assert "host_bytes" not in fields
    assert not optimizer._optimizer_step_pre_hooks


def test_the_rest_of_the_peak_is_what_no_category_explains(cuda: dict[str, int]) -> None:
    model, optimizer, ema = build()
    cuda["peak"] = 10**9  # of the encoders, before the training
    report, log = MemoryReport(ema, CUDA), Log()
    assert cuda["peak"] == 0
    backward(model)
    fixed = MATRIX + MATRIX // 2 + 4 * WIDTH + MATRIX  # weights, frozen weights, buffer, EMA
    cuda["peak"] = fixed + MATRIX + 1000  # with the gradients, before the optimizer has made its state
    optimizer.step()
    optimizer.zero_grad()
    cuda["peak"] += 10  # less than the state
    report.first_step(log, 1)  # type: ignore[arg-type]
    fields = log.events[0][2]
    assert fields["rest_of_peak_bytes"] == 1000
    assert (fields["allocated_bytes"], fields["reserved_bytes"], fields["peak_bytes"]) == (3000, 4096, cuda["peak"])
    assert "process_rss_bytes" not in fields


def test_running_out_counts_the_gradients_of_now(cuda: dict[str, int], tmp_path: Path) -> None:
    model, optimizer, ema = build()
    report = MemoryReport(ema, CUDA)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        report.first_step(Log(), 1)  # type: ignore[arg-type]
    assert "gradients" not in report.after_running_out(tmp_path, 0)["held_bytes"]
    backward(model)
    assert report.after_running_out(tmp_path, 0)["held_bytes"]["gradients"] == MATRIX


@pytest.mark.parametrize("is_recording", [True, False])
def test_running_out_leaves_a_summary_and_where_one_is_recorded_a_snapshot(
    cuda: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_recording: bool,
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    report = MemoryReport(build()[2], CUDA)
    cuda["peak"] = 5_000_000_000
    if is_recording:
        memory_history.start()
    with caplog.at_level(logging.INFO, "accel_train.reporting.memory"):
        fields = report.after_running_out(tmp_path / "logs", 3)
    if is_recording:
        memory_history.stop()
    assert fields["peak_bytes"] == cuda["peak"]
    console = [record.getMessage() for record in caplog.records if not getattr(record, FILE_ONLY, False)]
    assert console[0].startswith(
        "memory of this process: weights 256 B, frozen weights 128 B, buffers 32 B, ema 256 B;"
    )
    assert "peak 5.0 GB, allocated 3.0 kB, reserved 4.1 kB" in console[0]
    in_file = [record.getMessage() for record in caplog.records if getattr(record, FILE_ONLY, False)]
    assert in_file == ["| a table |"]
    snapshot = tmp_path / "logs" / "memory_snapshot_rank_3.pickle"
    assert snapshot.exists() == is_recording
    assert [f"written: {snapshot}, for https://pytorch.org/memory_viz"] * is_recording == console[1:]


def test_what_cannot_be_counted_costs_no_step_and_hides_no_error(
    cuda: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(torch.cuda, "memory_summary", fail)
    model, optimizer, ema = build()
    report, log = MemoryReport(ema, CUDA), Log()
    assert report.after_running_out(tmp_path, 0)["held_bytes"]["weights"] == MATRIX
    assert "the memory could not be counted: RuntimeError: device lost" in caplog.text
    monkeypatch.setattr(memory, "held", fail)
    backward(model)
    optimizer.step()
    report.first_step(log, 1)  # type: ignore[arg-type]
    assert log.events == []
    assert report.after_running_out(tmp_path, 0) == {}
