"""Links between machines, by name, and the time of a collective over several machines.

A group within one machine takes the device's own link, as in a plan. Over M machines with m of its processes in each:

    bandwidth = min(device link, m * LINK_SHARE of each GPU's part of the machine's ports)
    latency   = that within one machine + further steps
    further steps, to gather and to scatter, in a ring:     (M - 1) * (step between + (m - 1) * step within)
    further steps, to reduce and for all else, in a tree:   2 * (ceil(log2 M) * step between + (m - 1) * step within)

A ring enters and leaves each machine once, so that all ports of its processes share the bytes that one process sends.
Steps of a tree take longer than those of a ring. Where groups lie differently over the machines, a step waits for the
slowest: the fewest of its processes in a machine have the fewest ports, and m of the latency is their mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel_train.config import UsageError
from accel_train.cost_model.rates import LINK_SHARE, LINKS, RULE, Link, Rates
from accel_train.wording import did_you_mean, nearest

GPUS_PER_MACHINE = 8
RING = ("all-gather", "reduce-scatter")
"""Kinds that use a ring. NCCL has a tree for all-reduces, which it uses where a ring's latency would matter."""
NCCL = "NCCL's own model of its LL128 protocol (src/graph/tuning.cc)"


class Network(NamedTuple):
    """Network between machines."""

    gbits: float
    """Gb/s of one port, in one direction."""
    gpus_per_port: int | None
    """None: one port for the whole machine."""
    source: str
    step_seconds: float = 4.0e-6
    """Latency of a ring's step from one machine to the next: NCCL's for any network."""
    inside_seconds: float = 1.9e-6
    """Latency of a ring's step from GPU to GPU within a machine: NCCL's for NVLink. For PCIe it has 2.5 us."""
    tree_step_seconds: float = 8.5e-6
    """Latency of a tree's step from one machine to the next."""
    tree_inside_seconds: float = 1.25e-6
    """Latency of a tree's step within a machine: NCCL's for NVLink. For PCIe it has 1.9 us."""

    def bytes_per_second(self, gpus: int) -> float:
        """Return each GPU's share of the ports of a machine with ``gpus`` of them, by the data sheet."""
        return self.gbits * 1e9 / 8 / min(self.gpus_per_port or gpus, gpus)


NETWORKS = {
    "infiniband-hdr": Network(200, 1, "NVIDIA DGX A100 data sheet: eight ports of 200 Gb/s for eight GPUs"),
    "infiniband-ndr": Network(400, 1, "NVIDIA DGX H100 user guide: eight ports of 400 Gb/s for eight GPUs"),
    "roce-100": Network(
        100, 2, "NVIDIA DGX-1 architecture paper: four ports of 100 Gb/s for eight GPUs, InfiniBand or Ethernet"
    ),
    "ethernet-25": Network(25, None, "Amazon EC2 P3: 25 Gb/s for the eight GPUs of a p3.16xlarge"),
}
"""By the name for ``--link``."""


