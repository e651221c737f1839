"""Options for gradient reduction under DDP and for prefetching under FSDP2. Options without effect are refused.

The launch file sets FSDP2's resharding (``fsdp_reshard_after_forward``) and ZeRO's buckets. The search for unused
parameters is off and has no option, because every parameter takes part in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

from accel_train.config import PositiveInt, UsageError, refuse_without_effect

BUCKET_MIB = 25
POWERSGD_RANK = 1
POWERSGD_START = 1000

_HOOKS = {
    "none": DDPCommunicationHookType.NO,
    "bf16": DDPCommunicationHookType.BF16,
    "powersgd": DDPCommunicationHookType.POWER_SGD,
}
_ELSEWHERE = {
    "single": "one process exchanges no gradients; leave it out, or start several with `accelerate launch`",
    "fsdp2": "FSDP2 reads fsdp_config of the launch file (fsdp_reshard_after_forward); leave it out",
    "zero": "ZeRO reads the DeepSpeed settings of the launch file (reduce_bucket_size, overlap_comm); leave it out",
}


@dataclass(frozen=True)
class DistributedConfig:
    """Gradient reduction under DDP and prefetching of weights under FSDP2. Refused under any other strategy."""

    gradient_as_bucket_view: bool | None = None
    """DDP: gradients are views of the communication buckets, which saves 4 bytes per parameter and a copy.
    None: True."""

    bucket_cap_mb: PositiveInt | None = None
    """DDP: MiB of gradients per reduction. Smaller buckets start earlier in the backward pass, larger ones are fewer.
    None: 25."""

    comm_hook: Literal["none", "bf16", "powersgd"] = "none"
    """DDP, for slow links between hosts. bf16 halves the bytes and rounds gradients to 8 bits of fraction, GPUs only.
    powersgd sends low-rank factors and carries their error over to the next step, in memory as large as the gradients.
    It is refused with precision fp16. Both make the result depend on the number of processes."""

    powersgd_rank: PositiveInt | None = None
    """powersgd: rank of the factors of each matrix. Twice the rank is twice the bytes. None: 1."""

    powersgd_start_step: PositiveInt | None = None
    """powersgd: reductions of full gradients before the first factors: one per optimizer step, or one per micro-batch
    with sync every. The count starts over at each start, because the state of the hook is not in the checkpoint. At
    least 2. None: 1000."""

    static_graph: bool = False
    """DDP: promise that every step uses the same parameters in the same way. Not with accumulation."""

    fsdp2_prefetch: PositiveInt | None = None
    """FSDP2: number of blocks whose weights are gathered ahead of the one that computes, in forward and backward. Each
    stays in memory until its use. For slow links. None: torch's default, the next block as far as the host runs
    ahead."""

    def __post_init__(self) -> None:
        if self.comm_hook != "powersgd":
            because = f"with distributed.comm_hook: {self.comm_hook}"
            names = ("powersgd_rank", "powersgd_start_step")
            refuse_without_effect(self, "distributed", names, because, "give --distributed.comm_hook powersgd")
        if self.powersgd_start_step is not None and self.powersgd_start_step < 2:
            raise UsageError(
                f"distributed.powersgd_start_step: {self.powersgd_start_step}: at least 2 is needed, because DDP "
                "rebuilds its buckets after the first reduction; give 2 or more, 1000 is usual"
            )


def ddp_handlers(
    config: DistributedConfig, strategy: str, *, on_device: bool, accumulation_steps: int, precision: str = "fp32"
) -> list[DistributedDataParallelKwargs]:
    """Return the value of ``Accelerator(kwargs_handlers=...)``: one handler for DDP, none otherwise.

    ``strategy`` is "single", "ddp", "fsdp2" or "zero". Raises ``UsageError`` for options that would be ignored, fail or
    corrupt the training.
    """
    _refuse_ignored(config, strategy)
    if strategy != "ddp":
        return []
    if config.comm_hook == "bf16" and not on_device:
        raise UsageError(
            "distributed.comm_hook: bf16 needs NCCL or XCCL: torch's bf16_compress_hook raises on gloo, which CPU "
            "processes use; leave it out here"
        )
    if config.comm_hook == "powersgd" and precision == "fp16":
        raise UsageError(
            "distributed.comm_hook: powersgd with precision: fp16: the hook adds what it kept of one step's gradient "
            "to the next, and an overflow, which loss scaling lets happen, would stay in it for good as NaN, and "
            "finite remainders would be at another loss scale; a precision without a loss scale is required: use "
            "--precision bf16 or fp32, or --distributed.comm_hook bf16 or none"
        )
    if config.static_graph and accumulation_steps > 1:
        raise UsageError(
            f"distributed.static_graph: true with {accumulation_steps} micro-batches per step: DDP counts the hooks of "
            "the first backward, which no_sync leaves out, and stops on an assertion (accelerate#3679); leave it out, "
            "or raise --micro_batch_size until one micro-batch is enough"
        )
    return [_ddp_handler(config)]


def _refuse_ignored(config: DistributedConfig, strategy: str) -> None:
    """Refuse options not read by ``strategy``."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            changed[field.name] = value
    ahead = changed.pop("fsdp2_prefetch", None)
    if ahead is not None and strategy != "fsdp2":
        raise UsageError(
            f"distributed.fsdp2_prefetch: {ahead}: applies to FSDP2 only, and this run uses {strategy}, which gathers "
            "no blocks; leave it out, or launch with accelerate_configs/fsdp2.yaml"
        )
    if changed and strategy != "ddp":
        values = ", ".join(f"distributed.{name}: {value}" for name, value in changed.items())
        raise UsageError(f"{values}: applies to DDP only, and this run uses {strategy}: {_ELSEWHERE[strategy]}")


