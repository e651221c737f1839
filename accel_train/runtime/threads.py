"""How many threads torch takes on a CPU: those that the machine has to spare, unless somebody said a number.

More threads than free cores collapse: each parallel region waits for the thread that is not running. Two threads on two
cores under a load of eight were 30 times slower than one.
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
