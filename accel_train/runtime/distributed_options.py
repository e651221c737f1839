"""How gradients travel between the processes, and weights ahead of their use. What would have no effect is refused.

Whether FSDP2 frees what it gathered (``fsdp_reshard_after_forward``) and ZeRO's buckets are the launch file's business.
The search for unused parameters is off and no option: every parameter takes part in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

from accel_train.config import PositiveInt, UsageError

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
    """How DDP exchanges gradients and FSDP2 gathers weights. Each is refused under a strategy that does not read it."""

    gradient_as_bucket_view: bool | None = None
    """DDP: gradients are views of the buckets in which they travel, 4 bytes per parameter less memory and no copy.
    None = True."""

    bucket_cap_mb: PositiveInt | None = None
    """DDP: MiB of gradients per reduction. Smaller ones start earlier in the backward, larger ones are fewer.
    None = 25."""

    comm_hook: Literal["none", "bf16", "powersgd"] = "none"
    """DDP, for slow links between hosts: bf16 halves the bytes and rounds gradients to 8 bits of fraction, GPUs only;
    powersgd sends low-rank factors and keeps what they miss for the next step, in memory as large as the gradients; not
    with precision fp16. Both change the result with the number of processes."""

    powersgd_rank: PositiveInt | None = None
    """powersgd: rank of the factors of each matrix; twice the rank is twice the bytes. None = 1."""

    powersgd_start_step: PositiveInt | None = None
    """powersgd: reductions of whole gradients before the first factors: one in each optimizer step, one for each
    micro-batch with sync every. Counted anew from each start, for what the hook has kept is in no checkpoint. At least
    2. None = 1000."""

    static_graph: bool = False
    """DDP: promise that the same parameters take part in the same way in every step. Not with accumulation."""

    fsdp2_prefetch: PositiveInt | None = None
    """FSDP2: blocks whose weights are gathered ahead of the one that computes, in forward and backward, each in memory
    until it is used. For slow links. None = torch's own way: the next one, as far as the host runs ahead."""

    def __post_init__(self) -> None:
        given = [name for name in ("powersgd_rank", "powersgd_start_step") if getattr(self, name) is not None]
        if given and self.comm_hook != "powersgd":
            values = ", ".join(f"distributed.{name}: {getattr(self, name)}" for name in given)
            raise UsageError(f"{values}: comm_hook {self.comm_hook} does not read it; leave it out, or use powersgd")
        if self.powersgd_start_step is not None and self.powersgd_start_step < 2:
            raise UsageError(
                f"distributed.powersgd_start_step: {self.powersgd_start_step}: at least 2 is needed, because DDP sorts "
                "its buckets anew after the first reduction; give 2 or more, 1000 is usual"
            )


def ddp_handlers(
    config: DistributedConfig, strategy: str, *, on_device: bool, accumulation_steps: int, precision: str = "fp32"
) -> list[DistributedDataParallelKwargs]:
    """What ``Accelerator(kwargs_handlers=...)`` takes: one handler for DDP, none elsewhere.

    ``strategy`` is "single", "ddp", "fsdp2" or "zero". Raises ``UsageError`` for what would be ignored, fail or spoil
    the training.
    """
    set_here = {f.name: value for f in fields(config) if (value := getattr(config, f.name)) != f.default}
    if strategy != "fsdp2" and (ahead := set_here.pop("fsdp2_prefetch", None)) is not None:
        raise UsageError(
            f"distributed.fsdp2_prefetch: {ahead}: acts on FSDP2, and {strategy} runs, which gathers no blocks; leave "
            "it out, or launch with accelerate_configs/fsdp2.yaml"
        )
    if strategy != "ddp":
        set_here.pop("fsdp2_prefetch", None)
        if set_here:
            values = ", ".join(f"distributed.{name}: {value}" for name, value in set_here.items())
            raise UsageError(f"{values}: acts on DDP, and {strategy} runs: {_ELSEWHERE[strategy]}")
        return []
    if config.comm_hook == "bf16" and not on_device:
        raise UsageError(
            "distributed.comm_hook: bf16 needs NCCL or XCCL: torch's bf16_compress_hook raises on gloo, which CPU "
            "processes use; leave it out here"
        )
    if config.comm_hook == "powersgd" and precision == "fp16":
        raise UsageError(
            "distributed.comm_hook: powersgd with precision: fp16: the hook adds what it kept of one step's gradient "
            "to the next, and one that overflows, as loss scaling lets happen, would stay in it for good as NaN, and "
            "what is finite at another loss scale; a precision without a loss scale is required: use --precision bf16 "
            "or fp32, or --distributed.comm_hook bf16 or none"
        )
    if config.static_graph and accumulation_steps > 1:
        raise UsageError(
            f"distributed.static_graph: true with {accumulation_steps} micro-batches per step: DDP counts the hooks of "
            "the first backward, which no_sync leaves out, and stops on an assertion (accelerate#3679); leave it out, "
            "or raise --micro_batch_size until one micro-batch is enough"
        )
    state: dict[str, int] = {}
    if config.comm_hook == "powersgd":
        state = {
            "matrix_approximation_rank": config.powersgd_rank or POWERSGD_RANK,
            "start_powerSGD_iter": config.powersgd_start_step or POWERSGD_START,
        }
    return [
        DistributedDataParallelKwargs(
            bucket_cap_mb=config.bucket_cap_mb or BUCKET_MIB,
            gradient_as_bucket_view=config.gradient_as_bucket_view is not False,
            static_graph=config.static_graph,
            comm_hook=_HOOKS[config.comm_hook],
            comm_state_option=state,
        )
    ]