def _ddp_handler(config: DistributedConfig) -> DistributedDataParallelKwargs:
    # Empty without powersgd: Accelerate passes it to any hook, and other hooks take no such state.
    state: dict[str, int] = {}
    if config.comm_hook == "powersgd":
        state = {
            "matrix_approximation_rank": config.powersgd_rank or POWERSGD_RANK,
            "start_powerSGD_iter": config.powersgd_start_step or POWERSGD_START,
        }
    return DistributedDataParallelKwargs(
        bucket_cap_mb=config.bucket_cap_mb or BUCKET_MIB,
        # None stands for the default, True.
        gradient_as_bucket_view=config.gradient_as_bucket_view is not False,
        static_graph=config.static_graph,
        comm_hook=_HOOKS[config.comm_hook],
        comm_state_option=state,
    )


def verify_ddp(model: nn.parallel.DistributedDataParallel, asked: DistributedDataParallelKwargs | None) -> str:
    """Compare the settings of DDP with those asked for, and return a description for the log. After ``prepare``.

    Raises ``UsageError`` for a difference, and for powersgd with several buckets on CPU processes.
    """
    if asked is None:
        return "torch's own settings"
    wrapped: Any = model
    # DDP has no public list of its hooks. Without it a hook that was not registered would go unnoticed.
    hooks = [getattr(hook, "__name__", str(hook)) for hook, _ in wrapped._comm_hooks]
    expected_hooks = 0 if asked.comm_hook == DDPCommunicationHookType.NO else 1
    checks = (
        ("bucket_cap_mb", asked.bucket_cap_mb, wrapped.bucket_bytes_cap / 2**20),
        ("gradient_as_bucket_view", asked.gradient_as_bucket_view, wrapped.gradient_as_bucket_view),
        ("static_graph", asked.static_graph, wrapped.static_graph),
        ("comm_hook", expected_hooks, len(hooks)),
        ("find_unused_parameters", False, wrapped.find_unused_parameters),
    )
    for option, wanted, real in checks:
        if wanted != real:
            raise UsageError(
                f"distributed.{option}: {wanted} was asked for, but DDP uses {real}; this version of accelerate or "
                "torch does not pass it on: leave it out, or install the versions that the project names"
            )
    if asked.comm_hook == DDPCommunicationHookType.POWER_SGD and wrapped.device_type == "cpu":
        _refuse_several_buckets(wrapped.module, asked)
    description = f"buckets of {asked.bucket_cap_mb} MiB, "
    description += "gradients as views" if asked.gradient_as_bucket_view else "gradients beside them"
    if hooks:
        description += f", {hooks[0]}"
    return description


def _refuse_several_buckets(model: nn.Module, asked: DistributedDataParallelKwargs) -> None:
    """Refuse powersgd on gloo with more gradients than fit into one bucket."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Gradients have the dtype of their parameters.
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    needed = gradient_bytes / 2**20
    if needed > asked.bucket_cap_mb:
        raise UsageError(
            f"distributed.comm_hook: powersgd on CPU processes with buckets of {asked.bucket_cap_mb} MiB for "
            f"{needed:.1f} MiB of gradients: torch's hook starts reductions of several buckets from gloo's threads, "
            f"in an order that differs between processes; give --distributed.bucket_cap_mb {math.ceil(needed)}, or "
            "leave it out"
        )
