"""The recording of CUDA's allocations, with stand-ins for torch's calls: when it begins and ends, what it leaves."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from accel_train.config import UsageError
from accel_train.data.loader import StepBatches
from accel_train.metrics.profiling import memory_history, profiler
from accel_train.metrics.profiling.options import ProfileConfig, StepRange
from accel_train.metrics.throughput import Throughput
from tests.metrics.test_profiling import setting
from tests.metrics.test_throughput import CPU

ON = ("record", "all", {"max_entries": 100_000, "stacks": "python"})
OFF = ("record", None, {})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch was asked for, in order. A snapshot holds what had been asked before it."""
    made: list[Any] = []

    def record(enabled: str | None = "all", **options: object) -> None:
        made.append(("record", enabled, options))

    def dump(path: str) -> None:
        Path(path).write_bytes(pickle.dumps(list(made)))
        made.append("dump")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(profiler, "_profiler", lambda _: profile(activities=[ProfilerActivity.CPU], acc_events=True))
    yield made
    assert not memory_history._is_recording


def steps(calls: list[Any], last: int) -> Generator[StepBatches]:
    for step in range(last):
        calls.append(step + 1)
        torch.ones(4, 4) @ torch.ones(4, 4)
        yield StepBatches(step, [], 0.0)


def run(calls: list[Any], directory: Path, last: int = 5, *, memory: bool = True) -> list[int]:
    given = setting(directory, records_memory=memory)
    passed = profiler.profiled(steps(calls, last), StepRange(1, 3), given, 0, CPU, Throughput(CPU).pause)
    return [batches.done for batches in passed]


def test_the_profiled_steps_are_recorded_and_written(calls: list[Any], tmp_path: Path) -> None:
    assert run(calls, tmp_path) == [1, 2, 3, 4, 5]
    assert calls == [1, ON, 2, 3, "dump", OFF, 4, 5]
    report = tmp_path / "report"
    assert pickle.loads((report / "memory_snapshot.pickle").read_bytes()) == [1, ON, 2, 3]
    assert not [path for path in report.iterdir() if path.name.startswith(".")]


def test_without_the_option_nothing_is_recorded(calls: list[Any], tmp_path: Path) -> None:
    run(calls, tmp_path, memory=False)
    assert calls == [1, 2, 3, 4, 5]
    assert not memory_history.write(tmp_path / "snapshot.pickle")
    assert not (tmp_path / "report" / "memory_snapshot.pickle").exists()


def test_a_run_that_ends_within_the_range_writes_none(calls: list[Any], tmp_path: Path) -> None:
    run(calls, tmp_path, last=2)
    assert calls == [1, ON, 2, OFF]
    assert not (tmp_path / "report").exists()


def test_a_full_disk_costs_the_snapshot_and_not_the_run(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dump(path: str) -> None:
        Path(path).write_bytes(b"a part of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    assert run(calls, tmp_path) == [1, 2, 3, 4, 5]
    assert "memory_snapshot.pickle could not be written" in caplog.text
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "profile.md",
        "profile_operators.txt",
        "profile_trace.json.gz",
    ]


def test_memory_needs_steps_and_cuda() -> None:
    with pytest.raises(UsageError, match=r"profile\.memory: true: has no effect without profile\.steps"):
        ProfileConfig(memory=True)
    ProfileConfig("1:2", memory=True).refuse_device("cuda")
    ProfileConfig("1:2").refuse_device("cpu")
    with pytest.raises(UsageError, match=r"of CUDA only, and this run is on mps"):
        ProfileConfig("1:2", memory=True).refuse_device("mps")
