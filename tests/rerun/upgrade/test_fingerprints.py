"""Hashes of tensors: equal for equal bits, however they lie in memory, and another one for every other bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel_train.rerun.upgrade import fingerprints

TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
)


def hashed(tensor: Tensor) -> int:
    found = fingerprints.fingerprint(tensor)
    assert found is not None
    return int(found)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.empty((), dtype=dtype).element_size()
    width = 1 if dtype == torch.bool else 8 * size
    raw = torch.randint(0, 2 if dtype == torch.bool else 128, (6, size), dtype=torch.uint8, generator=generator)
    seen = {hashed(raw.view(dtype))}
    for bit in range(width):
        changed = raw.clone()
        changed[3, bit // 8] ^= 1 << bit % 8
        seen.add(hashed(changed.view(dtype)))
    assert len(seen) == 1 + width


def test_values_are_told_apart_where_they_are_equal_or_change_places() -> None:
    assert hashed(torch.tensor([0.0])) != hashed(torch.tensor([-0.0]))
    assert hashed(torch.tensor([1.0, 2.0])) != hashed(torch.tensor([2.0, 1.0]))
    assert hashed(torch.tensor([0.0])) != hashed(torch.tensor([0.0, 0.0]))
    # One ulp up and one down, which a sum of bits would not show.
    a = torch.tensor([1.5, 2.5])
    b = torch.stack([a[0].nextafter(torch.tensor(9.0)), a[1].nextafter(torch.tensor(0.0))])
    assert hashed(a) != hashed(b)


def test_a_number_and_its_complement_are_told_apart() -> None:
    # The mixing begins at 0 for the first of these in the first place, and at -1 for the second.
    one, two = 7046029254386353131, 7046029254386353130
    assert hashed(torch.tensor([one])) != hashed(torch.tensor([two]))


def test_neither_strides_nor_the_chunks_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    wanted = hashed(tensor)
    assert hashed(tensor.T.contiguous().T) == wanted
    assert hashed(tensor.T) != wanted
    assert hashed(tensor.to(torch.complex64).conj().real) == wanted
    monkeypatch.setattr(fingerprints, "CHUNK", 7)
    assert hashed(tensor) == wanted
    assert hashed(tensor[:0]) == 0


def test_what_has_no_plain_memory_has_no_hash() -> None:
    assert fingerprints.fingerprint(torch.ones(3).to_sparse()) is None
    assert fingerprints.fingerprint(torch.ones(3, device="meta")) is None
