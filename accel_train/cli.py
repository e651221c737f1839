"""``accel-train``: each command reads its arguments and calls one function of a room."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from accel_train import __version__
from accel_train.config import run_main


def main() -> None:
    """Entry point of the ``accel-train`` command."""
    run_main(_main)


def _main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.command == "doctor":
        from accel_train.runtime.doctor import report

        print(report())
        return 0
    from accel_train.runtime.launch import Launch, launch

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
        from accel_train.runtime.check import check

        print(check(request))
        return 0
    return launch(request, rehearsal=arguments.command == "rehearse")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accel-train", description="Launch, rehearse and check training recipes.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="versions, devices, kernels, and what this machine can run")
    texts = {
        "launch": "start a recipe from an accelerate launch file, read strictly; forwards signals, keeps exit codes",
        "rehearse": "run the launch file's strategy for real on CPU processes, before paying for the cluster",
        "check": "read the launch file and the recipe's config, say what would run, run nothing",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config_file", required=True, help="accelerate launch file (YAML or JSON)")
        command.add_argument("--num_processes", type=int, help="processes over all machines; as the file says")
        command.add_argument("--machine_rank", type=int, help="number of this machine, from 0")
        command.add_argument("--main_process_ip", help="address of machine 0")
        command.add_argument("--main_process_port", type=int, help="port of machine 0")
        command.add_argument("recipe", help="path of the recipe")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="preset or YAML file, and flags of the recipe")
    return parser


if __name__ == "__main__":
    sys.exit(main())
