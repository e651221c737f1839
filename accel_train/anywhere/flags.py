"""Flags of ``accel-train run``, given before the recipe. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from accel_train.anywhere.devices import visible_vram_gib
from accel_train.config import UsageError

HELP = "train on whatever devices are available; adapt the layout when their number changes"


@dataclass(frozen=True)
class Request:
    """The recipe to run, and its devices."""

    recipe: str
    arguments: tuple[str, ...]
    config_files: tuple[str, ...] = ()
    """Launch files, each for as many devices as it names. Empty: a layout is chosen for the number of devices."""
    devices: str | None = None
    """File with the number of devices. None: the accelerators visible to torch."""
    vram_gib: float | None = None
    """Memory of a GPU in GiB, for the plan. None: no plan."""
    rehearse: bool = False
    """Use CPU processes in place of the devices."""
    max_restarts: int = 3
    grace_seconds: float = 300.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "--anywhere",
        action="store_true",
        help="required: it allows the layout to change between starts. `accel-train launch` keeps it fixed",
    )
    parser.add_argument(
        "--config_file",
        action="append",
        default=[],
        metavar="FILE",
        help="launch file; may be repeated. The one with the most processes that fit the devices is used. "
        "Default: one process for each device, DDP or what the plan says",
    )
    parser.add_argument(
        "--devices",
        metavar="FILE",
        help="file with the number of devices to use, read every second; default: the accelerators that torch sees",
    )
    parser.add_argument(
        "--vram_gib",
        metavar="GIB",
        help="memory of one GPU in GiB, or auto for that of the smallest one here: `accel-train plan` then chooses "
        "strategy, micro-batch and activation checkpointing for each number of devices",
    )
    parser.add_argument("--rehearse", action="store_true", help="CPU processes instead of the devices")
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=3,
        help="failed starts in a row without a new checkpoint that are allowed; default: 3",
    )
    parser.add_argument(
        "--grace_seconds",
        type=float,
        default=300.0,
        help="time for a run to save after it was asked to stop; then it is killed. Default: 300",
    )


def _vram_gib(text: str) -> float:
    if text == "auto":
        found = visible_vram_gib()
        if not found:
            raise UsageError("vram_gib: auto: torch sees no GPU here; give the memory of one in GiB, such as 80")
        return found
    try:
        given = float(text)
    except ValueError:
        given = math.nan
    if not 0 < given < math.inf:
        raise UsageError(f"vram_gib: {text}: the memory of one GPU in GiB is required, or auto; give 80")
    return given


def request_of(arguments: Any) -> Request:
    """Return the request of parsed arguments. Raises ``UsageError``."""
    if not arguments.anywhere:
        raise UsageError(
            "run: --anywhere is required, because the layout may then change between starts; add it, or use "
            f"`accel-train launch {arguments.recipe}`, which keeps the layout of its launch file"
        )
    for name, low in (("max_restarts", 0), ("grace_seconds", 1)):
        value = getattr(arguments, name)
        if not value >= low:
            raise UsageError(f"{name}: {value:g}: {low} or more is required; give --{name} {low} or more")
    if arguments.vram_gib is not None and arguments.config_file:
        raise UsageError("vram_gib with --config_file: a plan writes its own launch files; leave one of the two out")
    return Request(
        recipe=arguments.recipe,
        arguments=tuple(arguments.arguments),
        config_files=tuple(arguments.config_file),
        devices=arguments.devices,
        vram_gib=None if arguments.vram_gib is None else _vram_gib(arguments.vram_gib),
        rehearse=arguments.rehearse,
        max_restarts=arguments.max_restarts,
        grace_seconds=arguments.grace_seconds,
    )