@dataclass(frozen=True)
class Machines:
    """Machines with ``gpus`` each, and the network between them."""

    gpus: int = GPUS_PER_MACHINE
    name: str | None = None
    network: Network | None = None
    """None with one machine."""

    def link(self, kind: str, size: int, stride: int, rates: Rates, processes: int | None = None) -> Link:
        """Return the slowest link of the groups of ``size`` processes, whose ranks are ``stride`` apart.

        Without ``processes`` there are as many as fill one block of groups.
        """
        within = rates.links.get(kind, rates.links[LINKS[0]])
        network = self.network
        if network is None:
            return within
        links = [
            self._over(network, kind, size, division, within)
            for division in self.divisions(size, stride, processes or size * stride)
        ]
        return min(links, key=lambda link: (link.bytes_per_second, -link.latency_seconds))

    def _over(self, network: Network, kind: str, size: int, division: tuple[int, int], within: Link) -> Link:
        fewest, machines = division
        if machines == 1:
            return within
        neighbours = size / machines - 1
        if kind in RING:
            further = (machines - 1) * (network.step_seconds + neighbours * network.inside_seconds)
        else:
            levels = math.ceil(math.log2(machines))
            further = 2 * (levels * network.tree_step_seconds + neighbours * network.tree_inside_seconds)
        between = fewest * network.bytes_per_second(self.gpus) * LINK_SHARE
        return Link(within.latency_seconds + further, min(within.bytes_per_second, between))

    def divisions(self, size: int, stride: int, processes: int) -> set[tuple[int, int]]:
        """Return the distinct (fewest processes in one machine, number of machines) over all groups."""
        divisions: set[tuple[int, int]] = set()
        block = size * stride
        for first in range(0, processes, block):
            for rank in range(first, first + stride):
                members = Counter(other // self.gpus for other in range(rank, rank + block, stride))
                divisions.add((min(members.values()), len(members)))
        return divisions

    def refuse_idle(self, numbers: Sequence[int]) -> None:
        """Raise ``UsageError`` for a link between machines if each of the numbers of processes is within one."""
        if self.network is not None and max(numbers) <= self.gpus:
            raise UsageError(
                f"link: {self.name}: {max(numbers):,} process(es) are within one machine of {self.gpus} GPUs, so "
                f"nothing is sent between machines; leave --link out, give more --num_processes than {self.gpus}, or a "
                "smaller --gpus_per_machine"
            )

    def refuse(self, processes: int) -> None:
        """Raise ``UsageError`` if ``processes`` do not fill machines, or have no link between them."""
        if processes <= self.gpus:
            return
        if processes % self.gpus:
            usual = [number for number in range(self.gpus, 0, -1) if processes % number == 0]
            raise UsageError(
                f"gpus_per_machine: {self.gpus}: {processes:,} processes do not fill machines of {self.gpus} GPUs: a "
                f"number that divides them is required; give --gpus_per_machine {usual[0]}, or --num_processes "
                f"{processes // self.gpus * self.gpus}"
            )
        if self.network is None:
            raise UsageError(
                f"link: not given: {processes:,} processes fill {processes // self.gpus:,} machines of {self.gpus} "
                f"GPUs, and a link between them is required: {', '.join(NETWORKS)}; give one of them, such as --link "
                "infiniband-ndr"
            )

    def describe(self, processes: int) -> str:
        """Return the link between machines with the origin of its figures; empty where one machine is enough."""
        network = self.network
        if network is None or processes <= self.gpus:
            return ""
        bandwidth = network.bytes_per_second(self.gpus)
        return (
            f"{self.name} between machines of {self.gpus} GPUs: {LINK_SHARE:.0%} ({RULE}) of {bandwidth / 1e9:.4g} "
            f"GB/s for each GPU ({network.source}); {network.step_seconds * 1e6:g} us for a step between machines and "
            f"{network.inside_seconds * 1e6:g} us within in a ring, {network.tree_step_seconds * 1e6:g} and "
            f"{network.tree_inside_seconds * 1e6:g} us in a tree, by {NCCL}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the link's figures with their source."""
        tree: dict[str, Any] = {"gpus_per_machine": self.gpus, "link": self.name}
        if self.network is not None:
            tree["bytes_per_second_of_each_gpu"] = self.network.bytes_per_second(self.gpus)
            tree |= {"share": LINK_SHARE, "step_seconds": self.network.step_seconds}
            tree |= {"inside_seconds": self.network.inside_seconds, "source": self.network.source}
            tree["tree_step_seconds"] = self.network.tree_step_seconds
            tree["tree_inside_seconds"] = self.network.tree_inside_seconds
        return tree


def machines_of(link: str | None, gpus: int) -> Machines:
    """Return machines of ``gpus`` with a link of the table. Raises ``UsageError`` for an unknown one."""
    if link is None:
        return Machines(gpus)
    if link not in NETWORKS:
        meant = did_you_mean(nearest(link, NETWORKS))
        raise UsageError(f"link: {link}: one of the table is required: {', '.join(NETWORKS)}{meant}; give one of them")
    return Machines(gpus, link, NETWORKS[link])
