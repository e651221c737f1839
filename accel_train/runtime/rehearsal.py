"""Run the user's own launch file for real on CPU processes: DDP, FSDP2 and DeepSpeed ZeRO over gloo.

Accelerate has no CPU form of FSDP2 and ZeRO, and drops both in silence. The code paths themselves run on CPU
once its shared state says so, which is done here and nowhere else. It touches private state of Accelerate:
``check_version`` refuses versions that the tests have not seen.
"""

from __future__ import annotations

import os
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
    """Start gloo and mark the state so that ``Accelerator`` takes the path of ``strategy``. All ranks.

    ``AcceleratorState`` decides between its branches by the distributed type of ``PartialState``: with the type
    of a GPU machine it follows FSDP and DeepSpeed as it does there, while the device stays CPU.
    """
    check_version()
    os.environ.pop("ACCELERATE_USE_CPU", None)  # would make AcceleratorState take its CPU branch
    if strategy == "deepspeed":
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


def adapt(machine: MachineConfig, environment: dict[str, str], num_processes: int) -> list[str]:
    """Change what has no CPU form, in ``environment``, and return the banner that says so. Launcher only."""
    changes = [f"{num_processes} CPU process(es) over gloo instead of {machine.num_processes or 'all'} device(s)"]
    if environment.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
        environment["FSDP_OFFLOAD_PARAMS"] = "false"
        changes.append("fsdp_offload_params: false, because the shards are in host memory already")
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["ACCELERATE_USE_CPU"] = "true"
    environment["DS_ACCELERATOR"] = "cpu"
    environment.setdefault("OMP_NUM_THREADS", "1")
    width = 78
    place = "output_dir is that of the recipe: give --output_dir to keep the rehearsal apart from the real run"
    title = f"REHEARSAL of {machine.path}: {machine.strategy} for real, not at its speed"
    return ["=" * width, title, *(f"  changed: {change}" for change in changes), f"  {place}", "=" * width]


def check_version() -> None:
    """Refuse an accelerate whose private state may have moved."""
    installed = Version(version("accelerate"))
    if not TESTED[0] <= installed < TESTED[1]:
        raise UsageError(
            f"accelerate {installed} is installed; rehearsals are tested with >= {TESTED[0]}, < {TESTED[1]} because "
            f"they prime its private state; install such a version: pip install 'accelerate>={TESTED[0]},<{TESTED[1]}'"
        )
