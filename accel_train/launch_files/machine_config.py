"""Strict reader of `accelerate launch` files.

Accelerate itself checks little: a misspelt `fsdp_version` gives FSDP1, `zero_stage: 5` and `num_processes: two` pass,
and the second of two equal keys wins. Here every key must be known to Accelerate's launch parser or dataclasses, and
every value must have its type and range. Settings that Accelerate would ignore are refused. Those that the wizard
`accelerate config` writes go to `MachineConfig.notes` instead.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from accel_train.config import UsageError
from accel_train.launch_files.deepspeed_settings import DeepSpeedSettings, read_deepspeed
from accel_train.launch_files.processes import FLAG, HIGHEST_PORT, read_processes, refuse_processes
from accel_train.launch_files.section import Section, read_sections
from accel_train.launch_files.sharding import FsdpSettings, read_fsdp
from accel_train.options.strict_yaml import Document, Places, YamlError, read_document
from accel_train.wording import did_you_mean, nearest

Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
MachinePrecision = Literal["no", "fp16", "bf16", "fp8"]
NO_FILE = "no launch file"
"""Shown in messages instead of a path."""
DEFAULT_PORT = 29500
"""Accelerate's rendezvous port if the file has none."""

_INSTEAD = {
    "FSDP1": "write FSDP, with `fsdp_version: 2` under fsdp_config",
    "FSDP2": "write FSDP, with `fsdp_version: 2` under fsdp_config",
    "DDP": "write MULTI_GPU",
    "GPU": "write MULTI_GPU, or NO for one GPU",
    "CPU": "write NO with `use_cpu: true`, or MULTI_CPU",
    "SINGLE": "write NO",
    "ZERO": "write DEEPSPEED, with `zero_stage` under deepspeed_config",
    "TP": "tensor parallelism is not supported; write FSDP with `fsdp_version: 2`, which shards as well",
    "TPU": "TPUs are not supported; use a GPU or CPU type",
    "XLA": "TPUs are not supported; use a GPU or CPU type",
    "MEGATRON_LM": "Megatron-LM is not supported; write FSDP with `fsdp_version: 2`, or DEEPSPEED",
}
_TPU_KEYS = (
    "downcast_bf16",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "command_file",
    "commands",
    "tpu_vm",
    "tpu_env",
)
_SECTIONS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}


@dataclass(frozen=True)
class DynamoSettings:
    """Settings of `dynamo_config`."""

    backend: str
    """'no', or a backend in capitals."""
    mode: str
    use_fullgraph: bool
    use_dynamic: bool
    use_regional_compilation: bool


@dataclass(frozen=True)
class MachineConfig:
    """A checked launch file. `runtime.accelerator` compares it with the running machine."""

    path: Path
    distributed_type: str
    """As spelled in the file."""
    strategy: Strategy
    num_processes: int | None
    """Total over all machines. None if the file leaves it to the command line."""
    num_machines: int
    machine_rank: int
    main_process_ip: str | None
    main_process_port: int | None
    """None stands for 29500, 0 for any free port (one machine only)."""
    rdzv_backend: str
    gpu_ids: tuple[str, ...] | None
    """None stands for all."""
    use_cpu: bool
    debug: bool
    enable_cpu_affinity: bool
    mixed_precision: MachinePrecision | None
    """None if the file has no such key."""
    fsdp: FsdpSettings | None
    deepspeed: DeepSpeedSettings | None
    dynamo: DynamoSettings
    mpirun_hostfile: str | None
    notes: Mapping[str, str]
    """Sentences by key, for settings without effect unless a flag repeats them."""
    raw: Mapping[str, object]
    """Content of the file."""
    places: Places
    """Position of each key in the file."""


