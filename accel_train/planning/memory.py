"""Memory of a GPU beside the simulated tensors: rules with their numbers, none of them measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30


class Rule(NamedTuple):
    """Memory taken on a GPU by something other than tensors."""

    name: str
    gib: float
    """A fixed part."""
    share: float
    """A part of the tensors."""
    several: bool
    """Only with several processes."""
    reason: str


RULES = (
    Rule("CUDA context", 0.5, 0.0, False, "driver, and the code of kernels"),
    Rule("workspaces", 0.0625, 0.0, False, "cuBLAS and cuBLASLt, 32 MiB each as on compute capability 9.0"),
    Rule("NCCL buffers", 0.5, 0.0, True, "of channels to the other GPUs"),
    Rule("fragmentation", 0.0, 0.05, False, "gaps in segments of 2 and 20 MiB: 5 % of the tensors"),
)
MARGIN_SHARE = 0.05
"""Part of ``--vram_gib`` to leave free without ``--margin_gib``."""
BALANCED_SHARE = 0.8
"""Part of the memory to use with ``--goal balanced``."""


@dataclass(frozen=True)
class Budget:
    """Memory of each GPU. A plan may use ``limit_gib`` of it."""

    vram_gib: float
    margin_gib: float
    processes: int
    share: float = 1.0
    """Part to use of the memory left by the margin."""

    @property
    def limit_gib(self) -> float:
        return (self.vram_gib - self.margin_gib) * self.share

    def parts_gib(self, tensors: int) -> dict[str, float]:
        """Return the GiB added by each rule to ``tensors`` bytes."""
        rules = [rule for rule in RULES if self.processes > 1 or not rule.several]
        return {rule.name: rule.gib + rule.share * tensors / GIB for rule in rules}

    def needed_gib(self, tensors: int) -> float:
        """Return the GiB needed on a GPU for ``tensors`` bytes in blocks of the allocator."""
        return tensors / GIB + sum(self.parts_gib(tensors).values())

    def tensor_bytes(self) -> float:
        """Return the largest number of tensor bytes within the limit."""
        fixed = sum(self.parts_gib(0).values())
        # Every rule is linear in the tensors, so one GiB of them shows the slope.
        growth = self.needed_gib(GIB) - fixed
        return (self.limit_gib - fixed) / growth * GIB


def default_margin(vram_gib: float) -> float:
    """Return the margin without ``--margin_gib``."""
    return MARGIN_SHARE * vram_gib
