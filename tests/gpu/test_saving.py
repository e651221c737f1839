"""A snapshot of tensors on the device: complete, although training continues while it travels to the host."""

from __future__ import annotations

import pytest
import torch

from accel_train.checkpoints import snapshot
from accel_train.checkpoints.background import Writer
from accel_train.store import planning


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_may_change_while_the_snapshot_travels() -> None:
    weights = {f"w{i:02d}": torch.randn(2_000_003 + i, device="cuda") for i in range(20)}  # odd sizes, several buckets
    averages = {name: torch.randn_like(tensor) for name, tensor in weights.items()}
    kinds = [
        planning.Collection("model", weights.__getitem__, "bf16"),
        planning.Collection("optimizer/exp_avg", averages.__getitem__, spread=True),
    ]
    planned = planning.plan(kinds, {name: tensor.numel() for name, tensor in weights.items()}, 1)
    assert len(list(snapshot._buckets(planned.tensors))) > 2
    expected = [{n: t.bfloat16().cpu() for n, t in weights.items()}, {n: t.cpu() for n, t in averages.items()}]
    writer = Writer(planned.sizes[0])
    taken = snapshot.Snapshot(planned, kinds, writer.buffer, None, 0)
    try:
        for _ in range(2):  # the second save reuses buffer and memory
            torch.cuda._sleep(100_000_000)  # the copies wait behind work that is still queued
            taken.take()
            assert not taken.ready(wait=False)
            taken.ready(wait=True)
            for (kind, name), view in taken._views.items():
                assert torch.equal(view, expected[kind][name].reshape(-1)), name
                view.zero_()
            for tensor in (*weights.values(), *averages.values()):
                tensor.add_(0)
            taken.take()
            for tensor in (*weights.values(), *averages.values()):
                tensor.fill_(float("nan"))  # the loop continues
            taken.ready(wait=True)
            for (kind, name), view in taken._views.items():
                assert torch.equal(view, expected[kind][name].reshape(-1)), name
            for name, tensor in weights.items():
                tensor.copy_(expected[0][name])
                averages[name].copy_(expected[1][name])
    finally:
        del taken, view
        writer.close()
