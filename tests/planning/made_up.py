"""Candidates with memory and time by formula, in place of simulations."""

from __future__ import annotations

from collections.abc import Mapping

from accel_train.cost_model.times import StepTime
from accel_train.cost_model.work import Work
from accel_train.planning.candidates import MODES, OFFLOADS, Candidate, Space, divisors
from accel_train.planning.memory import GIB
from accel_train.planning.probe import Probe
from accel_train.simulation.ledger import CATEGORIES, PARAMETERS, UNREDUCED

STATES = {"single": 8.0, "ddp": 8.0, "fsdp2": 2.0, "zero2_offload": 1.5, "zero3_offload": 0.5}
"""GiB."""
ON_HOST = {"zero2_offload": 6.0, "zero3_offload": 7.0}
"""GiB of all processes."""
OFFLOADED = {"zero2_offload": 0.05, "zero3_offload": 0.1}
"""Seconds of the optimizer on the host."""
KEPT = {"none": 1.0, "selective": 0.5, "full": 0.125}
"""GiB of activations for a sample."""
RECOMPUTED = {"none": 1.0, "selective": 1.1, "full": 1.3}
BLOCKS = 8
LAUNCHED = 0.001
"""Seconds for the kernels of a micro-batch, whatever its size."""
SENT = {"single": 0.0, "ddp": 0.05, "fsdp2": 0.1, "zero2_offload": 0.01, "zero3_offload": 0.015}
"""Seconds, for each micro-batch under the strategies that reduce in each."""


def space(gpus: int, global_batch_size: int, *, offloads: bool = False) -> Space:
    strategies = ("fsdp2", "ddp") if gpus > 1 else ("single",)
    if offloads:
        strategies += OFFLOADS
    sizes = divisors(global_batch_size // gpus)
    return Space(gpus, global_batch_size, strategies, MODES, sizes, frozenset())


def made_up(candidate: Candidate, micro_batches: int, held: Mapping[str, int] | None = None) -> Probe:
    size = candidate.micro_batch_size
    strategy = candidate.strategy
    part = 1.0 if candidate.blocks is None else candidate.blocks / BLOCKS
    # Each block that is not checkpointed keeps what it keeps without.
    kept = part * KEPT[candidate.mode] + (1 - part) * KEPT["none"]
    recomputed = part * RECOMPUTED[candidate.mode] + (1 - part) * RECOMPUTED["none"]
    # Gradients beside the activations of the next micro-batch.
    unreduced = 2.0 if micro_batches > 1 and strategy not in OFFLOADS else 0.0
    gib = STATES[strategy] + kept * size + unreduced
    passes = 1 if strategy in ("single", "ddp") else micro_batches
    seconds = recomputed * size * micro_batches / 64 + LAUNCHED * micro_batches
    states = round(STATES[strategy] * GIB)
    # Offloaded gradients are added up on the host, where a single micro-batch has nothing to add.
    on_host = round(ON_HOST.get(strategy, 0.0) * GIB) + (micro_batches > 1 and strategy in OFFLOADS) * GIB // 4
    sent = SENT[strategy] * passes
    return Probe(
        candidate=candidate,
        micro_batches=micro_batches,
        simulated=min(micro_batches, 3),
        by_category=dict.fromkeys(CATEGORIES, 0) | {PARAMETERS: states, UNREDUCED: round(unreduced * GIB)},
        tensors=round(gib * GIB),
        place="backward of it",
        work=Work(copied=on_host, on_host=on_host),
        time=StepTime(seconds, 0.0, 0.0, 0.0, 0.0, sent, on_host=OFFLOADED.get(strategy, 0.0)),
        counted={
            "values": 10**9,
            "trained": 10**8,
            "processes": 1,
            "precision": "bf16",
            "step": 1,
            "blocks": BLOCKS,
            "held": held or {"parameters": states},
            "host": {"optimizer state": on_host} if on_host else {},
        },
    )
