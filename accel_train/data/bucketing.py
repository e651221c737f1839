"""Micro-batches of similar length, cut from one and the same global batch.

Which samples a step trains on, their noise and their weights stay what the sampler says. Only inside the global
batch they are sorted by length before they are dealt to micro-batches and processes, and each micro-batch is padded
to its own longest sample instead of to the longest of all. The gradient changes by the order of its sums alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.sampler import Cut, Draw, Sampler, accumulation_steps

LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of it: GPU kernels work on tiles, and fewer lengths mean fewer compilations."""

DEFAULT_SHAPES = 4

PROBED_STEPS, PROBED_SAMPLES = 64, 16384
"""How many steps from the first one on decide the padded lengths, and about how many samples at most: 50 ms."""


@runtime_checkable
class Measured(Protocol):
    """A dataset whose samples have a length that is known without reading them."""

    def length(self, index: int, /) -> int:
        """What of the sample must be kept, in tokens; asked for every sample of every global batch, so cheap."""
        ...

    def trim(self, batch: Mapping[str, Tensor], length: int, /) -> Mapping[str, Tensor]:
        """The batch with its padded fields cut to `length`, contiguous; what is shorter already stays."""
        ...


class Buckets(NamedTuple):
    """How the samples of a step are grouped, the same on every process."""

    length: Callable[[int], int]
    shapes: tuple[int, ...]
    """Padded lengths, ascending; the last one holds the longest sample of the dataset."""

    def padded(self, length: int) -> int:
        """The smallest shape that holds `length`."""
        return self.shapes[bisect_left(self.shapes, length)]

    def micro_batches(self, draws: Sequence[Draw], cut: Cut) -> list[tuple[list[Draw], int]]:
        """What one process computes of the global batch `draws`: a micro-batch and its padded length, each.

        Longest first. The k-th micro-batches of all processes are dealt in turn from one piece of the sorted
        batch and padded alike, so that none waits for another. Their number and sizes are those of
        `StepSampler.micro_batches`; processes without a last sample repeat the shortest with weight 0.
        """
        world_size = cut.world_size
        ordered = [draw for _, draw in self._longest_first(draws)]
        share = -(-len(ordered) // world_size)
        ordered += [ordered[-1]._replace(weight=0.0)] * (share * world_size - len(ordered))
        pieces = accumulation_steps(len(draws), world_size, cut.micro_batch_size)
        bounds = [share * piece // pieces * world_size for piece in range(pieces + 1)]
        groups = (ordered[a:b] for a, b in itertools.pairwise(bounds))
        return [(group[cut.rank :: world_size], self.padded(self.length(group[0].sample))) for group in groups]

    def _longest_first(self, draws: Sequence[Draw]) -> list[tuple[int, Draw]]:
        """Samples of one length stay in the order of positions."""
        return sorted(((self.length(draw.sample), draw) for draw in draws), key=lambda item: -item[0])


def resolve_buckets(dataset: object, sampler: Sampler, cut: Cut, shapes: int | None) -> tuple[Buckets, str]:
    """Buckets for this dataset and cut with at most `shapes` padded lengths (None: 4), and a line for the log.

    The lengths are those that pad least over the first steps of the experiment. Every process finds the same;
    it asks the length of every sample once. Refuses a dataset that does not know its lengths.
    """
    if not isinstance(dataset, Measured):
        raise UsageError(
            f"bucket_by_length=True: {type(dataset).__name__} does not know the lengths of its samples. Give it the "
            "methods length(index) and trim(batch, length), or set bucket_by_length to False."
        )
    longest = max(map(dataset.length, range(sampler.dataset_size)))
    needed = _lengths_needed(dataset.length, longest, sampler, cut)
    chosen = choose_shapes(needed, shapes or DEFAULT_SHAPES)
    buckets = Buckets(dataset.length, chosen)
    padded = sum(buckets.padded(length) * count for length, count in needed.items())
    share = padded / (chosen[-1] * sum(needed.values()))
    return buckets, f"padded to {', '.join(map(str, chosen))} tokens, {share:.0%} of {chosen[-1]} on average"


def _lengths_needed(length: Callable[[int], int], longest: int, sampler: Sampler, cut: Cut) -> dict[int, int]:
    """Of the first samples of the experiment, how many are in micro-batches of each length; the longest with 0."""
    multiples = range(LENGTH_MULTIPLE, max(1, longest) + LENGTH_MULTIPLE, LENGTH_MULTIPLE)
    every = Buckets(length, tuple(multiples))
    needed = {every.shapes[-1]: 0}
    for step in range(min(PROBED_STEPS, 1 + PROBED_SAMPLES // sampler.global_batch_size)):
        for draws, padded in every.micro_batches(sampler.draws(step), cut):
            needed[padded] = needed.get(padded, 0) + len(draws)
    return needed


def choose_shapes(needed: Mapping[int, int], count: int) -> tuple[int, ...]:
    """At most `count` of the lengths in `needed`, the longest among them, that pad the least in all.

    `needed` says how many samples need each length; each sample is padded to the next length chosen. Exact, by
    dynamic programming: O(count * lengths^2).
    """
    lengths = np.array(sorted(needed))
    samples = np.cumsum([0, *(needed[length] for length in lengths.tolist())])
    first, end = np.ogrid[: len(samples), : len(samples)]
    # of the lengths first to end - 1: all their samples padded to the last of them
    cost = np.where(first < end, (samples[end] - samples[first]) * np.append(0, lengths)[end], np.inf)
    least, starts = cost[0], [np.zeros(len(samples), np.int64)]
    for _ in range(min(count, len(lengths)) - 1):
        with_one_more = least[:, None] + cost
        least = with_one_more.min(0)
        starts.append(with_one_more.argmin(0))
    shapes: list[int] = []
    stop = len(lengths)
    for start in reversed(starts):
        shapes.append(int(lengths[stop - 1]))
        stop = int(start[stop])
    return tuple(reversed(shapes))
