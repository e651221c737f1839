"""Which sample is where: a function of (seed, step) and of nothing that belongs to the machine.

Sample i of step s has position p = s * global_batch_size + i in one endless order. Its epoch is p // N, its
index a permutation of range(N) keyed by (seed, epoch), evaluated on demand. Batches run on across epochs, so
nothing is dropped. Resuming is a matter of naming the step.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from accel_train import rng
from accel_train.config import UsageError

BLOCK = 4096
"""Places of the order that are computed together. Changes no order."""


class Draw(NamedTuple):
    """One sample in one step."""

    sample: int
    """Index in the dataset."""
    occurrence: int
    """epoch * len(dataset) + sample: the key for everything random about it."""
    position: int
    """0 to global_batch_size - 1: its place in the batch of the step."""
    weight: float
    """1, or 0 for a repetition that only keeps the processes in step and must not count."""


class Cut(NamedTuple):
    """The part of every global batch that one process computes, and in what pieces."""

    rank: int
    world_size: int
    micro_batch_size: int


class EvenSetting(NamedTuple):
    """Sizes that divide without remainder: global = world_size * micro * accumulation."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


class Sampler(Protocol):
    """What the loader asks of the order of samples: `StepSampler`, or another one that is a function of the step."""

    @property
    def dataset_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def seed(self) -> int: ...

    def draws(self, step: int) -> list[Draw]: ...
    def epoch(self, step: int) -> float: ...
    def micro_batches(self, step: int, rank: int, world_size: int, micro_batch_size: int) -> list[list[Draw]]: ...


@dataclass(frozen=True)
class StepSampler:
    """Keeps no position and may be asked for any step. Refuses a dataset smaller than one global batch."""

    dataset_size: int
    global_batch_size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        size, batch = self.dataset_size, self.global_batch_size
        if size == 0:
            raise UsageError("dataset: it is empty, at least 1 sample is needed. Check its path and filters.")
        if batch < 1:
            raise UsageError(f"global_batch_size={batch}: must be at least 1. Raise it.")
        if batch > size:
            raise UsageError(
                f"global_batch_size={batch}: the dataset has {size} samples, at least one global batch is "
                f"needed. Lower it to {size} or less, or use more data."
            )

    def draws(self, step: int) -> list[Draw]:
        """The global batch of optimizer step `step`, in the order of positions."""
        return self._draws(step, 0, self.global_batch_size)

    def epoch(self, step: int) -> float:
        """Passes over the dataset completed when step `step` begins."""
        return step * self.global_batch_size / self.dataset_size

    def micro_batches(self, step: int, rank: int, world_size: int, micro_batch_size: int) -> list[list[Draw]]:
        """What `rank` computes in `step`: one list per forward, their number and sizes equal on all ranks.

        Shares are contiguous and differ by at most one sample; a rank whose share is the shorter one repeats
        its last sample with weight 0. No list is longer than micro_batch_size, and their lengths differ by
        at most one.
        """
        pieces = accumulation_steps(self.global_batch_size, world_size, micro_batch_size)
        shortest, longer = divmod(self.global_batch_size, world_size)
        start = rank * shortest + min(rank, longer)
        share = self._draws(step, start, start + shortest + (rank < longer))
        if longer and rank >= longer:
            share.append(share[-1]._replace(weight=0.0))
        bounds = [len(share) * piece // pieces for piece in range(pieces + 1)]
        return [share[a:b] for a, b in itertools.pairwise(bounds)]

    def _draws(self, step: int, start: int, stop: int) -> list[Draw]:
        first = step * self.global_batch_size
        draws: list[Draw] = []
        while start < stop:  # one turn for each block of each epoch that the range touches
            epoch, offset = divmod(first + start, self.dataset_size)
            block, place = divmod(offset, BLOCK)
            count = min(stop - start, self.dataset_size - offset, BLOCK - place)
            if self.shuffle:
                order = _block_of_order(self.dataset_size, self.seed, epoch, block)[place : place + count]
            else:
                order = range(offset, offset + count)
            before = epoch * self.dataset_size
            draws += [Draw(n, before + n, p, 1.0) for p, n in enumerate(order, start)]
            start += count
        return draws


@lru_cache(maxsize=32)
def _block_of_order(size: int, seed: int, epoch: int, block: int) -> Sequence[int]:
    """Indices at the places block * BLOCK and after it of one epoch. A permutation of a few costs as much as one of
    thousands: half a millisecond."""
    places = torch.arange(block * BLOCK, min(size, (block + 1) * BLOCK), device="cpu")
    return rng.permute(places, size, rng.key(seed, "order", epoch)).tolist()


def accumulation_steps(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """Forwards per process and optimizer step. Refuses fewer samples than processes."""
    if global_batch_size < world_size:
        raise UsageError(
            f"global_batch_size={global_batch_size}: every one of the {world_size} processes needs at least 1 "
            f"sample per step. Raise it to {world_size} or more, or start fewer processes."
        )
    if micro_batch_size < 1:
        raise UsageError(f"micro_batch_size={micro_batch_size}: must be at least 1. Raise it.")
    return math.ceil(math.ceil(global_batch_size / world_size) / micro_batch_size)


def notices(global_batch_size: int, world_size: int, micro_batch_size: int) -> list[str]:
    """What a person should know of a batch that does not divide evenly: it is exact, and what would be even."""
    settings = even_settings(global_batch_size, world_size, micro_batch_size)
    if not settings:
        return []
    proposals = "; ".join(
        f"--global_batch_size {s.global_batch_size} --micro_batch_size {s.micro_batch_size}" for s in settings
    )
    return [
        f"global_batch_size {global_batch_size} over {world_size} process(es) in micro-batches of "
        f"{micro_batch_size} is uneven: shares and micro-batches differ by one sample, the gradient is exact all "
        f"the same. Even: {proposals}"
    ]


def even_settings(global_batch_size: int, world_size: int, micro_batch_size: int) -> list[EvenSetting]:
    """The three nearest settings in which every forward of every process has the same number of samples.

    A smaller micro-batch is nearer than another global batch, which changes the experiment; a larger
    micro-batch is never proposed, it may not fit in memory. Empty where all forwards are equal already.
    """
    steps = accumulation_steps(global_batch_size, world_size, micro_batch_size)
    if global_batch_size % (world_size * steps) == 0:
        return []
    nearest: dict[int, tuple[float, EvenSetting]] = {}
    for micro in range(micro_batch_size, 0, -1):  # of one global batch, the largest micro-batch
        unit = world_size * micro
        for accumulation in {global_batch_size // unit, -(-global_batch_size // unit)} - {0}:
            total = unit * accumulation
            distance = 4 * abs(math.log(total / global_batch_size)) + math.log(micro_batch_size / micro)
            nearest.setdefault(total, (distance, EvenSetting(total, micro, accumulation)))
    return [setting for _, setting in sorted(nearest.values())[:3]]
