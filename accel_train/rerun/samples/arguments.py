"""Command lines of this package. Imported at every start of ``accel-train``, so it imports nothing heavy itself."""

from __future__ import annotations

import argparse
from typing import Any

COMMANDS = ("blame", "forget")


def add_commands(commands: Any) -> None:
    """Add the parsers to the subparsers of ``accel-train``."""
    text = "find the samples that stand out in one step, by the gradient of each alone"
    _add_blame(commands.add_parser("blame", help=text, description=text))
    text = "retrain without given samples, from the newest checkpoint before their first use"
    _add_forget(commands.add_parser("forget", help=text, description=text))


def run(arguments: argparse.Namespace) -> int:
    """Run one of ``COMMANDS`` and return its exit code."""
    if arguments.command == "forget":
        return _forget(arguments)
    return _blame(arguments)


def _add_blame(blame: argparse.ArgumentParser) -> None:
    blame.add_argument("run", metavar="RUN", help="directory of a run; the receipt goes into its report")
    blame.add_argument("--step", type=int, required=True, metavar="N", help="step as in the log, counted from 1")
    blame.add_argument(
        "--top", type=int, default=10, metavar="K", help="samples shown, largest distance first; default: 10"
    )
    text = "distance beyond which a sample is a suspect, in robust standard deviations; default: 6"
    blame.add_argument("--limit", type=float, default=6.0, metavar="Z", help=text)
    blame.add_argument("--recipe", metavar="FILE", help="recipe of your own that trained it; the file is executed")
    blame.add_argument("--json", action="store_true", help="print the receipt instead of the table")


def _blame(arguments: argparse.Namespace) -> int:
    from accel_train.rerun.samples.blame import Request, blame

    request = Request(
        run=arguments.run,
        step=arguments.step,
        top=arguments.top,
        limit=arguments.limit,
        recipe=arguments.recipe,
        as_json=arguments.json,
    )
    return blame(request)


def _add_forget(forget: argparse.ArgumentParser) -> None:
    forget.add_argument("run", metavar="RUN", help="directory of a run; it is read and never changed")
    text = "indices in the training split, as accel-train blame prints them"
    forget.add_argument("samples", type=int, nargs="+", metavar="SAMPLE", help=text)
    forget.add_argument("--output_dir", help="directory of the new run; default: next to the run")
    forget.add_argument("--recipe", metavar="FILE", help="recipe of your own that trained it; the file is executed")


def _forget(arguments: argparse.Namespace) -> int:
    from accel_train.rerun.samples.forget import Request, forget

    request = Request(
        run=arguments.run,
        samples=tuple(arguments.samples),
        output_dir=arguments.output_dir,
        recipe=arguments.recipe,
    )
    return forget(request)
