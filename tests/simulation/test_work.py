"""The work of operators by hand, on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from accel_train.cost_model.work import Work
from accel_train.simulation import collectives
from accel_train.simulation.collectives import Collective
from accel_train.simulation.ledger import HOST, Ledger
from accel_train.simulation.work import WorkCounter

VALUES = 1024
SIZE = 4 * VALUES


def work_of(compute: Callable[[], object]) -> Work:
    counter = WorkCounter()
    ledger = Ledger(lambda: ("forward", ""), counter.watch)
    with ledger.recording():
        compute()
    return counter.work()


def test_work_in_host_memory_is_apart() -> None:
    """An optimizer on the host, and copies to it and from it in the type in which they cross."""
    host, device = torch.ones(VALUES), torch.ones(VALUES)
    narrow = torch.ones(VALUES, dtype=torch.bfloat16)
    counter = WorkCounter(lambda tensor: ledger.is_on_host(tensor))
    ledger = Ledger(lambda: ("forward", ""), counter.watch)
    with ledger.recording():
        ledger.mark([host], HOST)
        host.mul_(2.0)
        host.copy_(device)
        narrow.copy_(host)
        device.mul_(torch.tensor(2.0))
        host.mul_(torch.tensor(2.0))
        host.view(2, -1)
    # A number on another memory makes no copy.
    device_alone = Work(moved=2 * SIZE + 4, kernels=1)
    assert counter.work() == Work(on_host=4 * SIZE + 4, copied=SIZE + SIZE // 2, copies=2) + device_alone


def values() -> Tensor:
    return torch.ones(VALUES)


@pytest.mark.parametrize(
    ("compute", "moved"),
    [
        (lambda a, b: a + b, 3 * SIZE),
        (lambda a, b: a.add_(b), 3 * SIZE),
        (lambda a, b: a.copy_(b), 2 * SIZE),
        (lambda a, b: a.zero_(), SIZE),
        (lambda a, b: torch.zeros_like(a), SIZE),
        (lambda a, b: a.sum(), SIZE + 4),
        # One number is read, however often it is used.
        (lambda a, b: a * b.new_ones(1).expand(VALUES), 2 * SIZE + 4 + 4),
        (lambda a, b: a.view(2, -1).t()[1:].detach(), 0),
        (lambda a, b: torch.empty_like(a), 0),
    ],
)
def test_an_operator_moves_what_it_reads_and_writes(compute: Callable[[Tensor, Tensor], object], moved: int) -> None:
    a, b = values(), values()
    found = work_of(lambda: compute(a, b))
    assert found == Work(moved=moved, kernels=found.kernels)
    assert bool(found.kernels) == bool(moved)


def test_collectives_are_apart_by_kind() -> None:
    """A ring of four sends three quarters, and twice that to reduce. A broadcast is counted with the all-reduces."""
    kinds = {"all-reduce": 400, "all-gather": 800, "reduce-scatter": 1600, "broadcast": 40}
    calls = [Collective(kind, 4, size) for kind, size in kinds.items()]
    found = WorkCounter().work([*calls, calls[1]])
    assert (found.sent, found.collectives) == (600 + 2 * 600 + 1200 + 30, 5)
    assert found.by_kind() == {"all-gather": (2, 1200), "reduce-scatter": (1, 1200), "all-reduce": (2, 630)}
    assert found.times(3).by_kind() == {"all-gather": (6, 3600), "reduce-scatter": (3, 3600), "all-reduce": (6, 1890)}
    assert replace(found, moved=5).computed(3) == replace(found, moved=15)


def test_products_and_attention_are_apart() -> None:
    layer = nn.Linear(16, 32, bias=False)
    query = torch.ones(2, 4, 8, 16)
    found = work_of(lambda: layer(torch.ones(10, 16)))
    assert (found.products, found.attention) == (2 * 10 * 16 * 32, 0)
    found = work_of(lambda: nn.functional.scaled_dot_product_attention(query, query, query))
    assert (found.products, found.attention) == (0, 2 * 2 * 2 * 4 * 8 * 8 * 16)


def test_a_fused_step_reads_and_writes_its_states() -> None:
    weight = nn.Parameter(values())
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = values()
    optimizer.step()
    found = work_of(optimizer.step)
    # Weight, gradient and two moments, each read and written; torch says that it may write gradients. Step counters.
    assert found.moved == pytest.approx(8 * SIZE, rel=0.01)


def test_work_adds_up() -> None:
    assert Work(1, 2, 3, 4, 5, 6) + Work(1, 1, 1, 1, 1, 1).times(2) == Work(3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("all-gather", "allgather_into_tensor_coalesced_"), ("reduce-scatter", "reduce_scatter_tensor_coalesced_")],
)
def test_all_tensors_of_one_call_are_counted(kind: str, name: str) -> None:
    """Two of 400 and 80 bytes over four processes, each beside the shard of one of them."""
    tensors = [torch.zeros(100), torch.zeros(20), torch.zeros(25), torch.zeros(5)]
    assert collectives._whole(kind, name, tensors, 4) == 480  # pyright: ignore[reportPrivateUsage]
