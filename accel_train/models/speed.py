"""The options that make a model faster or smaller, applied in the one order that works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accel_train.models.activation_checkpointing import ActivationCheckpointingConfig, apply_activation_checkpointing
from accel_train.models.attention import apply_attention, resolve_attention
from accel_train.models.attention_proof import kernels_that_ran
from accel_train.models.attention_table import AttentionNeeds
from accel_train.models.compile import CompileConfig, CompiledBlocks, apply_compile
from accel_train.models.float8 import Float8, apply_float8, refuse_float8

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    float8: Float8 = "none",
    strategy: str = "single",
) -> Applied:
    """Attention, float8, activation checkpointing, compilation: in place, before the optimizer and `prepare`.

    Every process calls it, with the initial weights in the model. Proves the kernel of attention and runs it once,
    which takes some milliseconds on a CPU and about a second on a GPU. Raises `UsageError` for what cannot be done.
    """
    refuse_float8(float8, needs.device, PRECISIONS.get(needs.dtype, str(needs.dtype)), strategy)
    needs = replace(needs, compiled=compilation.mode != "off")
    chosen, why = resolve_attention(attention, needs)
    apply_attention(model, chosen)
    eight = apply_float8(model, float8)
    kept = apply_activation_checkpointing(model, checkpointing)
    compiled = apply_compile(model, compilation, needs.device, accumulation_steps)
    if float8 != "none" and not compiled.blocks:
        eight += "; uncompiled it is slower than bf16, for each rounding is a pass over memory: set compile.mode on"
    facts = {"attention": chosen.name, "attention_kernels": kernels_that_ran(chosen, needs)}
    return Applied((why, eight, kept, compiled.notice), facts, compiled)
