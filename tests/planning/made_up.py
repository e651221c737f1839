"""Candidates with memory and time by formula, in place of simulations."""

from __future__ import annotations

from collections.abc import Mapping

from accel_train.planning.candidates import Candidate, Space, divisors
from accel_train.planning.memory import GIB
from accel_train.planning.probe import Probe
from accel_train.planning.times import StepTime
from accel_train.simulation.ledger import CATEGORIES
from accel_train.simulation.work import Work

STATES = {"single": 8.0, "ddp": 8.0, "fsdp2": 2.0}
"""GiB."""
KEPT = {"none": 1.0, "selective": 0.5, "full": 0.125}
"""GiB of activations for a sample."""
RECOMPUTED = {"none": 1.0, "selective": 1.1, "full": 1.3}
SENT = {"single": 0.0, "ddp": 0.05, "fsdp2": 0.1}
"""Seconds, under FSDP2 for each micro-batch."""


def space(gpus: int, global_batch_size: int) -> Space:
    strategies = ("fsdp2", "ddp") if gpus > 1 else ("single",)
    sizes = divisors(global_batch_size // gpus)
    return Space(gpus, global_batch_size, strategies, ("none", "selective", "full"), sizes, frozenset())


def made_up(candidate: Candidate, micro_batches: int, held: Mapping[str, int] | None = None) -> Probe:
    size = candidate.micro_batch_size
    gib = STATES[candidate.strategy] + KEPT[candidate.mode] * size
    if micro_batches > 1:
        # Gradients beside the activations of the next micro-batch.
        gib += 2.0
    passes = micro_batches if candidate.strategy == "fsdp2" else 1
    seconds = RECOMPUTED[candidate.mode] * size * micro_batches / 64 + 0.001 * micro_batches
    states = round(STATES[candidate.strategy] * GIB)
    return Probe(
        candidate=candidate,
        micro_batches=micro_batches,
        simulated=min(micro_batches, 3),
        by_category=dict.fromkeys(CATEGORIES, 0) | {"parameters": states},
        tensors=round(gib * GIB),
        place="backward of it",
        work=Work(),
        time=StepTime(seconds, 0.0, 0.0, 0.0, 0.0, SENT[candidate.strategy] * passes),
        counted={"held": held or {"parameters": states}},
    )
