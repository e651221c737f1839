"""One frozen, validated config from a preset or YAML file plus flags, and where each value came from.

A recipe's config is a frozen standard dataclass whose groups are dataclasses that live beside the code that
reads them. Four sources, later ones win: the dataclass defaults, the preset or YAML file named first on the
command line, the flags. pydantic checks types and ranges, tyro reads the flags and writes ``--help`` from the
attribute docstrings; both are imported here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, NoReturn, TypeGuard, TypeVar, cast, get_type_hints

import yaml
from annotated_types import Ge, Gt, Interval

from accel_train.atomic_files import replace_file
from accel_train.flags import NAMES_OF_OTHER_SCRIPTS, FlagError, nearest_option, read_flags, refusal, stray
from accel_train.strict_yaml import Places, YamlError, place_of, read_document, read_yaml
from accel_train.wording import did_you_mean, nearest

C = TypeVar("C")
Tree = dict[str, Any]
NOWHERE: Places = MappingProxyType({})
"""Of values that come from no file."""


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

    Raises ``UsageError``; exits with code 0 after ``--help`` or ``--print_config``.
    """
    arguments = list(argv)
    source = arguments.pop(0) if arguments and not arguments[0].startswith("-") else default_preset
    show, helped = "--print_config" in arguments, not {"--help", "-h"}.isdisjoint(arguments)
    arguments = [word for word in arguments if word != "--print_config"]
    names = preset_names(cls, presets)
    path = find_source(source, presets, names, option_names(cls), arguments)
    tree, places = _read_source(path, source)
    try:
        check_keys(cls, tree, str(path), places)
    except UsageError as error:
        of_another = path.parent == presets and len(names) > 0
        raise UsageError(f"{error}. Presets of this recipe are {', '.join(names)}" if of_another else error) from None
    base = from_tree(cls, tree, str(path), places)
    if helped:
        _print_help(cls, base, names)
    try:
        flags = read_flags(_leaves(cls), arguments, names)
    except FlagError as error:
        raise UsageError(str(error)) from None

    _state.output_dir = flags.get("output_dir", getattr(base, "output_dir", None))
    config = from_tree(cls, _overlay(to_tree(base), flags), "command line") if flags else base
    origins = _origins(tree, source, config, flags)
    object.__setattr__(config, _ORIGINS, origins)
    loaded = Loaded(config, origins)
    if show:
        print(loaded.describe())
        raise SystemExit(0)
    if _state.reading_only:
        raise _ConfigRead(loaded)
    return loaded


_ORIGINS = "_origins"


class _State:
    """Of this process: what the last config said, and whether its reader goes on to train."""

    output_dir: object = None
    reading_only = False


_state = _State()


class _ConfigRead(BaseException):
    def __init__(self, loaded: Loaded[Any]) -> None:
        self.loaded = loaded


def config_of(main: Callable[[Sequence[str]], object], argv: Sequence[str]) -> Loaded[Any] | None:
    """The config that ``main(argv)`` would train with; it is left as soon as it has read it. None: it reads none."""
    _state.reading_only = True
    try:
        main(argv)
    except _ConfigRead as found:
        return found.loaded
    finally:
        _state.reading_only = False
    return None


def asked_output_dir() -> Path | None:
    """Of the config that was read last in this process, also where the rest of its command line was refused."""
    return expand_path(_state.output_dir) if isinstance(_state.output_dir, str) else None


def origin_of(config: object, option: str) -> str:
    """``default``, the preset or file, or ``command line``; ``default`` for every option of a config made in Python."""
    return getattr(config, _ORIGINS, {}).get(option, "default")


def preset_names(cls: type, presets: Path) -> list[str]:
    """The presets of the recipe whose config is ``cls``: those with no option that it does not have."""
    names: list[str] = []
    for path in sorted(presets.glob("*.yaml")):
        try:
            check_keys(cls, read_yaml(path), str(path))
        except UsageError:
            continue
        except YamlError:
            pass  # its error is told when it is chosen
        names.append(path.stem)
    return names


def find_source(
    source: str, presets: Path, names: Sequence[str], options: Sequence[str] = (), after: Sequence[str] = ()
) -> Path:
    """The YAML file that a preset name or a path means. ``names`` are the presets to offer instead."""
    expanded = expand_path(source)
    if "=" in source or source.replace("-", "_") in options:
        raise UsageError(stray(source, after, options, names))
    if expanded.suffix in {".yaml", ".yml"} or os.sep in source:
        if not expanded.is_file():
            raise UsageError(f"config {source!r}: there is no such file ({expanded}); give a preset or a YAML file")
        return expanded
    if (presets / f"{source}.yaml").is_file():
        return presets / f"{source}.yaml"
    raise UsageError(
        f"preset {source!r} does not exist{did_you_mean(nearest(source, names))}; presets are {', '.join(names)}. "
        "A file is recognised by its .yaml ending."
    )


def read_tree(path: Path) -> Tree:
    """The strict reading of one YAML file."""
    return _read_source(path, str(path))[0]


