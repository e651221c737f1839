"""Command lines of this package. Imported at every start of ``accel-train``, so it imports nothing heavy itself."""

from __future__ import annotations

import argparse
from typing import Any

from accel_train.rerun.better import arguments as better
from accel_train.rerun.samples import arguments as samples

COMMANDS = ("replay", "branch", "better", *samples.COMMANDS)


def add_commands(commands: Any) -> None:
    """Add the parsers to the subparsers of ``accel-train``."""
    text = "repeat steps from a checkpoint, compare losses and weights bit by bit, and write a receipt"
    _add_replay(commands.add_parser("replay", help=text, description=text))
    text = "fork a run with changed options on the same samples and noise; report paired differences"
    _add_branch(commands.add_parser("branch", help=text, description=text))
    samples.add_commands(commands)
    better.add_command(commands)


def run(arguments: argparse.Namespace) -> int:
    """Run one of ``COMMANDS`` and return its exit code."""
    if arguments.command in samples.COMMANDS:
        return samples.run(arguments)
    if arguments.command == "better":
        return better.run(arguments)
    if arguments.command == "branch":
        from accel_train.rerun.branch import branch

        # It may stand before the run, as for the other commands, or after it among the recipe's own options.
        before = [] if arguments.recipe is None else ["--recipe", arguments.recipe]
        return branch(arguments.run, [*before, *arguments.arguments])
    return _replay(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    from accel_train.rerun.replay import Request, replay
    from accel_train.rerun.training import Machine

    request = Request(
        run=arguments.run,
        steps=arguments.steps,
        recipe=arguments.recipe,
        machine=Machine(arguments.config_file, arguments.num_processes),
        receipt=arguments.receipt,
        tolerance=arguments.tolerance,
    )
    if arguments.upgrade is not None:
        from accel_train.rerun.upgrade.upgrade import upgrade

        return upgrade(request, arguments.upgrade)
    return replay(request)


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("run", metavar="RUN", help="directory of a run, which is never changed, or hub:org/name")
    replay.add_argument(
        "--steps",
        required=True,
        metavar="FIRST:LAST",
        help="from the state after FIRST optimizer steps to the state after LAST; 0 is the beginning of the run",
    )
    replay.add_argument("--recipe", metavar="FILE", help="recipe of your own that trained it; the file is executed")
    replay.add_argument("--config_file", help="accelerate launch file; default: the same as for accel-train launch")
    replay.add_argument("--num_processes", type=int, help="processes on this machine; default: from the launch file")
    replay.add_argument("--receipt", metavar="FILE", help="default: replay-RUN_ID-FIRST-LAST.json in this directory")
    replay.add_argument(
        "--upgrade",
        metavar="ENV",
        help="replay the steps here and in another virtual environment (its directory or its Python), and name the "
        "first step, loss term and operator that differ",
    )
    replay.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        help="largest relative difference on another layout, machine or version; on the same one every bit must match",
    )


def _add_branch(branch: argparse.ArgumentParser) -> None:
    branch.add_argument("--recipe", metavar="FILE", help="recipe of your own that trained it; the file is executed")
    branch.add_argument("run", metavar="RUN", help="directory of a run; it is read and never changed")
    branch.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,  # also takes the flags of the recipe
        help="--at STEP, --steps N and options to change, such as --optimizer.lr 3e-4; --help after RUN lists all",
    ).required = False
