"""Bounds on an offload that need no simulation of it, because DeepSpeed's engine takes long to simulate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_train.planning.candidates import DIVIDED, OFFLOADS, Space
from accel_train.planning.flags import Goal
from accel_train.planning.memory import FP32, HALF, Budget, over
from accel_train.simulation import ledger

if TYPE_CHECKING:
    from accel_train.planning.chains import Chain
    from accel_train.planning.probe import Probe


def left_out(
    strategy: str, space: Space, goal: Goal, budget: Budget, earlier: Sequence[Chain], planned: Probe | None
) -> str | None:
    """Return why an offload cannot take the place of ``planned``, or None if that is not known without a simulation."""
    reason = _too_large(strategy, budget, earlier)
    return _slower_in_host_memory(space, goal, earlier, planned) if reason is None else reason


def _too_large(strategy: str, budget: Budget, earlier: Sequence[Chain]) -> str | None:
    """Describe by how much an offload exceeds a limit at least. None if it may fit."""
    known = _without_offload(earlier)
    # Where every launch file was refused, each one has its own reason.
    if known is None:
        return None
    needed = _least_on_gpu_gib(strategy, budget, known)
    if needed > budget.limit_gib:
        return f"needs at least {needed:.2f} GiB, {over(needed, budget.limit_gib)}, in any mode and micro-batch"
    # Gradients and buffers come on top, by an amount that only its simulation has.
    host = budget.needed_host_gib(_least_on_host(known))
    if host > budget.host_limit_gib:
        return f"needs at least {host:.1f} GiB of host memory, {budget.over_host(host)}"
    return None


def least_host_gib(strategy: str, budget: Budget, earlier: Sequence[Chain]) -> float | None:
    """Return the host memory that an offload needs at least, None if it would not fit the GPU or nothing is known."""
    known = _without_offload(earlier)
    if known is None or _least_on_gpu_gib(strategy, budget, known) > budget.limit_gib:
        return None
    return budget.needed_host_gib(_least_on_host(known))


def _without_offload(chains: Sequence[Chain]) -> Probe | None:
    """Return any simulated candidate without an offload."""
    return next((probe for chain in chains for probe in chain.probes if chain.strategy not in OFFLOADS), None)


def _least_on_gpu_gib(strategy: str, budget: Budget, known: Probe) -> float:
    # ZeRO-3 keeps the weights on the host as well, and ZeRO-2 all of them on each device, in two bytes or more.
    weights = 0 if strategy in DIVIDED else HALF * known.counted["trained"]
    return budget.needed_gib(weights)


def _least_on_host(known: Probe) -> int:
    """Return the bytes of all processes' fp32 weights, optimizer state and EMA. Gradients come on top."""
    states = known.counted["held"].get(ledger.OPTIMIZER, 0) + known.counted["held"].get(ledger.EMA, 0)
    # Under FSDP2 the counted state is the shard of one process.
    if known.candidate.strategy in DIVIDED:
        states *= known.counted["processes"]
    return FP32 * known.counted["trained"] + states


def _slower_in_host_memory(space: Space, goal: Goal, earlier: Sequence[Chain], fastest: Probe | None) -> str | None:
    """Return why no offload can be the fastest, or None if that is not known without a simulation."""
    if goal == "memory" or fastest is None:
        return None
    least: list[float] = []
    for chain in earlier:
        # The least accumulation and recomputation: an offload can at best do the same.
        if chain.strategy in OFFLOADS or chain.mode != space.modes[0]:
            continue
        probes = [probe for probe in chain.probes if probe.candidate.micro_batch_size == space.sizes[-1]]
        least += [probe.least_offloaded for probe in probes]
    times = min(least, default=0.0) / fastest.time.total
    if times < 1:
        return None
    return (
        f"takes at least {times:.2f} times as long as {fastest.candidate}: counting products, attention, and states "
        "that are copied from and updated in host memory"
    )
