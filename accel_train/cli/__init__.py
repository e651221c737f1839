"""``accel-train``: each command reads its arguments and calls one function of the library."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Sequence

from accel_train.anywhere import flags as anywhere
from accel_train.calibration import command as calibration
from accel_train.calibration.flags import STOPPED
from accel_train.cli.arguments import add_rows_flags, build_parser
from accel_train.config import flags_behind, refuse_impossible
from accel_train.drill import command as drilling
from accel_train.planning import flags as planning
from accel_train.rerun import arguments as rerun
from accel_train.runtime.early_stop import stoppable
from accel_train.runtime.exiting import exit_with, lose_output
from accel_train.simulation.flags import read_arguments
from accel_train.verification import command as verification


def main() -> None:
    """Run the ``accel-train`` command."""
    exit_with(_interruptible)


def _interruptible(argv: Sequence[str]) -> int:
    try:
        return _main(argv)
    except KeyboardInterrupt:
        # As for the commands that also stop on other signals (`stoppable`).
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except OSError as error:
        # `accel-train doctor > report.txt` on a full disk. An error of another file names it.
        if error.errno != errno.ENOSPC or error.filename is not None or _takes_output():
            raise
        lose_output(sys.stdout, error)
        return 1


def _takes_output() -> bool:
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _main(argv: Sequence[str]) -> int:
    # Without the options of recipes, whose imports take a second. Only completion needs them.
    arguments = build_parser().parse_args(argv)
    refuse_impossible(vars(arguments))
    if arguments.command == "doctor":
        return _doctor(arguments)
    if arguments.command == "checkpoints":
        return _checkpoints(arguments)
    if arguments.command == "compare":
        return _compare(arguments)
    if arguments.command in rerun.COMMANDS:
        return rerun.run(arguments)
    if arguments.command == "verify":
        return verification.run(arguments)
    if arguments.command == "drill":
        return drilling.run(arguments)
    if arguments.command == "sample":
        from accel_train.commands.sample import sample

        return sample(arguments.place, arguments.arguments, arguments.recipe)
    if arguments.command == "data":
        return _data(arguments)
    if arguments.command == "lora":
        from accel_train.commands.lora import lora

        return lora(arguments.place, arguments.arguments)
    if arguments.command == "export":
        return _export(arguments)
    if arguments.command == "init":
        from accel_train.commands.init import init

        print(init(arguments.directory, arguments.recipe, scaffold=arguments.scaffold))
        return 0
    if arguments.command == "completion":
        return _completion(arguments)
    if arguments.command == "monitor":
        from accel_train.watching.monitor import monitor

        return monitor(
            arguments.runs,
            once=arguments.once,
            as_json=arguments.json,
            every=arguments.every,
            webhook=arguments.webhook,
        )
    if arguments.command == "report":
        from accel_train.watching.report import report

        return report(arguments.runs, arguments.output)
    if arguments.command == "run":
        return _run(arguments)
    if arguments.command in BEFORE_A_RUN:
        with stoppable(STOPPED):
            return BEFORE_A_RUN[arguments.command](arguments)
    return _launch(arguments)


# Each command imports its own module, so that a fast one never pays for the imports of a slow one.
def _doctor(arguments: argparse.Namespace) -> int:
    from accel_train.commands.doctor import attention_report, report

    text = attention_report() if arguments.attention else report()
    print(text)
    return 0


def _data(arguments: argparse.Namespace) -> int:
    from accel_train.commands import data

    if arguments.action == "check":
        return data.check(arguments.place, arguments.arguments)
    if arguments.action == "rows":
        return _rows(arguments)
    return data.cache(arguments.cache_action, arguments.arguments)


def _rows(arguments: argparse.Namespace) -> int:
    flags, rest = flags_behind("data rows", add_rows_flags, arguments.arguments, arguments)
    from accel_train.commands.rows import Request, rows

    return rows(Request(flags.recipe, flags.count, flags.heldout, flags.ids), rest)


def _completion(arguments: argparse.Namespace) -> int:
    from accel_train.commands.bundled import recipe_names, recipes_with_options
    from accel_train.options.completion import script

    # Here the recipes are imported: completion is generated once, and completes their options.
    recipes = recipes_with_options([*recipe_names(), *arguments.recipes])
    print(script(build_parser(recipes), arguments.shell))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from accel_train.compare.comparison import compare
    from accel_train.compare.request import Request

    options = vars(arguments)
    # The remaining names are those of the fields of Request.
    del options["command"]
    options["sources"] = tuple(arguments.sources)
    options["gates"] = tuple(arguments.gates)
    options["common"] = tuple(arguments.common)
    options["seeds"] = tuple(arguments.seeds)
    if arguments.rounds is None:
        options["rounds"] = len(arguments.seeds) or Request.rounds
    return compare(Request(**options))


def _launch(arguments: argparse.Namespace) -> int:
    from accel_train.commands.launch import Launch, launch

    # Launching, rehearsing and checking read the same arguments, so that a check covers what will start.
    request = Launch(
        config_file=arguments.config_file,
        recipe=arguments.recipe,
        arguments=tuple(arguments.arguments),
        num_processes=arguments.num_processes,
        machine_rank=arguments.machine_rank,
        main_process_ip=arguments.main_process_ip,
        main_process_port=arguments.main_process_port,
    )
    if arguments.command == "check":
        from accel_train.commands.check import run

        return run(request, ignored=arguments.ignore, as_json=arguments.json, fix=arguments.fix)
    return launch(request, rehearsal=arguments.command == "rehearse")


def _run(arguments: argparse.Namespace) -> int:
    # Before the import of the supervisor, so that a wrong flag is refused at once.
    request = anywhere.request_of(arguments)
    from accel_train.anywhere.supervisor import run_anywhere

    return run_anywhere(request)


def _simulate(arguments: argparse.Namespace) -> int:
    # Read first, so that a wrong flag is refused without the imports of a simulation.
    rest, options = read_arguments(arguments.arguments, arguments)
    from accel_train.simulation.command import simulate

    print(simulate(arguments.recipe, rest, options))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    # Read first, so that a wrong flag is refused without the imports of a simulation.
    rest, options = planning.read_arguments(arguments.arguments, arguments)
    from accel_train.planning.command import plan

    print(plan(arguments.recipe, rest, options))
    return 0


BEFORE_A_RUN = {"simulate": _simulate, "plan": _plan, "calibrate": calibration.run}
"""Commands that write files only at their end, if at all, so that a signal may stop them at any time."""


def _export(arguments: argparse.Namespace) -> int:
    from accel_train.commands.export import export

    return export(
        arguments.place,
        arguments.destination,
        precision=arguments.precision,
        source=arguments.weights,
        merged=arguments.merged,
    )


def _checkpoints(arguments: argparse.Namespace) -> int:
    """Run an action on checkpoints. Only actions on tensors import torch."""
    place = arguments.place
    action = arguments.action
    if action == "diff":
        from accel_train.commands.diff import diff

        return diff(place, arguments.other)
    if action == "convert":
        from accel_train.commands import convert

        if arguments.base is not None:
            return convert.convert_adapters(place, arguments.base, arguments.destination, arguments.stem)
        return convert.convert(place, arguments.destination, stem=arguments.stem)
    if action == "export":
        return _export(arguments)
    from accel_train.commands import checkpoints as commands

    if action == "ls":
        return commands.ls(place, as_json=arguments.json, quick=arguments.quick)
    if action == "verify":
        return commands.verify(place)
    # The rest are options of the run by name, None if not given.
    not_flags = ("command", "action", "place", "dry_run")
    flags = {name: value for name, value in vars(arguments).items() if name not in not_flags}
    if action == "prune":
        return commands.prune(place, dry_run=arguments.dry_run, flags=flags)
    return commands.push(place, flags)
