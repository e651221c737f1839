"""A plan: the chosen candidate, the reason for each of its values, and remedies if nothing fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accel_train.config import UsageError
from accel_train.planning.bounds import least_host_gib
from accel_train.planning.candidates import (
    BLOCKS,
    LAUNCH_FILES,
    MICRO_BATCH,
    MODE,
    MODES,
    OFFLOADS,
    WHOLE,
    Candidate,
    Space,
)
from accel_train.planning.chains import Chain, best, not_needed, smallest
from accel_train.planning.flags import Goal
from accel_train.planning.memory import GIB, MARGIN_SHARE, Budget, default_margin, difference, over
from accel_train.planning.probe import Probe
from accel_train.planning.search import Measure, spare_recomputation
from accel_train.simulation import ledger


@dataclass(frozen=True)
class Plan:
    """The chosen candidate, and the space and chains it was chosen from."""

    recipe: str
    goal: Goal
    space: Space
    budget: Budget
    chains: Sequence[Chain]
    chosen: Probe
    whole: Probe
    """The best candidate with all of its blocks checkpointed. The plan has its launch file, and its micro-batch unless
    a smaller one needs so much less checkpointing that it is faster."""

    def reasons(self) -> dict[str, str]:
        """Return why each value was chosen, by option."""
        candidate = self.chosen.candidate
        others = [name for name in self.space.strategies if name != candidate.strategy]
        strategy = "one process" if self.budget.on_cpu else "one GPU"
        if others:
            strategy = self._compared_with(others, lambda chain: chain.strategy)
        modes = [name for name in self.space.modes if name != candidate.mode]
        mode = "as the flag says"
        if MODE not in self.space.fixed:
            mode = self._compared_with(modes, self._mode_of)
        reasons = {"launch file": strategy, MICRO_BATCH: self._reason_of_size(), MODE: mode}
        if self.chosen.checkpointed:
            reasons[BLOCKS] = self._reason_of_blocks()
        return reasons

    def exceeding(self) -> list[Probe]:
        """Return the simulated candidates over the limit, the nearest first."""
        probes = [probe for chain in self.chains for probe in chain.probes if not probe.fits(self.budget)]
        return sorted(probes, key=lambda probe: probe.tensors)

    def _mode_of(self, chain: Chain) -> str:
        # Compared under the chosen strategy only.
        return chain.mode if chain.strategy == self.chosen.candidate.strategy else ""

    def _compared_with(self, values: Sequence[str], key: Callable[[Chain], str]) -> str:
        """Compare the best candidate of each other value with the chosen one."""
        by_reason: dict[str, list[str]] = {}
        for value in values:
            chains = [chain for chain in self.chains if key(chain) == value]
            by_reason.setdefault(self._compared(chains), []).append(value)
        return "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in by_reason.items())

    def _compared(self, chains: Sequence[Chain]) -> str:
        other = best(chains, self.goal, self.budget)
        if other is not None and self.goal == "memory":
            return f"needs {other.needs(self.budget)}"
        if other is not None:
            text = f"takes {other.time.total / self.chosen.time.total:.2f} times as long"
            if other.candidate.strategy not in WHOLE and other.time.total < self.chosen.time.total:
                text += f", but {not_needed(self.chosen, self.budget)}"
            return text
        nearest = smallest(chains)
        reasons = [chain.left_out for chain in chains if chain.left_out]
        # Without a reason each chain was searched down to its smallest micro-batch, so this is the least memory.
        if nearest is not None and not reasons:
            return f"does not fit, needs at least {nearest.needs(self.budget)}"
        return reasons[0]

    def _reason_of_size(self) -> str:
        size = self.whole.candidate.micro_batch_size
        if MICRO_BATCH in self.space.fixed:
            return "as the flag says"
        # Only the two ends were simulated for this goal.
        if self.goal == "memory" and len(self.space.sizes) > 1:
            ends = [self.space.sizes[0], self.space.sizes[-1]]
            return f"of the ends, {ends[0]} and {ends[1]}, the one with less memory"
        if self.chosen.candidate.micro_batch_size < size:
            return self._reason_of_smaller_size()
        if size == self.space.share:
            return "the whole share of a process: nothing is accumulated"
        nearest = self._next_larger()
        if nearest is None:
            return "the largest that fits"
        larger = nearest.candidate.micro_batch_size
        needed = nearest.needed_gib(self.budget)
        if nearest.fits(self.budget):
            return f"faster than {larger}, which needs {needed:.2f} GiB and fits too"
        mode = ""
        if self.whole.candidate.mode != self.chosen.candidate.mode:
            mode = f" with {self.whole.candidate.mode}"
        return f"the largest that fits{mode}: {larger} needs {self._over(nearest)}"

    def _reason_of_smaller_size(self) -> str:
        size = self.chosen.candidate.micro_batch_size
        probes = [probe for chain in self.chains for probe in chain.probes if probe.fits(self.budget)]
        larger = [probe for probe in probes if probe.candidate.strategy == self.chosen.candidate.strategy]
        larger = [probe for probe in larger if probe.candidate.micro_batch_size > size]
        nearest = min(larger, key=lambda probe: (probe.candidate.micro_batch_size, probe.time.total))
        times = nearest.time.total / self.chosen.time.total
        return (
            f"{nearest.candidate.micro_batch_size} fits with {nearest.checkpointed} blocks of mode "
            f"{nearest.candidate.mode}, but takes {times:.2f} times as long"
        )

    def _reason_of_blocks(self) -> str:
        if self.space.blocks is not None:
            return "as preset or flag says"
        fewer = self.chosen.checkpointed - 1
        nearest = self._simulated(self.chosen.candidate.with_blocks(fewer))
        if nearest is None:
            return f"at least one, which {MODE} {self.chosen.candidate.mode} requires"
        if self.goal == "memory":
            needed = nearest.needed_gib(self.budget)
            more = difference(needed - self.chosen.needed_gib(self.budget))
            return f"the fewest with the least memory: with {fewer} it needs {needed:.2f} GiB, {more} more"
        return f"the fewest that fit: with {fewer} it needs {self._over(nearest)}"

    def _simulated(self, candidate: Candidate) -> Probe | None:
        for chain in self.chains:
            for probe in chain.probes:
                if probe.candidate == candidate:
                    return probe
        return None

    def _over(self, probe: Probe) -> str:
        needed = probe.needed_gib(self.budget)
        return f"{needed:.2f} GiB, {over(needed, self.budget.limit_gib)}"

    def _next_larger(self) -> Probe | None:
        """Return the simulated candidate of the next larger micro-batch, all else equal."""
        chosen = self.whole.candidate
        larger: list[Probe] = []
        for probe in (probe for chain in self.chains for probe in chain.probes):
            size = probe.candidate.micro_batch_size
            if size > chosen.micro_batch_size and replace(chosen, micro_batch_size=size) == probe.candidate:
                larger.append(probe)
        return min(larger, key=lambda probe: probe.candidate.micro_batch_size, default=None)


def make_plan(recipe: str, goal: Goal, space: Space, budget: Budget, chains: Sequence[Chain], config: Any) -> Plan:
    """Choose among the simulated candidates. Raises ``UsageError`` if nothing fits or a start would refuse all."""
    chosen = best(chains, goal, budget)
    if chosen is None:
        raise UsageError(_nothing_fits(space, budget, chains, config))
    return Plan(recipe, goal, space, budget, chains, chosen, chosen)


def without_needless_checkpointing(plan: Plan, measure: Measure) -> Plan:
    """Return the plan with as much activation checkpointing as it needs, and no more."""
    budget = plan.budget
    if plan.goal == "memory":
        # No more memory than the least that was found.
        budget = replace(budget, vram_gib=plan.whole.needed_gib(budget), margin_gib=0.0, share=1.0)
    chains, chosen = spare_recomputation(plan.space, plan.goal, budget, plan.chains, plan.whole, measure)
    return replace(plan, chains=chains, chosen=chosen)


def _nothing_fits(space: Space, budget: Budget, chains: Sequence[Chain], config: Any) -> str:
    # What fits the GPU, and not the machine around it, has a remedy of its own.
    found = smallest(chains, budget) or smallest(chains)
    if found is None:
        # Mostly all have the same reason: an option of the experiment.
        return str(chains[0].left_out)
    states = found.states / GIB
    activations = found.by_category[ledger.ACTIVATIONS] / GIB
    needed = found.needed_gib(budget)
    enough = _enough(budget, needed)
    helps = [*_more_host_memory(budget, chains), f"{_device(budget)} {enough:.1f} GiB"]
    rules = [f"{name} {gib:.2f}" for name, gib in budget.parts_gib(found.tensors).items()]
    # If it would not fit even without tensors, making them smaller does not help.
    if budget.needed_gib(0) <= replace(budget, share=1.0).limit_gib:
        helps += _remedies(space, budget, config, found)
    return (
        f"vram_gib: {budget.vram_gib:g}: nothing fits into {budget.limit_gib:.2f} GiB, {_share(budget)}; the smallest "
        f"that was found needs {needed:.2f} GiB ({found.candidate}): weights, gradients, optimizer and EMA take "
        f"{states:.2f}, activations {activations:.2f}; besides all tensors, {', '.join(rules)}"
        f"{_offloads_ruled_out(chains)}. What helps: {'; '.join(helps)}"
    )


def _offloads_ruled_out(chains: Sequence[Chain]) -> str:
    """Describe the limits that rule out an offload without a simulation."""
    files: dict[str | None, dict[str, None]] = {}
    for chain in _ruled_out(chains):
        files.setdefault(chain.left_out, {})[LAUNCH_FILES[chain.strategy]] = None
    return "".join(f". {' and '.join(names)}: {reason}" for reason, names in files.items())


def _ruled_out(chains: Sequence[Chain]) -> list[Chain]:
    """Return the chains of offloads that were not simulated, because a limit is known to be too low."""
    return [chain for chain in chains if chain.strategy in OFFLOADS and not chain.probes and not chain.refused]


def _device(budget: Budget) -> str:
    return "for each process" if budget.on_cpu else "a GPU of"


def _more_host_memory(budget: Budget, chains: Sequence[Chain]) -> list[str]:
    """Return the host memory that the least demanding launch file needs, of those that fit the GPU, if there is one."""
    probes = [probe for chain in chains for probe in chain.probes]
    short = [probe for probe in probes if not probe.fits_host(budget) and probe.needed_gib(budget) <= budget.limit_gib]
    nearest = min(short, key=lambda probe: probe.needed_host_gib(budget), default=None)
    if nearest is None:
        return _at_least_host_memory(budget, chains)
    needed = nearest.needed_host_gib(budget) / (1 - MARGIN_SHARE)
    file = LAUNCH_FILES[nearest.candidate.strategy]
    return [f"a machine with {math.ceil(needed)} GiB of memory instead of {budget.host_gib:.4g}, for {file}"]


def _at_least_host_memory(budget: Budget, chains: Sequence[Chain]) -> list[str]:
    """Return the host memory below which no offload can fit, among those that the GPU's limit does not rule out."""
    least: dict[str, float] = {}
    for strategy in dict.fromkeys(chain.strategy for chain in _ruled_out(chains)):
        needed = least_host_gib(strategy, budget, chains)
        if needed is not None:
            least[LAUNCH_FILES[strategy]] = needed / (1 - MARGIN_SHARE)
    if not least:
        return []
    return [
        f"a machine with at least {math.ceil(min(least.values()))} GiB of memory instead of {budget.host_gib:.4g}, "
        f"for {' or '.join(least)}"
    ]


