"""The number of processes of a launch, and the flags that replace numbers of the launch file.

Flags are checked here, with errors that name them: Accelerate takes 0 processes for an absent flag, and ends in a
traceback for other numbers out of range.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from accel_train.config import UsageError
from accel_train.launch_files.section import Section

if TYPE_CHECKING:
    from accel_train.launch_files.machine_config import MachineConfig

FLAG = "--num_processes"
HIGHEST_PORT = 65535
_OTHER_TYPE = "write MULTI_GPU (or FSDP, DEEPSPEED) as distributed_type, or"


def read_processes(top: Section, kind: str, machines: int, flag: int | None, given_by: str) -> int | None:
    """Return the number of processes over all machines, or None if neither file nor flag has one.

    ``given_by`` names the flag, or the variable in its place.
    """
    count = 1 if kind == "NO" else None
    if top.values.get("num_processes") is not None:
        # Refuses Accelerate's -1, which asks for a flag: an absent key does the same.
        count = top.integer("num_processes", 1, low=1)
    if flag is not None:
        refuse_processes(flag)
        count = flag
    if count is None:
        return None
    if kind == "NO" and (count > 1 or machines > 1):
        raise _one_process(top, count, flag, given_by)
    here, rest = divmod(count, machines)
    if rest:
        required = f"a multiple of num_machines ({machines}): it counts the processes of all machines"
        nearest = f"{max(1, here) * machines} or {(here + 1) * machines}"
        if flag is not None:
            raise UsageError(f"{given_by} {flag}: must be {required}, in {top.file}; give {nearest}")
        raise top.refuse("num_processes", required, f"write {nearest}")
    return count


def _one_process(top: Section, count: int, flag: int | None, given_by: str) -> UsageError:
    """Return the error for more than one process or machine with `distributed_type: NO`."""
    required = "1 with `distributed_type: NO`, which starts one process whatever the number"
    if count > 1 and flag is not None:
        place = top.where("distributed_type")
        return UsageError(f"{given_by} {flag}: must be {required} ({place}); {_OTHER_TYPE} give 1")
    key = "num_processes" if count > 1 else "num_machines"
    return top.refuse(key, required, f"{_OTHER_TYPE} 1 here")


def refuse_uneven_hosts(environment: Mapping[str, str]) -> None:
    """Refuse hosts that started different numbers of processes, by torchrun's variables on each host that can tell."""
    names = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    if not all(environment.get(name, "").isdecimal() for name in names):
        return
    here, hosts, count = (int(environment[name]) for name in names)
    if here * hosts != count:
        raise UsageError(
            f"num_processes: the hosts started different numbers of processes: {here} on {socket.gethostname()}, and "
            f"{count} on {hosts} hosts together; give every host the same --num_processes, that of all hosts together"
        )


def refuse_processes(flag: int | None) -> None:
    """Refuse a flag `--num_processes` below 1. None stands for no flag."""
    if flag is not None and flag < 1:
        raise UsageError(
            f"--num_processes {flag}: must be a whole number, 1 or more, for the processes of all machines; correct "
            "it, or leave it out for the number in the launch file"
        )


def refuse_missing_processes(machine: MachineConfig) -> None:
    """Refuse a launch whose number of processes is neither in the file nor given by a flag."""
    if machine.num_processes is None:
        raise Section(machine.path, "", dict(machine.raw), machine.places).refuse(
            "num_processes",
            "a whole number, 1 or more, which counts the processes of all machines",
            "add the line, or give --num_processes N",
        )


def device_of_process(environment: Mapping[str, str], visible: int) -> int:
    """Return the index of this process's device among the ``visible`` ones. Refuses two processes on one.

    Accelerate takes the local rank modulo the number of devices, and NCCL then ends in "Duplicate GPU detected".
    """
    rank = int(environment.get("LOCAL_RANK", "0"))
    # Children of torchrun see the same devices. All of them refuse, because only the first one reports it.
    needed = int(environment.get("LOCAL_WORLD_SIZE", rank + 1))
    # Tasks started by srun have one device each, whose index is 0 in all of them.
    if visible == 1 and "TORCHELASTIC_RUN_ID" not in environment:
        return 0
    refuse_shared_devices(needed, visible)
    return rank


def refuse_shared_devices(needed: int, visible: int) -> None:
    """Refuse ``needed`` processes on a machine that shows fewer devices."""
    if needed > visible:
        raise UsageError(
            f"num_processes: {needed} processes on this machine need one device each, but only {visible} are visible; "
            f"name {needed} in CUDA_VISIBLE_DEVICES (with one task per machine, `srun --gpus-per-task {needed}` gives "
            f"it these), or start {visible}"
        )


def refuse_rank_and_port(machines: int, rank: int | None, port: int | None) -> None:
    """Refuse flags `--machine_rank` and `--main_process_port` out of range. None stands for no flag."""
    if rank is not None and not 0 <= rank < machines:
        raise UsageError(
            f"--machine_rank {rank}: must be 0 to {machines - 1}, because num_machines is {machines}; count the "
            "machines from 0, which is the one at main_process_ip"
        )
    # Several machines cannot agree on "any free port".
    lowest = 1 if machines > 1 else 0
    if port is not None and not lowest <= port <= HIGHEST_PORT:
        raise UsageError(
            f"--main_process_port {port}: must be a whole number, {lowest} to {HIGHEST_PORT}; correct it, or leave it "
            "out"
        )


def refuse_launch_without_device(machine: MachineConfig, source: str) -> None:
    """Refuse a launch file whose settings Accelerate would ignore on this machine, which shows no accelerator."""
    multi_gpu = machine.distributed_type == "MULTI_GPU" and not machine.use_cpu
    if multi_gpu or machine.strategy not in ("single", "ddp"):
        refuse_without_device(machine.strategy, source)


def refuse_without_device(strategy: str, source: str) -> NoReturn:
    """Refuse ``strategy``, which `source` asks for, because this machine shows no accelerator."""
    raise UsageError(
        f"distributed_type: {strategy} was asked for by {source}, but this machine has no accelerator device, so "
        "Accelerate would ignore the setting; run it on GPUs, or try it here with `accel-train rehearse --config_file "
        "FILE --num_processes N RECIPE ...`"
    )
