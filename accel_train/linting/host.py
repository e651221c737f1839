"""Collect the facts of the host and of the launch. Reads /proc and /sys, starts nothing, opens no connection."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_train.config import expand_path, origin_of
from accel_train.cores import usable_cores
from accel_train.launch_files.machine_config import MachineConfig
from accel_train.linting.facts import Device, Disk, Facts, Host, Layout
from accel_train.options.tree import flatten, to_tree

SHARED_MEMORY = Path("/dev/shm")
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
INTERFACES = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
MOUNTS = Path("/proc/mounts")
# So many cores that no rule finds them too few.
UNLIMITED = 10**6
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def facts_of(
    config: Any,
    layout: Layout,
    environment: Mapping[str, str],
    host: Host,
    *,
    dataset_size: int | None = None,
    parameters: int | None = None,
    frozen_bytes: int = 0,
) -> Facts:
    """Assemble the facts of a start."""
    options = flatten(to_tree(config))
    return Facts(
        options=options,
        layout=layout,
        host=host,
        environment=environment,
        origins={name: origin_of(config, name) for name in options},
        dataset_size=dataset_size,
        parameters=parameters,
        frozen_bytes=frozen_bytes,
    )


def layout_of_file(machine: MachineConfig, *, has_devices: bool) -> Layout:
    """Return the layout that a launch file asks for."""
    # Any other type means accelerators, even if this host has none. These two use one only if it is there.
    needs_devices = machine.distributed_type not in ("NO", "MULTI_CPU")
    on_cpu = machine.use_cpu or not (needs_devices or has_devices)
    return _layout(
        machine,
        strategy=machine.strategy,
        processes=machine.num_processes or 1,
        machines=machine.num_machines,
        device="cpu" if on_cpu else "cuda",
    )


def facts_of_start(config: Any, accelerator: Any, **sizes: Any) -> Facts:
    """Collect the facts of the running processes, with the ``sizes`` of ``facts_of``. Takes about 10 ms."""
    # Imported here: they import accelerate, which explaining a rule does not need.
    from accel_train.launch_files.parents import parent_command_lines
    from accel_train.launch_files.requested import THREADS_VARIABLE, launcher_flags, read_request
    from accel_train.runtime import threads
    from accel_train.runtime.strategy import strategy_of

    command_lines = parent_command_lines()
    requested = read_request(os.environ, command_lines)
    environment = dict(os.environ)
    # A number set by a launcher is ignored: a run on CPUs chooses its own.
    if not threads.asked(environment, launcher_flags(command_lines)):
        environment.pop(THREADS_VARIABLE, None)
    processes = int(accelerator.num_processes)
    # Set by torchrun. Without it all processes are on one machine.
    local = int(environment.get("LOCAL_WORLD_SIZE", processes))
    layout = _layout(
        requested.machine,
        strategy=strategy_of(accelerator),
        processes=processes,
        machines=max(1, processes // local),
        device=accelerator.device.type,
    )
    host = read_host(str(config.output_dir), environment)
    return facts_of(config, layout, environment, host, **sizes)


def unknown_host() -> Host:
    """Return an unknown host, for which no rule has a finding."""
    return Host(cores=UNLIMITED, all_cores=UNLIMITED)


def _layout(machine: MachineConfig | None, *, strategy: str, processes: int, machines: int, device: str) -> Layout:
    offload = debug = chosen = False
    reshard = True
    replicate = None
    if machine is not None:
        debug = machine.debug
        chosen = machine.gpu_ids is not None
        if machine.fsdp is not None:
            offload = machine.fsdp.offload_params
            reshard = machine.fsdp.reshard_after_forward
            replicate = machine.fsdp.dp_replicate_size
        if machine.deepspeed is not None:
            places = (machine.deepspeed.offload_optimizer_device, machine.deepspeed.offload_param_device)
            # The reader of launch files allows only none and cpu.
            offload = "cpu" in places
    return Layout(
        strategy=strategy,
        processes=processes,
        machines=machines,
        device=device,
        offload=offload,
        reshard_after_forward=reshard,
        replicate_size=replicate,
        debug=debug,
        chosen_devices=chosen,
    )


def read_host(output_dir: str, environment: Mapping[str, str]) -> Host:
    """Read the facts of this host."""
    cores, _ = usable_cores()
    # The soft limits are the ones that stop a process.
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        cores=cores,
        # Beside the usable ones: a difference shows that this process is bound or limited.
        all_cores=os.cpu_count() or cores,
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=_size_of(SHARED_MEMORY),
        open_files=_limit(open_files),
        core_file_bytes=_core_file_bytes(),
        locked_memory_bytes=_limit(locked),
        interfaces=_names_in(INTERFACES),
        has_infiniband=bool(_names_in(INFINIBAND)),
        devices=visible_devices(),
        output=_disk(expand_path(output_dir), environment),
        compile_cache_filesystem=_cache_filesystem(environment),
        # The first method is the default. Asking for the method in use would fix it for the process.
        forks=multiprocessing.get_all_start_methods()[0] == "fork",
        has_fast_bf16=has_fast_bf16(),
        seconds_left=_seconds_left(environment),
    )


def has_fast_bf16() -> bool:
    """Tell if torch computes bf16 products on this CPU by oneDNN, rather than by loops many times slower than fp32."""
    import torch

    # torch asks the same before each product.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def visible_devices() -> tuple[Device, ...]:
    """Return the CUDA devices visible to this process. Imports torch, as every recipe has already done."""
    import torch

    devices: list[Device] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = (properties.major, properties.minor)
            devices.append(Device(properties.name, properties.total_memory, capability))
    return tuple(devices)


def _memory_bytes() -> int:
    from accel_train.speed.memory.fitting import host_bytes

    return host_bytes()


def _limit(value: int) -> float:
    return math.inf if value == resource.RLIM_INFINITY else value


def _core_file_bytes() -> float:
    with suppress(OSError):
        # The kernel hands the core to a program, such as systemd-coredump, which has limits of its own.
        if CORE_PATTERN.read_text().startswith("|"):
            return 0
    size, _ = resource.getrlimit(resource.RLIMIT_CORE)
    return _limit(size)


def _size_of(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    # Its size rather than the free part, which other processes use only briefly.
    return status.f_blocks * status.f_frsize


def _names_in(folder: Path) -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted(path.name for path in folder.iterdir()))
    return ()


def _disk(path: Path, environment: Mapping[str, str]) -> Disk:
    # The run directory itself may not exist yet.
    existing = next(place for place in (path, *path.parents) if place.exists())
    free = None
    with suppress(OSError):
        status = os.statvfs(existing)
        # Not f_bfree, which counts blocks reserved for root.
        free = status.f_bavail * status.f_frsize
    temporary = {Path("/tmp"), Path("/var/tmp"), Path(environment.get("TMPDIR") or tempfile.gettempdir())}
    return Disk(
        filesystem=filesystem_of(existing),
        free_bytes=free,
        is_temporary=any(folder in path.parents for folder in temporary),
    )


def filesystem_of(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of a path's filesystem, empty if the system does not report it."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    place = path.resolve()
    best = Path("/")
    kind = ""
    for line in lines:
        _, mounted, name, *_ = line.split()
        # Spaces are written as octal numbers there.
        folder = Path(mounted.replace("\\040", " "))
        is_inside = folder == place or folder in place.parents
        # A later mount covers an earlier one at the same place.
        if is_inside and len(folder.parts) >= len(best.parts):
            best = folder
            kind = name
    return kind


def _cache_filesystem(environment: Mapping[str, str]) -> str:
    """Return the filesystem of the compiler's cache, empty if it is the default one, below /tmp."""
    for name in CACHE_VARIABLES:
        if environment.get(name):
            return filesystem_of(expand_path(environment[name]))
    return ""


def _seconds_left(environment: Mapping[str, str]) -> float | None:
    # Seconds since 1970, set by newer versions of SLURM only.
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        return None
    return int(end) - time.time()
