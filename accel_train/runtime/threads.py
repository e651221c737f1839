"""Number of torch threads on a CPU: the spare cores of the machine, unless a person set a number.

With more threads than free cores speed collapses, because each parallel region waits for the thread that is not
running. Two threads on two cores under a load of eight were 30 times slower than one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from accel_train.cores import usable_cores
from accel_train.launch_files.parents import parent_command_lines
from accel_train.launch_files.requested import THREADS_UNASKED_VARIABLE, THREADS_VARIABLE, launcher_flags


def asked(environment: Mapping[str, str], flags: Mapping[str, Any] | None) -> bool:
    """Return True if a person set the number of threads. ``flags`` of ``accelerate launch`` are None without it."""
    if environment.get(THREADS_UNASKED_VARIABLE):
        return False
    if flags is not None and flags.get("num_cpu_threads_per_process") is not None:
        return True
    # Launchers set the variable of their children themselves, so the launcher's own environment counts.
    has_launcher = flags is not None or "TORCHELASTIC_RUN_ID" in environment
    launcher = psutil.Process().parent() if has_launcher else None
    if launcher is None:
        return THREADS_VARIABLE in environment
    try:
        return THREADS_VARIABLE in launcher.environ()
    except psutil.Error:
        return THREADS_VARIABLE in environment


def _asked() -> bool:
    return asked(os.environ, launcher_flags(parent_command_lines()))


def choose(cores: int, local_processes: int, load: float, all_cores: int) -> int:
    """Return the number of threads for each of ``local_processes``.

    ``load`` is the system's average over the last minute, on ``all_cores`` of the machine. About 1 of it is this start
    itself.
    """
    # A quarter of a core is the tail of the previous command and must not cost a thread.
    spare = math.floor(all_cores - max(0.0, load - 1) + 0.25)
    return max(1, min(cores, spare) // local_processes)


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def resolve_threads(device: str) -> str:
    """Set torch's number of threads unless a person set one, and return a line for the log."""
    if _asked():
        return f"{torch.get_num_threads()} torch thread(s), as {THREADS_VARIABLE} or the launcher's flag says"
    cores, reason = usable_cores()
    local_processes = _local_processes()
    load, _, _ = os.getloadavg()
    all_cores = os.cpu_count() or 1
    if device == "cpu":
        torch.set_num_threads(choose(cores, local_processes, load, all_cores))
    elif torch.get_num_threads() > cores:
        # With a GPU the host computes little, and no sum of the model: the number cannot change a result.
        torch.set_num_threads(cores)
    return (
        f"{torch.get_num_threads()} torch thread(s): {cores} core(s) usable ({reason}), {local_processes} process(es) "
        f"here, load {load:.1f} of {all_cores}; {THREADS_VARIABLE} sets another number"
    )


def keep_threads(manifest: Mapping[str, Any], device: str) -> list[str]:
    """Restore the number of threads of the checkpoint on a resume: another number sums in another order.

    Nothing changes if a person set a number, or if this machine lacks the cores. The comparison of layouts then names
    the difference. Returns at most one line for the log.
    """
    before = manifest.get("layout", {}).get("threads")
    now = torch.get_num_threads()
    if device != "cpu" or not isinstance(before, int) or before == now or _asked():
        return []
    cores, _ = usable_cores()
    available = max(1, cores // _local_processes())
    if before < 1 or before > available:
        return [f"{now} torch thread(s): the checkpoint was computed with {before}, for which cores are missing here"]
    torch.set_num_threads(before)
    return [f"{before} torch thread(s) instead of {now}, as the checkpoint was computed: the same bits"]
