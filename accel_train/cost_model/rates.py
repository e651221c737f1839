"""Rates of a device, and the time that work takes at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_train.cost_model.work import Work

RULE = "a rule, not measured"
LINK_SHARE = 0.8
"""Part of a link's bandwidth reached by collectives. A rule, not measured."""
LINKS = ("all-reduce", "all-gather", "reduce-scatter")
"""Kinds of collectives with a link of their own. Others, such as a broadcast, take the first."""


@dataclass(frozen=True)
class Link:
    """Time of one kind of collective: a latency, and bytes sent by each process over a bandwidth."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, calls: int, sent: int) -> float:
        """Return the time of ``calls`` that send ``sent`` bytes in total."""
        return calls * self.latency_seconds + sent / self.bytes_per_second


@dataclass(frozen=True)
class Rates:
    """Rates of a device per second, and its times per kernel and collective."""

    products: float
    """FLOPs of matrix products."""
    attention: float
    """FLOPs of attention, forward and backward."""
    moved: float
    """Bytes moved by other operators."""
    host_seconds: float
    """Time of the host for each kernel."""
    links: Mapping[str, Link]
    """By the kinds of ``LINKS``."""
    on_host: float
    """Bytes of host memory read and written by an offloaded optimizer of each process, while all of them step."""
    copied: float
    """Bytes copied between host memory and the device."""
    serial: bool = False
    """The host computes as well, as on a CPU: nothing overlaps."""

    def device_seconds(self, work: Work) -> float:
        """Return the time of everything but collectives on the device."""
        return work.products / self.products + work.attention / self.attention + work.moved / self.moved

    def copy_seconds(self, work: Work) -> float:
        """Return the time of copies between host memory and the device, each of which the host starts."""
        return work.copies * self.host_seconds + work.copied / self.copied

    def latency_seconds(self, work: Work) -> float:
        """Return the part of the collectives' time that no bandwidth shortens."""
        return sum(self.links[kind].latency_seconds * calls for kind, (calls, _) in work.by_kind().items())

    def communication_seconds(self, work: Work) -> float:
        """Return the time of all collectives, overlapped with computation or not."""
        return sum(self.links[kind].seconds(calls, sent) for kind, (calls, sent) in work.by_kind().items())


def rate(value: float, unit: str) -> str:
    """Return a rate with a prefix, such as ``92.8 GFLOP/s``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
