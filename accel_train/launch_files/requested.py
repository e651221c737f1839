"""The launch request: the launch file, the launcher's flags, the environment.

Accelerate hands a script only environment variables, and drops unknown settings. This module reads the file again,
strictly. Our own launcher names it in the environment. For plain ``accelerate launch`` its path is found in the command
lines of the parents.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.config import (
    MACHINE_FILE_VARIABLE,
    REHEARSAL_VARIABLE,
    UsageError,
    expand_path,
    launched_processes,
)
from accel_train.launch_files.machine_config import (
    MachineConfig,
    default_machine_config_path,
    read_machine_config,
)
from accel_train.launch_files.processes import FLAG, refuse_uneven_hosts

THREADS_VARIABLE = "OMP_NUM_THREADS"
THREADS_UNASKED_VARIABLE = "ACCEL_TRAIN_THREADS_UNASKED"
"""Set by ``accel-train launch`` if its user gave no number, because Accelerate then sets one for the processes."""

MISLEADING_VARIABLES = {
    "NCCL_TIMEOUT": "is read by neither NCCL nor torch; use --collective_timeout_seconds",
    "NCCL_BLOCKING_WAIT": "is an obsolete name; TORCH_NCCL_BLOCKING_WAIT is read instead",
    "NCCL_ASYNC_ERROR_HANDLING": "is an obsolete name; TORCH_NCCL_ASYNC_ERROR_HANDLING is read instead",
    "NCCL_MIN_NCHANNELS": "is deprecated since NCCL 2.17 (NCCL_MIN_CTAS) and meant for debugging; unset it",
    "NCCL_SOCKET_NTHREADS": "affects the socket transport only and costs CPU time; unset it on NVLink or InfiniBand",
    "NCCL_NSOCKS_PERTHREAD": "affects the socket transport only and costs CPU time; unset it on NVLink or InfiniBand",
}
"""Variables of widespread advice that have no effect or do harm (torch 2.13 headers, NCCL documentation)."""


@dataclass(frozen=True)
class Requested:
    """The launch request as written."""

    machine: MachineConfig | None
    """The strictly read launch file. None if no file was named and `accelerate config` has written none."""
    source: str
    """Origin of the request, for messages."""
    num_processes: int | None
    """Total over all machines. None if not given."""
    strategy: str | None
    """'fsdp' or 'deepspeed' according to the launcher's environment, else None."""
    rehearsal: bool


def read_request(environment: Mapping[str, str], command_lines: Sequence[Sequence[str]]) -> Requested:
    """Collect the request. It is the same on every process. Raises ``UsageError`` for a bad file."""
    flags = launcher_flags(command_lines)
    override, given_by = _overriding_processes(environment, flags)
    file = environment.get(MACHINE_FILE_VARIABLE)
    default = None
    source = "the environment"
    if flags is not None:
        file = file or flags.get("config_file")
        # torchrun reads no such file. `accelerate launch` does, except with --cpu.
        if not flags.get("cpu"):
            default = default_machine_config_path()
        source = "the command line of `accelerate launch`"
    machine = None
    rehearsal = bool(environment.get(REHEARSAL_VARIABLE))
    if file:
        # The launcher of a rehearsal has compared the number of GPUs, and a simulation needs none.
        machine = read_machine_config(expand_path(file), num_processes=override, given_by=given_by, simulated=rehearsal)
        source = str(file)
    elif default is not None:
        machine = read_machine_config(default, num_processes=override)
        source = f"{default}, the default file of `accelerate config`"
    return Requested(
        machine=machine,
        source=source,
        num_processes=_requested_processes(override, machine),
        strategy=_requested_strategy(environment),
        rehearsal=rehearsal,
    )


