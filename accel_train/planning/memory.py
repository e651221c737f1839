"""Memory of a GPU and of its host besides the simulated tensors: rules with their numbers, none of them measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30
FP32, HALF = 4, 2
"""Bytes of a value."""


class Rule(NamedTuple):
    """Memory taken on a GPU or on its host by something other than tensors."""

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
CPU_RULES = (
    Rule("process", 0.5, 0.0, False, "Python, torch's libraries, the code of kernels"),
    Rule("fragmentation", 0.0, 0.05, False, "gaps between blocks: 5 % of the tensors"),
)
"""Rules for a process that trains on the CPU, in place of ``RULES``."""
HOST_RULES = (
    Rule("processes", 4.0, 0.0, False, "4 GiB for each: its libraries, CUDA's host side, its data"),
    Rule("page-locked blocks", 0.0, 1 / 3, False, "sizes that are powers of two: a third more on average"),
)
"""Rules for the host memory of each process that keeps tensors there."""
MARGIN_SHARE = 0.05
"""Part of ``--vram_gib`` to leave free without ``--margin_gib``, and of ``--host_gib``."""
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
    host_gib: float = math.inf
    """Memory of the machine, which its GPUs share."""
    host_is_here: bool = False
    """``host_gib`` is the memory of this machine, because none was given."""
    on_cpu: bool = False
    """Processes on a CPU. The memory of each takes the place of a GPU's."""

    @property
    def host_limit_gib(self) -> float:
        return self.host_gib * (1 - MARGIN_SHARE)

    def host_parts_gib(self, tensors: int) -> dict[str, float]:
        """Return the GiB added by each rule to ``tensors`` bytes in host memory, those of all processes."""
        return {rule.name: rule.gib * self.processes + rule.share * tensors / GIB for rule in HOST_RULES}

    def needed_host_gib(self, tensors: int) -> float:
        """Return the GiB needed on the machine for ``tensors`` bytes, those of all processes, or 0 for none."""
        # Without an offload the host holds what it holds for any launch file, and limits none.
        return tensors / GIB + sum(self.host_parts_gib(tensors).values()) if tensors else 0.0

    def over_host(self, needed: float) -> str:
        """Describe how much of ``needed`` GiB exceeds the machine's own memory, and whose limit that is."""
        text = over(needed, self.host_limit_gib)
        if self.host_is_here:
            text += f" of {self.host_limit_gib:.1f} GiB, this machine's; give --host_gib for that of the target"
        return text

    @property
    def limit_gib(self) -> float:
        return (self.vram_gib - self.margin_gib) * self.share

    @property
    def rules(self) -> tuple[Rule, ...]:
        if self.on_cpu:
            return CPU_RULES
        return tuple(rule for rule in RULES if self.processes > 1 or not rule.several)

    @property
    def memory(self) -> str:
        """Owner of the memory, for messages."""
        return "a process" if self.on_cpu else "a GPU"

    def machine(self) -> str:
        """Describe the devices of a plan."""
        if self.on_cpu:
            return f"{self.processes} process(es) on a CPU, {self.vram_gib:g} GiB for each"
        return f"{self.processes} GPU(s) of {self.vram_gib:g} GiB"

    def parts_gib(self, tensors: int) -> dict[str, float]:
        """Return the GiB added by each rule to ``tensors`` bytes."""
        return {rule.name: rule.gib + rule.share * tensors / GIB for rule in self.rules}

    def needed_gib(self, tensors: int) -> float:
        """Return the GiB needed on a GPU for ``tensors`` bytes in blocks of the allocator."""
        return tensors / GIB + sum(self.parts_gib(tensors).values())

    def tensor_bytes(self) -> float:
        """Return the largest number of tensor bytes within the limit."""
        fixed = sum(self.parts_gib(0).values())
        # Every rule is linear in the tensors, so one GiB of them shows the slope.
        growth = self.needed_gib(GIB) - fixed
        return (self.limit_gib - fixed) / growth * GIB


def difference(gib: float) -> str:
    """Return a difference in GiB, or in MiB where that would be rounded to nothing."""
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def over(needed: float, limit: float) -> str:
    """Describe how much of ``needed`` GiB exceeds the limit."""
    return f"{difference(needed - limit)} too much"


def default_margin(vram_gib: float) -> float:
    """Return the margin without ``--margin_gib``."""
    return MARGIN_SHARE * vram_gib
