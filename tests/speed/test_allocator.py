"""Options of torch's allocator: obeyed on a GPU, by stand-ins for its calls, and refused elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train import simulated
from accel_train.config import UsageError
from accel_train.speed.memory import fitting
from accel_train.speed.memory.allocator import VARIABLES, apply_memory
from accel_train.speed.options import MemoryConfig

CUDA = torch.device("cuda")
"""Without an index, as Accelerate gives it to a run of one process."""
CURRENT = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's bindings were asked for. Its Python functions above them are the real ones, with their checks."""
    found: list[Any] = []
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CURRENT)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * 2**30))
    bindings = {
        "_cuda_setMemoryFraction": lambda share, index: found.append((share, index)),
        "_accelerator_setAllocatorSettings": found.append,
    }
    for name, call in bindings.items():
        monkeypatch.setattr(torch._C, name, call, raising=False)
    return found


def test_a_gpu_obeys(calls: list[Any]) -> None:
    assert apply_memory(MemoryConfig(), CUDA) == []
    assert calls == []
    (notice,) = apply_memory(MemoryConfig(fraction=0.25), CUDA)
    assert notice == "memory.fraction: 0.25: 2.00 GiB of cuda"
    assert calls == [(0.25, CURRENT)]
    apply_memory(MemoryConfig(fraction=0.75), torch.device("cuda", 1))
    assert calls.pop() == (0.75, 1)
    assert len(apply_memory(MemoryConfig(0.5, expandable_segments=True), CUDA)) == 2
    # Segments first: a limit concerns what is allocated from then on.
    assert calls[1:] == ["expandable_segments:True", (0.5, CURRENT)]


def test_settings_of_the_environment_stay(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch resets what a change does not name."""
    config = MemoryConfig(expandable_segments=True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128, roundup_power2_divisions:[256:1,512:2]")
    apply_memory(config, CUDA)
    assert calls == ["max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2],expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    apply_memory(config, CUDA)
    assert calls[1:] == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments: False,max_split_size_mb:128")
    with pytest.raises(
        UsageError, match=r"memory\.expandable_segments: true, but PYTORCH_ALLOC_CONF is 'expandable_seg"
    ):
        apply_memory(config, CUDA)


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
    asked: list[int] = []

    def share(index: int) -> float:
        asked.append(index)
        return shares.pop(0)

    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", share, raising=False)
    size = fitting.Size(parameters=2**28, trained=2**28, weight_bytes=2**30)

    def check() -> None:
        fitting.refuse_what_cannot_fit(
            size, fitting.Kept("adamw", has_ema=True), sharded=False, world_size=1, device=CUDA
        )

    check()  # 5 of 8 GiB
    with pytest.raises(UsageError, match=r"5\.0 GiB .* but cuda has 2\.0 GiB"):
        check()
    assert asked == [CURRENT, CURRENT]
