"""The command line of ``accel-train``: its commands, their arguments and their help. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from accel_train import __version__
from accel_train.anywhere import flags as anywhere
from accel_train.calibration import flags as calibration
from accel_train.drill import flags as drilling
from accel_train.planning import flags as planning
from accel_train.rerun import arguments as rerun
from accel_train.simulation.flags import add_flags
from accel_train.verification import command as verification
from accel_train.watching.arguments import add_monitor, add_report
from accel_train.wording import did_you_mean, nearest

EXPORT = (
    "write weights with config.json, assets and options; for bundled recipes also model.py, which needs only torch, "
    "and verify.py, which repeats the outputs in example.safetensors"
)


class _Parser(argparse.ArgumentParser):
    """Parser that names the nearest choice for a misspelt one. The parsers of its commands have this class too."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if found:
            # Quoted or not, depending on the version of Python.
            choices = [choice.strip("'") for choice in found[2].split(", ")]
            message += did_you_mean(nearest(found[1], choices))
        super().error(message)


def build_parser(
    recipes: Mapping[str, Callable[[argparse.ArgumentParser], None]] | None = None,
) -> argparse.ArgumentParser:
    """Return the parser. With ``recipes`` it is one for completion, which has the options of each recipe."""
    parser = _Parser(
        prog="accel-train", description="Launch, rehearse and check training recipes; manage their checkpoints."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "show versions, devices, kernels and the strategies this machine can run"
    doctor = commands.add_parser("doctor", help=text, description=text)
    doctor.add_argument("--attention", action="store_true", help="try every attention kernel: time, error, what ran")
    texts = {
        "launch": "start a recipe from a strictly read accelerate launch file; forward signals, keep exit codes",
        "rehearse": "run the launch file's strategy on CPU processes, before paying for the cluster",
        "check": "read launch file and config, describe the run, report what looks wrong; run nothing",
    }
    for name, text in texts.items():
        launch = commands.add_parser(name, help=text, description=text)
        _add_launch(launch, file_required=name == "rehearse")
        if name == "check":
            _add_check(launch)
        _add_recipe(launch, recipes)
    run = commands.add_parser("run", help=anywhere.HELP, description=anywhere.HELP)
    anywhere.add_flags(run)
    _add_recipe(run, recipes)
    _add_before_a_run(commands, recipes)
    text = "benchmark two configs, or values of one option, in alternating runs: time, memory, loss, with intervals"
    _add_compare(commands.add_parser("compare", help=text, description=text), recipes)
    rerun.add_commands(commands)
    verify = commands.add_parser("verify", help=verification.HELP, description=verification.HELP)
    verification.add_options(verify)
    _add_recipe(verify, recipes)
    drill = commands.add_parser("drill", help=drilling.HELP, description=drilling.HELP)
    drilling.add_flags(drill)
    _add_recipe(drill, recipes)
    text = "copy a bundled recipe with its presets and launch files, or start a new one"
    _add_init(commands.add_parser("init", help=text, description=text))
    text = "sample from a trained model: a run, checkpoint, export or hub:org/name; put its flags after the place"
    _add_sample(commands.add_parser("sample", help=text, description=text))
    text = "inspect pictures or rows of text before a run; list, verify or clear the cache of computed entries"
    _add_data(commands.add_parser("data", help=text, description=text), recipes)
    text = "train adapters on a dataset of pictures: check, plan for this machine, cache, train, validate, export"
    _add_lora(commands.add_parser("lora", help=text, description=text))
    text = "watch runs in the terminal: progress, losses, throughput; exit code 3 while an alert is active"
    add_monitor(commands.add_parser("monitor", help=text, description=text))
    text = "write one HTML file about runs: curves, events, evaluations, samples, how to resume"
    add_report(commands.add_parser("report", help=text, description=text))
    export = commands.add_parser("export", help=EXPORT, description=EXPORT)
    export.add_argument("place", metavar="RUN_OR_CHECKPOINT")
    _add_export(export)
    text = "list, verify, compare, prune, convert, export or push checkpoints"
    _add_checkpoints(commands.add_parser("checkpoints", help=text, description=text))
    text = "print a shell completion script, which knows the options and presets of recipes"
    _add_completion(commands.add_parser("completion", help=text, description=text))
    return parser


def _add_before_a_run(
    commands: Any,
    recipes: Mapping[str, Callable[[argparse.ArgumentParser], None]] | None,
) -> None:
    """Add the commands that estimate memory and time before a machine is rented."""
    text = "count memory, collectives and FLOPs of a step at any world size, without GPUs"
    simulate = commands.add_parser("simulate", help=text, description=text)
    add_flags(simulate)
    _add_recipe(simulate, recipes)
    plan = commands.add_parser("plan", help=planning.HELP, description=planning.HELP)
    planning.add_flags(plan)
    _add_recipe(plan, recipes)
    calibrate = commands.add_parser("calibrate", help=calibration.HELP, description=calibration.HELP)
    calibration.add_flags(calibrate)
    _add_launch(calibrate, file_required=False)


def _add_sample(sample: argparse.ArgumentParser) -> None:
    sample.add_argument("--recipe", metavar="FILE", help="recipe of your own that trained it; the file is imported")
    sample.add_argument(
        "place", metavar="RUN_OR_CHECKPOINT", help="run, checkpoint, export, or hub:org/name[@revision]"
    )
    sample.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,  # also takes --flags, which the pipeline reads
        help="flags of the model's pipeline; --help after the place lists them",
    ).required = False


