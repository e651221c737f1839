"""Held-out batches for evaluation: each process its share, the same number of forwards on all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import default_collate

from accel_train.data.progress import Progress
from accel_train.data.reading import Batch, MapDataset


def heldout_batches(
    dataset: MapDataset, samples: int, batch_size: int, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[Batch, Batch]]:
    """This rank's part of the first ``samples`` held-out samples, each batch beside its shuffled partner.

    The partner of sample i is sample ``(i + n // 2) % n``: a fixed derangement that does not depend on how the set
    is cut. A batch has ``sample`` (B,) int64 and ``weight`` (B,), 0 for repetitions that keep the ranks in step.
    No collectives; all ranks get equally many batches. Process 0 shows how far it is where it takes longer.
    """
    count = min(samples, len(dataset))
    rounds = -(-count // (batch_size * world_size))
    with Progress("evaluation", count, enabled=rank == 0) as progress:
        for number in range(rounds):
            start = (number * world_size + rank) * batch_size
            wanted = torch.arange(start, start + batch_size)
            index = wanted.clamp(max=count - 1)
            weight = (wanted < count).float()
            yield (
                _collate(dataset, index, weight, device),
                _collate(dataset, (index + count // 2) % count, weight, device),
            )
            progress.update(min(batch_size * world_size, count - progress.done))


def _collate(dataset: MapDataset, index: torch.Tensor, weight: torch.Tensor, device: torch.device) -> Batch:
    batch = default_collate([dataset[i] for i in index.tolist()])
    return {k: v.to(device) for k, v in (batch | {"sample": index, "weight": weight}).items()}
