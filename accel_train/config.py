"""One frozen, validated config from a preset or YAML file plus flags, and where each value came from.

A recipe's config is a frozen standard dataclass whose groups are dataclasses that live beside the code that
reads them. Four sources, later ones win: the dataclass defaults, the preset or YAML file named first on the
command line, the flags. pydantic checks types and ranges, tyro reads the flags and writes ``--help`` from the
attribute docstrings; both are imported here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Interval

from accel_train.strict_yaml import YamlError, read_yaml

C = TypeVar("C")
Tree = dict[str, Any]


class UsageError(ValueError):
    """Something the person who started the run can put right: exit code 2, no traceback.

    The text carries three things: the option and its value; what is required, with the numbers; what to do.
    """


PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Interval(gt=0, lt=float("inf"))]
NonNegativeFloat = Annotated[float, Interval(ge=0, lt=float("inf"))]
Fraction = Annotated[float, Interval(ge=0, le=1)]
"""0 to 1, both ends included."""
FractionBelowOne = Annotated[float, Interval(ge=0, lt=1)]
"""0 included, 1 excluded: betas, decays."""
Seed = Annotated[int, Interval(ge=0, lt=2**32)]
"""What numpy accepts as a seed as well."""

NAMES_OF_OTHER_SCRIPTS = {
    "train_batch_size": "--micro_batch_size (samples per process per forward) and --global_batch_size",
    "per_device_train_batch_size": "--micro_batch_size (samples per process per forward)",
    "gradient_accumulation_steps": "--global_batch_size and --micro_batch_size: accumulation is derived from them",
    "accumulation_steps": "--global_batch_size and --micro_batch_size: accumulation is derived from them",
    "learning_rate": "--optimizer.lr",
    "max_train_steps": "--max_steps",
    "num_train_epochs": "--max_epochs",
    "checkpointing_steps": "--checkpoints.save_every",
    "save_steps": "--checkpoints.save_every",
    "checkpoints_total_limit": "--checkpoints.keep_last",
    "save_total_limit": "--checkpoints.keep_last",
    "resume_from_checkpoint": "--resume auto|must|never|PATH (it resumes by itself)",
    "report_to": "--log.trackers",
    "mixed_precision": "--precision fp32|bf16|fp16",
    "lr_scheduler": "--schedule.kind",
    "lr_scheduler_type": "--schedule.kind",
    "lr_warmup_steps": "--schedule.warmup_steps",
    "warmup_steps": "--schedule.warmup_steps",
    "gradient_checkpointing": "--activation_checkpointing.mode full",
    "dataloader_num_workers": "--loader.num_workers",
    "max_grad_norm": "--optimizer.max_grad_norm",
    "weight_decay": "--optimizer.weight_decay",
    "hub_token": "the HF_TOKEN environment variable (a flag is readable by every user of the machine)",
}
"""Flags of the diffusers and transformers scripts, refused with the name used here (not with a guess)."""

WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}

OF_THE_INVOCATION = ("resume", "allow", "overwrite", "evaluate_only")
"""Options of one call, not of the experiment: never written to config.yaml."""


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[C]):
    """A config and, for each dotted option, where its value came from."""

    config: C
    origins: Mapping[str, str]

    def describe(self) -> str:
        """Every option, its value and its origin, one a line."""
        values = flatten(to_tree(self.config))
        width = max(len(f"{key}: {value!r}") for key, value in values.items())
        return "\n".join(f"{f'{k}: {v!r}':<{min(width, 60)}}  # {self.origins[k]}" for k, v in values.items())


def load_config(cls: type[C], argv: Sequence[str], *, presets: Path, default_preset: str = "demo") -> Loaded[C]:
    """Read ``[PRESET | FILE.yaml] [--flag value ...]``; every process reads the same and needs no other.

    Raises ``UsageError``; exits with code 2 where tyro refuses a flag and 0 after ``--help`` or
    ``--print_config``.
    """
    arguments = list(argv)
    source = arguments.pop(0) if arguments and not arguments[0].startswith("-") else default_preset
    if show := "--print_config" in arguments:
        arguments.remove("--print_config")
    path = find_source(source, presets)
    tree = read_tree(path)
    check_keys(cls, tree, str(path))
    base = from_tree(cls, tree, str(path))
    refuse_foreign_flags(cls, arguments)
    arguments = spell_for_tyro(cls, arguments)
    config = _apply_flags(cls, base, arguments, presets)
    loaded = Loaded(config, _origins(cls, tree, source, config, arguments))
    if show:
        print(loaded.describe())
        raise SystemExit(0)
    return loaded


def find_source(source: str, presets: Path) -> Path:
    """The YAML file that a preset name or a path means."""
    expanded = expand_path(source)
    if expanded.suffix in {".yaml", ".yml"} or os.sep in source:
        if not expanded.is_file():
            raise UsageError(f"config {source!r}: there is no such file ({expanded}); give a preset or a YAML file")
        return expanded
    if (presets / f"{source}.yaml").is_file():
        return presets / f"{source}.yaml"
    names = sorted(p.stem for p in presets.glob("*.yaml"))
    raise UsageError(
        f"preset {source!r} does not exist{_did_you_mean(source, names)}; presets are {', '.join(names)}. "
        "A file is recognised by its .yaml ending."
    )


def read_tree(path: Path) -> Tree:
    """The strict reading of one YAML file."""
    try:
        return read_yaml(path)
    except YamlError as error:
        raise UsageError(str(error)) from None


def check_keys(cls: type, tree: Mapping[str, Any], where: str) -> None:
    """Refuse keys that ``cls`` does not have, with the nearest dotted name."""
    known = option_names(cls)
    for key, value in flatten(dict(tree)).items():
        if key in known or (isinstance(value, dict) and key in _group_names(cls)):
            continue
        hint = NAMES_OF_OTHER_SCRIPTS.get(key.rsplit(".", 1)[-1])
        if key in _group_names(cls):
            raise UsageError(f"{where}: {key}: {value!r} must be a mapping of options, such as {key}: {{...}}")
        remedy = f"use {hint}" if hint else f"remove it or correct it{_did_you_mean(key, known)}"
        raise UsageError(f"{where}: unknown option {key!r}: {value!r}; {remedy}")


def from_tree(cls: type[C], tree: Mapping[str, Any], where: str) -> C:
    """Validate a nested mapping into ``cls``: types, ranges, and each group's own checks."""
    from pydantic import TypeAdapter, ValidationError

    _refuse_truth_as_number(cls, tree, where)
    try:
        return TypeAdapter(cls).validate_python(dict(tree))
    except ValidationError as error:
        raise UsageError("\n".join(_explain(e, where) for e in error.errors())) from None


