"""The command line of ``accel-train verify``. Imports nothing heavy, since every command reads it."""

from __future__ import annotations

import argparse
from typing import Any

from accel_train.config import flags_behind

HELP = "prove that a recipe's gradient does not depend on the layout, by short runs on the CPU; exit code 1 if it does"


def add_options(verify: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    text = "make this check only; NAME,NAME for several"
    verify.add_argument("--only", action="append", default=[], metavar="NAME", help=text)
    verify.add_argument("--steps", type=int, default=6, help="optimizer steps of each run, an even number; default: 6")
    text = "one micro-batch on each process, for a loss with negatives from the whole batch"
    verify.add_argument("--one_micro_batch", action="store_true", help=text)
    text = "launch file of your own, rehearsed on two CPU processes as one more layout"
    verify.add_argument("--config_file", help=text)
    verify.add_argument("--output", help="directory that keeps the runs; default: a temporary one")
    verify.add_argument("--json", action="store_true", help="all results, for programs")


def run(arguments: Any) -> int:
    """Call ``verify`` with the parsed arguments. The command's own options may also stand among the recipe's."""
    from accel_train.verification.verify import Request, verify

    found, rest = flags_behind("verify", add_options, arguments.arguments, arguments)
    request = Request(
        recipe=found.recipe,
        arguments=tuple(rest),
        only=tuple(name for text in found.only for name in text.split(",")),
        steps=found.steps,
        one_micro_batch=found.one_micro_batch,
        config_file=found.config_file,
        output=found.output,
        as_json=found.json,
    )
    return verify(request)
