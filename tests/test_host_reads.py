"""What ``HostReads`` sees beside the reads of single numbers, which ``test_benchmarks.py`` has."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.reads import HostReads


def test_a_shape_that_depends_on_values_is_counted_with_its_place() -> None:
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, True])
    with HostReads() as reads:
        x.clone()[torch.tensor([0, 2])] = torch.zeros(2)
        x.clone()[mask] = 0.0  # masked_fill
        torch.where(mask, x, 0.0)
        assert not reads.counts
        mask.nonzero()
        x[mask]
        torch.masked_select(x, mask)
        x.clone()[mask] = torch.zeros(3)
        x.unique()
        torch.equal(x, x)
    assert reads.counts == {"nonzero": 1, "mask": 2, "masked_select": 1, "unique": 1, "equal": 1}
    assert len(reads.places) == 6
    assert all(f" {Path(__file__).parent.name}/{Path(__file__).name}:" in place for place in reads.places)


def test_what_is_meant_for_the_host_can_be_left_out() -> None:
    x = torch.arange(4.0)
    with HostReads() as reads:
        with reads.paused():
            x.tolist()
            x.nonzero()
        x.tolist()
    assert reads.counts == {"tolist": 1}
