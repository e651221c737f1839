"""``accel-train``: each command reads its arguments and calls one function of a room."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from accel_train import __version__
from accel_train.runtime.exiting import exit_with


def main() -> None:
    """Entry point of the ``accel-train`` command."""
    exit_with(_main)


def _main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.command == "doctor":
        from accel_train.commands.doctor import attention_report, report

        print(attention_report() if arguments.attention else report())
        return 0
    if arguments.command == "checkpoints":
        return _checkpoints(arguments)
    if arguments.command == "compare":
        from accel_train.compare.comparison import Request, compare

        arguments.sources, arguments.gates = tuple(arguments.sources), tuple(arguments.gates)
        return compare(Request(**{k: v for k, v in vars(arguments).items() if k != "command"}))
    from accel_train.commands.launch import Launch, launch

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
        from accel_train.commands.check import check

        print(check(request))
        return 0
    return launch(request, rehearsal=arguments.command == "rehearse")


def _checkpoints(arguments: argparse.Namespace) -> int:
    """Torch is imported by those alone that read tensors."""
    place, action = arguments.place, arguments.action
    if action == "diff":
        from accel_train.commands.diff import diff

        return diff(place, arguments.other)
    if action == "convert":
        from accel_train.commands.convert import convert

        return convert(place, arguments.destination, stem=arguments.stem)
    if action == "export":
        from accel_train.commands.export import export

        return export(place, arguments.destination, precision=arguments.precision, source=arguments.weights)
    from accel_train.commands import checkpoints as commands

    if action == "ls":
        return commands.ls(place, as_json=arguments.json, quick=arguments.quick)
    if action == "verify":
        return commands.verify(place)
    flags = {k: v for k, v in vars(arguments).items() if k not in ("command", "action", "place", "dry_run")}
    if action == "prune":
        return commands.prune(place, dry_run=arguments.dry_run, flags=flags)
    return commands.push(place, flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel-train", description="Launch, rehearse and check training recipes; look after their checkpoints."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="versions, devices, kernels, and what this machine can run")
    doctor.add_argument("--attention", action="store_true", help="try every kernel of attention: time, error, what ran")
    texts = {
        "launch": "start a recipe from an accelerate launch file, read strictly; forwards signals, keeps exit codes",
        "rehearse": "run the launch file's strategy for real on CPU processes, before paying for the cluster",
        "check": "read the launch file and the recipe's config, say what would run, run nothing",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        instead = "" if name == "rehearse" else "; as `accelerate launch` takes it where none is named"
        command.add_argument(
            "--config_file", required=name == "rehearse", help=f"accelerate launch file (YAML or JSON){instead}"
        )
        command.add_argument("--num_processes", type=int, help="processes over all machines; as the file says")
        command.add_argument("--machine_rank", type=int, help="number of this machine, from 0")
        command.add_argument("--main_process_ip", help="address of machine 0")
        command.add_argument("--main_process_port", type=int, help="port of machine 0")
        command.add_argument("recipe", help="path of the recipe")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="preset or YAML file, and flags of the recipe")
    text = "two configs of a recipe, or values of one option, run in turns: time, memory, losses with intervals; gates"
    _add_compare(commands.add_parser("compare", help=text, description=text))
    _add_checkpoints(commands.add_parser("checkpoints", help="list, verify, compare, delete, convert, export, push"))
    return parser


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument("recipe", help="path of the recipe")
    compare.add_argument("sources", nargs="+", metavar="PRESET_OR_YAML", help="A and B, or one with --vary")
    compare.add_argument("--config_file", help="accelerate launch file for every run; none: one plain process")
    compare.add_argument("--vary", metavar="KEY=V1,V2", help="values of one option, the others against the first")
    compare.add_argument("--ablate", action="store_true", help="also A with each single option in which B differs")
    compare.add_argument("--max_steps", type=int, help="optimizer steps of every run; as the configs say")
    compare.add_argument("--max_epochs", type=float, help="passes over the data, instead of --max_steps")
    compare.add_argument("--seed", type=int, help="of every run; as the configs say")
    compare.add_argument(
        "--rounds", type=int, default=5, help="runs of each side (5); with fewer, intervals are too narrow"
    )
    gate = "'speedup>=3' 'loss_delta<=0.03' 'memory_peak_gib<=50': exit code 1 where an interval excludes one"
    compare.add_argument("--gate", dest="gates", nargs="+", action="extend", default=[], metavar="EXPR", help=gate)
    compare.add_argument("--output", help="directory for runs, compare.json and compare.png; runs/compare-TIME")
    compare.add_argument("--tolerance", type=float, default=1e-5, help="losses this close, relative to A, are equal")
    compare.add_argument("--keep_checkpoints", action="store_true", help="of the runs; else deleted after each")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def add(name: str, meaning: str, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("place", metavar=meaning)
        return action

    ls = add("ls", "RUN_OR_DIRECTORY", "a table: step, age, size, metric, state, whether it verifies and is on the Hub")
    ls.add_argument("--json", action="store_true", help="everything that is known, for programs")
    ls.add_argument("--quick", action="store_true", help="compare sizes only, hash nothing")
    add("verify", "RUN_OR_CHECKPOINT", "hash every file and compare with the manifest; exit code 1 if one is damaged")
    diff = add("diff", "A", "where two differ and by how much; exit code 1 if they do")
    diff.add_argument("other", metavar="B", help="like A: run, checkpoint, or any directory with safetensors")
    _add_prune(add("prune", "RUN", "delete what is not to be kept; options that are not given are those of the run"))
    convert = add("convert", "SOURCE", "what Accelerator.save_state or save_pretrained wrote, for --init_from")
    convert.add_argument("destination", metavar="DESTINATION", help="directory to put checkpoint_00000000 into")
    convert.add_argument("--stem", help="which weights, where there are several: model_1, model.fp16")
    export = add(
        "export", "RUN_OR_CHECKPOINT", "weights, config.json, assets and options, for from_pretrained and others"
    )
    export.add_argument("destination", metavar="DESTINATION", help="directory that does not exist or is empty")
    export.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of what is written")
    export.add_argument("--weights", choices=("model", "ema"), default="model", help="the weights or their average")
    push = add("push", "RUN_OR_CHECKPOINT", "push a checkpoint, or what waits in a run, to the Hub; waits for it")
    push.add_argument("--repo_id", help="ORGANISATION/NAME; hub.repo_id of the run where it is not given")
    push.add_argument("--include_state", action="store_true", default=None, help="the optimizer state as well")
    push.add_argument("--revisions", choices=("branch", "tag"), help="what names the step")
    push.add_argument("--public", dest="private", action="store_false", default=None, help="where it is created")
    push.add_argument("--finish_minutes", type=float, help="how long network trouble is tried again")


def _add_prune(prune: argparse.ArgumentParser) -> None:
    prune.add_argument("--dry-run", "--dry_run", action="store_true", help="say what would go and why the rest stays")
    for name in ("keep_last", "keep_best", "keep_every", "keep_window_steps", "keep_state_last"):
        prune.add_argument(f"--{name}", type=int, help=f"as checkpoints.{name} of a run")
    prune.add_argument("--keep_window_epochs", type=float, help="as checkpoints.keep_window_epochs of a run")
    prune.add_argument("--best_metric", help="name of a figure in the manifests")
    prune.add_argument("--best_mode", choices=("min", "max"), help="whether a smaller or a larger figure is better")
    prune.add_argument("--pinned", nargs="+", metavar="NAME", help="left alone, beside those that the run pins")


if __name__ == "__main__":
    sys.exit(main())
