"""Modes of activation checkpointing for tests: those of the option, and one with some of the blocks."""

from __future__ import annotations

from typing import Any

from accel_train.speed.options import ActivationCheckpointingConfig

PARTIAL = "partial"
"""Mode full of the first block alone."""
MODES = ("none", "full", PARTIAL, "attention", "ffn", "selective")


def config_of(mode: Any) -> ActivationCheckpointingConfig:
    """Return the options of a mode."""
    if mode == PARTIAL:
        return ActivationCheckpointingConfig("full", blocks=1)
    return ActivationCheckpointingConfig(mode)


def flags_of(mode: str) -> list[str]:
    """Return the flags of a mode."""
    config = config_of(mode)
    flags = ["--activation_checkpointing.mode", config.mode]
    if config.blocks is not None:
        flags += ["--activation_checkpointing.blocks", str(config.blocks)]
    return flags
