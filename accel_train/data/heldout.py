"""Held-out batches for evaluation: each process its share, the same number of forwards on all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import default_collate

from accel_train import rng
from accel_train.data.progress import Progress
from accel_train.data.reading import Batch, MapDataset, random_states_kept, seed_generators


def heldout_batches(
    dataset: MapDataset, samples: int, batch_size: int, rank: int, world_size: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's part of the first ``samples`` held-out samples.

    A batch has the dataset's fields, ``sample`` (B,) int64 and ``weight`` (B,): 0 for repetitions that keep the ranks
    in step. A sample that draws at random gives the same in every evaluation, on any process: the global generators
    are seeded by its index, and restored. No collectives; all ranks get equally many batches, all of ``batch_size``.
    Process 0 shows how far it is where it takes longer.
    """
    shares = _shares(len(dataset), samples, batch_size, rank, world_size)
    return (_collate(dataset, index, weight, device) for _, index, weight in shares)


def heldout_pairs(
    dataset: MapDataset, samples: int, batch_size: int, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[Batch, Batch]]:
    """``heldout_batches``, each beside its shuffled partner.

    The partner of sample i is sample ``(i + n // 2) % n``: a fixed derangement that does not depend on how the set
    is cut.
    """
    for count, index, weight in _shares(len(dataset), samples, batch_size, rank, world_size):
        partner = (index + count // 2) % count
        yield _collate(dataset, index, weight, device), _collate(dataset, partner, weight, device)


def _shares(
    size: int, samples: int, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Number of samples in all, and indices and weights (B,) of each of this rank's batches."""
    count = min(samples, size)
    rounds = -(-count // (batch_size * world_size))
    with Progress("evaluation", count, enabled=rank == 0) as progress:
        for number in range(rounds):
            start = (number * world_size + rank) * batch_size
            wanted = torch.arange(start, start + batch_size)
            yield count, wanted.clamp(max=count - 1), (wanted < count).float()
            progress.update(min(batch_size * world_size, count - progress.done))


def _collate(dataset: MapDataset, index: torch.Tensor, weight: torch.Tensor, device: torch.device) -> Batch:
    keys = rng.sample_keys(0, "heldout", 0, index).tolist()
    with random_states_kept():
        batch = default_collate([_read(dataset, i, key) for i, key in zip(index.tolist(), keys, strict=True)])
    return {k: v.to(device) for k, v in (batch | {"sample": index, "weight": weight}).items()}


def _read(dataset: MapDataset, sample: int, key: int) -> Batch:
    seed_generators(key)
    return dict(dataset[sample])
