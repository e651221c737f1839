"""Heuristics of torch's compiler for GPUs: rows as wide as a model's tokens are reduced in registers.

Imports the compiler, so import it only where something is compiled.

torch keeps a row in registers for a reduction over up to 1024 values. It reads a wider row once for the sum and again
for what follows, with Welford's update for a variance. It also writes intermediate values to memory in fp32: values
with several readers that are computed from more than four others, such as the normalised activations in a backward, and
any value computed from more than eight, such as the gradient of a norm's input. The latter could wait for the sum that
is needed, and be written in bf16.
"""

from __future__ import annotations

from typing import Any

import torch._inductor.config as inductor
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

ROW = 4096
"""Number of values in the longest row kept in registers: 16 per thread, at which no norm of a block spills."""
READS = 8
"""A result with several readers is written to memory only if it is computed from more values than this."""
CHAIN = 16
"""Any intermediate result is written to memory if it is computed from more values. A norm's backward reads 11."""


class RowsInRegisters(InductorChoices):
    """torch's choices, except that reductions of rows are persistent up to `ROW` values."""

    def uuid(self) -> str:
        """Return the key of these choices in the cache of compiled code."""
        return f"accel_train rows of {ROW}"

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Return True if a kernel shall hold a whole row at once."""
        if (
            inductor.triton.persistent_reductions
            and not cooperative_reduction
            and V.graph.sizevars.statically_known_leq(features.reduction_numel, ROW)
            and all(map(_reduces_rows, features.reduction_nodes()))
        ):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)


def _reduces_rows(node: Any) -> bool:
    """Return True if neighbours in memory are reduced. torch's own hint wants every operand as long as the result."""
    return all(
        isinstance(operand, MemoryDep) and operand.stride1_for_last_dim(result_for_complex_expression=False)
        for operand in node.read_writes.reads
        if not isinstance(operand, MemoryDep) or operand.var_names[-1] in operand.index.free_symbols
    )


def set_heuristics() -> None:
    """Set these heuristics for this process, unless a class of choices is set already.

    Whoever set it has tuned the compiler, so its thresholds stay as well. Without one, larger thresholds stay.
    """
    if inductor.inductor_choices_class is not None:
        return
    inductor.realize_reads_threshold = max(inductor.realize_reads_threshold, READS)
    # From torch 2.13, None stands for eight.
    inductor.realize_acc_reads_threshold = max(inductor.realize_acc_reads_threshold or 0, CHAIN)
    inductor.inductor_choices_class = RowsInRegisters
    # A thread that has compiled before already holds torch's choices.
    V.set_choices_handler(RowsInRegisters())