def add_rows_flags(rows: argparse.ArgumentParser) -> None:
    """Add the flags of ``accel-train data rows``, which may be given before or after the recipe."""
    rows.add_argument("--count", type=int, default=4, help="rows to print; default: 4")
    rows.add_argument("--heldout", action="store_true", help="held-out rows instead of the first training rows")
    text = "print a table instead of the text: id, piece, learned (0 or 1) and position of each token"
    rows.add_argument("--ids", action="store_true", help=text)


def _add_data(
    data: argparse.ArgumentParser, recipes: Mapping[str, Callable[[argparse.ArgumentParser], None]] | None
) -> None:
    actions = data.add_subparsers(dest="action", required=True, metavar="COMMAND")
    text = "report sizes, buckets, duplicates, captions, blur, exposure; exit code 1 below --min_dataset_quality"
    check = actions.add_parser("check", help=text, description=text)
    check.add_argument("place", metavar="SOURCE", help="folder, parquet files, saved dataset or Hub id, as data.path")
    text = "print rows of text as a run gets them: tokens, what the loss counts, packed texts, what is truncated"
    rows = actions.add_parser("rows", help=text, description=text)
    add_rows_flags(rows)
    _add_recipe(rows, recipes)
    text = "manage entries computed from data: latents of pictures, outputs of text encoders"
    cache = actions.add_parser("cache", help=text, description=text)
    cache.add_argument("cache_action", choices=("ls", "verify", "clear"), metavar="ls|verify|clear")
    for parser in (check, cache):
        parser.add_argument(
            "arguments", nargs=argparse.REMAINDER, help="flags; --help after them lists all"
        ).required = False


def _add_lora(lora: argparse.ArgumentParser) -> None:
    lora.add_argument("place", metavar="DATASET", help="folder, parquet files, saved dataset or Hub id, as data.path")
    lora.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="--base MODEL, then any option of the recipe; --help after the dataset lists its own",
    ).required = False


def _add_init(init: argparse.ArgumentParser) -> None:
    init.add_argument("directory", metavar="DIRECTORY", help="directory that does not exist or is empty")
    source = init.add_mutually_exclusive_group()
    source.add_argument("--recipe", default="mmdit", metavar="NAME", help="causal_lm, lora, mmdit (default) or pde")
    source.add_argument(
        "--scaffold", action="store_true", help="a new recipe.py of 130 lines instead, with marks at what to replace"
    )


