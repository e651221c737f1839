"""Order of samples: a function of (seed, step), independent of the machine.

Sample i of step s has position p = s * global_batch_size + i in one endless order, unless a schedule changes the batch
size. Its epoch is p // N. Its index is a permutation of range(N) keyed by (seed, epoch), evaluated on demand. Batches
span epochs, so nothing is dropped. To resume, continue at the next step. Rows of data larger than memory come in the
order of `data.block_order` instead.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from accel_train import rng
from accel_train.config import UsageError
from accel_train.data.options import ONE_BATCH_SIZE, BatchScheduleConfig

SHOWN_SAMPLES = 8
"""Samples named in an error about a request."""
BLOCK = 4096
"""Indices computed at a time. Has no effect on the order."""


class Draw(NamedTuple):
    """One sample in one step."""

    sample: int
    """Index in the dataset."""
    occurrence: int
    """epoch * len(dataset) + sample: the key of all its random draws."""
    position: int
    """Place in the global batch, from 0."""
    weight: float
    """1, or 0 for a repeated sample: it keeps the processes in step and must not count."""


class Request(NamedTuple):
    """One micro-batch to read."""

    step: int
    micro_batch: int
    draws: list[Draw]
    length: int | None = None
    """Padded length to trim the batch to. None: as the dataset pads it."""

    def __str__(self) -> str:
        samples = [str(draw.sample) for draw in self.draws[:SHOWN_SAMPLES]]
        if len(self.draws) > SHOWN_SAMPLES:
            samples.append("...")
        # Counted from 1, like the steps of log lines and checkpoints.
        return f"step {self.step + 1}, micro-batch {self.micro_batch + 1} (samples {', '.join(samples)})"


class BatchShard(NamedTuple):
    """One process's share of every global batch, and the size of its micro-batches."""

    rank: int
    world_size: int
    micro_batch_size: int


