"""Micro-batches of similar length from an unchanged global batch.

The sampler still decides the samples of a step, their noise and their weights. Within the global batch they are sorted
by length before they are dealt to micro-batches and processes. Each micro-batch is padded to its own longest sample.
Only the order of sums in the gradient changes.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from accel_train.config import UsageError
from accel_train.data.datasets import VariableLengthDataset
from accel_train.data.sampler import BatchShard, Draw, Sampler, accumulation_steps

LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of it: GPU kernels work on tiles, and fewer lengths mean fewer compilations."""

DEFAULT_SHAPES = 4

PROBED_STEPS = 64
"""First steps of the experiment that decide the padded lengths."""
PROBED_SAMPLES = 16384
"""Approximate limit on the samples of these steps. Measuring them takes about 50 ms."""


class Buckets(NamedTuple):
    """Grouping of a step's samples by length, the same on every process."""

    length: Callable[[int], int]
    shapes: tuple[int, ...]
    """Padded lengths, ascending. The last one fits the longest sample of the dataset."""

    def padded(self, length: int) -> int:
        """Return the smallest shape of at least `length`."""
        return self.shapes[bisect_left(self.shapes, length)]

    def micro_batches(self, draws: Sequence[Draw], shard: BatchShard) -> list[tuple[list[Draw], int]]:
        """Return one process's micro-batches of the global batch `draws`, each with its padded length.

        Longest first. The k-th micro-batches of all processes are dealt in turn from one slice of the sorted batch and
        padded alike, so no process waits for another. Their number and sizes equal `StepSampler.micro_batches`.
        Processes without a last sample repeat the shortest one with weight 0.
        """
        world_size = shard.world_size
        # `sorted` is stable: samples of one length stay in the order of positions.
        ordered = sorted(draws, key=lambda draw: -self.length(draw.sample))
        per_process = math.ceil(len(ordered) / world_size)
        padding = per_process * world_size - len(ordered)
        ordered += [ordered[-1]._replace(weight=0.0)] * padding

        # Bounds are multiples of the world size, so each slice deals equally many samples to every process.
        count = accumulation_steps(len(draws), world_size, shard.micro_batch_size)
        bounds = [per_process * k // count * world_size for k in range(count + 1)]
        micro_batches: list[tuple[list[Draw], int]] = []
        for start, stop in itertools.pairwise(bounds):
            # Dealt in turn: each process gets long and short ones of the slice alike.
            own = ordered[start:stop][shard.rank :: world_size]
            # The longest of all processes, not only of this one.
            longest = self.length(ordered[start].sample)
            micro_batches.append((own, self.padded(longest)))
        return micro_batches


def resolve_buckets(
    dataset: object,
    sampler: Sampler,
    shard: BatchShard,
    shapes: int | None,
) -> tuple[Buckets, str]:
    """Choose at most `shapes` padded lengths (None: 4). Return the buckets and a notice for the log.

    The chosen lengths minimise padding over the first steps of the experiment. Every process chooses the same. Asks
    for the length of every sample once. Refuses a dataset without lengths.
    """
    if not isinstance(dataset, VariableLengthDataset):
        raise UsageError(
            f"loader.bucket_by_length=True: {type(dataset).__name__} does not know the lengths of its samples. Give it "
            "the methods length(index) and trim(batch, length), or set bucket_by_length to False."
        )
    # Over the whole dataset: a sample longer than every shape would not fit anywhere.
    longest = max(map(dataset.length, range(sampler.dataset_size)))
    counts = _count_lengths(dataset.length, longest, sampler, shard)
    chosen = choose_shapes(counts, shapes or DEFAULT_SHAPES)
    buckets = Buckets(dataset.length, chosen)
    padded = sum(buckets.padded(length) * count for length, count in counts.items())
    unbucketed = chosen[-1] * sum(counts.values())
    lengths = ", ".join(map(str, chosen))
    return buckets, f"padded to {lengths} tokens, {padded / unbucketed:.0%} of {chosen[-1]} on average"


def _count_lengths(
    length: Callable[[int], int],
    longest: int,
    sampler: Sampler,
    shard: BatchShard,
) -> dict[int, int]:
    """Count the samples of the first steps by the length of their micro-batch. The longest length is always a key."""
    multiples = range(LENGTH_MULTIPLE, max(1, longest) + LENGTH_MULTIPLE, LENGTH_MULTIPLE)
    # As if every length were allowed, to see where samples would end up.
    finest = Buckets(length, tuple(multiples))
    # The longest sample may be beyond the probed steps, but must still fit.
    counts = {finest.shapes[-1]: 0}
    # The first steps are the same on every process and after every resume, and so are the lengths.
    steps = min(PROBED_STEPS, 1 + PROBED_SAMPLES // sampler.global_batch_size)
    for step in range(steps):
        for draws, padded in finest.micro_batches(sampler.draws(step), shard):
            counts[padded] = counts.get(padded, 0) + len(draws)
    return counts


def choose_shapes(counts: Mapping[int, int], shapes: int) -> tuple[int, ...]:
    """Choose at most `shapes` of the lengths in `counts`, the longest included, with the least padding in total.

    `counts` maps a length to its number of samples. Each sample is padded to the next chosen length. Exact, by
    dynamic programming in O(shapes * lengths^2).
    """
    lengths = np.array(sorted(counts))
    of_length = [counts[length] for length in lengths.tolist()]
    samples = np.cumsum([0, *of_length])
    start, stop = np.ogrid[: len(samples), : len(samples)]  # a column and a row, which broadcast to a table
    # cost[i, j]: tokens of lengths i to j - 1 with all their samples padded to the last of them.
    padded_to = np.append(0, lengths)[stop]
    padded_tokens = (samples[stop] - samples[start]) * padded_to
    cost = np.where(start < stop, padded_tokens, np.inf)
    # least[j]: tokens of the first j lengths with the shapes so far. starts: where the last shape begins.
    least = cost[0]
    starts = [np.zeros(len(samples), np.int64)]
    for _ in range(min(shapes, len(lengths)) - 1):
        with_one_more = least[:, None] + cost
        least = with_one_more.min(0)
        starts.append(with_one_more.argmin(0))
    chosen: list[int] = []
    end = len(lengths)
    # Trace the choices back from the longest length.
    for best_start in reversed(starts):
        chosen.append(int(lengths[end - 1]))
        end = int(best_start[end])
    return tuple(reversed(chosen))
