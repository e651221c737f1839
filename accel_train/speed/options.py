"""Options for speed and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accel_train.config import PositiveInt


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """Recomputation of activations in the backward pass instead of storing them. Costs time, changes no result."""

    mode: Literal["none", "full", "every_nth", "attention", "ffn", "selective"] = "none"
    """full: every block stores only its inputs: a quarter of the peak memory for a third more time. every_nth: the
    same for one block in `every`. attention or ffn: only that half of each block. selective: recompute everything
    except matrix products and attention: half of the memory for 11 % more time. Measured on a CPU by
    benchmarks/activation_checkpointing.py, without weights and optimizer. Compiled blocks keep the output of
    attention in every mode."""
    every: PositiveInt = 2
    """With mode every_nth: blocks 0, n, 2 n, ... are checkpointed. 1 is the same as full."""


@dataclass(frozen=True)
class CompileConfig:
    """Compilation of the model's blocks by torch.compile, each in place and with fullgraph=True."""

    mode: Literal["off", "auto", "on"] = "off"
    """on: compile, or stop with the cause. auto: compile where that works, else run uncompiled with a warning. Most
    useful where launches and elementwise work dominate a step (small models on a GPU, not yet measured), least where
    matrix products do. Measure with `accel-train compare`. Evaluation and sampling run uncompiled."""
    optimize: Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead"] = "default"
    """torch's mode. max-autotune-no-cudagraphs tries several kernels on a GPU and compiles longer.
    reduce-overhead replays CUDA graphs: it needs a GPU and one micro-batch per step."""
    dynamic: bool = False
    """False: one compilation per shape. True: one more compilation, at the second shape, for all further shapes. For
    batches of varying lengths, at some loss of speed."""
    recompile_budget: PositiveInt = 8
    """Recompilations before a warning. The warning names the failed guard."""


Float8 = Literal["none", "tensorwise", "rowwise"]
"""torchao's names of its recipes, or none."""

OutOfMemory = Literal["halve", "stop"]
"""What a training step that does not fit leads to."""
