"""Bandwidth and latency of collectives, fitted to their times at several sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.calibration.timing import LEAST, MOST, WARM_UP, Clock, Timed, summarize
from accel_train.cost_model.rates import LINKS, Link
from accel_train.simulation.collectives import sent_bytes

SIZES = {
    "cpu": tuple(2**power for power in (12, 15, 18, 20, 22, 24, 25)),
    "cuda": tuple(2**power for power in (12, 16, 20, 22, 24, 26, 28)),
}
"""Sizes of the whole tensor in bytes, by device type."""


@dataclass(frozen=True)
class Fitted:
    """A link whose latency and bandwidth are fitted to measured times."""

    link: Link
    residual: float
    """Root mean square of the relative errors."""


def fit(sent: Sequence[int], seconds: Sequence[float]) -> Fitted:
    """Fit the line ``latency + sent / bandwidth`` by least squares of the relative errors.

    The largest sizes take a thousand times as long as the smallest: with absolute errors they alone would decide.
    Raises ``ValueError`` for fewer than two sizes, and for times that do not grow with the size.
    """
    # (latency + slope x - t) / t: a linear problem in 1 / t and x / t, whose target is 1.
    ones = [1 / t for t in seconds]
    slopes = [x / t for x, t in zip(sent, seconds, strict=True)]
    aa, ab, bb = _dot(ones, ones), _dot(ones, slopes), _dot(slopes, slopes)
    a, b = sum(ones), sum(slopes)
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        raise ValueError("a line requires two sizes or more")
    latency = (a * bb - b * ab) / determinant
    slope = (b * aa - a * ab) / determinant
    # A latency cannot be negative: take the best line through zero.
    if latency < 0:
        latency, slope = 0.0, b / bb
    if slope <= 0:
        raise ValueError("the times do not grow with the size")
    errors = [latency * one + slope * x - 1 for one, x in zip(ones, slopes, strict=True)]
    return Fitted(Link(latency, 1 / slope), math.sqrt(_dot(errors, errors) / len(errors)))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def time_links(device: torch.device, seconds: float, clock: Clock) -> Mapping[str, Mapping[int, Timed]]:
    """Time each kind of collective, by the bytes that a process sends. Collective: every process calls it."""
    processes = dist.get_world_size()
    times_by_kind: dict[str, dict[int, Timed]] = {}
    for kind in LINKS:
        times_by_kind[kind] = {}
        for size in SIZES[device.type]:
            # Whole shards of fp32, the type of DDP's gradients. Gathered weights differ in their bytes only.
            values = max(1, size // 4 // processes) * processes
            share = seconds / len(LINKS) / len(SIZES[device.type])
            times = _rounds(_collective(kind, values, processes, device), share, clock, device)
            times_by_kind[kind][sent_bytes(kind, processes, 4 * values)] = times
    return times_by_kind


def _collective(kind: str, values: int, processes: int, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(values, device=device)
    if kind == "all-reduce":
        return lambda: dist.all_reduce(whole)
    shard = torch.zeros(values // processes, device=device)
    # torch 2.13 renamed both, and warns of the older names.
    named: Any = dist
    if kind == "all-gather":
        return partial(getattr(dist, "all_gather_single", named.all_gather_into_tensor), whole, shard)
    return partial(getattr(dist, "reduce_scatter_single", named.reduce_scatter_tensor), shard, whole)


def _rounds(collective: Callable[[], object], seconds: float, clock: Clock, device: torch.device) -> Timed:
    """Time a collective. Every process runs as many rounds as the slowest one has time for."""
    collective()
    before = clock.read()
    for _ in range(WARM_UP):
        collective()
    each = torch.tensor((clock.read() - before) / WARM_UP, device=device)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    rounds = min(max(round(seconds / float(each)), LEAST), MOST)
    times: list[float] = []
    dist.barrier()
    before = clock.read()
    for _ in range(rounds):
        collective()
        after = clock.read()
        times.append(after - before)
        before = after
    return summarize(gather(torch.tensor(times, device=device, dtype=torch.float64)))


def gather(times: Tensor) -> list[list[float]]:
    """Return the values of every process. Collective: each calls it with the same number of values."""
    if not dist.is_initialized():
        return [times.tolist()]
    every = [torch.empty_like(times) for _ in range(dist.get_world_size())]
    dist.all_gather(every, times)
    return [found.tolist() for found in every]
