"""AdamW on the host beside torch's on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_train.training.optimizer_classes.offload import HostAdamW


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_are_back_before_the_next_forward() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24))).cuda()  # 400 MB: several buckets
    theirs = copy.deepcopy(ours)
    before = copy.deepcopy(ours)
    host = HostAdamW([{"params": list(ours.parameters()), "lr": 1e-3}], betas=(0.9, 0.95), eps=1e-8)
    device = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(4):
        x = torch.randn(64, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for model, optimizer in ((ours, host), (theirs, device)):
            torch.cuda._sleep(50_000_000)  # copies must be ordered against work that is still queued
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(list(host.state)) == 48
    for one, other, first in zip(ours.parameters(), theirs.parameters(), before.parameters(), strict=True):
        moved = (other - first).norm()
        assert moved > 0
        assert (one - other).norm() < 1e-3 * moved  # single values may differ: Adam divides tiny by tiny
