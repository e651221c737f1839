"""One frozen, validated config from a preset or YAML file plus flags, with the origin of each value.

A recipe's config is a frozen standard dataclass. Its groups are dataclasses beside the code that uses them. Later
sources win: the dataclass defaults, the preset or YAML file named first on the command line, the flags. pydantic
checks types and ranges, and tyro writes ``--help`` from the attribute docstrings. Both are imported in this file only.
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
"""Positions of values from no file."""


class UsageError(ValueError):
    """Error that the user can correct: exit code 2, no traceback.

    The text has the option and its value, the requirement with numbers, and the remedy.
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
"""The range of numpy's seeds."""

INVOCATION_OPTIONS = ("resume", "allow", "overwrite", "evaluate_only")
"""Options of one start, not of the experiment. Never written to config.yaml."""


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[C]):
    """A config and the origin of each dotted option."""

    config: C
    origins: Mapping[str, str]

    def describe(self) -> str:
        """List every option with its value and origin, one per line."""
        values = flatten(to_tree(self.config))
        shown = {key: f"{key}: {value!r}" for key, value in values.items()}
        # Origins are aligned, except for very long values.
        width = min(max(map(len, shown.values())), 60)
        return "\n".join(f"{text:<{width}}  # {self.origins[key]}" for key, text in shown.items())


def load_config(cls: type[C], argv: Sequence[str], *, presets: Path, default_preset: str = "demo") -> Loaded[C]:
    """Read ``[PRESET | FILE.yaml] [--flag value ...]``. Every process reads the same by itself.

    Raises ``UsageError``. Exits with code 0 after ``--help`` or ``--print_config``.
    """
    arguments = list(argv)
    source = default_preset
    if arguments and not arguments[0].startswith("-"):
        source = arguments.pop(0)
    prints_config = "--print_config" in arguments
    arguments = [word for word in arguments if word != "--print_config"]
    names = preset_names(cls, presets)
    path = find_source(source, presets, names, option_names(cls), arguments)
    tree, places = _read_source(path, source)
    try:
        check_keys(cls, tree, str(path), places)
    except UsageError as error:
        if path.parent == presets and names:
            # A preset of another recipe.
            raise UsageError(f"{error}. Presets of this recipe are {', '.join(names)}") from None
        raise
    base = from_tree(cls, tree, str(path), places)
    if "--help" in arguments or "-h" in arguments:
        _print_help(cls, base, names)
    try:
        flags = read_flags(_leaves(cls), arguments, names)
    except FlagError as error:
        raise UsageError(str(error)) from None

    # Set before the flags are validated: a refusal is logged below this directory.
    _state.output_dir = flags.get("output_dir", getattr(base, "output_dir", None))
    config = base
    if flags:
        config = from_tree(cls, _overlay(to_tree(base), flags), "command line")
    origins = _origins(tree, source, config, flags)
    object.__setattr__(config, _ORIGINS, origins)  # the dataclass is frozen
    loaded = Loaded(config, origins)
    if prints_config:
        print(loaded.describe())
        raise SystemExit(0)
    if _state.reading_only:
        raise _ConfigRead(loaded)
    return loaded


_ORIGINS = "_origins"


class _State:
    """State of this process across calls of ``load_config``."""

    output_dir: object = None
    """Output directory of the last config."""
    reading_only = False
    """Leave the recipe's ``main`` once it has read its config."""


_state = _State()


class _ConfigRead(BaseException):
    """Leaves a recipe's ``main``. A ``BaseException``, so that no recipe catches it."""

    def __init__(self, loaded: Loaded[Any]) -> None:
        self.loaded = loaded


def config_of(main: Callable[[Sequence[str]], object], argv: Sequence[str]) -> Loaded[Any] | None:
    """Return the config that ``main(argv)`` would train with, without training. None if it reads no config."""
    _state.reading_only = True
    try:
        main(argv)
    except _ConfigRead as found:
        return found.loaded
    finally:
        _state.reading_only = False
    return None


def requested_output_dir() -> Path | None:
    """Return the output directory of the config read last, even if the rest of its command line was refused."""
    if isinstance(_state.output_dir, str):
        return expand_path(_state.output_dir)
    return None


def origin_of(config: object, option: str) -> str:
    """Return ``default``, the preset or file, or ``command line``. Always ``default`` for a config built in Python."""
    origins: Mapping[str, str] = getattr(config, _ORIGINS, {})
    return origins.get(option, "default")


def preset_names(cls: type, presets: Path) -> list[str]:
    """Return the presets of the recipe with config ``cls``: those without unknown options."""
    names: list[str] = []
    for path in sorted(presets.glob("*.yaml")):
        try:
            check_keys(cls, read_yaml(path), str(path))
        except UsageError:
            continue
        except YamlError:
            pass  # still offered: its error is reported when it is chosen
        names.append(path.stem)
    return names


