"""Options for speed and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accel_train.config import PositiveFraction, PositiveInt, refuse_without_effect


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """Recomputation of activations in the backward pass instead of storing them. Costs time, changes no result."""

    mode: Literal["none", "full", "attention", "ffn", "selective"] = "none"
    """full: every block stores only its inputs: a quarter of the peak memory for a third more time. attention or ffn:
    only that half of each block. selective: recompute everything except matrix products and attention: half of the
    memory for 6 % more time. Measured on a CPU by benchmarks/activation_checkpointing.py, without weights and
    optimizer. Compiled blocks keep the output of attention in every mode."""
    blocks: PositiveInt | None = None
    """Blocks that are checkpointed, the first ones: as many as it takes to fit, since each costs time. None: all."""
    offload: bool = False
    """Keep what mode full stores, the inputs of each block but the last two, in pinned host memory between forward and
    backward, copied alongside the computation. For many blocks or long sequences on a GPU. Changes no result. Each
    process needs as much host memory, tensors rounded up to 2 MiB. Refused on a CPU, in other modes and with
    compile.mode on. Its speed: not yet measured here."""

    def __post_init__(self) -> None:
        with_mode = f"with activation_checkpointing.mode: {self.mode}"
        instead = "give --activation_checkpointing.mode full"
        if self.mode == "none":
            refuse_without_effect(self, "activation_checkpointing", ["blocks", "offload"], with_mode, instead)
        if self.mode != "full":
            because = f"{with_mode}, which does not store only the inputs of whole blocks"
            refuse_without_effect(self, "activation_checkpointing", ["offload"], because, instead)


@dataclass(frozen=True)
class MemoryConfig:
    """torch's allocator on a GPU. On a CPU these are refused."""

    fraction: PositiveFraction = 1.0
    """Share of a GPU's memory that a process may allocate: a step that needs more runs out of memory, as on a smaller
    GPU. For a GPU that others use as well."""
    expandable_segments: bool = False
    """Let the allocator extend its segments instead of adding new ones, so that shapes that vary from step to step
    leave fewer gaps. Changes no result. Its speed and saving: not yet measured here."""


@dataclass(frozen=True)
class CompileConfig:
    """Compilation of the model's blocks by torch.compile, each in place and with fullgraph=True."""

    mode: Literal["off", "auto", "on"] = "off"
    """on: compile, or stop with the cause. auto: compile on a GPU where that works, else run uncompiled and say why.
    Most useful where launches and elementwise work dominate a step, as with small models on a GPU, least where matrix
    products do. Measure with `accel-train compare`. Evaluation and sampling run uncompiled."""
    optimize: Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead"] = "default"
    """torch's mode. max-autotune-no-cudagraphs tries several kernels on a GPU and compiles longer.
    reduce-overhead replays CUDA graphs: it needs a GPU and one micro-batch per step."""
    dynamic: bool = False
    """False: one compilation per shape. True: one more compilation, at the second shape, for all further shapes. For
    batches of varying lengths, at some loss of speed."""
    recompile_budget: PositiveInt = 8
    """Recompilations before a warning. The warning names the failed guard."""

    def __post_init__(self) -> None:
        if self.mode == "off":
            names = ("optimize", "dynamic", "recompile_budget")
            because = "with compile.mode: off, which compiles nothing"
            refuse_without_effect(self, "compile", names, because, "give --compile.mode auto or on")


Float8 = Literal["none", "tensorwise", "rowwise"]
"""torchao's names of its recipes, or none."""

OutOfMemory = Literal["halve", "stop"]
"""Reaction to a training step that does not fit into memory."""
