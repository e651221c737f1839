"""Options of torch's allocator on a GPU."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from accel_train.speed.memory import fitting
from accel_train.speed.memory.allocator import apply_memory
from accel_train.speed.options import MemoryConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device() -> Generator[torch.device]:
    """The device without an index, as a run of one process has it, given back without a limit."""
    torch.cuda.empty_cache()
    yield torch.device("cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)
    bindings: Any = torch._C
    bindings._accelerator_setAllocatorSettings("expandable_segments:False")
    torch.cuda.empty_cache()


def test_more_than_the_share_is_out_of_memory(device: torch.device) -> None:
    apply_memory(MemoryConfig(fraction=0.05), device)
    allowed = int(0.05 * torch.cuda.get_device_properties(device).total_memory)
    # Other tests of this process may have left something.
    left = allowed - torch.cuda.memory_reserved(device)
    assert torch.empty(int(0.8 * left), dtype=torch.uint8, device=device).is_cuda
    assert fitting.device_bytes(device) == pytest.approx(allowed, rel=1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(1.1 * allowed), dtype=torch.uint8, device=device)


def test_segments_are_extended(device: torch.device) -> None:
    apply_memory(MemoryConfig(expandable_segments=True), device)
    kept = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    segments = torch.cuda.memory_snapshot()
    found = [each for each in segments if each["address"] <= kept.data_ptr() < each["address"] + each["total_size"]]
    assert [each["is_expandable"] for each in found] == [True]