def find_source(
    source: str,
    presets: Path,
    names: Sequence[str],
    options: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Path:
    """Resolve a preset name or a path to a YAML file. Errors offer the presets in ``names``."""
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
    """Read one YAML file strictly."""
    tree, _ = _read_source(path, str(path))
    return tree


_LAUNCH_FILE_KEYS = {"distributed_type", "compute_environment", "num_machines"}


def _read_source(path: Path, source: str) -> tuple[Tree, Places]:
    try:
        document = read_document(path)
    except YamlError as error:
        raise UsageError(str(error)) from None
    found = sorted(_LAUNCH_FILE_KEYS & document.values.keys())
    if found:
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
    """Validate a nested mapping into ``cls``: types, ranges, and the checks of each group."""
    from pydantic import TypeAdapter, ValidationError

    kinds = _leaves(cls)
    for key, value in flatten(tree).items():
        if key in kinds and (reason := refusal(kinds[key], value)):
            raise UsageError(f"{place_of(where, places, key.split('.'))}: {key}: {reason}; {_remedy(where, key)}")
    try:
        return TypeAdapter(cls).validate_python(dict(tree))
    except ValidationError as error:
        # For a union pydantic reports each member. `refusal` has checked its literals already.
        found = [e for e in error.errors() if e["type"] != "literal_error"]
        raise UsageError("\n".join(_explain(cls, e, where, places) for e in found)) from None


def _remedy(where: str, key: str) -> str:
    if where == "command line":
        return f"correct --{key}"
    return f"change it in the file or with --{key}"


def _explain(cls: type, error: Any, where: str, places: Places) -> str:
    names = {name for option in option_names(cls) for name in option.split(".")}
    parts = [str(part) for part in error["loc"] if part in names or isinstance(part, int)]
    key, there = ".".join(parts), place_of(where, places, parts)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        # From a group's own check, with a complete text.
        return f"{there}: {key}: {message}" if key else f"{there}: {message}"
    value = error.get("input")
    if isinstance(value, float) and not math.isfinite(value):
        message = "Input should be a finite number"
    # An element such as betas.1 is set with --betas.
    flag = ".".join(part for part in parts if not part.isdigit())
    return f"{there}: {key}: {value!r} is refused: {message}; {_remedy(where, flag)}"


def _overlay(tree: Tree, flags: Mapping[str, Any]) -> Tree:
    """Set the values of flags in ``tree``, in place."""
    for key, value in flags.items():
        *groups, leaf = key.split(".")
        inner: Any = tree
        for group in groups:
            inner = inner[group]
        inner[leaf] = value
    return tree


def _print_help(cls: type, base: object, names: Sequence[str]) -> NoReturn:
    import tyro

    usage = (
        f"First argument: a preset ({', '.join(names)}) or a YAML file. Flags override it. "
        "--print_config shows the result."
    )
    description = f"{inspect.getdoc(cls) or ''}\n\n{usage}"
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    tyro.cli(
        cls,
        args=["--help"],
        default=base,
        description=description,
        use_underscores=True,
        console_outputs=is_first,
    )
    raise SystemExit(0)


def _origins(tree: Tree, source: str, config: object, flags: Mapping[str, Any]) -> dict[str, str]:
    in_file = flatten(tree)
    origins: dict[str, str] = {}
    for key in flatten(to_tree(config)):
        if key in flags:
            origins[key] = "command line"
        elif any(key == given or key.startswith(f"{given}.") for given in in_file):
            origins[key] = source
        else:
            origins[key] = "default"
    return origins


def to_tree(config: object) -> Tree:
    """Convert to nested dicts and lists of plain values, as written to YAML."""
    tree = dataclasses.asdict(cast(Any, config))
    return cast(Tree, _plain(tree))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def experiment_tree(config: object) -> Tree:
    """Return ``to_tree`` without the options of one invocation."""
    return {key: value for key, value in to_tree(config).items() if key not in INVOCATION_OPTIONS}


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text unless it begins with a letter. PyYAML leaves 1e3 bare, to be read back as a number."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text[:1].isalpha() else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def write_config(config: object, path: Path) -> None:
    """Write the resolved config as YAML for ``load_config``. Main process only."""
    text = "# Resolved config of this run; valid input for the same recipe.\n"
    body = yaml.dump(experiment_tree(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    replace_file(path, (text + body).encode())


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten ``{"a": {"b": 1}}`` to ``{"a.b": 1}``. An empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def option_names(cls: type) -> list[str]:
    """Return every dotted option of a config class, in order."""
    return list(_leaves(cls))


def _leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    """Map each dotted option to its type."""
    leaves: dict[str, Any] = {}
    for name, kind in _fields(cls).items():
        if _is_group(kind):
            leaves |= _leaves(kind, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = kind
    return leaves


def _is_group(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _fields(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def expand_path(text: str | os.PathLike[str]) -> Path:
    """Expand ``~`` and ``$VAR``, and make the path absolute against the working directory."""
    expanded = os.path.expandvars(os.path.expanduser(os.fspath(text)))
    return Path(os.path.abspath(expanded))