def default_machine_config_path() -> Path | None:
    """Return the file of `accelerate config` if it exists. `accelerate launch` reads it without --config_file."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    path = Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def read_machine_config(
    path: str | os.PathLike[str], *, num_processes: int | None = None, given_by: str = FLAG, simulated: bool = False
) -> MachineConfig:
    """Read and check a launch file. `num_processes` of the flag or variable `given_by` overrides the file's number.

    A `simulated` machine need not be this one: its `gpu_ids` may be fewer than the processes, and become None.
    Raises `UsageError` with file, line, key, requirement and remedy. Uses neither devices nor the network. The first
    call imports accelerate, later ones take about 5 ms.
    """
    path = Path(path)
    try:
        document = read_document(path)
    except YamlError as error:
        raise UsageError(str(error)) from error
    return _read(path, document, num_processes, given_by, simulated=simulated)


def simulated_machine(num_processes: int | None = None) -> MachineConfig:
    """Return the machine of a simulation without a launch file: DDP, whatever accelerators are here."""
    return _machine_of(num_processes, 0)


def visible_machine(num_processes: int | None = None) -> MachineConfig:
    """Return the machine of a start without a launch file: DDP over the visible accelerators, else on the CPU.

    Without `num_processes` there is one process per accelerator, or one on the CPU. Imports torch.
    """
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return _machine_of(num_processes, count)


def _machine_of(num_processes: int | None, count: int) -> MachineConfig:
    """Return the machine of a start on `count` accelerators, 0 for the CPU."""
    refuse_processes(num_processes)
    processes = num_processes
    if processes is None:
        processes = max(count, 1)
    if count and processes > count:
        raise UsageError(
            f"num_processes: {processes} without a launch file: one accelerator for each process is required, and "
            f"{count} are visible; give --num_processes {count} or fewer"
        )
    kind = "MULTI_GPU" if count else "MULTI_CPU"
    if processes == 1:
        kind = "NO"
    values: dict[str, object] = {"distributed_type": kind, "num_processes": processes, "use_cpu": count == 0}
    # Through the reader, so that a start without a file obeys the rules of one with a file.
    return _read(Path(NO_FILE), Document(values, {}), None, FLAG, simulated=False)


def _read(path: Path, document: Document, count: int | None, given_by: str, *, simulated: bool) -> MachineConfig:
    top, sections = read_sections(path, document)
    kind = _supported_type(top, sections)
    machines = top.integer("num_machines", 1, low=1)
    processes = read_processes(top, kind, machines, count, given_by)
    fsdp, deepspeed = _read_sharding(top, sections, kind, machines, processes)
    # Only checked: nothing here depends on it, but Accelerate would take any text for true.
    top.boolean("same_network", False)
    return MachineConfig(
        path=path,
        distributed_type=kind,
        strategy=_strategy(kind, deepspeed),
        num_processes=processes,
        num_machines=machines,
        machine_rank=_machine_rank(top, machines),
        main_process_ip=_main_process_ip(top, machines),
        main_process_port=_main_process_port(top, machines),
        rdzv_backend=_rdzv_backend(top),
        gpu_ids=_gpu_ids(top, kind, processes, machines, simulated=simulated),
        use_cpu=_use_cpu(top, kind),
        debug=top.boolean("debug", False),
        enable_cpu_affinity=top.boolean("enable_cpu_affinity", False),
        mixed_precision=_mixed_precision(top, sections["fp8_config"]),
        fsdp=fsdp,
        deepspeed=deepspeed,
        dynamo=_dynamo(sections["dynamo_config"]),
        mpirun_hostfile=sections["mpirun_config"].text("mpirun_hostfile"),
        notes=_notes(top),
        raw=document.values,
        places=document.places,
    )


def _supported_type(top: Section, sections: Mapping[str, Section]) -> str:
    """Read the distributed type. Refuses settings of other environments and sections of other types."""
    _refuse_other_environments(top)
    kind = _distributed_type(top)
    _refuse_unused_sections(top, sections, kind)
    return kind


def _read_sharding(
    top: Section, sections: Mapping[str, Section], kind: str, machines: int, processes: int | None
) -> tuple[FsdpSettings | None, DeepSpeedSettings | None]:
    if kind == "FSDP":
        return read_fsdp(sections["fsdp_config"], sections["parallelism_config"], processes), None
    if kind == "DEEPSPEED":
        return None, read_deepspeed(sections["deepspeed_config"], top, machines)
    return None, None


def _refuse_other_environments(top: Section) -> None:
    if top.text("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise top.refuse("compute_environment", "LOCAL_MACHINE", "start the processes on the machines themselves")
    for key in _TPU_KEYS:
        # `accelerate config` writes some of them into every file, with these values.
        if top.values.get(key) not in (None, False, "no", "", [], [""], {}):
            raise top.refuse(key, "empty, because it acts on TPUs only", "delete the line")
    if top.values.get("main_training_function") not in (None, "main"):
        raise top.refuse("main_training_function", "`main`: it acts on TPUs only", "delete the line")


def _distributed_type(top: Section) -> str:
    from accelerate.utils import DistributedType

    known = [kind.value for kind in DistributedType]
    supported = [kind for kind in known if kind not in ("XLA", "MEGATRON_LM")]
    kind = top.text("distributed_type")
    if kind is None:
        raise top.refuse("distributed_type", f"a value, one of {', '.join(supported)}", "add the line")
    if kind in supported:
        return kind
    name = kind.upper()
    if name in _INSTEAD:
        remedy = _INSTEAD[name]
    elif re.fullmatch(r"ZERO\d?", name):
        remedy = _INSTEAD["ZERO"]
    else:
        remedy = did_you_mean(nearest(name, supported), bare=True) or "write one of them"
    raise top.refuse("distributed_type", f"one of {', '.join(supported)}", remedy)


def _refuse_unused_sections(top: Section, sections: Mapping[str, Section], kind: str) -> None:
    both = [name for name in ("fsdp_config", "deepspeed_config") if sections[name].values]
    if len(both) == 2:
        raise top.refuse(
            "deepspeed_config",
            "the only one of the two, but fsdp_config is there as well",
            "keep one of the two",
        )
    # Accelerate reads the section of its own type and says nothing about the others.
    for owner, name in _SECTIONS.items():
        if sections[name].values and kind != owner:
            raise top.refuse(
                name,
                f"absent with `distributed_type: {kind}`, which ignores it",
                f"write `distributed_type: {owner}`, or delete {name}",
            )
    if sections["parallelism_config"].values and kind != "FSDP":
        raise top.refuse(
            "parallelism_config",
            "absent without `distributed_type: FSDP` and `fsdp_version: 2`",
            "delete the section",
        )


def _strategy(kind: str, deepspeed: DeepSpeedSettings | None) -> Strategy:
    if deepspeed is not None:
        return cast(Strategy, f"zero{deepspeed.zero_stage}")
    if kind == "FSDP":
        return "fsdp2"
    return "single" if kind == "NO" else "ddp"


def _machine_rank(top: Section, machines: int) -> int:
    rank = top.integer("machine_rank", 0, low=0)
    if rank >= machines:
        raise top.refuse(
            "machine_rank",
            f"0 to {machines - 1}, because num_machines is {machines}",
            "number the machines from 0; the one at main_process_ip is 0",
        )
    return rank


def _main_process_ip(top: Section, machines: int) -> str | None:
    host = top.text("main_process_ip")
    remedy = "write the address or name of machine 0, and the port in main_process_port"
    if host is None:
        if machines > 1:
            raise top.refuse("main_process_ip", f"a value, because num_machines is {machines}", remedy)
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        # Names of containers may have underscores, which no name in DNS has.
        if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", host):
            raise top.refuse("main_process_ip", "an IP address or a host name", remedy) from None
    return host


def _main_process_port(top: Section, machines: int) -> int | None:
    if top.values.get("main_process_port") is None:
        return None
    # Several machines cannot agree on "any free port".
    lowest = 1 if machines > 1 else 0
    return top.integer("main_process_port", DEFAULT_PORT, low=lowest, high=HIGHEST_PORT)


def _use_cpu(top: Section, kind: str) -> bool:
    use_cpu = top.boolean("use_cpu", False)
    if kind == "MULTI_CPU" and not use_cpu:
        raise top.refuse("use_cpu", "true with `distributed_type: MULTI_CPU`", "write `use_cpu: true`")
    if use_cpu and kind not in ("NO", "MULTI_CPU"):
        raise top.refuse(
            "use_cpu",
            f"false with `distributed_type: {kind}`, where Accelerate ignores it",
            "delete the line; to try the file without GPUs use `accel-train rehearse`",
        )
    return use_cpu


def _gpu_ids(
    top: Section, kind: str, processes: int | None, machines: int, *, simulated: bool
) -> tuple[str, ...] | None:
    if isinstance(top.values.get("gpu_ids"), int):
        raise top.refuse("gpu_ids", "text: Accelerate cannot split a number", "put it in quotes, as '0'")
    text = top.text("gpu_ids")
    if text is None or text == "all":
        return None
    ids = tuple(text.split(","))
    repeated = len(set(ids)) < len(ids)
    if repeated or not all(re.fullmatch(r"[A-Za-z0-9:/.-]+", item) for item in ids):
        raise top.refuse("gpu_ids", "`all`, or different ids with commas and no spaces", "write it as '0,1'")
    if simulated:
        return None
    needed = (processes or machines) // machines
    # Accelerate refuses a single id for several GPUs, whatever the number of processes.
    if kind.startswith("MULTI_") and kind != "MULTI_CPU" and machines == 1:
        needed = max(needed, 2)
    if len(ids) < needed:
        raise top.refuse(
            "gpu_ids",
            f"at least {needed} ids, one for each process of this machine",
            "add ids, or write `all`",
        )
    return ids


def _mixed_precision(top: Section, fp8: Section) -> MachinePrecision | None:
    from accelerate.utils import PrecisionType

    precision = top.choice("mixed_precision", [str(p.value) for p in PrecisionType], None)
    if fp8.values and precision != "fp8":
        raise top.refuse("fp8_config", "absent without `mixed_precision: fp8`", "delete the section")
    return cast("MachinePrecision | None", precision)


def _dynamo(section: Section) -> DynamoSettings:
    from accelerate.utils import DynamoBackend
    from accelerate.utils.constants import TORCH_DYNAMO_MODES

    unread = next(iter(section.values), None)
    if unread is not None and "dynamo_backend" not in section.values:
        raise section.refuse(unread, "absent without dynamo_backend, of which it is a setting", "delete the section")
    backend = section.choice("dynamo_backend", [str(b.value) for b in DynamoBackend], "NO")
    if backend == "NO":
        backend = "no"
    return DynamoSettings(
        backend=str(backend),
        mode=str(section.choice("dynamo_mode", TORCH_DYNAMO_MODES, "default")),
        use_fullgraph=section.boolean("dynamo_use_fullgraph", False),
        use_dynamic=section.boolean("dynamo_use_dynamic", False),
        use_regional_compilation=section.boolean("dynamo_use_regional_compilation", False),
    )


def _rdzv_backend(top: Section) -> str:
    return str(top.text("rdzv_backend", "static"))


def _notes(top: Section) -> dict[str, str]:
    notes: dict[str, str] = {}
    # The launcher takes from the file only what is None among its flags, and these flags default to other values.
    ignored = "is ignored: `accelerate launch` 1.15 reads it from the command line only; give it"
    backend = _rdzv_backend(top)
    if backend != "static":
        notes["rdzv_backend"] = (
            f"rdzv_backend: {backend} {ignored} `--rdzv_backend {backend}` (`accel-train launch` always takes static)"
        )
    if top.boolean("enable_cpu_affinity", False):
        notes["enable_cpu_affinity"] = f"enable_cpu_affinity: true {ignored} `--enable_cpu_affinity`"
    return notes