def _explain(error: Any, where: str) -> str:
    key = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("function-", "dataclass")))
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":  # a group's own check: its text is complete
        return f"{where}: {key + ': ' if key else ''}{message}"
    value = error.get("input")
    if isinstance(value, float) and not math.isfinite(value):
        message = "Input should be a finite number"
    flag = ".".join(part for part in key.split(".") if not part.isdigit())  # betas.1 is given with --betas
    return f"{where}: {key}: {value!r} is refused: {message}; change it in the file or with --{flag}"


def _refuse_truth_as_number(cls: type, tree: Mapping[str, Any], where: str) -> None:
    """pydantic reads true as 1; a person who writes ``max_steps: true`` means something else."""
    kinds = _leaves(cls)
    for key, value in flatten(tree).items():
        if isinstance(value, bool) and key in kinds and str(value) not in _words_of(kinds[key]):
            raise UsageError(f"{where}: {key}: {str(value).lower()} is refused: it is not yes or no; correct it")


def refuse_foreign_flags(cls: type, arguments: Sequence[str]) -> None:
    """Name the option of this project where a flag of another script is given."""
    known = option_names(cls)
    for argument in arguments:
        name = _flag_name(argument.split("=", 1)[0])
        if name in NAMES_OF_OTHER_SCRIPTS and name not in known:
            raise UsageError(f"--{name} is a name of other scripts; here use {NAMES_OF_OTHER_SCRIPTS[name]}")


def spell_for_tyro(cls: type, arguments: Sequence[str]) -> list[str]:
    """YAML's ``true``, ``false`` and ``null`` after a flag, in tyro's words: ``--x true`` becomes ``--x`` and
    ``--x false`` ``--no_x`` for a yes-or-no option, elsewhere True, False and None where the option takes them."""
    kinds = _leaves(cls)
    spelled: list[str] = []
    for argument in (part for whole in arguments for part in _split_word(whole)):
        name = _flag_name(spelled[-1]) if spelled else ""
        word = WORDS.get(argument.lower())
        if word not in _words_of(kinds.get(name)):
            spelled.append(argument)
        elif kinds[name] is bool:
            group, dot, leaf = name.rpartition(".")
            spelled[-1] = f"--{name}" if word == "True" else f"--{group}{dot}no_{leaf}"
        else:
            spelled.append(str(word))
    return spelled


def _split_word(argument: str) -> list[str]:
    """``--x=true`` in two, everything else as it is."""
    flag, _, value = argument.partition("=")
    return [flag, value] if argument.startswith("--") and value.lower() in WORDS else [argument]


def _flag_name(argument: str) -> str:
    return argument[2:].replace("-", "_") if argument.startswith("--") else ""


def _words_of(kind: Any) -> set[str]:
    """Which of True, False and None an option of this type takes."""
    if kind is bool:
        return {"True", "False"}
    if kind is type(None):
        return {"None"}
    if get_origin(kind) is Literal:
        return {str(value) for value in get_args(kind) if isinstance(value, bool)}
    return {word for part in get_args(kind) for word in _words_of(part)}


