"""One simulated candidate: its memory and the time of its step, extended where not all micro-batches were simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_train.calibration.rates import Rates
from accel_train.planning.candidates import Candidate
from accel_train.planning.memory import Budget
from accel_train.planning.times import StepTime, step_time, step_work
from accel_train.simulation import ledger
from accel_train.simulation.work import Work

STATES = (ledger.PARAMETERS, ledger.BUFFERS, ledger.GRADIENTS, ledger.OPTIMIZER, ledger.EMA, ledger.BESIDE)


@dataclass(frozen=True)
class Probe:
    """Figures of one candidate."""

    candidate: Candidate
    micro_batches: int
    """Of each process in a step."""
    simulated: int
    """Of them, how many were simulated. The rest adds its inputs to the memory, and work like the middle one."""
    by_category: Mapping[str, int]
    """Bytes at the peak."""
    tensors: int
    """Bytes at the peak, each tensor in blocks of the allocator."""
    place: str
    work: Work
    time: StepTime
    counted: Mapping[str, Any]
    """Fields of ``simulation.step.Counted``."""

    @property
    def states(self) -> int:
        """Bytes held whatever the micro-batch: all of them are there when the optimizer steps."""
        return sum(self.counted["held"].get(name, 0) for name in STATES)

    def needed_gib(self, budget: Budget) -> float:
        """Return the GiB needed on each GPU."""
        return budget.needed_gib(self.tensors)

    def fits(self, budget: Budget) -> bool:
        """Return True within the limit of the budget."""
        return self.needed_gib(budget) <= budget.limit_gib


def probe_of(candidate: Candidate, micro_batches: int, counted: Mapping[str, Any], rates: Rates) -> Probe:
    """Return the figures of a step with ``micro_batches`` from those counted with as many or fewer."""
    simulated = int(counted["micro_batches"])
    # Simulated steps are short: the middle micro-batches are all alike, and a real step may have hundreds.
    missing = micro_batches - simulated
    parts = [Work(**part) for part in counted["work"]]
    work = step_work(parts, micro_batches)
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
        # The work ends with the last micro-batch and the end of the step.
        time=step_time(work, parts[-2], parts[-1], candidate.strategy, rates),
        counted=counted,
    )
