"""Inputs of checkpointed blocks in pinned memory: the same bits, their memory free, copies beside the kernels."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.memory.activation_offload import InputOffload, input_offload
from accel_train.speed.options import ActivationCheckpointingConfig
from tests.gpu.test_overlap import hidden_share, spans

WIDTH, DEPTH, ROWS = 4096, 12, 8192
GPU = torch.device("cuda")
OFFLOAD = ActivationCheckpointingConfig("full", offload=True)
INPUT_BYTES = 2 * ROWS * WIDTH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    """2.2 TFLOP a forward, which in bf16 take a GPU longer than the copy of the input, 64 MiB, over PCIe."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, streams: list[Tensor], *, vector: Tensor) -> list[Tensor]:
        (x,) = streams
        return [x + self.narrow(self.wide(x * vector).relu())]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        vector = x.tanh()
        streams = [x * 1]
        for block in self.blocks:
            streams = block(streams, vector=vector)
        return streams[0]


def models() -> tuple[Chain, Chain]:
    """The same model with its inputs on the device and in host memory."""
    torch.manual_seed(0)
    plain = Chain().to(GPU, torch.bfloat16)
    host = copy.deepcopy(plain)
    apply_activation_checkpointing(plain, ActivationCheckpointingConfig("full"))
    apply_activation_checkpointing(host, OFFLOAD, offload_of_the_option())
    return plain, host


def offload_of_the_option() -> InputOffload:
    offload = input_offload(OFFLOAD, GPU, "off")
    assert offload is not None
    return offload


def step(model: nn.Module, number: int, rows: int = ROWS) -> Tensor:
    x = torch.randn(rows, WIDTH, device=GPU, dtype=torch.bfloat16, generator=torch.Generator(GPU).manual_seed(number))
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def test_the_bits_are_those_without_offload() -> None:
    plain, host = models()
    for number in range(4):
        losses: list[Tensor] = []
        for model in (plain, host):
            model.zero_grad()
            # Copies must be ordered against work that is still queued.
            torch.cuda._sleep(50_000_000)
            # Two micro-batches of different lengths, so that pieces and freed memory change hands.
            losses.append(step(model, number) + step(model, number + 10, ROWS - 1000 * number))
        assert torch.equal(*losses)
        pairs = zip(plain.parameters(), host.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs if one.grad is not None)


def test_the_memory_of_all_inputs_but_two_is_free() -> None:
    plain, host = models()
    kept: list[int] = []
    peaks: list[int] = []
    for model in (plain, host):
        step(model, 0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        x = torch.randn(ROWS, WIDTH, device=GPU, dtype=torch.bfloat16)
        output = model(x)
        kept.append(torch.cuda.memory_allocated() - before)
        # Not the one of the other model, which would be there before the next forward.
        del output, x
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(model, 1)
        peaks.append(torch.cuda.max_memory_allocated())
        # Its gradients would be there beside those of the other model.
        model.zero_grad()
    saved = (DEPTH - 2) * INPUT_BYTES
    assert kept[0] - kept[1] == pytest.approx(saved, rel=0.03)
    assert peaks[0] - peaks[1] == pytest.approx(saved, rel=0.1)


def test_the_host_waits_for_nothing() -> None:
    _, host = models()
    step(host, 0)
    pieces = torch.cuda.host_memory_stats()["num_host_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            step(host, number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Pinned memory of the first step is used again, although the host is ahead of the device.
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pieces


def test_copies_run_beside_the_kernels(tmp_path: Path) -> None:
    _, host = models()
    step(host, 0)
    trace = tmp_path / "trace.json"
    with torch.profiler.profile(acc_events=True) as profile:
        step(host, 1)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(trace))
    kernels = spans(trace, "kernel", "")
    for direction, blocks in (("DtoH", DEPTH - 1), ("HtoD", DEPTH - 2)):
        copies = spans(trace, "gpu_memcpy", direction)
        assert len(copies) >= blocks * (INPUT_BYTES // (4 << 20))
        assert hidden_share(copies, kernels) > 0.8
