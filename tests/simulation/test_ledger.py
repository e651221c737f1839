"""The ledger against sums by hand, on real tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_train.simulation import ledger as ledgers
from accel_train.simulation.ledger import Ledger
from accel_train.simulation.places import Places
from accel_train.simulation.tensors.fake_tensors import FakeWhereNeeded
from accel_train.simulation.work import Flops

MIB = 2**20


def quarter() -> Tensor:
    return torch.empty(MIB // 16, dtype=torch.float32)


def ledger_of(place: str = "forward") -> Ledger:
    return Ledger(lambda: (place, f"{place} of it"), lambda *_: None)


def test_the_peak_is_the_largest_sum_of_what_lives_at_once() -> None:
    ledger = ledger_of()
    with ledger.recording():
        first = quarter()
        second = quarter()
        view = second[1:]
        del first, second
        third = quarter()
    assert ledger.peak().total == MIB // 2
    assert ledger.peak().by_category["activations"] == MIB // 2
    # The view still holds all of the second.
    held = [dict(parts) for _, parts in ledger.replay()]
    assert sum(held[-1].values()) == MIB // 2
    del view, third


def test_a_category_may_be_known_after_the_peak() -> None:
    ledger = ledger_of("backward")
    with ledger.recording():
        made = quarter()
        temporary = made * 2
        del temporary
        assert ledger.mark([made, made[:2]], ledgers.GRADIENTS) == MIB // 4
    parts = ledger.peak().by_category
    assert (parts["gradients"], parts["temporaries"]) == (MIB // 4, MIB // 4)


def test_memory_refilled_without_an_operator_counts_as_gathered() -> None:
    ledger = ledger_of()
    before = torch.UntypedStorage.resize_
    with ledger.recording():
        made = quarter()
        storage = made.untyped_storage()
        storage.resize_(0)
        storage.resize_(MIB)
        assert ledger.peak().by_category["gathered weights"] == MIB
    assert torch.UntypedStorage.resize_ is before


def test_shapes_without_memory_are_not_counted() -> None:
    """DTensor computes them for whole tensors, in a mode of its own."""
    ledger = ledger_of()
    with ledger.recording():
        shape = torch.empty(MIB, device="meta")
        with FakeTensorMode():
            fake = torch.empty(MIB) * 2
        made = quarter()
    assert ledger.peak().total == MIB // 4
    del shape, fake, made


def test_a_block_holds_a_tensor_of_four_bytes() -> None:
    ledger = ledger_of()
    with ledger.recording():
        made = [torch.ones(()) for _ in range(3)]
    assert ledger.peak().total == 12
    assert ledger.peak_in_blocks() == 3 * 512
    del made


def test_the_place_of_a_peak_is_the_module_that_computes() -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 1))
    places = Places(model)
    ledger = Ledger(places.now, lambda *_: None)
    with places.following(), ledger.recording():
        model(torch.ones(64, 64)).sum().backward()
    # GELU's output lies beside its input, and in the backward a third of their size.
    assert ledger.peak().place == "backward of 2"
    visited = {event.place for event in ledger.events}
    assert {"forward of 0", "forward of 1", "forward of the loss", "backward of 0"} <= visited


def test_operations_are_two_for_each_weight_and_sample_and_four_more_in_the_backward() -> None:
    flops = Flops()
    ledger = Ledger(lambda: ("forward", ""), flops.watch)
    layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    with ledger.recording():
        layers(torch.ones(10, 16)).sum().backward()
    weights = 16 * 32 + 32 * 8
    # The input needs no gradient.
    assert flops.total == 6 * 10 * weights - 2 * 10 * 16 * 32


def test_attention_on_the_cpu_is_counted() -> None:
    flops = Flops()
    ledger = Ledger(lambda: ("forward", ""), flops.watch)
    query = torch.ones(2, 4, 8, 16, requires_grad=True)
    with ledger.recording():
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    product = 2 * 2 * 4 * 8 * 8 * 16
    # Two products forward; five backward, because flash attention computes the scores again.
    assert flops.total == 7 * product


def test_only_what_meets_a_fake_tensor_is_fake() -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        weight = torch.ones(4)
    with FakeWhereNeeded(fake) as mode:
        number = torch.arange(3).sum()
        assert int(number) == 3
        assert type(weight * 2).__name__ == "FakeTensor"
        assert type(torch.empty(MIB)).__name__ == "FakeTensor"
        mode.computing = 1
        assert type(torch.zeros(2)).__name__ == "FakeTensor"