class EvenSetting(NamedTuple):
    """Sizes that divide without remainder: global = world_size * micro * accumulation."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


class Sampler(Protocol):
    """Order of samples as the loader needs it: `StepSampler`, or any other function of the step."""

    @property
    def dataset_size(self) -> int: ...

    @property
    def global_batch_size(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def batch_size(self, step: int) -> int: ...
    def draws(self, step: int) -> list[Draw]: ...
    def epoch(self, step: int) -> float: ...
    def micro_batches(
        self,
        step: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
    ) -> list[list[Draw]]: ...


class RowOrder(Protocol):
    """Keyed order of each epoch other than a permutation of all samples, such as `BlockOrder`."""

    def __len__(self) -> int: ...
    def rows(self, seed: int, epoch: int, offset: int, count: int) -> Sequence[int]:
        """Return the samples of an epoch from place `offset` on: at least 1, at most `count`."""
        ...


@dataclass(frozen=True)
class StepSampler:
    """Stateless sampler with random access to any step. Refuses a dataset smaller than one global batch."""

    dataset_size: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    blocks: RowOrder | None = None
    """Shuffle blocks, and rows within windows of blocks. None: shuffle all rows among each other."""
    schedule: BatchScheduleConfig = ONE_BATCH_SIZE
    """Numbers of samples per step that replace `global_batch_size` from given steps on."""
    more: str = "use more data"
    """How to get more samples, as the end of an error message."""

    def __post_init__(self) -> None:
        size = self.dataset_size
        batch = self.global_batch_size
        if self.blocks is not None and len(self.blocks) != size:
            raise ValueError(f"the blocks have {len(self.blocks)} rows, but the dataset has {size}")
        if size == 0:
            raise UsageError("dataset: it is empty, but at least 1 sample is required; check its path and filters")
        if batch < 1:
            raise UsageError(f"global_batch_size: {batch}: at least 1 is required; raise it")
        if max(self.schedule.sizes, default=1) > size:
            raise UsageError(
                f"batch_schedule.sizes: {list(self.schedule.sizes)}: the dataset has {size} samples, and no step can "
                f"have more; lower them to {size} or less, or {self.more}"
            )
        if (self.schedule.max_size or 1) > size:
            raise UsageError(
                f"batch_schedule.max_size: {self.schedule.max_size}: the dataset has {size} samples, and no step can "
                f"have more; lower it to {size} or less, or {self.more}"
            )
        self.refuse_small_data()

    def refuse_small_data(self) -> None:
        """Raise `UsageError` for fewer samples than a global batch. A simulation skips this check."""
        size = self.dataset_size
        if self.global_batch_size > size:
            raise UsageError(
                f"global_batch_size: {self.global_batch_size}: the dataset has {size} samples, but at least one "
                f"global batch is required; lower it to {size} or less, or {self.more}"
            )

    def batch_size(self, step: int) -> int:
        """Return the number of samples of optimizer step `step` over all processes."""
        return self.schedule.size(self.global_batch_size, step)

    def draws(self, step: int) -> list[Draw]:
        """Return the global batch of optimizer step `step`, in the order of positions."""
        return self._draws(step, 0, self.batch_size(step))

    def epoch(self, step: int) -> float:
        """Return the passes over the dataset completed before step `step`."""
        return self.schedule.samples_before(self.global_batch_size, step) / self.dataset_size

    def micro_batches(
        self,
        step: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
    ) -> list[list[Draw]]:
        """Return the share of `rank` in `step`: one list per forward, equal in number and sizes on all ranks.

        Shares are contiguous and differ by at most one sample. A rank with the shorter share repeats its last sample
        with weight 0. No list is longer than micro_batch_size, and their lengths differ by at most one.
        """
        batch_size = self.batch_size(step)
        count = accumulation_steps(batch_size, world_size, micro_batch_size)
        # The first `longer` ranks have one sample more than the others.
        shortest, longer = divmod(batch_size, world_size)
        start = rank * shortest + min(rank, longer)
        if rank < longer:
            share = self._draws(step, start, start + shortest + 1)
        else:
            share = self._draws(step, start, start + shortest)
            if longer:
                # Repeated rather than left out, because a forward of a sharded model is a collective.
                share.append(share[-1]._replace(weight=0.0))
        # Even cuts: a short last micro-batch would cost as much time as a full one.
        bounds = [len(share) * k // count for k in range(count + 1)]
        return [share[start:stop] for start, stop in itertools.pairwise(bounds)]

    def _draws(self, step: int, start: int, stop: int) -> list[Draw]:
        """Return the draws at positions `start` to `stop` - 1 of `step`."""
        first = self.schedule.samples_before(self.global_batch_size, step)
        draws: list[Draw] = []
        # One iteration for each block of each epoch in the range.
        while start < stop:
            epoch, offset = divmod(first + start, self.dataset_size)
            samples = self._samples(epoch, offset, min(stop - start, self.dataset_size - offset))
            for position, sample in enumerate(samples, start):
                # Another number in each epoch: noise of a sample differs from epoch to epoch, and nowhere else.
                occurrence = epoch * self.dataset_size + sample
                draws.append(Draw(sample, occurrence, position, weight=1.0))
            start += len(samples)
        return draws

    def _samples(self, epoch: int, offset: int, count: int) -> Sequence[int]:
        """Return the samples of an epoch from place `offset` on: at least 1, at most `count`."""
        if not self.shuffle:
            return range(offset, offset + count)
        if self.blocks is not None:
            return self.blocks.rows(self.seed, epoch, offset, count)
        # Without a list of the whole epoch: a billion samples would be 8 GB on every process.
        block, block_offset = divmod(offset, BLOCK)
        return _shuffled_block(self.dataset_size, self.seed, epoch, block)[block_offset : block_offset + count]


@lru_cache(maxsize=32)
def _shuffled_block(size: int, seed: int, epoch: int, block: int) -> Sequence[int]:
    """Return up to BLOCK indices of one epoch, from place block * BLOCK on."""
    # Permuting a few indices costs as much as thousands (half a millisecond), so blocks are computed and kept.
    end = min(size, (block + 1) * BLOCK)
    places = torch.arange(block * BLOCK, end, device="cpu")
    return rng.permute(places, size, rng.key(seed, "order", epoch)).tolist()


def scheduled(order: Sampler, schedule: BatchScheduleConfig) -> Sampler:
    """Return the order with the batch sizes of `schedule`. Refuses an order that does not support them."""
    if not schedule.steps and not schedule.measures:
        return order
    if not isinstance(order, StepSampler):
        given = f"noise_factor {schedule.noise_factor}"
        if schedule.steps:
            given = f"steps {list(schedule.steps)}"
        raise UsageError(
            f"batch_schedule.{given}: {type(order).__name__} gives every step the same number of samples; leave "
            "batch_schedule out, which needs StepSampler"
        )
    return replace(order, schedule=schedule)


def accumulation_steps(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """Return the forwards per process and step. Refuses a global batch that leaves a process without a sample."""
    if global_batch_size < world_size:
        raise UsageError(
            f"global_batch_size: {global_batch_size} is smaller than the {world_size} processes, so some would have "
            f"no sample; give --global_batch_size {world_size} or more, or start fewer processes"
        )
    if micro_batch_size < 1:
        raise UsageError(f"micro_batch_size: {micro_batch_size} must be at least 1; raise it")
    # Counted for the longest share: a forward of a sharded model is a collective, so all ranks must make equally many.
    return math.ceil(math.ceil(global_batch_size / world_size) / micro_batch_size)


def refuse_other_data(order: Sampler, size: int) -> None:
    """Raise `UsageError` for an order whose number of samples is not `size`, that of the dataset."""
    if order.dataset_size != size:
        raise UsageError(
            f"order: it is for {order.dataset_size} samples, but the dataset has {size}; pass the length of the "
            "dataset, as in StepSampler(len(data), config.global_batch_size, config.seed)"
        )


def refuse_small_batches(order: Sampler, world_size: int, micro_batch_size: int) -> None:
    """Raise `UsageError` for a step of fewer samples than processes."""
    accumulation_steps(order.global_batch_size, world_size, micro_batch_size)
    # Samples that are left out do not change the sizes.
    plain: object = getattr(order, "order", order)
    sizes = plain.schedule.sizes if isinstance(plain, StepSampler) else ()
    if min(sizes, default=world_size) < world_size:
        raise UsageError(
            f"batch_schedule.sizes {list(sizes)}: {min(sizes)} is smaller than the {world_size} processes, so some "
            f"would have no sample; give {world_size} or more, or start fewer processes"
        )


def notices(global_batch_size: int, world_size: int, micro_batch_size: int) -> list[str]:
    """Return a notice if a micro-batch is larger than a process's share, or the batch does not divide evenly."""
    share = math.ceil(global_batch_size / world_size)
    larger: list[str] = []
    if micro_batch_size > share:
        larger.append(
            f"micro_batch_size: {micro_batch_size} is more than the {share} samples of the global batch "
            f"({global_batch_size}) that each of the {world_size} process(es) has: every forward takes {share}"
        )
    settings = even_settings(global_batch_size, world_size, micro_batch_size)
    if not settings:
        return larger
    # Uneven settings are allowed, so this is advice: they cost some time and change nothing.
    proposals = "; ".join(
        f"--global_batch_size {s.global_batch_size} --micro_batch_size {s.micro_batch_size}" for s in settings
    )
    return [
        *larger,
        f"global_batch_size {global_batch_size} over {world_size} process(es) in micro-batches of "
        f"{micro_batch_size} is uneven: shares and micro-batches differ by one sample, the gradient is still exact. "
        f"Even: {proposals}",
    ]


def even_settings(global_batch_size: int, world_size: int, micro_batch_size: int) -> list[EvenSetting]:
    """Return the three nearest settings with equally many samples in every forward of every process.

    Prefers a smaller micro-batch to another global batch, which changes the experiment. Never proposes a larger
    micro-batch, which may not fit in memory. Empty for even settings.
    """
    steps = accumulation_steps(global_batch_size, world_size, micro_batch_size)
    # All forwards are equal already.
    if global_batch_size % (world_size * steps) == 0:
        return []
    nearest: dict[int, tuple[float, EvenSetting]] = {}
    # Downwards, so the largest micro-batch of each global batch is kept.
    for micro in range(micro_batch_size, 0, -1):
        unit = world_size * micro
        for accumulation in (global_batch_size // unit, math.ceil(global_batch_size / unit)):
            if accumulation == 0:
                continue
            total = unit * accumulation
            # A change of the global batch weighs four times as much as one of the micro-batch.
            distance = 4 * abs(math.log(total / global_batch_size)) + math.log(micro_batch_size / micro)
            nearest.setdefault(total, (distance, EvenSetting(total, micro, accumulation)))
    return [setting for _, setting in sorted(nearest.values())[:3]]
