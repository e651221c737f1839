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
"""Variables of a process started by torchrun or accelerate launch."""


@dataclass(frozen=True)
class Options:
    """Flags of the measurement itself, without those of the launch."""

    output: Path
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """None: bf16 on a GPU, fp32 on a CPU."""
    seconds: float = DEFAULT_SECONDS

    def words(self) -> list[str]:
        """Return the flags of another process with the same options."""
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
    """Return the options. Raises ``UsageError``."""
    seconds = arguments.seconds
    # NaN is no number above 0 either.
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds: {seconds:g}: a number above 0 is required; give --seconds {DEFAULT_SECONDS:g}")
    return Options(_output(arguments.output), arguments.precision, seconds)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return True in a process of a launcher, which measures with the others that it started."""
    return all(name in environment for name in LAUNCHED)


def _output(text: str) -> Path:
    path = expand_path(text)
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(
            f"output: {path}: {folder} is no directory of yours; one is required. Make it, or give another"
        )
    # Refused before the measurement. Another calibration may be replaced, and the writing looks whether it is one.
    if path.suffix != ".json":
        raise UsageError(f"output: {path}: a name that ends in .json is required, by which --device knows the file")
    refuse_unusable_folder(f"output: {path}", folder)
    return path
