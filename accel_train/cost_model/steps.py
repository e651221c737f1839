"""The time of a simulated step on a named device, whose machines a named link connects."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accel_train.config import UsageError
from accel_train.cost_model.devices import Rated, is_cpu, rated, refuse_several_machines
from accel_train.cost_model.networks import Machines, machines_of
from accel_train.cost_model.rates import LINKS, Link, Rates
from accel_train.cost_model.scaling import Point
from accel_train.cost_model.times import StepTime, step_time
from accel_train.cost_model.work import Work


@dataclass(frozen=True)
class TimedStep:
    """A counted step with its modelled time."""

    point: Point
    work: Work
    time: StepTime
    latency: float
    """Seconds of the communication that no bandwidth shortens."""
    device: Rated
    machines: Machines

    @property
    def between(self) -> str:
        """The link between its machines with the origin of its figures; empty if it takes one machine."""
        return self.machines.describe(self.point.processes)

    def as_json(self) -> dict[str, Any]:
        """Return seconds by part, and the rates and link that they follow from, each with its origin."""
        seconds = dataclasses.asdict(self.time)
        seconds |= {"computation": self.time.computation, "total": self.time.total, "latency": self.latency}
        return {
            "seconds": seconds,
            "samples_per_second": self.point.samples_per_second,
            "device": {"name": self.device.name, **self.device.as_json()},
            "machines": self.machines.as_json(),
        }


@dataclass(frozen=True)
class Timing:
    """Device and machines that ``--device``, ``--link`` and ``--gpus_per_machine`` name."""

    device: str
    is_cpu: bool
    machines: Machines

    def of(self, counted: Mapping[str, Any], *, is_another: bool = False) -> TimedStep:
        """Return the time of a step from the fields of ``simulation.step.Counted``. Raises ``UsageError``.

        ``is_another``: its global batch is not that of the config.
        """
        processes = counted["processes"]
        self.machines.refuse(processes)
        device = rated(self.device, counted["precision"], min(processes, self.machines.gpus))
        step = timed(counted, device, self.machines)
        return replace(step, point=replace(step.point, is_another=is_another))


def timing_of(device: str, link: str | None, gpus_per_machine: int) -> Timing:
    """Return the timing of these flags. Raises ``UsageError`` for unknown names, or a damaged calibration file."""
    if link is not None:
        refuse_several_machines(device, link)
    return Timing(device, is_cpu(device), machines_of(link, gpus_per_machine))


def timed(counted: Mapping[str, Any], device: Rated, machines: Machines) -> TimedStep:
    """Return the time of a step at the rates of ``device``. Raises ``UsageError`` if work was not counted by part."""
    parts = [Work(**part) for part in counted["work"]]
    if not parts:
        raise UsageError(
            f"device: {device.name}: the micro-batches of this step run different numbers of forwards, and a step time "
            "requires the same; leave --device out to do without it"
        )
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    links, latency = _links(counted, device.rates, machines)
    rates = replace(device.rates, links=links)
    # The work ends with the last micro-batch and the end of the step.
    time = step_time(total, parts[-2], parts[-1], counted["strategy"], rates, counted.get("overlap_comm"))
    point = Point(counted["processes"], counted["global_batch_size"], time.total)
    return TimedStep(point, total, time, latency, device, machines)


def _links(counted: Mapping[str, Any], rates: Rates, machines: Machines) -> tuple[dict[str, Link], float]:
    """Return the mean link of each kind of collective over its groups, and the seconds of all latencies."""
    used: dict[str, list[tuple[Link, int, int]]] = {}
    latency = 0.0
    for row in counted["collectives"]:
        link = machines.link(row["kind"], row["group_size"], row["stride"], rates, counted["processes"])
        kind = row["kind"] if row["kind"] in LINKS else LINKS[0]
        used.setdefault(kind, []).append((link, row["count"], row["sent"]))
        latency += row["count"] * link.latency_seconds
    return {**rates.links, **{kind: _mean(rows) for kind, rows in used.items()}}, latency


def _mean(rows: Sequence[tuple[Link, int, int]]) -> Link:
    """Return the link over which the calls and bytes of all rows take as long in total as over their own links."""
    first = rows[0][0]
    if all(link == first for link, _, _ in rows):
        return first
    calls = sum(count for _, count, _ in rows)
    sent = sum(size for _, _, size in rows)
    seconds = sum(size / link.bytes_per_second for link, _, size in rows)
    bandwidth = sent / seconds if seconds else math.inf
    return Link(sum(count * link.latency_seconds for link, count, _ in rows) / calls, bandwidth)
