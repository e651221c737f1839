"""Fused AdamW on a GPU: torch's bits, and no wait for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def test_the_bits_are_those_of_torch_without_a_wait() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((300, 40), (7,), (64, 64), ())]
    theirs = copy.deepcopy(ours)
    fused = FusedAdamW([{"params": ours, "weight_decay": 0.1}], **SETTINGS)  # type: ignore[arg-type]
    reference = torch.optim.AdamW(theirs, **SETTINGS, weight_decay=0.1, fused=True)  # type: ignore[arg-type]
    scales = torch.tensor([1.0, 1.0, 3.0, 1.0], device="cuda")
    found = torch.tensor([0.0, 1.0, 0.0, 0.0], device="cuda")
    for number in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in (fused, reference):
            optimizer.grad_scale = scales[number].clone()  # type: ignore[union-attr]
            optimizer.found_inf = found[number].clone()  # type: ignore[union-attr]
        # The first step makes the state, which torch fills on the device as well.
        torch.cuda.set_sync_debug_mode("error")
        try:
            fused.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(value, reference.state[other][name]) for name, value in fused.state[one].items())
