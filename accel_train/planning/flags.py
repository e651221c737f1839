"""Flags of ``accel-train plan``, given before or after the recipe. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accel_train.config import UsageError, flags_behind
from accel_train.planning.memory import default_margin

Goal = Literal["speed", "memory", "balanced"]
GOALS: tuple[Goal, ...] = ("speed", "memory", "balanced")
HELP = "find the launch file, micro-batch and checkpointing that fit given GPUs, which need not be there"


@dataclass(frozen=True)
class Options:
    """Flags of the command itself."""

    gpus: int
    vram_gib: float
    device: str | None = None
    goal: Goal = "speed"
    margin_gib: float | None = None
    """None: a share of ``vram_gib``."""
    host_gib: float | None = None
    """None: this machine's."""
    step: int | None = None
    explain: bool = False
    as_json: bool = False
    write: str | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("--gpus", type=int, help="GPUs of one machine, a process on each; required")
    parser.add_argument("--vram_gib", type=float, help="memory of one GPU in GiB, as nvidia-smi shows; required")
    parser.add_argument(
        "--device", metavar="NAME", help="model of the GPU, such as h100-sxm, or a file of calibrate: step times"
    )
    parser.add_argument(
        "--goal",
        choices=GOALS,
        default="speed",
        help="speed: the fastest that fits (default). balanced: the same in 80 %% of the memory. memory: the smallest",
    )
    parser.add_argument("--margin_gib", type=float, help="GiB to leave free; default: 5 %% of --vram_gib")
    parser.add_argument(
        "--host_gib", type=float, help="memory of the machine in GiB, for an offload; default: that of this machine"
    )
    parser.add_argument("--step", type=int, help="number of the simulated step, from 1; default: the middle of the run")
    parser.add_argument("--explain", action="store_true", help="also list what was tried, and by how much it missed")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with the origin of each figure")
    parser.add_argument("--write", metavar="DIR", help="write launch.yaml and preset.yaml for `accelerate launch`")


def read_arguments(words: Sequence[str], earlier: argparse.Namespace) -> tuple[list[str], Options]:
    """Take the command's own flags out of the words after the recipe. ``earlier`` holds those before it."""
    flags, rest = flags_behind("plan", add_flags, words, earlier)
    # Not argparse's `required`, which would demand the flag on this side of the recipe.
    _require("gpus", flags.gpus, "the number of GPUs", "--gpus 8")
    _require("vram_gib", flags.vram_gib, "the memory of one GPU in GiB", "--vram_gib 80")
    if flags.host_gib is not None:
        _require("host_gib", flags.host_gib, "the memory of the machine in GiB", "--host_gib 256")
    margin = flags.margin_gib
    if margin is not None and not 0 <= margin < flags.vram_gib:
        raise UsageError(
            f"margin_gib: {margin:g}: from 0 to less than --vram_gib {flags.vram_gib:g} is required; "
            f"leave it out for {default_margin(flags.vram_gib):.2g}"
        )
    options = Options(
        gpus=flags.gpus,
        vram_gib=flags.vram_gib,
        device=flags.device,
        goal=flags.goal,
        margin_gib=margin,
        host_gib=flags.host_gib,
        step=flags.step,
        explain=flags.explain,
        as_json=flags.json,
        write=flags.write,
    )
    return rest, options


def _require(name: str, value: float | None, meaning: str, example: str) -> None:
    # NaN is no number above 0 either.
    if value is None or not 0 < value < math.inf:
        given = "not given" if value is None else f"{value:g}"
        raise UsageError(f"{name}: {given}: {meaning}, a number above 0, is required; give {example}")
