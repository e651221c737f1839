"""Keys of a launch file that make `accelerate launch` start the processes of all machines, by mpirun or DeepSpeed.

Accelerate obeys them. `accel-train launch` starts the processes of its own machine only, so it refuses them.
"""

from __future__ import annotations

from typing import cast

from accel_train.launch_files.machine_config import MachineConfig
from accel_train.launch_files.section import Section

_OF_DEEPSPEED = ("deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter")


def refuse_other_launchers(machine: MachineConfig) -> None:
    """Raise ``UsageError`` for a file whose processes are started from one machine by mpirun, pdsh or the like."""
    required = "absent: `accel-train launch` starts the processes of its own machine only"
    mpirun = _section(machine, "mpirun_config")
    if mpirun.values.get("mpirun_hostfile") is not None:
        raise mpirun.refuse(
            "mpirun_hostfile",
            required,
            "delete mpirun_config, write num_machines, main_process_ip and main_process_port, and start the same "
            "command on each machine with its own --machine_rank; or use `accelerate launch`",
        )
    # On one machine Accelerate ignores these keys as well.
    if machine.deepspeed is None or machine.num_machines == 1:
        return
    deepspeed = _section(machine, "deepspeed_config")
    remedy = (
        "write `deepspeed_multinode_launcher: standard` without host file and filters, and start the same command on "
        f"each of the {machine.num_machines} machines with its own --machine_rank; or use `accelerate launch`"
    )
    launcher = deepspeed.text("deepspeed_multinode_launcher", "standard")
    if str(launcher).lower() != "standard":
        required = "standard: `accel-train launch` starts the processes of its own machine only"
        raise deepspeed.refuse("deepspeed_multinode_launcher", required, remedy)
    for key in _OF_DEEPSPEED:
        if deepspeed.values.get(key) is not None:
            raise deepspeed.refuse(key, required, remedy)


def _section(machine: MachineConfig, name: str) -> Section:
    values = cast("dict[str, object]", machine.raw.get(name) or {})
    return Section(machine.path, name, values, machine.places)
