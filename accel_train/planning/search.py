"""Search for the largest fitting micro-batch of each strategy and mode, and for the fewest checkpointed blocks.

Memory grows with the micro-batch, so a few sizes are simulated and the rest follows. A single micro-batch is a special
case: a process then never holds gradients next to the activations of another one, and may need less memory than with
two of half the size. It is tried first, because it also takes the least time.

Modes are compared on all blocks. Then as many blocks of the chosen candidate as fit keep their activations. Smaller
micro-batches, of which more blocks can keep them, are tried as long as the step becomes faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from accel_train.config import UsageError
from accel_train.planning.bounds import left_out
from accel_train.planning.candidates import MODES, OFFLOADS, Candidate, Space
from accel_train.planning.chains import Chain, best, fastest_of, seconds_to_beat, slowness
from accel_train.planning.flags import Goal
from accel_train.planning.memory import Budget
from accel_train.planning.probe import Probe

Measure = Callable[[Candidate], Probe]
"""Raises ``UsageError`` if a start would refuse the candidate."""


def search(space: Space, goal: Goal, budget: Budget, measure: Measure) -> list[Chain]:
    """Simulate as few candidates as the goal needs."""
    chains: list[Chain] = []
    # Modes run from the fastest to the smallest, so that what is found early rules later ones out unsimulated.
    for strategy in space.strategies:
        slower = None
        if strategy in OFFLOADS:
            slower = left_out(strategy, space, goal, budget, chains, best(chains, goal, budget))
        for mode in space.modes:
            chain = Chain(strategy, mode, left_out=slower)
            if slower is None:
                chain = _search_chain(space, goal, budget, measure, chains, (strategy, mode))
            chains.append(chain)
    return chains


def _search_chain(
    space: Space, goal: Goal, budget: Budget, measure: Measure, earlier: Sequence[Chain], names: tuple[str, str]
) -> Chain:
    strategy, mode = names
    fastest = fastest_of(earlier, budget)
    is_last = mode == space.modes[-1]
    # For the least memory a slower mode may be the right one, so none is left out.
    if goal != "memory":
        for chain in earlier:
            reason = _slower_by_recomputing(space, chain, budget, fastest)
            if chain.strategy == strategy and reason is not None:
                return Chain(strategy, mode, left_out=reason)

    def simulate(size: int) -> Probe:
        return measure(Candidate(strategy, mode, size, space.blocks))

    hopeless = [chain.left_out for chain in earlier if chain.strategy == strategy and chain.hopeless]
    if hopeless and not is_last:
        return Chain(strategy, mode, left_out=hopeless[0], hopeless=True)
    try:
        if hopeless:
            # Simulated only to tell how much is missing at least.
            return Chain(strategy, mode, (simulate(space.sizes[0]),), hopeless[0], hopeless=True)
        if goal == "memory":
            # Memory grows with the micro-batch, but a single one may need less: the least is at one of the ends.
            ends = sorted({space.sizes[0], space.sizes[-1]})
            return Chain(strategy, mode, tuple(simulate(size) for size in ends))
        largest = simulate(space.sizes[-1])
        if not largest.fits_host(budget):
            # Smaller ones fit even less: with several micro-batches, host memory also accumulates their gradients.
            return Chain(strategy, mode, (largest,), f"needs {largest.needs(budget)}", hopeless=True)
        # A smaller micro-batch makes activations smaller, but never the states.
        needed = budget.needed_gib(largest.states)
        if needed > budget.limit_gib and not is_last:
            reason = f"weights, gradients, optimizer and EMA alone need {needed:.2f} GiB"
            return Chain(strategy, mode, (largest,), reason, hopeless=True)
        probes, reason = _sizes_to_the_limit(space, budget, simulate, fastest, largest)
    except UsageError as error:
        return Chain(strategy, mode, left_out=str(error), refused=True)
    return Chain(strategy, mode, probes, reason)


def _slower_by_recomputing(space: Space, chain: Chain, budget: Budget, fastest: Probe | None) -> str | None:
    """Return why a mode with more recomputation than ``chain`` cannot be the fastest, or None."""
    for probe in chain.probes:
        if probe.candidate.micro_batch_size != space.share:
            continue
        # It has the fewest kernels and gathers of its chain.
        if probe.fits(budget):
            return f"{chain.mode} fits without accumulation, and more recomputation in all blocks only takes longer"
        if fastest is not None and probe.time.total >= fastest.time.total:
            return f"{chain.mode} takes longer than {fastest.candidate} already, and more recomputation longer still"
    return None


def _sizes_to_the_limit(
    space: Space, budget: Budget, simulate: Callable[[int], Probe], fastest: Probe | None, largest: Probe
) -> tuple[tuple[Probe, ...], str | None]:
    """Simulate sizes up to the limit, unless no size can be the fastest. Return them, and the reason if cut short."""
    probes = [largest]
    if largest.fits(budget):
        return tuple(probes), None
    sizes = space.sizes[:-1]
    if not sizes:
        return tuple(probes), None
    if fastest is not None and largest.time.total >= seconds_to_beat(fastest, budget, largest):
        times = largest.time.total / fastest.time.total
        # The memory first: the time alone would read as if it fitted.
        reason = (
            f"needs {largest.needs(budget)}, with micro_batch_size {largest.candidate.micro_batch_size}, and with a "
            f"smaller one takes at best {times:.2f} times as long as {fastest.candidate}"
        )
        return tuple(probes), reason
    # If the smallest does not fit, no size of this mode does, and the search is over.
    probes.append(simulate(sizes[0]))
    if probes[-1].fits(budget):
        ends = Point(sizes[0], probes[-1]), Point(space.share, largest)
        probes += _towards_the_limit(sizes, budget, simulate, ends)
    return tuple(probes), None


def spare_recomputation(
    space: Space, goal: Goal, budget: Budget, chains: Sequence[Chain], chosen: Probe, measure: Measure
) -> tuple[list[Chain], Probe]:
    """Return the chains with further probes, and the fastest candidate with as few checkpointed blocks as fit.

    First at the chosen micro-batch, in each mode that fits there. Then at smaller ones, of which more blocks can keep
    their activations, for as long as that is faster.
    """
    if chosen.candidate.mode == MODES[0] or space.blocks is not None:
        return list(chains), chosen
    simulate = Simulated(chains, measure)
    fewest = FewestBlocks(budget, simulate, space.share, _least_blocks(chains, chosen.candidate.strategy))
    first = space.modes.index(chosen.candidate.mode)
    # Earlier modes need more memory, on all blocks and on each: they do not fit at this size, or were slower.
    wholes = fewest.fitting(chosen.candidate, space.modes[first:])
    fastest = min(map(fewest.of, wholes), key=slowness)
    if goal != "memory":
        fastest = _at_smaller_sizes(space, fewest, fastest)
    return [simulate.joined(chain) for chain in chains], fastest


def _at_smaller_sizes(space: Space, fewest: FewestBlocks, fastest: Probe) -> Probe:
    modes = [mode for mode in space.modes if mode != MODES[0]]
    for size in reversed(space.sizes):
        if size >= fastest.candidate.micro_batch_size:
            continue
        candidate = replace(fastest.candidate, micro_batch_size=size, blocks=None)
        wholes = fewest.fitting(candidate, modes)
        promising = [whole for whole in wholes if fewest.expected_seconds(whole) < fastest.time.total]
        quickest = min(map(fewest.of, promising), key=slowness, default=fastest)
        if slowness(quickest) >= slowness(fastest):
            break
        fastest = quickest
    return fastest


class Simulated:
    """A measure that simulates each candidate at most once, and none that is in a chain."""

    def __init__(self, chains: Sequence[Chain], measure: Measure) -> None:
        self._measure = measure
        self._known: dict[Candidate, Probe] = {}
        for chain in chains:
            for probe in chain.probes:
                self._known[probe.candidate] = probe

    def __call__(self, candidate: Candidate) -> Probe:
        """Return the figures of a candidate."""
        if candidate not in self._known:
            self._known[candidate] = self._measure(candidate)
        return self._known[candidate]

    def is_known_to_exceed(self, candidate: Candidate, budget: Budget, share: int) -> bool:
        """Return True if a simulation shows that it does not fit, or that it does not with a smaller micro-batch."""
        size = candidate.micro_batch_size
        if candidate in self._known:
            return not self._known[candidate].fits(budget)
        # A single micro-batch may need less than several smaller ones.
        if size == share:
            return False
        for known, probe in self._known.items():
            alike = replace(known, micro_batch_size=size) == candidate
            if alike and known.micro_batch_size < size and not probe.fits(budget):
                return True
        return False

    def ends(self, candidate: Candidate, least: int) -> tuple[Probe, Probe] | None:
        """Return it with all blocks and with ``least``, at the smallest micro-batch from its own on that has both."""
        larger = sorted(known.micro_batch_size for known in self._known)
        for size in larger:
            whole = self._known.get(replace(candidate, micro_batch_size=size))
            end = self._known.get(replace(candidate, micro_batch_size=size).with_blocks(least))
            if size >= candidate.micro_batch_size and whole is not None and end is not None:
                return whole, end
        return None

    def joined(self, chain: Chain) -> Chain:
        """Return the chain with all simulated candidates of its strategy and mode."""
        probes: list[Probe] = []
        for candidate, probe in self._known.items():
            if candidate.strategy == chain.strategy and candidate.mode == chain.mode:
                probes.append(probe)
        return replace(chain, probes=tuple(probes))


def _least_blocks(chains: Sequence[Chain], strategy: str) -> int:
    """Return 0 if a plan without checkpointing was an alternative, or else 1."""
    for chain in chains:
        if chain.strategy == strategy and chain.mode == MODES[0]:
            return int(chain.refused)
    # The mode is given.
    return 1


@dataclass(frozen=True)
class FewestBlocks:
    """Finds the smallest number of blocks that have to be checkpointed."""

    budget: Budget
    simulate: Simulated
    share: int
    """Samples of each GPU."""
    least: int

    def fitting(self, candidate: Candidate, modes: Sequence[str]) -> list[Probe]:
        """Return the candidate in each of the modes in which it fits with all blocks."""
        fitting: list[Probe] = []
        for mode in modes:
            whole = replace(candidate, mode=mode)
            if self.simulate.is_known_to_exceed(whole, self.budget, self.share):
                continue
            # A chain that was refused says already why nothing of it was simulated.
            with suppress(UsageError):
                fitting.append(self.simulate(whole))
        return [probe for probe in fitting if probe.fits(self.budget)]

    def of(self, whole: Probe) -> Probe:
        """Return the candidate with the fewest blocks that fits. One less is simulated too. ``whole`` fits with all."""

        def keep(kept: int) -> Probe:
            """Let ``kept`` blocks keep their activations."""
            if not kept:
                return whole
            return self.simulate(whole.candidate.with_blocks(whole.checkpointed - kept))

        most = whole.checkpointed - self.least
        end = keep(most)
        if end.fits(self.budget):
            return end
        ends = Point(0, whole), Point(most, end)
        probes = _towards_the_limit(range(most), self.budget, keep, ends)
        fitting = [whole]
        fitting += [probe for probe in probes if probe.fits(self.budget)]
        # Each has fewer checkpointed blocks than the one before.
        return fitting[-1]

    def expected_seconds(self, whole: Probe) -> float:
        """Return the seconds of a step with the fewest blocks, by the memory and time of a larger micro-batch."""
        ends = self.simulate.ends(whole.candidate, self.least)
        if ends is None:
            return math.inf
        checkpointed, kept = ends
        smaller = whole.candidate.micro_batch_size / checkpointed.candidate.micro_batch_size
        more = smaller * (kept.tensors - checkpointed.tensors)
        free = self.budget.tensor_bytes() - whole.tensors
        # All samples of a step are computed, whatever their micro-batch: the time does not shrink with it.
        spared = checkpointed.time.total - kept.time.total
        return whole.time.total - spared * min(1.0, free / max(more, 1.0))


MOST_SLOW = 3
"""Number of guesses that fit and leave more than half of the range. After that the middle is tried, because the search
of a long range would otherwise simulate many."""


class Point(NamedTuple):
    """A simulated candidate, with its varied value."""

    value: int
    probe: Probe


def _towards_the_limit(
    values: Sequence[int], budget: Budget, simulate: Callable[[int], Probe], ends: tuple[Point, Point]
) -> list[Probe]:
    """Simulate values until the largest fitting one is known. Of ``ends`` the first fits and the second does not."""
    fits, exceeds = ends
    # Index of a value that fits, and of one that does not: the second end lies past the end of `values`.
    low = 0
    high = len(values)
    probes: list[Probe] = []
    slow = 0
    # Until both sides of the limit are simulated: that the next larger value does not fit is shown, not assumed.
    while high - low > 1:
        between = values[low + 1 : high]
        guess = _between(between, budget, fits, exceeds)
        if slow >= MOST_SLOW:
            # Memory stays the same at first, and the line does not tell where it begins to grow.
            guess = between[len(between) // 2]
        probe = simulate(guess)
        probes.append(probe)
        if probe.fits(budget):
            fits = Point(guess, probe)
            low = values.index(guess)
            slow += 2 * (high - low) > len(between)
        else:
            exceeds = Point(guess, probe)
            high = values.index(guess)
    return probes


def _between(values: Sequence[int], budget: Budget, fits: Point, exceeds: Point) -> int:
    """Return the largest of ``values`` expected to fit, on the line through two points, or else the smallest."""
    each = (exceeds.probe.tensors - fits.probe.tensors) / (exceeds.value - fits.value)
    free = budget.tensor_bytes() - fits.probe.tensors
    expected = [value for value in values if each * (value - fits.value) <= free]
    # A line through two points is a guess, so a value that it rules out is simulated anyway.
    return expected[-1] if expected else values[0]
