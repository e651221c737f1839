"""Options of torch's allocator: obeyed on a GPU, by stand-ins for its calls, and refused elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train import simulated
from accel_train.config import UsageError
from accel_train.speed.memory import fitting
from accel_train.speed.memory.allocator import apply_memory
from accel_train.speed.options import MemoryConfig

CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch was asked for. Its function for the fraction takes a float alone, as the real one does."""
    found: list[Any] = []

    def fraction(share: float, device: torch.device) -> None:
        assert type(share) is float
        found.append((share, device))

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * 2**30))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    return found


def test_a_gpu_obeys(calls: list[Any]) -> None:
    assert apply_memory(MemoryConfig(), CUDA) == []
    assert calls == []
    (notice,) = apply_memory(MemoryConfig(fraction=0.25), CUDA)
    assert notice == "memory.fraction: 0.25: 2.00 GiB of cuda:0"
    assert calls == [(0.25, CUDA)]
    assert len(apply_memory(MemoryConfig(0.5, expandable_segments=True), CUDA)) == 2
    # Segments first: a limit concerns what is allocated from then on.
    assert calls[1:] == ["expandable_segments:True", (0.5, CUDA)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MemoryConfig(fraction=0.5), r"memory\.fraction: 0\.5: a GPU is required, .* this run is on cpu; leave it out"),
        (MemoryConfig(expandable_segments=True), r"memory\.expandable_segments: true: a GPU is required"),
    ],
)
def test_a_cpu_refuses(config: MemoryConfig, message: str, calls: list[Any]) -> None:
    with pytest.raises(UsageError, match=message):
        apply_memory(config, torch.device("cpu"))
    assert calls == []


def test_a_simulation_needs_no_device(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "active", lambda: object())
    assert apply_memory(MemoryConfig(0.5, expandable_segments=True), CUDA) == []
    assert calls == []


def test_what_cannot_fit_into_the_share_is_refused(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [1.0, 0.25]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: shares.pop(0))
    size = fitting.Size(parameters=2**28, trained=2**28, weight_bytes=2**30)

    def check() -> None:
        fitting.refuse_what_cannot_fit(
            size, "adamw", training=True, has_average=True, sharded=False, world_size=1, device=CUDA
        )

    check()  # 5 of 8 GiB
    with pytest.raises(UsageError, match=r"5\.0 GiB .* and cuda:0 has 2\.0 GiB"):
        check()