def _read_source(path: Path, source: str) -> tuple[Tree, Places]:
    try:
        document = read_document(path)
    except YamlError as error:
        raise UsageError(str(error)) from None
    if found := sorted({"distributed_type", "compute_environment", "num_machines"} & document.values.keys()):
        launch = shlex.join(["accelerate", "launch", "--config_file", source, sys.argv[0]])
        raise UsageError(
            f"{source} is a launch file of accelerate (it has {found[0]}): it describes the machine, not the "
            f"experiment; give it to the launcher: {launch} [PRESET]"
        )
    return document.values, document.places


def check_keys(cls: type, tree: Mapping[str, Any], where: str, places: Places = NOWHERE) -> None:
    """Refuse keys that ``cls`` does not have, with their place in the file and the nearest dotted name."""
    for path, value, kind in _misfits(cls, tree, ()):
        key, there = ".".join(path), place_of(where, places, path)
        if kind is not None:
            raise UsageError(f"{there}: {key}: {value!r} must be a mapping of options, such as {key}: {{...}}")
        known = option_names(cls)
        other = NAMES_OF_OTHER_SCRIPTS.get(key.rsplit(".", 1)[-1])
        remedy = "remove it or correct it" + did_you_mean(nearest_option(key, known))
        if other:
            remedy = f"use {other}"
        if key in known:  # a key with a dot in it
            group, _, leaf = key.rpartition(".")
            remedy = f"in a file groups are mappings: {group}: {{{leaf}: ...}}"
        raise UsageError(f"{there}: unknown option {key!r}: {value!r}; {remedy}")


def _misfits(cls: type, tree: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Path, value and type of what is no option (type None), or a group that is no mapping."""
    kinds = _fields(cls)
    for key, value in tree.items():
        kind, path = kinds.get(key), (*above, key)
        if _is_group(kind) and isinstance(value, Mapping):
            yield from _misfits(kind, cast(Mapping[str, Any], value), path)
        elif _is_group(kind):
            yield path, value, kind
        elif kind is None or isinstance(value, Mapping):
            deeper = next(iter(flatten({key: value}).items())) if isinstance(value, Mapping) else (key, value)
            yield (*above, *deeper[0].split(".")) if deeper[0] != key else path, deeper[1], None


def from_tree(cls: type[C], tree: Mapping[str, Any], where: str, places: Places = NOWHERE) -> C:
    """Validate a nested mapping into ``cls``: types, ranges, and each group's own checks."""
    from pydantic import TypeAdapter, ValidationError

    kinds = _leaves(cls)
    for key, value in flatten(tree).items():
        if key in kinds and (reason := refusal(kinds[key], value)):
            raise UsageError(f"{place_of(where, places, key.split('.'))}: {key}: {reason}; {_remedy(where, key)}")
    try:
        return TypeAdapter(cls).validate_python(dict(tree))
    except ValidationError as error:
        found = [e for e in error.errors() if e["type"] != "literal_error"]  # of a union: `refusal` knew the words
        raise UsageError("\n".join(_explain(cls, e, where, places) for e in found)) from None


def _remedy(where: str, key: str) -> str:
    return f"correct --{key}" if where == "command line" else f"change it in the file or with --{key}"


def _explain(cls: type, error: Any, where: str, places: Places) -> str:
    names = {name for option in option_names(cls) for name in option.split(".")}
    parts = [str(part) for part in error["loc"] if part in names or isinstance(part, int)]
    key, there = ".".join(parts), place_of(where, places, parts)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":  # a group's own check: its text is complete
        return f"{there}: {key + ': ' if key else ''}{message}"
    value = error.get("input")
    if isinstance(value, float) and not math.isfinite(value):
        message = "Input should be a finite number"
    flag = ".".join(part for part in parts if not part.isdigit())  # betas.1 is given with --betas
    return f"{there}: {key}: {value!r} is refused: {message}; {_remedy(where, flag)}"


def _overlay(tree: Tree, flags: Mapping[str, Any]) -> Tree:
    """``tree`` with the values of flags set, in place."""
    for key, value in flags.items():
        *groups, leaf = key.split(".")
        inner: Any = tree
        for group in groups:
            inner = inner[group]
        inner[leaf] = value
    return tree


def _print_help(cls: type, base: object, names: Sequence[str]) -> NoReturn:
    import tyro

    usage = "First argument: a preset ({}) or a YAML file. Flags go over it; --print_config shows the result."
    about = f"{inspect.getdoc(cls) or ''}\n\n{usage.format(', '.join(names))}"
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    tyro.cli(cls, args=["--help"], default=base, description=about, use_underscores=True, console_outputs=first)
    raise SystemExit(0)


def _origins(tree: Tree, source: str, config: object, flags: Mapping[str, Any]) -> dict[str, str]:
    in_file = flatten(tree)
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
    body = yaml.dump(experiment_tree(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    replace_file(path, (text + body).encode())


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
        leaves |= _leaves(kind, f"{prefix}{name}.") if _is_group(kind) else {f"{prefix}{name}": kind}
    return leaves


def _is_group(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _fields(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def expand_path(text: str | os.PathLike[str]) -> Path:
    """``~`` and ``$VAR`` expanded, made absolute against the directory of the start."""
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(os.fspath(text)))))
