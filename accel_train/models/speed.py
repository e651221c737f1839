"""The options that make a model faster or smaller, applied in the one order that works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from accel_train.models.activation_checkpointing import ActivationCheckpointingConfig, apply_activation_checkpointing
from accel_train.models.attention import apply_attention, resolve_attention
from accel_train.models.attention_proof import kernels_that_ran
from accel_train.models.attention_table import AttentionNeeds
from accel_train.models.compile import CompileConfig, CompiledBlocks, apply_compile


@dataclass(frozen=True)
class Applied:
    """What `apply_speed_options` did to a model."""

    notices: tuple[str, ...]
    """A line for the log for each option: what was decided and why."""
    facts: dict[str, Any]
    """For the record of the run: the kernel of attention by its name, and what really ran under it."""
    compiled: CompiledBlocks
    """Counts compilations while the run goes on."""


def apply_speed_options(
    model: nn.Module,
    needs: AttentionNeeds,
    attention: str,
    checkpointing: ActivationCheckpointingConfig,
    compilation: CompileConfig,
    accumulation_steps: int,
) -> Applied:
    """Attention, activation checkpointing, compilation: in place, before the optimizer and `prepare`.

    Every process calls it. Proves the kernel and runs it once, which takes some milliseconds on a CPU and about a
    second on a GPU. Raises `UsageError` for what cannot be done.
    """
    needs = replace(needs, compiled=compilation.mode != "off")
    chosen, why = resolve_attention(attention, needs)
    apply_attention(model, chosen)
    kept = apply_activation_checkpointing(model, checkpointing)
    compiled = apply_compile(model, compilation, needs.device, accumulation_steps)
    facts = {"attention": chosen.name, "attention_kernels": kernels_that_ran(chosen, needs)}
    return Applied((why, kept, compiled.notice), facts, compiled)