def launcher_flags(command_lines: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """Return the parsed flags of the nearest ``accelerate launch`` among the parents, or None."""
    for line in command_lines:
        rest = _after_launch(line)
        if rest is None:
            continue
        from accelerate.commands.launch import launch_command_parser

        try:
            flags, _ = launch_command_parser().parse_known_args(rest)
        except SystemExit:
            # Accelerate refuses these flags, so this command did not start the process.
            return None
        return vars(flags)
    return None


def _after_launch(line: Sequence[str]) -> list[str] | None:
    """Return the arguments of an `accelerate launch` in any spelling, or None for another command.

    The interpreter and its options may come first.
    """
    # Only the first words, because later ones may be arguments of a script with the same name.
    head = [Path(word).name for word in line[:6]]
    for name in ("accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli", "accelerate"):
        if name not in head:
            continue
        start = head.index(name) + 1
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return list(line[start:])
        if list(line[start : start + 1]) == ["launch"]:
            return list(line[start + 1 :])
    return None


def _overriding_processes(environment: Mapping[str, str], flags: Mapping[str, Any] | None) -> tuple[int | None, str]:
    """Return the number of processes that overrides the file's, and the flag or variable that gave it.

    Raises ``UsageError`` if the hosts started different numbers.
    """
    is_ours = bool(environment.get(MACHINE_FILE_VARIABLE) or environment.get(REHEARSAL_VARIABLE))
    # torchrun alone may start any number on each host.
    if is_ours or flags is not None:
        refuse_uneven_hosts(environment)
    # Both start as many processes as were asked for, so WORLD_SIZE is the request.
    if is_ours:
        return launched_processes(environment), "WORLD_SIZE"
    if flags is not None and flags.get("num_processes") is not None:
        return int(flags["num_processes"]), FLAG
    return None, FLAG


def _requested_processes(override: int | None, machine: MachineConfig | None) -> int | None:
    if override is not None or machine is None:
        return override
    return machine.num_processes


def _requested_strategy(environment: Mapping[str, str]) -> str | None:
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "deepspeed"
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "fsdp"
    return None


def misleading_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable set on outdated advice, with its problem."""
    found: list[str] = []
    for name, problem in MISLEADING_VARIABLES.items():
        if name in environment:
            found.append(f"{name}={environment[name]} {problem}")
    # Accelerate sets both to 1 on cards that need it, unless the environment has the name with any value.
    found += [
        f"{name}=0 enables nothing, and defeats the guard that `accelerate launch` sets; unset it"
        for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
        if environment.get(name) == "0"
    ]
    heartbeat = environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    if heartbeat.isdigit() and int(heartbeat) > 3600:
        found.append(
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} disarms the watchdog and does not lengthen collectives; "
            "unset it and use --collective_timeout_seconds"
        )
    return found


SET_BY_NOTEBOOK_LAUNCHER = {"NPROC", "NODE_RANK", "MIXED_PRECISION"}


IN_ITS_PLACE = {"bf16": "--precision bf16", "fp16": "--precision fp16", "fp8": "--float8 rowwise --precision bf16"}
"""Flags of the experiment in place of a launcher's precision. No flag replaces any other precision."""


def refuse_experiment_settings(requested: Requested, environment: Mapping[str, str], precision: str) -> None:
    """Refuse a different precision, or compilation, in the launch request. Both belong to the experiment."""
    precisions = [environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()]
    # Accelerate does not read this name, so `notebook_launcher(mixed_precision=)` would have no effect. Without the
    # launcher's other variables it may have another origin.
    if environment.keys() >= SET_BY_NOTEBOOK_LAUNCHER:
        precisions.append(environment["MIXED_PRECISION"].lower())
    if requested.machine is not None and requested.machine.mixed_precision is not None:
        precisions.insert(0, requested.machine.mixed_precision.lower())
    # "no" is the default of every launcher, and Accelerate's name for fp32.
    allowed = {"no"}
    if precision != "fp32":
        allowed.add(precision)
    for named in precisions:
        if named not in allowed:
            remedy = "choose one with --precision"
            if named in IN_ITS_PLACE:
                remedy = f"give {IN_ITS_PLACE[named]} if that is what you want"
            raise UsageError(
                f"mixed_precision: {named} in {requested.source} contradicts precision: {precision} of the experiment; "
                f"precision belongs to the experiment: remove it there and {remedy} (fp32, bf16 and fp16 exist)"
            )
    backend = "no"
    if requested.machine is not None:
        backend = requested.machine.dynamo.backend
    if backend == "no":
        backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    backend = backend.lower()
    if backend != "no":
        raise UsageError(
            f"dynamo backend {backend!r} in {requested.source}: compilation would be switched on behind the "
            "experiment's back; remove dynamo_config (or --dynamo_backend) from the launch request"
        )


def refuse_accumulation(requested: Requested, environment: Mapping[str, str], accumulation_steps: int) -> None:
    """Refuse accumulation steps that contradict the batch sizes. 1, every launcher's default, passes."""
    key = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    value = environment.get(key, "1")
    if value not in ("1", "auto", str(accumulation_steps)):
        raise UsageError(
            f"gradient_accumulation_steps: {value} ({key}, {requested.source}) contradicts the experiment, "
            f"whose batch sizes give {accumulation_steps}; remove it: global_batch_size and micro_batch_size decide"
        )


_AXES = {"TP": "tensor", "CP": "context", "SP": "sequence"}


def refuse_unsupported(requested: Requested, environment: Mapping[str, str]) -> None:
    """Refuse FSDP's activation checkpointing, and any parallelism other than data parallelism.

    Flags of `accelerate launch` arrive as variables, which the reader of the launch file has not seen.
    """
    machine = requested.machine
    place = None
    if machine is not None and machine.fsdp is not None and machine.fsdp.activation_checkpointing:
        place = requested.source
    elif requested.strategy == "fsdp" and _is_true(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        place = f"FSDP_ACTIVATION_CHECKPOINTING, set by hand or by {requested.source},"
    if place is not None:
        raise UsageError(
            f"fsdp_activation_checkpointing: true in {place} would rename the model's parameters, and checkpoints with "
            "them; remove it there, and give --activation_checkpointing.mode full"
        )
    if not _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    for axis, name in _AXES.items():
        variable = f"PARALLELISM_CONFIG_{axis}_SIZE"
        size = environment.get(variable, "1")
        if size != "1":
            raise UsageError(
                f"{variable.lower()}: {size} ({variable}, {requested.source}): 1 is required, because {name} "
                f"parallelism is not supported; remove it, or shard data over as many processes with "
                "parallelism_config_dp_shard_size"
            )


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    # The words that Accelerate takes for true.
    return environment.get(name, "false").lower() in ("y", "yes", "t", "true", "on", "1")


def notices(
    machine: MachineConfig | None, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a sentence for each setting of the launch file without effect, and for each misleading variable.

    `flags` are those of `accelerate launch`: some settings take effect as flags only. A start and `accel-train check`
    print the same sentences.
    """
    if machine is None:
        return misleading_variables(environment)
    given = flags or {}
    # A flag with the same value is obeyed, and needs no notice.
    sentences: list[str] = []
    for key, text in machine.notes.items():
        if given.get(key) != machine.raw.get(key):
            sentences.append(text)
    if machine.fsdp is not None and machine.fsdp.cpu_ram_efficient_loading:
        sentences.append(
            "fsdp_cpu_ram_efficient_loading: true is off here: one process of each host builds or reads the weights "
            "anyway, and the others map its memory"
        )
    if machine.deepspeed is not None and machine.deepspeed.zero3_init:
        sentences.append("zero3_init_flag: true is off here: the whole model is built or loaded, then sharded")
    return sentences + misleading_variables(environment)


def clear_environment(environment: MutableMapping[str, str]) -> None:
    """Remove variables that override our own arguments, and switch RAM-efficient loading off.

    RAM-efficient loading is the launcher's default for FSDP. One process of each host builds the weights anyway.
    """
    environment.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    # With it transformers encoders would load empty on all processes but the first.
    environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
