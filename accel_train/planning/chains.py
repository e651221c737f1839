"""Results of the search by launch file and mode, and how they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_train.linting.facts import divides_a_large_update
from accel_train.planning.candidates import MODES, OFFLOADS, WHOLE
from accel_train.planning.flags import Goal
from accel_train.planning.memory import GIB, Budget

if TYPE_CHECKING:
    from accel_train.planning.probe import Probe

UNDERSTATED = 1.4
"""Factor by which a modelled step with sharding must be faster than one without, where sharding is not needed. No model
counts the Python of FSDP2's hooks: real steps took 1.16 to 1.35 times as long as modelled under FSDP2, and the same
under DDP 1.01 to 1.06 times (docs/planning.md). Rounded up: calls of collectives cost the host time as well."""


@dataclass(frozen=True)
class Chain:
    """Results of the search for one strategy and mode."""

    strategy: str
    mode: str
    probes: tuple[Probe, ...] = ()
    left_out: str | None = None
    """Reason why no sizes, or not all of them, were simulated."""
    refused: bool = False
    """True if a start would refuse it."""
    hopeless: bool = False
    """The states alone do not fit, whatever the mode and the micro-batch."""


def best(chains: Sequence[Chain], goal: Goal, budget: Budget) -> Probe | None:
    """Return the candidate to plan, None if nothing fits."""
    fitting = fitting_probes(chains, budget)
    if goal == "memory":
        return min(fitting, key=lambda probe: (probe.tensors, probe.time.total), default=None)
    fastest = fastest_of(chains, budget)
    if fastest is None:
        return None
    # One that holds all states is planned unless sharding is clearly faster.
    in_place = [probe for probe in fitting if probe.time.total < seconds_to_beat(fastest, budget, probe)]
    return min(in_place, key=slowness, default=fastest)


def fitting_probes(chains: Sequence[Chain], budget: Budget) -> list[Probe]:
    """Return the simulated candidates within the budget."""
    return [probe for chain in chains for probe in chain.probes if probe.fits(budget)]


def fastest_of(chains: Sequence[Chain], budget: Budget) -> Probe | None:
    """Return the candidate of the lowest modelled time, whether or not it shards without need."""
    return min(fitting_probes(chains, budget), key=slowness, default=None)


def seconds_to_beat(fastest: Probe, budget: Budget, other: Probe) -> float:
    """Return the seconds below which a candidate is planned in place of the fastest, which may shard without need.

    Follows the linter's rules. Does not apply to a candidate with more recomputation: sharding is needless only if the
    activations fit as well.
    """
    if other.candidate.strategy not in WHOLE or fastest.candidate.strategy in WHOLE:
        return fastest.time.total
    needless = other.fits_easily(budget)
    if fastest.candidate.strategy not in OFFLOADS:
        needless = needless and not divides_a_large_update(other.trained_states, fastest.micro_batches)
    if needless and other.candidate.mode in (MODES[0], fastest.candidate.mode):
        return fastest.time.total * UNDERSTATED
    return fastest.time.total


def not_needed(probe: Probe, budget: Budget) -> str:
    """Describe why ``probe``, which holds all states, needs no sharding, and the speed that would justify it."""
    states = probe.states / GIB
    return (
        f"the states take {states:.2f} of {budget.vram_gib:g} GiB whole, so it has to be {UNDERSTATED:g} times as fast "
        "in a model that does not count its hooks"
    )


def smallest(chains: Sequence[Chain], budget: Budget | None = None) -> Probe | None:
    """Return the simulated candidate of least memory, with ``budget`` only among those that fit the host. None if all
    were refused.
    """
    probes = [probe for chain in chains for probe in chain.probes]
    if budget is not None:
        probes = [probe for probe in probes if probe.fits_host(budget)]
    return min(probes, key=lambda probe: probe.tensors, default=None)


def slowness(probe: Probe) -> tuple[float, int, int]:
    """Return the key by which candidates of one launch file are compared."""
    # At equal times, the fewest micro-batches and so the largest kernels.
    return probe.time.total, probe.micro_batches, probe.tensors
