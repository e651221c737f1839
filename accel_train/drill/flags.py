"""Flags of ``accel-train drill``, given before or after the recipe. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from accel_train.config import UsageError, flags_behind

HELP = "inject faults into short runs and check that they resume exactly; exit code 1 if not"
FEWEST_STEPS = 6
HOURS = 24.0
"""Mean time between failures unless given: about what published logs of hundreds of accelerators show per job."""


@dataclass(frozen=True)
class Options:
    """Flags of the command itself."""

    faults: tuple[str, ...] = ()
    """Names of faults. Empty: all."""
    steps: int = 8
    config_file: str | None = None
    num_processes: int | None = None
    keep: str | None = None
    """Directory that keeps the runs. None: a temporary one."""
    receipt: str | None = None
    """None: a name with the recipe, in the current directory."""
    mtbf_hours: float = HOURS
    step_seconds: float | None = None
    """None: as measured."""
    save_seconds: float | None = None
    """None: as measured."""
    as_json: bool = False


def add_flags(parser: argparse.ArgumentParser, *, behind: bool = False) -> None:
    """Add the command's own flags. With ``behind``, for those after the recipe, ``--faults`` takes several words."""
    # In front of the recipe, a list of words would end with the recipe itself.
    several = {"nargs": "+", "action": "extend"} if behind else {"action": "append"}
    text = "inject only these: NAME NAME after the recipe, NAME,NAME before it; default: all"
    parser.add_argument("--faults", metavar="NAME", help=text, **several)  # pyright: ignore[reportArgumentType]
    # A step of a large model takes long on a CPU, so there are few.
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run; default: 8")
    text = "accelerate launch file, rehearsed on CPU processes if its devices are not here; default: as for launch"
    parser.add_argument("--config_file", help=text)
    parser.add_argument("--num_processes", type=int, help="processes; default: from the file, 2 for a rehearsal")
    parser.add_argument("--keep", metavar="DIR", help="directory that keeps the runs; default: a temporary one")
    parser.add_argument("--receipt", metavar="FILE", help="default: drill-RECIPE.json in this directory")
    text = "mean time between failures of your machine in hours, for the save interval; default: 24"
    parser.add_argument("--mtbf_hours", type=float, default=HOURS, help=text)
    parser.add_argument("--step_seconds", type=float, help="seconds of a step on your machine; default: as measured")
    text = "seconds for which a save stops training on your machine; default: as measured"
    parser.add_argument("--save_seconds", type=float, help=text)
    parser.add_argument("--json", action="store_true", help="all results, for programs")


def read_arguments(words: Sequence[str], earlier: argparse.Namespace) -> tuple[list[str], Options]:
    """Take the command's own flags out of the words after the recipe. ``earlier`` holds those before it."""
    flags, rest = flags_behind("drill", partial(add_flags, behind=True), words, earlier)
    if flags.steps < FEWEST_STEPS:
        raise UsageError(
            f"--steps {flags.steps}: at least {FEWEST_STEPS} are required, for two saves with steps between and after "
            "them; give --steps 8"
        )
    _require_above_zero("mtbf_hours", flags.mtbf_hours, "hours between failures", "--mtbf_hours 24")
    _require_above_zero("step_seconds", flags.step_seconds, "seconds of a step", "--step_seconds 0.8")
    _require_above_zero("save_seconds", flags.save_seconds, "seconds of a save", "--save_seconds 3")
    options = Options(
        # Both forms may be mixed, one before the recipe and one after it.
        faults=tuple(name for text in flags.faults or () for name in text.split(",")),
        steps=flags.steps,
        config_file=flags.config_file,
        num_processes=flags.num_processes,
        keep=flags.keep,
        receipt=flags.receipt,
        mtbf_hours=flags.mtbf_hours,
        step_seconds=flags.step_seconds,
        save_seconds=flags.save_seconds,
        as_json=flags.json,
    )
    return rest, options


def _require_above_zero(name: str, value: float | None, meaning: str, example: str) -> None:
    # NaN is not above 0 either.
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"--{name} {value:g}: {meaning}, a number above 0, is required; give {example}")
