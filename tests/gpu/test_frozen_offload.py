"""Frozen blocks brought from host memory to a GPU: the same bits, two blocks of memory, copies beside the kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_train.speed.memory.frozen_offload import offload_frozen_blocks

WIDTH, DEPTH, ROWS = 4096, 12, 8192
GPU = torch.device("cuda")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide.requires_grad_(False)
        self.narrow.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x).relu()) + self.adapter(x)


def step(model: nn.Module, number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(ROWS, WIDTH, device=GPU, dtype=torch.bfloat16, generator=torch.Generator(GPU).manual_seed(number))
    model.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_are_there_when_kernels_read_them() -> None:
    torch.manual_seed(0)
    plain = Chain().bfloat16()
    host = copy.deepcopy(plain)
    each = sum(p.nbytes for p in host.blocks[0].parameters() if not p.requires_grad)
    plain.to(GPU)
    expected = [step(plain, number) for number in range(3)]
    del plain
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    offload_frozen_blocks(host, GPU, "single", "off")
    assert torch.cuda.memory_allocated() - before == 2 * each
    host.to(GPU)
    for number, (loss, gradients) in enumerate(expected):
        # Copies must be ordered against work that is still queued.
        torch.cuda._sleep(50_000_000)
        found, grads = step(host, number)
        assert torch.equal(found, loss)
        assert all(torch.equal(one, other) for one, other in zip(grads, gradients, strict=True))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
