"""Apply the options for speed and memory to a model, in the only order that works."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.precision import Precision, dtype_of
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.attention.other_libraries import Example, apply_library_attention, library_parts
from accel_train.speed.attention.proof import kernels_that_ran
from accel_train.speed.attention.selection import apply_attention, resolve_attention
from accel_train.speed.attention.table import AttentionNeeds
from accel_train.speed.compile import CompiledBlocks, apply_compile
from accel_train.speed.float8 import apply_float8, refuse_float8, refuse_float8_strategy
from accel_train.speed.memory.activation_offload import input_offload
from accel_train.speed.memory.allocator import apply_memory
from accel_train.speed.memory.frozen_offload import refuse_offload_strategy
from accel_train.speed.model_habits import settle_habits
from accel_train.speed.options import ActivationCheckpointingConfig, CompileConfig, Float8, MemoryConfig

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values with which the results of cuBLAS are reproducible, the faster first."""


@dataclass(frozen=True)
class SpeedOptions:
    """The recipe's options of the same names."""

    attention: str = "auto"
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8 = "none"


@dataclass(frozen=True)
class Applied:
    """Result of `apply_speed_options`."""

    notices: Sequence[str]
    """Notices about the habits of the model that were settled."""
    choices: Mapping[str, str]
    """The decision and its reason, by option."""
    facts: dict[str, Any]
    """Run info: the attention kernel by name, and the device kernels behind it. `own` for a model's own attention."""
    compiled: CompiledBlocks
    """Counts compilations during the run."""


def set_up_device(
    device: torch.device, memory: MemoryConfig, float8: Float8, precision: Precision, strategy: str
) -> list[str]:
    """Set up the allocator of ``device`` and return notices. Every process calls it, before anything is allocated.

    Raises ``UsageError`` for a device that does not support these options.
    """
    refuse_float8(float8, device, precision, strategy)
    return apply_memory(memory, device)


def refuse_strategy_of_speed(
    float8: Float8, compiled: CompileConfig, precision: Precision, strategy: str, *, offloads: bool
) -> None:
    """Raise ``UsageError`` for options of speed and memory that no device obeys under ``strategy``."""
    refuse_float8_strategy(float8, precision, strategy)
    if offloads:
        refuse_offload_strategy(strategy, compiled.mode)


def set_deterministic(device: torch.device) -> tuple[str, Callable[[], None]]:
    """Switch on torch's deterministic algorithms for this process. Return a notice, and a call that switches back.

    Call it before the first matrix product on a GPU. Raises ``UsageError`` for a workspace of cuBLAS that lets products
    differ. See torch's notes on reproducibility.
    """
    before = torch.are_deterministic_algorithms_enabled()
    notice = "deterministic: an operator without a deterministic kernel ends the run"
    if device.type == "cuda":
        # With a workspace of another size, streams that share it may pick different kernels from call to call.
        workspace = os.environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
        if workspace not in DETERMINISTIC_WORKSPACES:
            raise UsageError(
                f"deterministic: {WORKSPACE}={workspace}: {' or '.join(DETERMINISTIC_WORKSPACES)} is required; unset "
                "it, or leave --deterministic out"
            )
        notice += f"; {WORKSPACE}={workspace}"
    torch.use_deterministic_algorithms(True)
    return notice, partial(torch.use_deterministic_algorithms, before)


def apply_speed_options(
    model: nn.Module,
    options: SpeedOptions,
    device: torch.device,
    precision: Precision,
    needs: AttentionNeeds | None = None,
    accumulation_steps: int = 1,
    strategy: str = "single",
    example: Example | None = None,
) -> Applied:
    """Apply attention, float8, activation checkpointing and compilation in place, before the optimizer and `prepare`.

    Every process calls it, with the initial weights in the model. Proves the attention kernel and runs it once:
    some milliseconds on a CPU, about a second on a GPU. `needs` is None for a model without this package's attention:
    one of transformers or diffusers attends by its library, proven on `example`, and for any other the option must be
    auto. Settles the model's habits first (`settle_habits`). Raises `UsageError` for an option that cannot be obeyed.
    """
    refuse_float8(options.float8, device, precision, strategy)
    offload = input_offload(options.activation_checkpointing, device, options.compile.mode)
    # Before anything wraps a forward: a habit of the model may contradict the option that is to be applied.
    habits = settle_habits(model, precision, strategy, options.activation_checkpointing.mode)
    # A recipe states the needs of its model alone. Not every kernel can be part of a compiled block.
    if needs is not None:
        needs = replace(needs, compiled=options.compile.mode != "off")
    if needs is None and library_parts(model):
        compiled_blocks = options.compile.mode != "off"
        applied = apply_library_attention(
            model, options.attention, device, dtype_of(precision), example, compiled=compiled_blocks
        )
        attention = applied.notice
        facts: dict[str, Any] = {"attention": applied.name, "attention_kernels": applied.kernels}
    else:
        attention, facts = _attention(model, needs, options.attention)
    # float8 replaces the linear layers, checkpointing wraps their forwards, and compilation traces the result.
    float8 = apply_float8(model, options.float8)
    checkpointing = apply_activation_checkpointing(model, options.activation_checkpointing, offload)
    compiled = apply_compile(model, options.compile, device, accumulation_steps)
    if options.float8 != "none" and not compiled.blocks:
        float8 += (
            "; uncompiled it is slower than bf16, because each rounding is a pass over memory: set compile.mode on"
        )
    choices = {
        "attention": attention,
        "float8": float8,
        "activation_checkpointing.mode": checkpointing,
        "compile.mode": compiled.notice,
    }
    return Applied(habits, choices, facts, compiled)


def _attention(model: nn.Module, needs: AttentionNeeds | None, name: str) -> tuple[str, dict[str, Any]]:
    """Return the notice with the choice and its reason, and the run info."""
    if needs is None:
        if name != "auto":
            raise UsageError(
                f"attention {name}: {type(model).__name__} chooses its own attention, because its recipe states no "
                "needs; leave the option out"
            )
        return "attention: the model's own", {"attention": "own"}
    chosen, why = resolve_attention(name, needs)
    apply_attention(model, chosen)
    return why, {"attention": chosen.name, "attention_kernels": kernels_that_ran(chosen, needs)}