def _enough(budget: Budget, needed: float) -> float:
    """Return the smallest GPU memory with a limit of at least ``needed``, in GiB, rounded up to tenths."""
    used = needed / budget.share
    # The default margin grows with the memory, one of --margin_gib does not.
    enough = used + budget.margin_gib
    if budget.margin_gib == default_margin(budget.vram_gib):
        enough = used / (1 - MARGIN_SHARE)
    return math.ceil(enough * 10) / 10


def _share(budget: Budget) -> str:
    text = f"which is {budget.vram_gib:g} less a margin of {budget.margin_gib:.2f}"
    return text if budget.share == 1 else f"{budget.share:.0%} of what is left by a margin of {budget.margin_gib:.2f}"


def _more_gpus_can_help(space: Space, budget: Budget, found: Probe) -> bool:
    """Return False if it would not fit with all its states on other GPUs, or no more of them divide the batch."""
    size = found.candidate.micro_batch_size
    # A smaller share of the batch may be a single micro-batch, of one sample at least.
    spared = found.states + found.by_category[ledger.UNREDUCED]
    spared += found.by_category[ledger.ACTIVATIONS] * (size - 1) // size
    several = replace(budget, processes=max(2, budget.processes))
    return space.gpus < space.global_batch_size and several.needed_gib(found.tensors - spared) <= several.limit_gib