def _add_completion(completion: argparse.ArgumentParser) -> None:
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.add_argument("recipes", nargs="*", metavar="RECIPE", help="your own recipes, besides the bundled ones")


def _add_recipe(
    command: argparse.ArgumentParser, recipes: Mapping[str, Callable[[argparse.ArgumentParser], None]] | None
) -> None:
    text = "path of the recipe, or the name of a bundled one, such as mmdit"
    if recipes is not None:
        # As subcommands, because shtab completes each of them with its own options.
        parsers = command.add_subparsers(dest="recipe", help=text)
        for name, add_options in recipes.items():
            # Its options have their own --help, which takes a topic.
            add_options(parsers.add_parser(name, help="recipe", add_help=False))
        return
    command.add_argument("recipe", help=text)
    command.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,  # also takes --flags, which the recipe parses
        help="preset or YAML file, and flags of the recipe",
    ).required = False


def _add_launch(command: argparse.ArgumentParser, *, file_required: bool) -> None:
    text = "accelerate launch file (YAML or JSON)"
    if not file_required:
        text += "; default: the same as for `accelerate launch`"
    command.add_argument("--config_file", required=file_required, help=text)
    command.add_argument("--num_processes", type=int, help="processes over all machines; default: from the file")
    command.add_argument("--machine_rank", type=int, help="number of this machine, from 0")
    command.add_argument("--main_process_ip", help="address of machine 0")
    command.add_argument("--main_process_port", type=int, help="port of machine 0")