def verify_ddp(model: nn.parallel.DistributedDataParallel, asked: DistributedDataParallelKwargs | None) -> str:
    """Compare what DDP has with what was asked, after ``prepare``; returns words for the log. Raises ``UsageError``."""
    if asked is None:
        return "torch's own settings"
    wrapped: Any = model
    hooks = [getattr(hook, "__name__", str(hook)) for hook, _ in wrapped._comm_hooks]
    name = {v: k for k, v in _HOOKS.items()}[asked.comm_hook]
    checks = (
        ("bucket_cap_mb", asked.bucket_cap_mb, wrapped.bucket_bytes_cap / 2**20),
        ("gradient_as_bucket_view", asked.gradient_as_bucket_view, wrapped.gradient_as_bucket_view),
        ("static_graph", asked.static_graph, wrapped.static_graph),
        ("comm_hook", int(name != "none"), len(hooks)),
        ("find_unused_parameters", False, wrapped.find_unused_parameters),
    )
    for option, wanted, real in checks:
        if wanted != real:
            raise UsageError(
                f"distributed.{option}: {wanted} was asked for, but DDP has {real}; this version of accelerate or "
                "torch does not pass it on: leave it out, or install the versions that the project names"
            )
    needed = sum(p.numel() * p.element_size() for p in wrapped.module.parameters() if p.requires_grad) / 2**20
    if name == "powersgd" and wrapped.device_type == "cpu" and needed > asked.bucket_cap_mb:
        raise UsageError(
            f"distributed.comm_hook: powersgd on CPU processes with buckets of {asked.bucket_cap_mb} MiB for "
            f"{needed:.1f} MiB of gradients: torch's hook starts reductions of several buckets from gloo's threads, in "
            f"no order that the processes share; give --distributed.bucket_cap_mb {math.ceil(needed)}, or leave it out"
        )
    views = "gradients as views" if asked.gradient_as_bucket_view else "gradients beside them"
    return f"buckets of {asked.bucket_cap_mb} MiB, {views}" + (f", {hooks[0]}" if hooks else "")


def apply_fsdp2_prefetch(config: DistributedConfig, model: nn.Module) -> list[str]:
    """Tell each sharded block which blocks to gather while it computes; a line for the log where that was asked.

    After ``prepare``, every process. Blocks of one ``nn.ModuleList`` run one after another; beyond its end nothing is
    gathered, for a part that does not run next would later use the weights of then: of the average, after an
    evaluation. Raises ``UsageError`` where there are no two blocks.
    """
    if (ahead := config.fsdp2_prefetch) is None:
        return []
    from torch.distributed.fsdp import FSDPModule

    blocks: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    if len(blocks) < 2:
        raise UsageError(
            f"distributed.fsdp2_prefetch: {ahead}: the model has {len(blocks)} block(s) that are sharded by "
            "themselves, at least 2 are required; leave it out, or name them in fsdp_transformer_layer_cls_to_wrap"
        )
    for chain in _chains(model):
        for place, block in enumerate(chain):
            block.set_modules_to_forward_prefetch(chain[place + 1 : place + 1 + ahead])
            block.set_modules_to_backward_prefetch(chain[max(0, place - ahead) : place][::-1])
    return [f"fsdp2: {ahead} of {len(blocks)} blocks are gathered ahead of their use"]


def _chains(model: nn.Module) -> list[list[Any]]:
    """Sharded blocks that run one after another, in order."""
    from torch.distributed.fsdp import FSDPModule

    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return [[block for block in part if isinstance(block, FSDPModule)] for part in lists]