def _remedies(space: Space, budget: Budget, config: Any, found: Probe) -> list[str]:
    """Return possible remedies, the least harmful first."""
    remedies: list[str] = []
    if budget.share < 1:
        remedies.append("--goal speed, which uses all that the margin leaves")
    smallest_values = {MICRO_BATCH: 1, MODE: MODES[-1]}
    values = {MICRO_BATCH: space.sizes[0], MODE: space.modes[0]}
    # A flag with the smallest value is not the cause, and leaving it out helps nothing.
    larger = [name for name in sorted(space.fixed) if values[name] != smallest_values[name]]
    remedies += [f"without --{name} a smaller value is tried" for name in larger]
    if space.blocks is not None:
        remedies.append(f"without --{BLOCKS} {space.blocks} all blocks are checkpointed")
    if _more_gpus_can_help(space, budget, found):
        remedies.append(f"more --gpus than {space.gpus}, over which {LAUNCH_FILES['fsdp2']} divides the states")
    if config.precision == "fp32":
        remedies.append("--precision bf16, which halves most activations")
    unreduced = found.by_category[ledger.UNREDUCED] / GIB
    if unreduced > 0 and config.sync != "every":
        remedies.append(f"--sync every, which keeps no whole gradients between micro-batches ({unreduced:.2f} GiB)")
    if not budget.on_cpu and not set(OFFLOADS) & set(space.strategies):
        remedies.append("pip install 'accel-train[deepspeed]', for zero2_offload.yaml with states in host memory")
    remedies.append("a smaller model or shorter samples")
    return remedies
