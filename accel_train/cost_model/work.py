"""Amounts of work in a step, in the units of a device's rates: FLOPs, bytes moved, kernels, bytes sent and copied."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Work:
    """Amounts in one part of a step on one process."""

    products: int = 0
    """FLOPs of matrix products and convolutions."""
    attention: int = 0
    """FLOPs of attention."""
    moved: int = 0
    """Bytes read and written by all other operators."""
    kernels: int = 0
    """Number of operators, without views: they neither compute nor move anything."""
    sent: int = 0
    """Bytes sent in collectives, by the rule of a ring."""
    collectives: int = 0
    """Calls of collectives."""
    gathered: int = 0
    """Bytes of ``sent`` in all-gathers."""
    gathers: int = 0
    """Calls of all-gathers among ``collectives``."""
    scattered: int = 0
    """Bytes of ``sent`` in reduce-scatters."""
    scatters: int = 0
    """Calls of reduce-scatters among ``collectives``."""
    on_host: int = 0
    """Bytes read and written by operators on tensors in host memory."""
    copied: int = 0
    """Bytes copied between host memory and the device, in the type in which they cross."""
    copies: int = 0
    """Number of these copies."""

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Return (calls, bytes sent) of all-gathers, of reduce-scatters, and of all others as all-reduces."""
        return {
            "all-gather": (self.gathers, self.gathered),
            "reduce-scatter": (self.scatters, self.scattered),
            "all-reduce": (
                self.collectives - self.gathers - self.scatters,
                self.sent - self.gathered - self.scattered,
            ),
        }

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in NAMES))

    def times(self, factor: float) -> Work:
        """Return the work of ``factor`` such parts."""
        return Work(*(round(getattr(self, name) * factor) for name in NAMES))

    def computed(self, factor: float) -> Work:
        """Return the work of ``factor`` such parts that communicate as one."""
        communicated = ("sent", "collectives", "gathered", "gathers", "scattered", "scatters")
        return replace(self.times(factor), **{name: getattr(self, name) for name in communicated})


NAMES = tuple(field.name for field in fields(Work))
