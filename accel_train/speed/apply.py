"""The options that make a model faster or smaller, applied in the one order that works."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.speed.activation_checkpointing import ActivationCheckpointingConfig, apply_activation_checkpointing
from accel_train.speed.attention import apply_attention, resolve_attention
from accel_train.speed.attention_proof import kernels_that_ran
from accel_train.speed.attention_table import AttentionNeeds
from accel_train.speed.compile import CompileConfig, CompiledBlocks, apply_compile
from accel_train.speed.float8 import Float8, apply_float8, refuse_float8


@dataclass(frozen=True)
class SpeedOptions:
    """What a recipe's options of the same names say."""

    attention: str = "auto"
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8 = "none"


@dataclass(frozen=True)
class Applied:
    """What `apply_speed_options` did to a model."""

    notices: tuple[str, ...]
    """A line for the log for each option: what was decided and why."""
    facts: dict[str, Any]
    """For the record of the run: the kernel of attention by its name, and what really ran under it; `own` where the
    model chooses it itself."""
    compiled: CompiledBlocks
    """Counts compilations while the run goes on."""


def apply_speed_options(
    model: nn.Module,
    options: SpeedOptions,
    device: torch.device,
    precision: str,
    needs: AttentionNeeds | None = None,
    accumulation_steps: int = 1,
    strategy: str = "single",
) -> Applied:
    """Attention, float8, activation checkpointing, compilation: in place, before the optimizer and `prepare`.

    Every process calls it, with the initial weights in the model. Proves the kernel of attention and runs it once,
    which takes some milliseconds on a CPU and about a second on a GPU. `needs` None: a model without this package's
    attention, for which the option must be auto. Raises `UsageError` for what cannot be done.
    """
    refuse_float8(options.float8, device, precision, strategy)
    if needs is not None:
        needs = replace(needs, compiled=options.compile.mode != "off")
    why, facts = _attention(model, needs, options.attention)
    eight = apply_float8(model, options.float8)
    kept = apply_activation_checkpointing(model, options.activation_checkpointing)
    compiled = apply_compile(model, options.compile, device, accumulation_steps)
    if options.float8 != "none" and not compiled.blocks:
        eight += "; uncompiled it is slower than bf16, for each rounding is a pass over memory: set compile.mode on"
    return Applied((why, eight, kept, compiled.notice), facts, compiled)


def _attention(model: nn.Module, needs: AttentionNeeds | None, name: str) -> tuple[str, dict[str, Any]]:
    """What was chosen and why, and what is recorded of it."""
    if needs is None:
        if name != "auto":
            raise UsageError(
                f"attention {name}: {type(model).__name__} chooses its attention itself: its recipe states no "
                "needs; leave the option out"
            )
        return "attention: the model's own", {"attention": "own"}
    chosen, why = resolve_attention(name, needs)
    apply_attention(model, chosen)
    return why, {"attention": chosen.name, "attention_kernels": kernels_that_ran(chosen, needs)}
