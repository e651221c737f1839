"""Measure the rates of this machine's devices and, with several processes, of the links between them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from accel_train.calibration import links
from accel_train.calibration.timing import MOST, Clock, Timed, own_clock, summarize, time_rounds, wall_clock
from accel_train.calibration.workloads import Workload, count, workloads
from accel_train.config import UsageError
from accel_train.cores import cpu_name, usable_cores
from accel_train.cost_model.record import Calibration, Figure, Figures, LinkFigure, Links, Machine
from accel_train.precision import Precision, dtype_of

LINKS_SHARE = 0.4
"""Share of the time spent on collectives if there are several processes."""
ONE_PROCESS = "not measured: one process; a plan for several uses a rule"


@dataclass(frozen=True)
class Place:
    """Device and precision to measure with, and how busy the system was."""

    device: torch.device
    precision: Precision
    load: float
    """The system's load average before anything was measured."""


def measure(place: Place, seconds: float) -> Calibration:
    """Measure this machine. Collective: every process calls it and gets the same calibration."""
    clock, clock_name = own_clock(place.device)
    several = dist.is_initialized()
    to_time = workloads(place.device, dtype_of(place.precision))
    share = seconds * (1 - LINKS_SHARE if several else 1) / len(to_time)
    figures = {name: _figure(workload, share, clock, place.device) for name, workload in to_time.items()}
    # Collectives run in threads of their own, which only the wall clock sees.
    link_figures = _links(place.device, seconds * LINKS_SHARE, wall_clock(place.device)) if several else _no_links()
    return Calibration(_machine(place, clock_name), Figures(**figures), Links(**link_figures))


def _figure(workload: Workload, seconds: float, clock: Clock, device: torch.device) -> Figure:
    """Time one workload on all processes at once: they share memory and power, as they do in a run."""
    amount = workload.amount(count(workload.compute))
    if dist.is_initialized():
        dist.barrier()
    times = time_rounds(workload.compute, seconds, clock)
    # Processes have run different numbers of rounds, but a gather needs as many values from each: pad with -1.
    padded = torch.full((MOST,), -1.0, dtype=torch.float64, device=device)
    padded[: len(times)] = torch.tensor(times, dtype=torch.float64)
    timed = summarize([[value for value in row if value >= 0] for row in links.gather(padded)])
    return Figure(amount / timed.seconds, workload.unit, timed.spread, timed.rounds, workload.how)


def _links(device: torch.device, seconds: float, clock: Clock) -> Mapping[str, LinkFigure]:
    figures: dict[str, LinkFigure] = {}
    how = f"{dist.get_backend()}, {dist.get_world_size()} processes: least squares of relative errors over sizes"
    for kind, times in links.time_links(device, seconds, clock).items():
        try:
            fitted = links.fit(list(times), [timed.seconds for timed in times.values()])
        except ValueError as error:
            raise UsageError(
                f"seconds: {seconds:.3g} of them for collectives: {kind}: {error}; times that grow are required. Give "
                "more --seconds, on a machine that is idle"
            ) from None
        figures[kind.replace("-", "_")] = _link_figure(fitted, times, how)
    return figures


def _link_figure(fitted: links.Fitted, times: Mapping[int, Timed], how: str) -> LinkFigure:
    """Describe a fit to ``times``, whose keys are bytes sent."""
    return LinkFigure(
        latency_seconds=fitted.link.latency_seconds,
        bytes_per_second=fitted.link.bytes_per_second,
        residual=fitted.residual,
        spread=max(timed.spread for timed in times.values()),
        rounds=sum(timed.rounds for timed in times.values()),
        how=how,
    )


def _no_links() -> Mapping[str, LinkFigure]:
    missing = LinkFigure(None, None, None, None, 0, ONE_PROCESS)
    return dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), missing)


def _machine(place: Place, clock: str) -> Machine:
    is_cuda = place.device.type == "cuda"
    cores, _ = usable_cores()
    several = dist.is_initialized()
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        device=torch.cuda.get_device_name(place.device) if is_cuda else cpu_name(),
        device_type="cuda" if is_cuda else "cpu",
        precision=place.precision,
        torch=torch.__version__,
        num_machines=_num_machines() if several else 1,
        processes=dist.get_world_size() if several else 1,
        backend=dist.get_backend() if several else None,
        threads=torch.get_num_threads(),
        clock=clock,
        load=place.load,
        cores=cores,
    )


def _num_machines() -> int:
    """Derive the number of machines from the launcher's variables. All have the same number of processes."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return math.ceil(dist.get_world_size() / here)


def load_before() -> float:
    """Return the system's load average over the last minute, to be read before the measurement."""
    return os.getloadavg()[0]
