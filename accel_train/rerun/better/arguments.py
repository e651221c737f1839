"""Command line of this package. Imported at every start of ``accel-train``, so it imports nothing heavy itself."""

from __future__ import annotations

import argparse
from typing import Any

from accel_train.config import refuse_impossible

HELP = "decide which of two checkpoints is better on the same held-out samples; exit code 3 if unresolved"


def add_command(commands: Any) -> None:
    """Add the parser to the subparsers of ``accel-train``."""
    better: argparse.ArgumentParser = commands.add_parser("better", help=HELP, description=HELP)
    better.add_argument("a", metavar="A", help="run, for its newest checkpoint, or checkpoint; only read")
    better.add_argument("b", metavar="B", help="run or checkpoint to compare it with; only read")
    _add_flags(better)
    better.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,  # also takes the flags of the recipe
        help="options of the evaluation, for both sides, such as --evaluation.samples 2048",
    ).required = False


def _add_flags(parser: argparse.ArgumentParser) -> None:
    text = "metric that decides; NAME:max if larger is better; may be repeated; default: what the run or recipe names"
    parser.add_argument("--metric", dest="metrics", action="append", metavar="NAME", help=text)
    parser.add_argument("--recipe", metavar="FILE", help="recipe of your own that trained both; the file is executed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    # No abbreviations: a flag of the recipe may begin like one of these.
    parser = argparse.ArgumentParser(prog="accel-train better A B", allow_abbrev=False)
    _add_flags(parser)
    flags, rest = parser.parse_known_args(arguments.arguments, arguments)
    refuse_impossible(vars(flags))
    from accel_train.rerun.better.better import Request, better

    request = Request(
        a=arguments.a,
        b=arguments.b,
        metrics=tuple(flags.metrics or ()),
        recipe=flags.recipe,
        as_json=flags.json,
        flags=rest,
    )
    return better(request)