class _Explain(argparse.Action):
    """Print a rule and exit. Needs no recipe, as --version does not."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> None:
        from accel_train.linting.reporting import explain
        from accel_train.linting.table import find_rule

        print(explain(find_rule(str(values))))
        parser.exit()


def _add_check(check: argparse.ArgumentParser) -> None:
    form = check.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="findings with all fields, for programs")
    form.add_argument(
        "--fix", action="store_true", help="change the values in your YAML file; the original is kept as FILE.orig"
    )
    check.add_argument("--ignore", action="append", default=[], metavar="RULE", help="silence a rule; may be repeated")
    check.add_argument("--explain", action=_Explain, metavar="RULE", help="print a rule with its reason and source")


def _add_compare(compare: argparse.ArgumentParser, recipes: Iterable[str] | None) -> None:
    recipe = compare.add_argument("recipe", help="path of the recipe, or the name of a bundled one, such as mmdit")
    if recipes is not None:
        recipe.choices = list(recipes)
    compare.add_argument("sources", nargs="+", metavar="PRESET_OR_YAML", help="A and B, or one with --vary")
    compare.add_argument("--config_file", help="accelerate launch file for every run; default: one plain process")
    compare.add_argument("--num_processes", type=int, help="processes over all machines; default: from the file")
    compare.add_argument(
        "--set",
        dest="common",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="options of the recipe for every run, such as data.path=my.jsonl; values are divided into words as in a "
        "shell: \"data.path='my data.jsonl'\"",
    )
    compare.add_argument("--vary", metavar="KEY=V1,V2", help="values of one option, compared with the first")
    compare.add_argument("--ablate", action="store_true", help="also run A with each differing option of B by itself")
    compare.add_argument("--max_steps", type=int, help="optimizer steps of every run; default: from the configs")
    compare.add_argument("--max_epochs", type=float, help="passes over the data, instead of --max_steps")
    compare.add_argument("--seed", type=int, help="seed of every run; default: from the configs")
    compare.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[],
        metavar="SEED",
        help="one round for each seed, so that intervals of losses are over seeds; 5 or more give a reliable one",
    )
    compare.add_argument(
        "--rounds",
        type=int,
        help="runs of each side (default: 5, or the number of --seeds); with fewer than 5, intervals are too narrow",
    )
    compare.add_argument(
        "--gate",
        dest="gates",
        nargs="+",
        action="extend",
        default=[],
        metavar="EXPR",
        help="'speedup>=3' 'loss_delta<=0.03' 'memory_peak_gib<=50': exit code 1 if an interval excludes a target",
    )
    compare.add_argument(
        "--output",
        help="directory for runs, compare.json and compare.png; default: runs/compare-TIME",
    )
    compare.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        help="losses this close, relative to A, count as equal",
    )
    compare.add_argument("--keep_checkpoints", action="store_true", help="keep the checkpoints of the runs")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def add(name: str, meaning: str, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("place", metavar=meaning)
        return action

    ls = add("ls", "RUN_OR_DIRECTORY", "list step, age, size, metric, state, verification and state on the Hub")
    ls.add_argument("--json", action="store_true", help="all fields, for programs")
    ls.add_argument("--quick", action="store_true", help="compare sizes only, hash nothing")
    add("verify", "RUN_OR_CHECKPOINT", "hash every file and compare with the manifest; exit code 1 if one is damaged")
    diff = add("diff", "A", "compare the tensors of A and B; exit code 1 if they differ")
    diff.add_argument("other", metavar="B", help="like A: run, checkpoint, or any directory with safetensors")
    _add_prune(add("prune", "RUN", "delete old checkpoints; options default to those of the run"))
    convert = add("convert", "SOURCE", "convert the files of Accelerator.save_state or save_pretrained for --init_from")
    convert.add_argument("destination", metavar="DESTINATION", help="directory for checkpoint_00000000")
    convert.add_argument("--stem", help="one of several sets of weights: model_1, model.fp16")
    text = "SOURCE is a LoRA file of diffusers or kohya for this pipeline, a Hub id or folder"
    convert.add_argument("--base", metavar="BASE", help=text)
    _add_export(add("export", "RUN_OR_CHECKPOINT", EXPORT))
    text = "push a checkpoint, or all waiting ones of a run, to the Hub, and wait"
    _add_push(add("push", "RUN_OR_CHECKPOINT", text))


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("destination", metavar="DESTINATION", help="directory that does not exist or is empty")
    export.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype of the weights (default: fp32)",
    )
    export.add_argument(
        "--weights",
        choices=("model", "ema"),
        help="trained weights or their EMA (default: the EMA where there is one, as in an evaluation)",
    )
    export.add_argument(
        "--merged", action="store_true", help="for adapters: the whole model, with the adapters merged into their base"
    )


def _add_push(push: argparse.ArgumentParser) -> None:
    push.add_argument("--repo_id", help="ORGANISATION/NAME; default: hub.repo_id of the run")
    # The default None means "not given", so that the option of the run applies.
    push.add_argument(
        "--include_state",
        action="store_true",
        default=None,
        help="push the optimizer state as well",
    )
    push.add_argument("--revisions", choices=("branch", "tag"), help="name the step by a branch or a tag")
    push.add_argument(
        "--public",
        dest="private",
        action="store_false",
        default=None,
        help="create the repository as a public one",
    )
    push.add_argument("--license", help="licence in the card, such as apache-2.0; default: hub.license of the run")
    push.add_argument("--finish_minutes", type=float, help="time limit for retries after network errors")


def _add_prune(prune: argparse.ArgumentParser) -> None:
    prune.add_argument(
        "--dry-run",
        "--dry_run",  # options of recipes are written with underscores
        action="store_true",
        help="list deletions, and the reasons for keeping the rest, without deleting",
    )
    # Named as in `checkpoints`, because they override the run's options by name.
    for name in ("keep_last", "keep_best", "keep_every", "keep_window_steps", "keep_state_last"):
        prune.add_argument(f"--{name}", type=int, help=f"see checkpoints.{name}")
    prune.add_argument("--keep_window_epochs", type=float, help="see checkpoints.keep_window_epochs")
    prune.add_argument("--best_metric", help="name of a metric in the manifests")
    prune.add_argument("--best_mode", choices=("min", "max"), help="min if a smaller metric is better, else max")
    prune.add_argument("--pinned", nargs="+", metavar="NAME", help="never delete these, in addition to the run's own")
