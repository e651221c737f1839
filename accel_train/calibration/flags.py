"""Flags of ``accel-train calibrate``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_train.config import UsageError, expand_path, refuse_unusable_folder

HELP = "measure the rates of this machine and write them to a file for accel-train plan --device FILE"
DEFAULT_OUTPUT = "calibration.json"
DEFAULT_SECONDS = 20.0
STOPPED = "stopped; nothing was written"
LAUNCHED = ("RANK", "WORLD_SIZE")
"""Environment variables set by torchrun and accelerate launch."""


@dataclass(frozen=True)
class Options:
    """Flags of the measurement itself. Those of the launch are not among them."""

    output: Path
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """None: bf16 on a GPU, fp32 on a CPU."""
    seconds: float = DEFAULT_SECONDS

    def words(self) -> list[str]:
        """Return the command-line flags that give another process the same options."""
        precision = [] if self.precision is None else ["--precision", self.precision]
        return ["--output", str(self.output), "--seconds", f"{self.seconds:g}", *precision]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the measurement."""
    parser.add_argument("--output", metavar="FILE", default=DEFAULT_OUTPUT, help="default: calibration.json")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="of the runs to plan; default: bf16 on a GPU, fp32 on a CPU",
    )
    parser.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="time to measure, without the start; default: 20"
    )


def options_of(arguments: argparse.Namespace) -> Options:
    """Build the options from parsed flags. Raises ``UsageError`` for a bad value or an unusable output."""
    seconds = arguments.seconds
    # The comparison is False for NaN as well.
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds: {seconds:g}: a number above 0 is required; give --seconds {DEFAULT_SECONDS:g}")
    return Options(_output(arguments.output), arguments.precision, seconds)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return True if a launcher started this process, which then measures together with its other processes."""
    return all(name in environment for name in LAUNCHED)


def _output(text: str) -> Path:
    path = expand_path(text)
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"output: {path}: {folder} is not a directory; one is required. Make it, or give another")
    # Refused before the measurement. An older calibration may be replaced: that is checked when the file is written.
    if path.suffix != ".json":
        raise UsageError(
            f"output: {path}: a name that ends in .json is required, by which --device recognises the file"
        )
    refuse_unusable_folder(f"output: {path}", folder)
    return path
