"""One simulated candidate: its memory and the time of its step, extrapolated if not all micro-batches ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_train.cost_model.rates import Rates
from accel_train.cost_model.times import StepTime, step_time, step_work
from accel_train.cost_model.work import Work
from accel_train.linting.facts import fits_easily
from accel_train.planning.candidates import MODES, Candidate
from accel_train.planning.memory import FP32, GIB, HALF, Budget, over
from accel_train.simulation import ledger

STATES = (
    *(ledger.PARAMETERS, ledger.MASTERS, ledger.BUFFERS, ledger.GRADIENTS),
    *(ledger.OPTIMIZER, ledger.EMA, ledger.BESIDE),
)


@dataclass(frozen=True)
class Probe:
    """Memory and time of one candidate."""

    candidate: Candidate
    micro_batches: int
    """Micro-batches of each process in a step."""
    simulated: int
    """Micro-batches that were simulated. Each of the others is assumed to add the memory of its inputs, and as much
    work as the middle one."""
    by_category: Mapping[str, int]
    """Bytes at the peak."""
    tensors: int
    """Bytes at the peak, each tensor in blocks of the allocator."""
    place: str
    work: Work
    time: StepTime
    counted: Mapping[str, Any]
    """Fields of ``simulation.step.Counted``."""
    least_offloaded: float = 0.0
    """Lower bound on the seconds of the same step with its states in host memory."""

    @property
    def checkpointed(self) -> int:
        """Number of the model's blocks that are checkpointed."""
        if self.candidate.mode == MODES[0]:
            return 0
        if self.candidate.blocks is None:
            return int(self.counted["blocks"])
        return self.candidate.blocks

    @property
    def states(self) -> int:
        """Bytes held whatever the micro-batch: all of them are there when the optimizer steps."""
        return sum(self.counted["held"].get(name, 0) for name in STATES)

    @property
    def trained_states(self) -> int:
        """Bytes of the states without frozen weights, which an update reads and writes. Only right without shards."""
        frozen = self.counted["held"].get(ledger.PARAMETERS, 0) - FP32 * self.counted["trained"]
        return self.states - max(0, frozen)

    def fits_easily(self, budget: Budget) -> bool:
        """Return True if the states held here leave room, by the linter's rule about needless sharding and offload."""
        return fits_easily(self.states, budget.vram_gib * GIB)

    def needed_gib(self, budget: Budget) -> float:
        """Return the GiB needed on each GPU."""
        return budget.needed_gib(self.tensors)

    def on_host(self, budget: Budget) -> dict[str, int]:
        """Return the bytes in host memory by category, those of all processes: each of them counts as the first."""
        host: Mapping[str, int] = self.counted.get("host", {})
        return {category: size * budget.processes for category, size in host.items()}

    def needed_host_gib(self, budget: Budget) -> float:
        """Return the GiB needed in the machine's own memory, 0 without an offload."""
        return budget.needed_host_gib(sum(self.on_host(budget).values()))

    def fits_host(self, budget: Budget) -> bool:
        """Return True if it is within the limit of host memory."""
        return self.needed_host_gib(budget) <= budget.host_limit_gib

    def fits(self, budget: Budget) -> bool:
        """Return True if it is within both limits of the budget."""
        return self.needed_gib(budget) <= budget.limit_gib and self.fits_host(budget)

    def needs(self, budget: Budget) -> str:
        """Describe the memory needed, and by how much it exceeds the limits."""
        parts: list[str] = []
        needed = self.needed_gib(budget)
        parts.append(f"{needed:.2f} GiB")
        if needed > budget.limit_gib:
            parts.append(over(needed, budget.limit_gib))
        host = self.needed_host_gib(budget)
        if host:
            parts.append(f"{host:.1f} GiB of host memory")
        if not self.fits_host(budget):
            parts.append(budget.over_host(host))
        return ", ".join(parts)


def probe_of(candidate: Candidate, micro_batches: int, counted: Mapping[str, Any], rates: Rates) -> Probe:
    """Return the figures of a step with ``micro_batches`` from those counted with as many or fewer."""
    simulated = int(counted["micro_batches"])
    # Simulated steps are short: the middle micro-batches are all alike, and a real step may have hundreds.
    missing = micro_batches - simulated
    parts = [Work(**part) for part in counted["work"]]
    work = step_work(parts, micro_batches)
    # The work ends with the last micro-batch and the end of the step.
    time = step_time(work, parts[-2], parts[-1], candidate.strategy, rates, counted.get("overlap_comm"))
    peak = counted["peak"]
    by_category = dict(peak["by_category"])
    batch = counted["held"][ledger.BATCH]
    # The inputs of all micro-batches lie in memory from the beginning of a step.
    by_category[ledger.BATCH] += missing * batch // simulated
    by_category[ledger.TEMPORARY] += missing * (counted["inputs"] - batch) // simulated
    return Probe(
        candidate=candidate,
        micro_batches=micro_batches,
        simulated=simulated,
        by_category=by_category,
        tensors=counted["peak_in_blocks"] + missing * counted["inputs_in_blocks"] // simulated,
        place=peak["place"],
        work=work,
        time=time,
        counted=counted,
        least_offloaded=least_offloaded(counted, time, rates),
    )


def least_offloaded(counted: Mapping[str, Any], time: StepTime, rates: Rates) -> float:
    """Return a lower bound on the seconds of the step of ``time`` with its states in host memory.

    It counts the operators that are known without a simulation of the offload: the same products and attention; on the
    host one read of each gradient, and one read and write of each fp32 weight, state and average; a copy of each
    gradient to the host, and of each weight back in two bytes or more. In the time model none of these overlap.
    """
    held = counted["held"]
    processes = counted["processes"]
    # ZeRO divides over all processes what FSDP2 has divided already.
    values = counted["trained"] / processes
    states = held.get(ledger.OPTIMIZER, 0) + held.get(ledger.EMA, 0)
    if counted["strategy"] != "fsdp2":
        states /= processes
    on_host = 3 * FP32 * values + 2 * states
    copied = (FP32 + HALF) * values
    return time.products + time.attention + on_host / rates.on_host + copied / rates.copied
