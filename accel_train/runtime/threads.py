"""How many threads torch takes on a CPU: those that the machine has to spare, unless somebody said a number.

More threads than free cores collapse: each parallel region waits for the thread that is not running. Two threads on two
cores under a load of eight were 30 times slower than one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from accel_train.launch_files.requested import (
    THREADS_UNASKED_VARIABLE,
    THREADS_VARIABLE,
    launcher_flags,
    parent_command_lines,
)

ROOT = Path("/sys/fs/cgroup")


def asked(environment: Mapping[str, str], flags: Mapping[str, Any] | None) -> bool:
    """Whether a person said how many. ``flags`` are those of ``accelerate launch``, None where it is not the launcher.

    Launchers set the variable of their children by themselves, so what counts is the launcher's own environment.
    """
    if environment.get(THREADS_UNASKED_VARIABLE):
        return False
    if flags is not None and flags.get("num_cpu_threads_per_process") is not None:
        return True
    if flags is None and "TORCHELASTIC_RUN_ID" not in environment:
        return THREADS_VARIABLE in environment
    launcher = psutil.Process().parent()
    try:
        return THREADS_VARIABLE in (environment if launcher is None else launcher.environ())
    except psutil.Error:
        return THREADS_VARIABLE in environment


def _asked() -> bool:
    return asked(os.environ, launcher_flags(parent_command_lines()))


def usable_cores(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> tuple[int, str]:
    """Cores that this process may use at once, and what says so: its affinity or the quota of its cgroup."""
    cores, reason = len(os.sched_getaffinity(0)), "affinity"
    quota = min(_quotas(root, own), default=math.inf)
    if quota < cores:
        cores, reason = max(1, math.floor(quota)), f"cgroup quota {quota:g}"
    return cores, reason


def _quotas(root: Path, own: Path) -> list[float]:
    """Of this process's cgroup and of those around it, in cores: version 2, and version 1 of the controller cpu."""
    found: list[float] = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        inner = top / place.lstrip("/")
        while True:
            found += _quota(inner)
            if inner == top or top not in inner.parents:
                break
            inner = inner.parent
    return found + _quota(root) + _quota(root / "cpu")  # a container may see its own cgroup as the root


def _quota(folder: Path) -> list[float]:
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return [int(quota) / int(period)] if quota.strip().isdigit() and int(quota) > 0 else []
    except (OSError, ValueError):
        return []


def choose(cores: int, local_processes: int, load: float, all_cores: int) -> int:
    """Threads for each of ``local_processes``. ``load`` is the system's average over the last minute, of which about
    one is this start itself; ``all_cores`` are those of the machine, to which it refers."""
    # A quarter of a core is no work but the end of the command before this one: it must not cost a thread.
    spare = math.floor(all_cores - max(0.0, load - 1) + 0.25)
    return max(1, min(cores, spare) // local_processes)


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def resolve_threads(device: str) -> str:
    """Set torch's number where nobody asked for one; returns one line for the log."""
    if _asked():
        return f"{torch.get_num_threads()} torch thread(s), as {THREADS_VARIABLE} or the launcher's flag says"
    cores, reason = usable_cores()
    local_processes = _local_processes()
    load, all_cores = os.getloadavg()[0], os.cpu_count() or 1
    if device == "cpu":
        torch.set_num_threads(choose(cores, local_processes, load, all_cores))
    elif torch.get_num_threads() > cores:  # the host's part is small, and none of its sums are the model's
        torch.set_num_threads(cores)
    return (
        f"{torch.get_num_threads()} torch thread(s): {cores} core(s) usable ({reason}), {local_processes} process(es) "
        f"here, load {load:.1f} of {all_cores}; {THREADS_VARIABLE} sets another number"
    )


def keep_threads(manifest: Mapping[str, Any], device: str) -> list[str]:
    """On a resume, take the number that the checkpoint was computed with: another one sums in another order.

    A number that somebody asked for stays, and so does one that this machine has no cores for; the comparison of
    layouts names the difference. Returns the line for the log.
    """
    before = manifest.get("layout", {}).get("threads")
    now = torch.get_num_threads()
    if device != "cpu" or not isinstance(before, int) or before == now or _asked():
        return []
    if before < 1 or before > max(1, usable_cores()[0] // _local_processes()):
        return [f"{now} torch thread(s): the checkpoint was computed with {before}, for which cores are missing here"]
    torch.set_num_threads(before)
    return [f"{before} torch thread(s) instead of {now}, as the checkpoint was computed: the same bits"]
