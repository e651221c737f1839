"""A snapshot of tensors on the device: complete, although training continues while it travels to the host."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from accel_train.checkpoints import snapshot
from accel_train.checkpoints.background import Writer
from accel_train.store import planning

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COUNT = 20


class Saved:
    """Weights, written in bf16, and averages, in fp32, with the snapshot of both."""

    def __init__(self) -> None:
        # Odd sizes, which start at every offset of a bucket.
        self.weights = {f"w{i:02d}": torch.randn(2_000_003 + i, device="cuda") for i in range(COUNT)}
        self.averages = {name: torch.randn_like(tensor) for name, tensor in self.weights.items()}
        kinds = [
            planning.Collection("model", self.weights.__getitem__, "bf16"),
            planning.Collection("optimizer/exp_avg", self.averages.__getitem__, spread=True),
        ]
        planned = planning.plan(kinds, {name: tensor.numel() for name, tensor in self.weights.items()}, 1)
        self.clones = list(snapshot._buckets(planned.tensors, snapshot.CLONE_BYTES))
        self.writer = Writer(planned.sizes[0])
        self.snapshot = snapshot.Snapshot(planned, kinds, self.writer.buffer, None, 0)
        self.expected = [
            {name: t.bfloat16().cpu() for name, t in self.weights.items()},
            {name: t.cpu() for name, t in self.averages.items()},
        ]

    def change(self) -> None:
        """As the loop does once it continues."""
        for tensor in (*self.weights.values(), *self.averages.values()):
            tensor.fill_(float("nan"))

    def restore(self) -> None:
        for name, tensor in self.weights.items():
            tensor.copy_(self.expected[0][name])
            self.averages[name].copy_(self.expected[1][name])

    def differing(self) -> list[str]:
        """What the buffer holds in place of the expected values; and clear it."""
        found: list[str] = []
        for (kind, name), view in self.snapshot._views.items():
            if not torch.equal(view, self.expected[kind][name].reshape(-1)):
                found.append(f"{kind} {name}")
            view.zero_()
        return found


@contextmanager
def saved(monkeypatch: pytest.MonkeyPatch) -> Generator[Saved]:
    monkeypatch.setattr(snapshot, "CLONE_BYTES", 64 << 20)
    state = Saved()
    writer = state.writer
    assert len(state.clones) > 2
    try:
        yield state
    finally:
        del state.snapshot
        writer.close()


@pytest.mark.gpu
@needs_gpu
def test_tensors_may_change_while_the_snapshot_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    with saved(monkeypatch) as state:
        # The second save reuses buffer and memory.
        for _ in range(2):
            # The copies wait behind work that is still queued.
            torch.cuda._sleep(100_000_000)
            state.snapshot.take()
            assert not state.snapshot.ready(wait=False)
            state.change()
            state.snapshot.ready(wait=True)
            assert state.differing() == []
            state.restore()


@pytest.mark.gpu
@needs_gpu
def test_without_room_on_the_device_the_rest_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with saved(monkeypatch) as state:
        torch.cuda.empty_cache()
        empty, made = torch.empty, []

        def little_room(size: int, **options: object) -> Tensor:
            made.append(size)
            if len(made) > 1:
                raise torch.OutOfMemoryError("no room")
            return empty(size, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(torch, "empty", little_room)
        torch.cuda._sleep(100_000_000)
        state.snapshot.take()
        monkeypatch.undo()
        state.change()
        state.snapshot.ready(wait=True)
        assert len(made) == len(state.clones)
        assert state.differing() == []
