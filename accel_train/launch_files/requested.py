"""What the person asked of the machine: the launch file, the launcher's flags, the environment.

Accelerate hands a script only environment variables, and drops what it does not understand. The file itself is
read again here, strictly, from wherever it was named: our own launcher says so in the environment, plain
``accelerate launch`` leaves it in its arguments, which a child finds in its parents' command lines.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path
from accel_train.launch_files.machine_config import (
    MachineConfig,
    default_machine_config_path,
    read_machine_config,
)

MACHINE_FILE_VARIABLE = "ACCEL_TRAIN_MACHINE_FILE"
REHEARSAL_VARIABLE = "ACCEL_TRAIN_REHEARSAL"
THREADS_VARIABLE = "OMP_NUM_THREADS"
THREADS_UNASKED_VARIABLE = "ACCEL_TRAIN_THREADS_UNASKED"
"""Set by ``accel-train launch`` where its user gave no number: Accelerate's own rule sets one for the processes."""

MISLEADING_VARIABLES = {
    "NCCL_TIMEOUT": "is read by neither NCCL nor torch; use --collective_timeout_seconds",
    "NCCL_BLOCKING_WAIT": "is an obsolete name; TORCH_NCCL_BLOCKING_WAIT is read instead",
    "NCCL_ASYNC_ERROR_HANDLING": "is an obsolete name; TORCH_NCCL_ASYNC_ERROR_HANDLING is read instead",
    "NCCL_MIN_NCHANNELS": "is deprecated since NCCL 2.17 (NCCL_MIN_CTAS) and meant for debugging; unset it",
    "NCCL_SOCKET_NTHREADS": "affects the socket transport only and costs CPU time; unset it on NVLink or InfiniBand",
    "NCCL_NSOCKS_PERTHREAD": "affects the socket transport only and costs CPU time; unset it on NVLink or InfiniBand",
}
"""Advice in circulation that does nothing or harm (torch 2.13 headers, NCCL documentation)."""


@dataclass(frozen=True)
class Requested:
    """The launch request as written, before anything came up."""

    machine: MachineConfig | None
    """The strictly read launch file, or None where no file was named and the wizard left none."""
    source: str
    """Where the request stands, for messages."""
    num_processes: int | None
    """Over all machines; None where nobody said."""
    strategy: str | None
    """'fsdp' or 'deepspeed' as the launcher's environment says, else None."""
    rehearsal: bool


def read_request(environment: Mapping[str, str], command_lines: Sequence[Sequence[str]]) -> Requested:
    """Collect the request. Every process reads the same; raises ``UsageError`` for a bad file."""
    flags = launcher_flags(command_lines)
    named = environment.get(MACHINE_FILE_VARIABLE) or (flags.get("config_file") if flags is not None else None)
    override = _overriding_processes(environment, flags)
    machine, source = None, "the environment" if flags is None else "the command line of `accelerate launch`"
    if named:
        machine, source = read_machine_config(expand_path(named), num_processes=override), str(named)
    elif flags is not None and (default := default_machine_config_path()) is not None:
        machine = read_machine_config(default, num_processes=override)
        source = f"{default}, the default file of `accelerate config`"
    return Requested(
        machine=machine,
        source=source,
        num_processes=_asked_processes(override, machine),
        strategy=_asked_strategy(environment),
        rehearsal=bool(environment.get(REHEARSAL_VARIABLE)),
    )


