"""Run the user's own launch file on CPU processes: DDP, FSDP2 and DeepSpeed ZeRO over gloo.

Accelerate has no CPU form of FSDP2 and ZeRO, and drops both silently. Their code runs on CPU once Accelerate's shared
state names the strategy. Only this module sets that private state. ``check_version`` refuses untested versions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from packaging.version import Version

from accel_train.config import UsageError
from accel_train.launch_files.machine_config import MachineConfig
from accel_train.runtime.deepspeed_build import load_communication

TESTED = (Version("1.15"), Version("1.16"))
"""First tested and first untested version of accelerate."""


def connect(strategy: str | None, timeout: timedelta) -> None:
    """Start gloo and set Accelerate's state so that ``Accelerator`` takes the path of ``strategy``. All ranks.

    ``AcceleratorState`` chooses its branch by the distributed type of ``PartialState``. With the type of a GPU machine
    it sets up FSDP and DeepSpeed as on GPUs, while the device stays CPU.
    """
    check_version()
    # With this variable AcceleratorState takes its CPU branch.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if strategy == "deepspeed":
        # DeepSpeed reads the variable during its import.
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed import comm

        load_communication()
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timeout, verbose=False)
    PartialState(cpu=True, timeout=timeout)
    state = PartialState._shared_state  # pyright: ignore[reportPrivateUsage]
    if strategy == "fsdp":
        state["distributed_type"] = DistributedType.MULTI_GPU
    elif strategy == "deepspeed":
        state["distributed_type"] = DistributedType.DEEPSPEED


def adapt(
    machine: MachineConfig, environment: dict[str, str], num_processes: int, arguments: Sequence[str] = ()
) -> list[str]:
    """Adapt ``environment`` to CPU processes and return the lines of a banner with the changes. Launcher only.

    ``arguments`` are those of the recipe.
    """
    devices = machine.num_processes or "all"
    changes = [f"{num_processes} CPU process(es) over gloo instead of {devices} device(s)"]
    if environment.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
        environment["FSDP_OFFLOAD_PARAMS"] = "false"
        changes.append("fsdp_offload_params: false, because the shards are in host memory already")
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["ACCELERATE_USE_CPU"] = "true"
    environment["DS_ACCELERATOR"] = "cpu"
    # All processes share the cores of this machine.
    environment.setdefault("OMP_NUM_THREADS", "1")
    rule = "=" * 78
    lines = [rule, f"REHEARSAL of {machine.path}: {machine.strategy} for real, not at its speed"]
    lines += [f"  changed: {change}" for change in changes]
    if not any(word.startswith("--output_dir") for word in arguments):
        lines.append(
            "  output_dir is that of the recipe: give --output_dir to keep the rehearsal apart from the real run"
        )
    lines.append(rule)
    return lines


def check_version() -> None:
    """Refuse an untested accelerate, whose private state may have changed."""
    installed = Version(version("accelerate"))
    first, untested = TESTED
    if not first <= installed < untested:
        raise UsageError(
            f"accelerate {installed} is installed; rehearsals are tested with >= {first}, < {untested} because they "
            f"prime its private state; install such a version: pip install 'accelerate>={first},<{untested}'"
        )
