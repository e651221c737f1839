"""Cores that this process may use, by its affinity and its cgroups' quotas, and the name of the processor."""

from __future__ import annotations

import math
import os
import platform
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def usable_cores() -> tuple[int, str]:
    """Return how many cores this process may use at once, and the limit that decides: affinity or a cgroup's quota."""
    cores = os.cpu_count() or 1
    # macOS has no affinity.
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = min(_quotas(), default=math.inf)
    if quota < cores:
        return max(1, math.floor(quota)), f"cgroup quota {quota:g}"
    return cores, "affinity"


def cpu_name() -> str:
    """Return the model name of the processor, or its architecture if the system does not report a name."""
    with suppress(OSError):  # only Linux has the file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _quotas() -> list[float]:
    """List the quotas of this process's cgroups and their parents, in cores: version 2, and version 1's ``cpu``."""
    # A container may see its own cgroup as the root.
    quotas = _quota(ROOT) + _quota(ROOT / "cpu")
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return quotas
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = ROOT / controllers
        group = top / place.lstrip("/")
        # The lowest quota holds, and a job may be limited by the group above its own.
        for folder in (group, *group.parents):
            if folder == top or top in folder.parents:
                quotas += _quota(folder)
    return quotas


def _quota(folder: Path) -> list[float]:
    """Read the quota of one cgroup, in cores. Returns an empty list if it has none."""
    try:
        quota, period = _quota_and_period(folder)
        # No quota is `max` in version 2 and -1 in version 1.
        if quota.isdigit() and int(quota) > 0:
            return [int(quota) / int(period)]
    except (OSError, ValueError):
        pass
    return []


def _quota_and_period(folder: Path) -> tuple[str, str]:
    version2 = folder / "cpu.max"
    if version2.exists():
        quota, period = version2.read_text().split()
    else:
        quota = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    return quota, period