def _apply_flags(cls: type[C], base: C, arguments: list[str], presets: Path) -> C:
    import tyro

    names = ", ".join(sorted(p.stem for p in presets.glob("*.yaml")))
    about = inspect.getdoc(cls) or ""
    usage = f"First argument: a preset ({names}) or a YAML file. Flags go over it; --print_config shows the result."
    try:
        config = tyro.cli(
            cls,
            args=arguments,
            default=base,
            description=f"{about}\n\n{usage}",
            use_underscores=True,
            console_outputs=os.environ.get("LOCAL_RANK", "0") == "0",
        )
    except ValueError as error:  # a group's own check, raised while tyro builds it
        raise UsageError(f"command line: {error}") from None
    return from_tree(cls, to_tree(config), "command line")


def _origins(cls: type, tree: Tree, source: str, config: object, arguments: Sequence[str]) -> dict[str, str]:
    in_file = flatten(tree)
    flags = {_flag_name(argument.split("=", 1)[0]) for argument in arguments}
    flags |= {f.replace("no_", "", 1) if f.startswith("no_") else f.replace(".no_", ".") for f in flags}
    origins: dict[str, str] = {}
    for key in flatten(to_tree(config)):
        from_file = any(key == k or key.startswith(k + ".") for k in in_file)
        origins[key] = "command line" if key in flags else source if from_file else "default"
    return origins


def to_tree(config: object) -> Tree:
    """Nested dict of plain values (tuples become lists), as written to YAML."""
    tree = dataclasses.asdict(cast(Any, config))
    return cast(Tree, _plain(tree))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def experiment_tree(config: object) -> Tree:
    """``to_tree`` without the options of one invocation."""
    return {k: v for k, v in to_tree(config).items() if k not in OF_THE_INVOCATION}


class _Dumper(yaml.SafeDumper):
    """Quotes text that does not begin with a letter: PyYAML leaves 1e3 bare, which is a number when read again."""


_Dumper.add_representer(
    str, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style=None if text[:1].isalpha() else "'")
)


def write_config(config: object, path: Path) -> None:
    """Write the resolved config as YAML that ``load_config`` reads back. Main process only."""
    text = "# Resolved config of this run; valid input for the same recipe.\n"
    temporary = path.with_name(f".{path.name}.tmp")
    body = yaml.dump(experiment_tree(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    temporary.write_text(text + body, encoding="utf-8")
    temporary.replace(path)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def option_names(cls: type) -> list[str]:
    """Every dotted option of a config class, in order."""
    return list(_leaves(cls))


def _leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted option -> its type."""
    leaves: dict[str, Any] = {}
    for name, kind in _fields(cls).items():
        is_group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        leaves |= _leaves(kind, f"{prefix}{name}.") if is_group else {f"{prefix}{name}": kind}
    return leaves


def _group_names(cls: type, prefix: str = "") -> list[str]:
    groups = {f"{prefix}{n}": k for n, k in _fields(cls).items() if dataclasses.is_dataclass(k)}
    return list(groups) + [g for name, kind in groups.items() for g in _group_names(cast(type, kind), f"{name}.")]


def _fields(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _did_you_mean(key: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not nearest:  # the right leaf in the wrong group, or a leaf without its group
        by_leaf = {k.rsplit(".", 1)[-1]: k for k in known}
        leaf = key.rsplit(".", 1)[-1]
        nearest = [by_leaf[n] for n in difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.7)]
    return f": did you mean {nearest[0]!r}?" if nearest else ""


def expand_path(text: str | os.PathLike[str]) -> Path:
    """``~`` and ``$VAR`` expanded, made absolute against the directory of the start."""
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(os.fspath(text)))))


def run_main(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Call ``main(argv)`` and exit with its code; a ``UsageError`` becomes its text and exit code 2.

    Launchers turn a child's 2 into 1, so the text says which it was. Before the processes know of each other all of
    them meet the same error, and torchrun ends all when the first leaves: one a host is heard first, the others wait.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        code = main(sys.argv[1:])
    except UsageError as error:
        if not first and not _processes_are_connected():
            time.sleep(SECONDS_TO_BE_HEARD)
        who = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK", "0") != "0" else ""
        print(f"{who}error (wrong usage, exit code 2): {error}", file=sys.stderr, flush=True)
        code = 2
    except SystemExit as left:  # tyro's and argparse's own: 2 for a flag, 0 after --help
        if not isinstance(left.code, int):
            raise
        code = left.code
        if code and not first:
            time.sleep(SECONDS_TO_BE_HEARD)
    _leave(int(code or 0))


SECONDS_TO_BE_HEARD = 5
EXIT_CODE_VARIABLE = "ACCEL_TRAIN_EXIT_CODE_FILE"
"""Where a worker tells ``accel-train launch`` its exit code, which torchrun would turn into 1."""


def _leave(code: int) -> NoReturn:
    """Exit; several CPU processes leave at once, without tearing torch down.

    gloo's threads race with the interpreter's end and abort now and then (torch 2.13), which would fail a finished run.
    """
    if code and (path := os.environ.get(EXIT_CODE_VARIABLE)):
        Path(path).write_text(str(code))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    torch = sys.modules.get("torch")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch is not None and not torch.accelerator.is_available():
        os._exit(code)
    raise SystemExit(code)


def _processes_are_connected() -> bool:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
