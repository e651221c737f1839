"""Refusals, before anything is built, of options that a simulation does not support."""

from __future__ import annotations

from typing import Any, NamedTuple

from accel_train.config import UsageError, as_written
from accel_train.launch_files.machine_config import MachineConfig

ONE_MEMORY = "host and device are one memory there"
OPTIMIZERS = {"adamw8bit": "the kernels of bitsandbytes are not torch's", "adamw_offload": ONE_MEMORY}
"""Reasons why the step of an optimizer cannot be simulated."""
CLASSES = (
    "a class of torch uses other kernels for simulated tensors (no foreach), a class may have kernels of its own, and "
    "under FSDP2 and ZeRO no start accepts one"
)
"""Reason for all other optimizers, which are named as module:Class."""


class Limit(NamedTuple):
    """The values of an option that a simulation supports, and the reason why others are refused."""

    option: str
    value: Any
    allowed: tuple[Any, ...]
    reason: str


def refuse_machine(machine: MachineConfig) -> None:
    """Refuse launch files in which torch itself moves memory between host and device."""
    if machine.fsdp is not None and machine.fsdp.offload_params:
        raise UsageError(
            "fsdp_offload_params: true: a simulation has one memory, and host and device need two; false is required. "
            "Simulate accelerate_configs/fsdp2.yaml"
        )


def refuse_config(config: Any) -> None:
    """Refuse options whose memory or collectives cannot be seen operator by operator, and starts without a step."""
    if config.evaluate_only:
        raise UsageError(
            "evaluate_only: true: a simulation is of a training step, and such a start has none; false is required. "
            "Leave it out, or give --evaluate_only false"
        )
    distributed, optimizer = config.distributed, config.optimizer.name
    limits = (
        Limit("compile.mode", config.compile.mode, ("off",), "a compiler decides by itself what it keeps"),
        Limit("precision", config.precision, ("fp32", "bf16"), "the loss scale of fp16 is read from the device"),
        Limit("offload_frozen", config.offload_frozen, (False,), ONE_MEMORY),
        Limit("activation_checkpointing.offload", config.activation_checkpointing.offload, (False,), ONE_MEMORY),
        Limit("optimizer.name", optimizer, ("adamw", "muon"), OPTIMIZERS.get(optimizer, CLASSES)),
        Limit("distributed.comm_hook", distributed.comm_hook, ("none",), "the hook takes buckets of torch's reducer"),
        Limit(
            "distributed.gradient_as_bucket_view",
            distributed.gradient_as_bucket_view is not False,
            (True,),
            "torch's reducer makes the copies",
        ),
    )
    for limit in limits:
        if limit.value not in limit.allowed:
            given = as_written(limit.value)
            choices = [as_written(value) for value in limit.allowed]
            raise UsageError(
                f"{limit.option}: {given}: a simulation cannot show it, because {limit.reason}; {' or '.join(choices)} "
                f"is required. Give --{limit.option} {choices[0]} to simulate the rest, or measure it: accel-train "
                "compare"
            )
