"""Samples of several shapes: micro-batches of one shape each, and an order that keeps shapes together.

The sampler decides the samples of a step. They are dealt to processes by shape, so a step has as many micro-batches as
its shapes need, equally many on every process. The gradient is divided by the true weight of the global batch, so only
the order of its sums changes. A shape of fewer samples than a micro-batch gives a smaller micro-batch: no sample is
dropped, repeated or given another shape.

`GroupOrder` draws some samples of one shape after another, so that few micro-batches are small.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train import rng
from accel_train.config import UsageError
from accel_train.data.datasets import ShapedDataset

if TYPE_CHECKING:
    from accel_train.data.sampler import BatchShard, Draw, Sampler

PROBED_STEPS = 64
"""First steps of the experiment, counted for the log."""
Ints = NDArray[np.int64]
Shape = tuple[int, ...]


class ShapeGroups(NamedTuple):
    """Micro-batches of one shape each, the same division on every process."""

    shape: Callable[[int], Shape]

    def micro_batches(self, draws: Sequence[Draw], shard: BatchShard) -> list[tuple[list[Draw], None]]:
        """Return one process's micro-batches of the global batch `draws`, equally many on every process.

        The largest come first, and the k-th ones of all processes are of about the same size. If there are more places
        than samples, the cheapest micro-batch is repeated with weight 0.
        """
        by_shape: dict[Shape, list[Draw]] = {}
        for draw in draws:
            by_shape.setdefault(self.shape(draw.sample), []).append(draw)
        groups = list(by_shape.values())
        sizes = [len(group) for group in groups]
        costs = [math.prod(shape) for shape in by_shape]
        # Decided from the global batch alone: every process comes to the same division without communication.
        fewest = [math.ceil(size / shard.micro_batch_size) for size in sizes]
        rounds = math.ceil(sum(fewest) / shard.world_size)
        # Every process needs equally many forwards, because each is a collective under FSDP2 and ZeRO-3.
        places = rounds * shard.world_size
        parts = _spread(fewest, sizes, costs, places)
        pieces: list[tuple[int, list[Draw]]] = []
        for group, count, cost in zip(groups, parts, costs, strict=True):
            pieces += [(cost * len(piece), piece) for piece in _cut(group, count)]
        # Stable: pieces of one cost stay in the order of positions.
        pieces.sort(key=lambda piece: -piece[0])
        _, cheapest = pieces[-1]
        padding = [draw._replace(weight=0.0) for draw in cheapest]
        pieces += [(0, padding)] * (places - len(pieces))
        own = pieces[shard.rank :: shard.world_size]
        return [(piece, None) for _, piece in own]


def _cut(group: list[Draw], count: int) -> list[list[Draw]]:
    """Cut a group into `count` pieces, equal up to one sample."""
    bounds = [len(group) * part // count for part in range(count + 1)]
    return [group[start:stop] for start, stop in itertools.pairwise(bounds)]


def _spread(parts: Sequence[int], sizes: Sequence[int], costs: Sequence[int], places: int) -> list[int]:
    """Return the number of pieces of each group: at least `parts`, at most `sizes`, and `places` in all if possible.

    Each further piece goes to the group whose largest piece costs most.
    """
    counts = list(parts)
    waiting: list[tuple[int, int]] = []

    def put(group: int) -> None:
        # A group of single samples cannot be divided.
        if counts[group] >= sizes[group]:
            return
        largest_piece = math.ceil(sizes[group] / counts[group])
        # heapq pops the smallest first, so the cost is negated.
        heapq.heappush(waiting, (-costs[group] * largest_piece, group))

    for group in range(len(counts)):
        put(group)
    for _ in range(places - sum(counts)):
        if not waiting:
            break
        _, group = heapq.heappop(waiting)
        counts[group] += 1
        put(group)
    return counts


def shape_groups(dataset: object, samples: int) -> ShapeGroups | None:
    """Return the groups of a dataset whose samples differ in shape, None for any other. Asks for every shape once."""
    if not isinstance(dataset, ShapedDataset):
        return None
    shapes = {dataset.sample_shape(index) for index in range(samples)}
    return ShapeGroups(dataset.sample_shape) if len(shapes) > 1 else None


def describe(groups: ShapeGroups, sampler: Sampler, shard: BatchShard) -> str:
    """Return a notice for the log about the micro-batches of the first steps."""
    shapes = len({groups.shape(index) for index in range(sampler.dataset_size)})
    steps = [groups.micro_batches(sampler.draws(step), shard) for step in range(PROBED_STEPS)]
    forwards = sum(len(step) for step in steps) / PROBED_STEPS
    samples_per_process = math.ceil(sampler.global_batch_size / shard.world_size)
    full = math.ceil(samples_per_process / shard.micro_batch_size)
    return (
        f"{shapes} sample shapes: {forwards:.1f} micro-batches per step and process, {full} if all were of one shape; "
        f"a shape with fewer samples than micro_batch_size {shard.micro_batch_size} gives smaller ones"
    )


# Compared and hashed by identity: the cache below is keyed by this object.
@dataclass(frozen=True, eq=False)
class GroupOrder:
    """Keyed order of an epoch with samples of one shape in groups, for `StepSampler.blocks`.

    Each epoch has every sample once. The samples of each shape are permuted and cut into groups, and the groups are
    permuted. The rest of each shape, fewer than a group, goes to the beginning and the end of the epoch. The number at
    the beginning makes groups start at multiples of their size in the endless order of all epochs.
    """

    shapes: Sequence[Shape]
    """Shape of each sample."""
    group: int
    """Samples of one shape drawn one after another. 1 mixes all samples."""
    numbers: Ints = field(init=False, repr=False)
    """Index of each sample's shape."""

    def __post_init__(self) -> None:
        if self.group < 1:
            raise UsageError(f"group={self.group}: a group must have at least 1 sample. Raise it.")
        different = dict.fromkeys(self.shapes)
        number_of = {shape: number for number, shape in enumerate(different)}
        numbers = [number_of[shape] for shape in self.shapes]
        # The dataclass is frozen.
        object.__setattr__(self, "numbers", np.array(numbers, np.int64))

    def __len__(self) -> int:
        return len(self.shapes)

    def rows(self, seed: int, epoch: int, offset: int, count: int) -> Sequence[int]:
        """Return the samples of an epoch from place `offset` on: `count`, or fewer at its end."""
        return _epoch(self, seed, epoch)[offset : offset + count].tolist()


