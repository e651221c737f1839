"""Order of samples that leaves some of them out wherever they occur.

Positions, occurrences, weights and noise of all others stay as they are, so two runs differ by these samples alone. In
place of one that is left out, another sample of the same step is read with weight 0, because a loss of the sample
itself that is not finite would stay so at any weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_train.config import UsageError
from accel_train.data.sampler import Draw, Sampler
from accel_train.wording import shortened


@dataclass(frozen=True)
class WithoutSamples:
    """The order of another sampler without ``samples``, whose places have weight 0."""

    order: Sampler
    samples: frozenset[int]

    @property
    def dataset_size(self) -> int:
        """Number of samples, with those of weight 0."""
        return self.order.dataset_size

    @property
    def global_batch_size(self) -> int:
        """Samples of the first step, with those of weight 0."""
        return self.order.global_batch_size

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.order.seed

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step, with those of weight 0."""
        return self.order.batch_size(step)

    def draws(self, step: int) -> list[Draw]:
        """Return the global batch of a step."""
        draws = self.order.draws(step)
        return self._replaced(draws, self._remaining(draws))

    def epoch(self, step: int) -> float:
        """Return the passes over the dataset completed before a step."""
        return self.order.epoch(step)

    def micro_batches(self, step: int, rank: int, world_size: int, micro_batch_size: int) -> list[list[Draw]]:
        """Return the share of a rank."""
        micro_batches = self.order.micro_batches(step, rank, world_size, micro_batch_size)
        if not any(draw.sample in self.samples for draws in micro_batches for draw in draws):
            return micro_batches
        # Taken from the whole step, so that a position gets the same sample however the step is shared out.
        remaining = self._remaining(self.order.draws(step))
        return [self._replaced(draws, remaining) for draws in micro_batches]

    def is_empty(self, step: int) -> bool:
        """Return True if no sample of a step has a weight."""
        # Usually the first sample has a weight, and the whole batch takes long to draw.
        (first,) = self.order.micro_batches(step, 0, self.batch_size(step), 1)
        if any(draw.weight and draw.sample not in self.samples for draw in first):
            return False
        return all(draw.weight == 0 for draw in self.draws(step))

    def _remaining(self, draws: Sequence[Draw]) -> list[int]:
        return [draw.sample for draw in draws if draw.sample not in self.samples]

    def _replaced(self, draws: Sequence[Draw], remaining: Sequence[int]) -> list[Draw]:
        replaced: list[Draw] = []
        for draw in draws:
            if draw.sample in self.samples:
                draw = draw._replace(weight=0.0)
                # If none remains, the step does not move the weights, whatever is read.
                if remaining:
                    draw = draw._replace(sample=remaining[draw.position % len(remaining)])
            replaced.append(draw)
        return replaced


def without_samples(order: Sampler, samples: Sequence[int]) -> Sampler:
    """Return the order without ``samples``, or ``order`` itself for none. Raises ``UsageError`` for unknown ones."""
    if not samples:
        return order
    size = order.dataset_size
    unknown = [str(sample) for sample in samples if not 0 <= sample < size]
    if unknown:
        raise UsageError(
            f"without_samples: the training split has {size} samples, 0 to {size - 1}, but no "
            f"{shortened(unknown, 8)}; `accel-train blame` prints their indices"
        )
    if len(set(samples)) == size:
        raise UsageError(f"without_samples: names all {size} samples, so nothing is left to train on; name fewer")
    return WithoutSamples(order, frozenset(samples))


def has_no_weight(order: Sampler, step: int) -> bool:
    """Return True if every sample of a step is left out, so that the step must not move anything."""
    return isinstance(order, WithoutSamples) and order.is_empty(step)
