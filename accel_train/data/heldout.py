"""Held-out batches for evaluation: each process reads its share, with the same number of forwards on all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from accel_train import rng
from accel_train.config import UsageError
from accel_train.data.datasets import (
    Batch,
    KindsDataset,
    MapDataset,
    collate_of,
    refuse_other_than_map_style,
    sample_of,
)
from accel_train.data.grouping.shape_groups import ShapeGroups, shape_groups
from accel_train.data.progress import Progress
from accel_train.data.sampler import BatchShard, Draw
from accel_train.rng import preserve_random_states, seed_generators


def heldout_batches(
    dataset: MapDataset,
    samples: int,
    batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield this rank's part of the first ``samples`` held-out samples.

    A batch has the dataset's fields, ``sample`` (B,) int64 and ``weight`` (B,). Weight 0 marks repeated samples that
    keep the ranks in step. All ranks get the same number of batches of ``batch_size``. No collectives.

    Samples of different shapes come in batches of one shape each, of at most ``batch_size``, as in training.

    Random draws in a sample are the same in every evaluation on any process: the global generators are seeded by its
    index and restored afterwards. Process 0 shows the progress of a long evaluation. Raises `UsageError` for data
    without a length and an index, and for no samples at all.
    """
    refuse_other_than_map_style(dataset)
    _refuse_empty(len(dataset), samples)
    groups = shape_groups(dataset, len(dataset))
    if groups is not None:
        shard = BatchShard(rank, world_size, batch_size)
        shares = _shares_by_shape(groups, min(samples, len(dataset)), shard)
    else:
        shares = _shares(len(dataset), samples, batch_size, rank, world_size)
    for _, index, weight in shares:
        yield _collate(dataset, index, weight, device)


def heldout_pairs(
    dataset: MapDataset,
    samples: int,
    batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Iterator[tuple[Batch, Batch]]:
    """Yield ``heldout_batches``, each with its shuffled partner.

    The partners are those of ``partners_of``, the same for every sharding.
    Refuses samples of different shapes, whose partners would not fit into one batch.
    """
    _refuse_empty(len(dataset), samples)
    if shape_groups(dataset, len(dataset)) is not None:
        raise ValueError("heldout_pairs: the held-out samples differ in shape, so their partners fit no batch")
    partners = torch.tensor(partners_of(kinds_of(dataset, samples)))
    for _, index, weight in _shares(len(dataset), samples, batch_size, rank, world_size):
        yield _collate(dataset, index, weight, device), _collate(dataset, partners[index], weight, device)


def kinds_of(dataset: MapDataset, samples: int) -> list[Hashable]:
    """List the kind of each of the first ``samples``. In a dataset without kinds, each sample has its own."""
    rows = range(min(samples, len(dataset)))
    if isinstance(dataset, KindsDataset):
        return [dataset.kind(index) for index in rows]
    return list(rows)


def partners_of(kinds: Sequence[Hashable]) -> list[int]:
    """Return the shuffled partner of each sample: a permutation, without a fixed point from two samples on.

    Where all kinds differ, the partner of sample i is ``(i + n // 2) % n``. Otherwise no sample has a partner of its
    own kind, unless one kind has more than half of the samples: then as few as possible have one.
    """
    count = len(kinds)
    sizes = Counter(kinds)  # in the order of first appearance
    place = {kind: number for number, kind in enumerate(sizes)}
    ordered = sorted(range(count), key=lambda index: place[kinds[index]])
    # Samples of a kind are adjacent here, so a shift by the size of the largest kind leaves every kind.
    largest = max(sizes.values())
    shift = count // 2
    if shift < largest < count:
        shift = largest
    partners = [0] * count
    for position, index in enumerate(ordered):
        partners[index] = ordered[(position + shift) % count]
    return partners


def pairs_of_a_kind(kinds: Sequence[Hashable]) -> int:
    """Count the samples whose shuffled partner is of their own kind."""
    return sum(kinds[index] == kinds[partner] for index, partner in enumerate(partners_of(kinds)))


def size_notices(asked: Mapping[str, int], size: int) -> list[str]:
    """Return a line on the options that ask for more than the ``size`` held-out samples, or none."""
    more = [f"--{name} {value:,}" for name, value in asked.items() if value > size]
    if not more:
        return []
    return [f"{' and '.join(more)}: {size:,} samples are held out, and all of them are used"]


def _refuse_empty(size: int, samples: int) -> None:
    if min(size, samples) < 1:
        raise UsageError(
            f"held-out set: it has {size} samples, an evaluation of {samples} is asked for, and at least 1 is needed; "
            "check its path, split and filters, or train without an evaluation (leave training.evaluate out)"
        )


def _shares(
    size: int,
    samples: int,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the number of samples over all ranks, and indices and weights (B,) of each of this rank's batches."""
    count = min(samples, size)
    global_batch_size = batch_size * world_size
    rounds = math.ceil(count / global_batch_size)
    with Progress("evaluation", count, enabled=rank == 0) as progress:
        for number in range(rounds):
            start = number * global_batch_size + rank * batch_size
            index = torch.arange(start, start + batch_size)  # (B,)
            # Indices beyond the last sample repeat it with weight 0.
            weight = (index < count).float()  # (B,)
            yield count, index.clamp(max=count - 1), weight
            progress.update(min(global_batch_size, count - progress.done))


def _shares_by_shape(
    groups: ShapeGroups, count: int, shard: BatchShard
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield `_shares` with one shape in each batch, as if all samples were one global batch."""
    draws = [Draw(sample, sample, sample, 1.0) for sample in range(count)]
    batches = groups.micro_batches(draws, shard)
    # Samples of this process alone: the batches of the others have other sizes.
    own = sum(len(batch) for batch, _ in batches)
    with Progress("evaluation", own, enabled=shard.rank == 0) as progress:
        for batch, _ in batches:
            index = torch.tensor([draw.sample for draw in batch])
            yield count, index, torch.tensor([draw.weight for draw in batch])
            progress.update(len(batch))


def _collate(
    dataset: MapDataset,
    index: torch.Tensor,
    weight: torch.Tensor,
    device: torch.device,
) -> Batch:
    # A fixed seed, so that evaluations of different runs compare.
    keys = rng.sample_keys(0, "heldout", 0, index).tolist()
    samples: list[Mapping[str, torch.Tensor]] = []
    with preserve_random_states():
        for sample, key in zip(index.tolist(), keys, strict=True):
            seed_generators(key)
            samples.append(sample_of(dataset, sample))
        batch = collate_of(dataset)(samples)
    batch = {**batch, "sample": index, "weight": weight}
    return {name: value.to(device) for name, value in batch.items()}
