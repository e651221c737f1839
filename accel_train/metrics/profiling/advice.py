"""Options most likely to make a step faster, from the shares of its time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.metrics.profiling.shares import COMMUNICATION, COMPUTE, IDLE, MEMORY, PYTHON, WAIT, Shares
from accel_train.store.names import CONFIG_FILE

MOST = 3
WORTH_WHILE = 0.05
"""Smallest share of a step worth reducing. Removing less would hardly show beside the noise."""


@dataclass(frozen=True)
class Setting:
    """Facts for the advice, beside the measured shares."""

    recipe: str
    """Path of the recipe, for the command."""
    directory: Path
    """Directory of the run. The command compares its config.yaml, and its report gets the profile."""
    options: Mapping[str, Any]
    """Options of the run, by their dotted names."""
    world_size: int
    micro_batch_size: int
    accumulation_steps: int
    num_workers: int
    records_memory: bool = False
    """``profile.memory``"""


@dataclass(frozen=True)
class Advice:
    """One option to try."""

    share: float
    """Part of the step's time the option may reduce."""
    reason: str
    vary: str
    """Value of ``accel-train compare --vary``."""

    def command(self, setting: Setting) -> str:
        """Return the command to check it."""
        config = setting.directory / CONFIG_FILE
        words = ["accel-train", "compare", setting.recipe, str(config), "--vary", self.vary, "--max_steps", "60"]
        return shlex.join(words)


def advise(shares: Shares, setting: Setting) -> list[Advice]:
    """Return at most three options, the largest share first. Empty if no reducible part is large."""
    found = [_workers(shares, setting), _compile(shares, setting), _larger_micro_batch(shares, setting)]
    found += [_precision(shares, setting), _buckets(shares, setting)]
    # Largest first, so that the limit of three cuts what helps least.
    worth = [advice for advice in found if advice is not None and advice.share >= WORTH_WHILE]
    return sorted(worth, key=lambda advice: -advice.share)[:MOST]


def _workers(shares: Shares, setting: Setting) -> Advice | None:
    waited = shares.of(WAIT)
    # From no workers to one, which already reads in parallel to the step.
    more = max(1, 2 * setting.num_workers)
    reason = (
        f"{waited:.0%} of the time is spent waiting for data with loader.num_workers {setting.num_workers}: more "
        "processes read ahead while a step trains"
    )
    return Advice(waited, reason, f"loader.num_workers={setting.num_workers},{more}")


def _compile(shares: Shares, setting: Setting) -> Advice | None:
    # On a CPU the time of other operators includes their dispatch, which compilation removes as well.
    small = 1 - shares.of(COMPUTE) - shares.of(COMMUNICATION) - shares.of(WAIT)
    # Advice is only about options that the run does not use yet.
    if setting.options["compile.mode"] != "off":
        return None
    parts = f"{MEMORY} and idle time" if shares.on_device else "small operators and Python between them"
    reason = f"{small:.0%} of the time is {parts}: compilation fuses the operators of a block"
    return Advice(small, reason, "compile.mode=off,on")


def _larger_micro_batch(shares: Shares, setting: Setting) -> Advice | None:
    gap = shares.of(IDLE) + shares.of(PYTHON)
    # With one micro-batch per step, there is nothing to merge.
    if setting.accumulation_steps == 1:
        return None
    size = setting.micro_batch_size
    reason = (
        f"in {gap:.0%} of the time no operator runs, and a step has {setting.accumulation_steps} micro-batches: fewer "
        "and larger ones have fewer gaps, but take more memory"
    )
    return Advice(gap, reason, f"micro_batch_size={size},{2 * size}")


def _precision(shares: Shares, setting: Setting) -> Advice | None:
    if not shares.on_device or setting.options["precision"] != "fp32":
        return None
    computed = shares.of(COMPUTE)
    reason = f"{computed:.0%} of the time is compute in fp32: bf16 uses the tensor cores; it changes the rounding"
    return Advice(computed, reason, "precision=fp32,bf16")


def _buckets(shares: Shares, setting: Setting) -> Advice | None:
    # A hook that is set already changes what this option would change.
    hooked = setting.options["distributed.comm_hook"] != "none"
    if setting.world_size == 1 or not shares.on_device or hooked:
        return None
    exposed = shares.of(COMMUNICATION)
    reason = (
        f"{exposed:.0%} of the time is communication that no computation hides: half the bytes take about half of it; "
        "the gradient is rounded to bf16 on the way, and strategies other than DDP refuse it"
    )
    return Advice(exposed, reason, "distributed.comm_hook=none,bf16")