@lru_cache(maxsize=4)
def _epoch(order: GroupOrder, seed: int, epoch: int) -> Ints:
    """Return the order of all samples in an epoch."""
    size = len(order)
    samples = torch.arange(size, device="cpu")
    permuted = rng.permute(samples, size, rng.key(seed, "order", epoch)).numpy()
    # Stable: samples of a shape stay in the order of the permutation.
    by_shape = permuted[np.argsort(order.numbers[permuted], kind="stable")]
    counts = np.bincount(order.numbers)
    counts = counts[counts > 0]
    groups: list[Ints] = []
    rest: list[Ints] = []
    first_of_next = np.cumsum(counts)[:-1]
    for members in np.split(by_shape, first_of_next):
        whole_groups = len(members) // order.group
        full = whole_groups * order.group
        # numpy cannot split into no parts.
        if whole_groups:
            groups += np.split(members[:full], whole_groups)
        rest.append(members[full:])
    # Places up to the next multiple of the group's size in the endless order.
    missing = -epoch * size % order.group
    if groups and sum(map(len, rest)) < missing:
        # Too few samples are left over to reach the multiple, so the last group is taken apart.
        rest.append(groups.pop())
    left = np.concatenate(rest)
    if groups:
        count = len(groups)
        places = torch.arange(count, device="cpu")
        shuffled = rng.permute(places, count, rng.key(seed, "groups", epoch)).tolist()
        groups = [groups[place] for place in shuffled]
    return np.concatenate([left[:missing], *groups, left[missing:]])
