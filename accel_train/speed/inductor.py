"""Heuristics of torch's compiler for GPUs: rows as wide as a model's tokens are reduced in registers.

Imports the compiler, so import it only where something is compiled.

torch keeps a row in registers for a reduction over up to 1024 values, and reads a wider one once for the sum and again
for what follows, with Welford's update for a variance. And it writes down, in fp32, a value made of more than four
others that has several readers, as the normalised activations of a backward, and any value made of more than eight, as
the gradient of a norm's input, where it could wait for the sum that is needed, in bf16.
"""

from __future__ import annotations

from typing import Any

import torch._inductor.config as inductor
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

ROW = 4096
"""Values of the longest row that is kept in registers: 16 a thread, at which no norm of a block spills."""
READS = 8
"""Values that are read again sooner than their result is written down, where it has several readers."""
CHAIN = 16
"""Values that are read before an intermediate result is written down. A norm's backward reads 11 up to its end."""


class RowsInRegisters(InductorChoices):
    """torch's choices but for reductions of rows: persistent up to `ROW` values."""

    def uuid(self) -> str:
        """Return what identifies the choices in the cache of compiled code."""
        return f"accel_train rows of {ROW}"

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Return True if a kernel reads a row at once."""
        if (
            inductor.triton.persistent_reductions
            and not cooperative_reduction
            and V.graph.sizevars.statically_known_leq(features.reduction_numel, ROW)
            and all(map(_reduces_rows, features.reduction_nodes()))
        ):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)


def _reduces_rows(node: Any) -> bool:
    """Return True if neighbours in memory are added up. torch's own hint wants every operand as long as the result."""
    return all(
        isinstance(operand, MemoryDep) and operand.stride1_for_last_dim(result_for_complex_expression=False)
        for operand in node.read_writes.reads
        if not isinstance(operand, MemoryDep) or operand.var_names[-1] in operand.index.free_symbols
    )


def set_heuristics() -> None:
    """Set them for this process, unless other choices than torch's are set already."""
    inductor.realize_reads_threshold = max(inductor.realize_reads_threshold, READS)
    # From torch 2.13, None stands for eight.
    inductor.realize_acc_reads_threshold = max(inductor.realize_acc_reads_threshold or 0, CHAIN)
    if inductor.inductor_choices_class is not None:
        return
    inductor.inductor_choices_class = RowsInRegisters
    # A thread that has compiled before has torch's choices in hand.
    V.set_choices_handler(RowsInRegisters())