def launcher_flags(command_lines: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """The parsed flags of the nearest ``accelerate launch`` among the parents, None where there is none."""
    for line in command_lines:
        rest = _after_launch(line)
        if rest is None:
            continue
        from accelerate.commands.launch import launch_command_parser

        try:
            return vars(launch_command_parser().parse_known_args(rest)[0])
        except SystemExit:  # accelerate itself refused these flags, so this child is not of that command
            return None
    return None


def _after_launch(line: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch`, `accelerate-launch` or `-m accelerate.commands.launch`, with or without
    the interpreter and its options before it; None where the command is another."""
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


def _overriding_processes(environment: Mapping[str, str], flags: Mapping[str, Any] | None) -> int | None:
    """A number of processes that beats the file's: our own launcher's, a rehearsal's, or a flag's."""
    if environment.get(MACHINE_FILE_VARIABLE) or environment.get(REHEARSAL_VARIABLE):
        return int(environment.get("WORLD_SIZE", "1"))
    if flags is not None and flags.get("num_processes") is not None:
        return int(flags["num_processes"])
    return None


def _asked_processes(override: int | None, machine: MachineConfig | None) -> int | None:
    if override is not None:
        return override
    return machine.num_processes if machine is not None else None


def _asked_strategy(environment: Mapping[str, str]) -> str | None:
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "deepspeed"
    return "fsdp" if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true" else None


def misleading_variables(environment: Mapping[str, str]) -> list[str]:
    """One sentence for each set variable that older guides recommend to no or bad effect."""
    found = [f"{name}={environment[name]} {why}" for name, why in MISLEADING_VARIABLES.items() if name in environment]
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


def refuse_experiment_settings(requested: Requested, environment: Mapping[str, str], precision: str) -> None:
    """Precision and compilation belong to the experiment: a launch request that names another is refused."""
    in_file = requested.machine.mixed_precision if requested.machine is not None else None
    said = [(in_file or "no").lower(), environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()]
    others = [named for named in said if named not in ("no", {"fp32": "no"}.get(precision, precision))]
    if others:
        named = others[0]
        raise UsageError(
            f"mixed_precision: {named} in {requested.source} contradicts precision: {precision} of the experiment; "
            f"precision belongs to the experiment: remove it from the launch file and give --precision {named} "
            "if that is what you want (fp32, bf16 and fp16 exist)"
        )
    in_file = requested.machine.dynamo.backend if requested.machine is not None else "no"
    backend = (in_file if in_file != "no" else environment.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower()
    if backend != "no":
        raise UsageError(
            f"dynamo backend {backend!r} in {requested.source}: compilation would be switched on behind the "
            "experiment's back; remove dynamo_config (or --dynamo_backend) from the launch request"
        )


def refuse_accumulation(requested: Requested, environment: Mapping[str, str], accumulation_steps: int) -> None:
    """Accumulation is derived from the batch sizes; 1 is every launcher's default and says nothing."""
    keys = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",)
    for key in keys:
        value = environment.get(key, "1")
        if value not in ("1", "auto", str(accumulation_steps)):
            raise UsageError(
                f"gradient_accumulation_steps: {value} ({key}, {requested.source}) contradicts the experiment, "
                f"whose batch sizes give {accumulation_steps}; remove it: global_batch_size and micro_batch_size decide"
            )


def notices(
    machine: MachineConfig | None, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> list[str]:
    """What is asked for in vain, one sentence each: settings of the launch file that neither the launcher nor the
    recipe follows, and variables set to no good effect. A start and `accel-train check` name the same.

    `flags` are those of `accelerate launch`, which obeys there what it does not read from the file.
    """
    said: list[str] = []
    if machine is not None:
        said += [text for key, text in machine.notes.items() if (flags or {}).get(key) != machine.raw.get(key)]
    if machine is not None and machine.fsdp is not None and machine.fsdp.cpu_ram_efficient_loading:
        said.append(
            "fsdp_cpu_ram_efficient_loading: true is off here: every process builds the same weights from the seed"
        )
    if machine is not None and machine.deepspeed is not None and machine.deepspeed.zero3_init:
        said.append("zero3_init_flag: true is off here: the whole model is built or loaded, then sharded")
    return said + misleading_variables(environment)


def clear_environment(environment: MutableMapping[str, str]) -> None:
    """Take out what would override an explicit choice of ours.

    RAM-efficient loading is the launcher's default for FSDP: every process here builds the same weights anyway, and
    with it transformers encoders would load empty on all processes but the first.
    """
    environment.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
