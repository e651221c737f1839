"""Choose the number of torch threads by the CPU's part of the computation, unless the user set a number.

A run on a CPU takes the spare cores of the machine, an optimizer in host memory its process's share of all cores. With
more threads than free cores speed collapses, because each parallel region waits for the thread that is not running. Two
threads on two cores under a load of eight were 30 times slower than one.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from accel_train.cores import usable_cores
from accel_train.launch_files.parents import parent_command_lines
from accel_train.launch_files.requested import THREADS_UNASKED_VARIABLE, THREADS_VARIABLE, launcher_flags
from accel_train.runtime.strategy import device_of_updates, strategy_of

LOAD = Path("/proc/loadavg")
SAMPLES = 5
SAMPLE_SECONDS = 0.01


def asked(environment: Mapping[str, str], flags: Mapping[str, Any] | None) -> bool:
    """Return True if the user set the number of threads. ``flags`` of ``accelerate launch`` are None without it."""
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

    ``load`` is that of ``all_cores`` of the machine (``current_load``). About 1 of it is this start itself.
    """
    # A quarter of a core may be left over from the previous command, and must not cost a thread.
    spare = math.floor(all_cores - max(0.0, load - 1) + 0.25)
    return max(1, min(cores, spare) // local_processes)


def current_load() -> float:
    """Return the system's load average over the last minute, or the number of threads running now if that is lower.

    A command that has just ended, such as the installation before a first run, is still in the average, and would cost
    the whole run its threads. Takes 50 ms.
    """
    average, _, _ = os.getloadavg()
    running: list[int] = []
    with suppress(OSError, ValueError, IndexError):  # another system than Linux: the average alone
        for _ in range(SAMPLES):
            running.append(int(LOAD.read_text().split()[3].partition("/")[0]))
            time.sleep(SAMPLE_SECONDS)
    return min(average, statistics.mean(running)) if len(running) == SAMPLES else average


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def updates_on_host(accelerator: Accelerator, optimizer: str) -> bool:
    """Return True if the optimizer of that name computes on the CPU, whatever the model's device."""
    if optimizer == "adamw_offload" or device_of_updates(accelerator).type == "cpu":
        return True
    if not strategy_of(accelerator).startswith("zero"):
        return False
    plugin: Any = accelerator.state.deepspeed_plugin
    offload = plugin.deepspeed_config.get("zero_optimization", {}).get("offload_optimizer", {})
    return offload.get("device") == "cpu"


def resolve_threads(device: str, *, updates_on_host: bool = False) -> str:
    """Set torch's number of threads unless the user set one, and return a line for the log."""
    if _asked():
        return f"{torch.get_num_threads()} torch thread(s), as {THREADS_VARIABLE} or the launcher's flag says"
    cores, reason = usable_cores()
    local_processes = _local_processes()
    load, _, _ = os.getloadavg()
    all_cores = os.cpu_count() or 1
    if device == "cpu":
        load = current_load()
        torch.set_num_threads(choose(cores, local_processes, load, all_cores))
    elif updates_on_host:
        # The launcher's 1 would leave every other core idle while the devices wait. The load does not count: a machine
        # with GPUs is rarely shared, and the load of a previous run would cost threads for the whole run.
        torch.set_num_threads(max(1, cores // local_processes))
        reason += ", shared by the optimizers on the host"
    elif torch.get_num_threads() > cores:
        # If the GPU also computes the updates, the host computes no sum of the model: the number changes no result.
        torch.set_num_threads(cores)
    return (
        f"{torch.get_num_threads()} torch thread(s): {cores} core(s) usable ({reason}), {local_processes} process(es) "
        f"here, load {load:.1f} of {all_cores}; {THREADS_VARIABLE} sets another number"
    )


def keep_threads(manifest: Mapping[str, Any], device: str, *, updates_on_host: bool = False) -> list[str]:
    """Restore on a resume the checkpoint's number of threads for this process: another number sums in another order.

    That holds for a model on the CPU, and for the gradient norm where updates are computed on the host. Nothing changes
    if the user set a number, or if this machine lacks the cores. The comparison of layouts then names the difference.
    Returns at most one line for the log.
    """
    before: Any = manifest.get("layout", {}).get("threads")
    rank = int(os.environ.get("RANK", "0"))
    if isinstance(before, list):
        # One number for each process. A rank beyond the list has none to keep.
        before = next(iter(before[rank : rank + 1]), None)
    now = torch.get_num_threads()
    if device != "cpu" and not updates_on_host:
        return []
    if not isinstance(before, int) or before == now or _asked():
        return []
    cores, _ = usable_cores()
    available = max(1, cores // _local_processes())
    if before < 1 or before > available:
        return [
            f"{now} torch thread(s): the checkpoint was computed with {before}, for which there are too few cores here"
        ]
    torch.set_num_threads(before)
    return [f"{before} torch thread(s) instead of {now}, as the checkpoint was computed: the same bits"]
