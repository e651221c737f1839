"""Read one frozen, validated config from a preset or YAML file plus flags, with the origin of each value.

A recipe's config is a frozen standard dataclass. Its groups are dataclasses beside the code that uses them. Later
sources win: the dataclass defaults, the preset or YAML file named first on the command line, the flags. pydantic
checks types and ranges; it is imported in this file only. ``help_text`` writes ``--help``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from accel_train.config import (
    GIVES_WAY,
    UsageError,
    WithoutEffectError,
    expand_path,
    set_origins,
    set_requested_output_dir,
)
from accel_train.options import completion, help_cache, help_text, other_recipes, refusals
from accel_train.options.allowed import refuse_undeclared, refuse_unknown_smoke
from accel_train.options.flags import FlagError, read_flags, refusal, refuse_other_fields, stray, words_of
from accel_train.options.keys import MAY_BE_EMPTY, NOWHERE, check_keys, invalid_keys
from accel_train.options.other_scripts import how_to_correct
from accel_train.options.strict_yaml import Places, YamlError, place_of, read_document, read_yaml
from accel_train.options.tree import (
    DEFAULT,
    Tree,
    defaults_tree,
    flatten,
    option_names,
    option_types,
    origins_of,
    overlaid,
    to_tree,
)
from accel_train.wording import did_you_mean, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

C = TypeVar("C")

MICRO_BATCH = "micro_batch_size"
"""Option whose value ``auto`` is replaced by a number when a config is made."""


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[C]):
    """A config and the origin of each dotted option."""

    config: C
    origins: Mapping[str, str]
    path: Path | None = None
    """Preset or file with the values."""
    changed: Collection[str] = ()
    """Options set by flags or ``--smoke``, and those that a flag replaces."""

    def describe(self, *, with_defaults: bool = True) -> str:
        """List the options with value and origin, one per line, optionally without those at their defaults."""
        values = flatten(to_tree(self.config))
        keys = [key for key in values if with_defaults or self.origins[key] != DEFAULT]
        shown = {key: f"{key}: {values[key]!r}" for key in keys}
        # Origins are aligned, except for very long values.
        width = min(max(map(len, shown.values())), 60)
        return "\n".join(f"{text:<{width}}  # {self.origins[key]}" for key, text in shown.items())


def load_config(cls: type[C], argv: Sequence[object], *, presets: Path, default_preset: str = "demo") -> Loaded[C]:
    """Read ``[PRESET | FILE.yaml] [--flag value ...]``. Every process reads it by itself. No collective.

    With ``--smoke``, ``smoke_values`` of the config override the file or preset, and flags override both. Raises
    ``UsageError``. Exits with code 0 after ``--help [GROUP]``, ``--print_config`` or ``--print_completion SHELL``.
    """
    refuse_other_fields(cls)
    refuse_undeclared(cls)
    arguments = words_of(argv)
    # Called only if a message or a help text lists the presets, because it reads all of them: 0.1 s of CPU.
    names = partial(preset_names, cls, presets)
    if arguments and not arguments[0].startswith("-"):
        source = arguments.pop(0)
    else:
        source = default_preset
        refusals.missing_default(source, presets, names)
    prints_config = "--print_config" in arguments
    arguments = [word for word in arguments if word != "--print_config"]
    # Left among the arguments of a recipe without smoke values, where it is refused as unknown.
    is_smoke = hasattr(cls, "smoke_values") and "--smoke" in arguments
    if is_smoke:
        arguments = [word for word in arguments if word != "--smoke"]
    path = find_source(source, presets, names, option_names(cls), arguments)
    tree, places = _read_source(path, source)
    _check_keys_of_source(cls, tree, path, places, presets, names)
    with refusals.at_a_resume(cls, tree, arguments):
        base = _read_base(cls, tree, (str(path), places), arguments, names)
    topic = help_text.requested_topic(arguments)
    if topic is not None:
        with help_cache.recording([presets, *presets.glob("*.yaml"), path]):
            help_text.print_help(cls, base, names(), topic)
    if completion.FLAG in arguments:
        completion.print_completion(cls, names(), arguments)
    try:
        flags = read_flags(option_types(cls), arguments, names)
    except FlagError as error:
        raise UsageError(str(error)) from None

    smoke = _smoke_values(base, flags) if is_smoke else {}
    replaced = _replaced(base, smoke, flags, source)
    changes = smoke | dict.fromkeys(replaced) | flags
    if changes and tree.get(MICRO_BATCH) == "auto":
        # Set to auto again, because a flag may change the number that replaces it.
        changes = {MICRO_BATCH: "auto", **changes}
    if not (prints_config or _state.reading_only):
        refusals.refuse_places(path, flatten(to_tree(base)) | changes, changes)
    # Set before the flags are validated: a refusal is logged below this directory.
    set_requested_output_dir(changes.get("output_dir", getattr(base, "output_dir", None)))
    with refusals.at_a_resume(cls, tree, arguments):
        config, moot = _with_changes(base, tree, changes, flags, source)
    origins = origins_of(tree, source, config, flags)
    origins |= {key: "--smoke" for key in smoke if key not in flags} | replaced | moot
    set_origins(config, origins)
    loaded = Loaded(config, origins, path, changes)
    if prints_config:
        print(loaded.describe())
        raise SystemExit(0)
    if _state.reading_only:
        raise _ConfigRead(loaded)
    return loaded


def _read_base(
    cls: type[C], tree: Tree, where: tuple[str, Places], arguments: Sequence[str], names: Callable[[], Sequence[str]]
) -> C:
    """Validate a file or preset before the flags, so that its errors name a position.

    A flag may complete it, as where exactly one of two options is required, or replace an invalid value.
    """
    try:
        return from_tree(cls, tree, *where)
    except UsageError:
        with suppress(FlagError, UsageError):
            return from_tree(cls, overlaid(tree, read_flags(option_types(cls), arguments, names)), *where)
        raise


def _with_changes(
    base: C, tree: Tree, changes: Mapping[str, Any], flags: Mapping[str, Any], source: str
) -> tuple[C, dict[str, str]]:
    """Return ``base`` with ``changes``, and the options that these leave without effect, with their new origins.

    Such options of the file or preset are reset to the defaults of their group. A flag without effect is refused.
    """
    cls = type(base)
    before = flatten(to_tree(base))
    given = dict(changes)
    moot: dict[str, str] = {}
    while True:
        try:
            config = from_tree(cls, overlaid(to_tree(base), given), "command line") if given else base
        except UsageError as error:
            found = refusals.given_way(error, source, before, given, flags)
            if not isinstance(error, WithoutEffectError) or not found or not moot.keys().isdisjoint(found):
                raise refusals.set_elsewhere(error, tree, changes, source, option_types(cls)) from None
            moot |= found
            # Not the recipe's own default, which may be what has no effect.
            given |= {option: value for option, value in error.options.items() if option in found}
        else:
            return config, moot


def _smoke_values(base: object, flags: Mapping[str, Any]) -> dict[str, Any]:
    before = flatten(to_tree(base))
    wanted: dict[str, Any] = cast("Any", base).smoke_values(flags)
    refuse_unknown_smoke(type(base), wanted)
    return {key: value for key, value in wanted.items() if before[key] != value}


def _replaced(base: object, smoke: Mapping[str, Any], flags: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return the options of the file or preset replaced by a flag, each with a note to show as its origin."""
    if not hasattr(base, "replaced_by_flags"):
        return {}
    replaced: dict[str, str] = cast("Any", base).replaced_by_flags(flags)
    values = {**flatten(to_tree(base)), **smoke}
    return {
        option: f"{values[option]!r} of {'--smoke' if option in smoke else source}{GIVES_WAY}--{flag}"
        for option, flag in replaced.items()
        if values[option] is not None
    }


class _State:
    """State of this process across calls of ``load_config``."""

    reading_only = False
    """True while ``config_of`` runs a recipe's ``main``, which is to be left once it has read its config."""


_state = _State()


class _ConfigRead(BaseException):
    """Leaves a recipe's ``main``. A ``BaseException``, so that no recipe catches it."""

    def __init__(self, loaded: Loaded[Any]) -> None:
        self.loaded = loaded


def config_of(main: Callable[[Sequence[str]], object], argv: Sequence[str]) -> Loaded[Any] | None:
    """Return the config of ``main(argv)`` without training. None if it reads no config."""
    _state.reading_only = True
    try:
        main(argv)
    except _ConfigRead as found:
        return found.loaded
    finally:
        _state.reading_only = False
    return None


def read_options(cls: type[C], arguments: Sequence[str], program: str) -> C:
    """Read a dataclass of options from flags alone, for a command without a config file. Raises ``UsageError``.

    Exits with code 0 after ``--help``, printed with ``program`` as the beginning of the command.
    """
    if "--help" in arguments or "-h" in arguments:
        help_text.print_command_help(cls, program)
    try:
        flags = read_flags(option_types(cls), arguments, list)
    except FlagError as error:
        raise UsageError(str(error)) from None
    refusals.refuse_unset(flags)
    return from_tree(cls, overlaid({}, flags), "command line")


def preset_names(cls: type, presets: Path) -> list[str]:
    """Return the presets of the recipe with config ``cls``: those without unknown options."""
    names: list[str] = []
    # The recipes share one folder, and no file names its recipe.
    for path in sorted(presets.glob("*.yaml")):
        try:
            unknown = next(invalid_keys(cls, read_yaml(path), ()), None)
        except YamlError:
            unknown = None  # still offered: its error is reported when it is chosen
        if unknown is None:
            names.append(path.stem)
    return names


def find_source(
    source: str,
    presets: Path,
    names: Callable[[], Sequence[str]],
    options: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Path:
    """Resolve a preset name or a path to a YAML file. Errors offer the presets of ``names``."""
    expanded = expand_path(source)
    # Such as max_steps=10, an option without its dashes.
    if "=" in source or source.replace("-", "_") in options:
        raise UsageError(stray(source, after, options, names))
    # A bare name is a preset, even if the working directory has a file or folder of that name.
    if expanded.suffix in {".yaml", ".yml"} or os.sep in source:
        if not expanded.is_file():
            wrong = "there is no such file"
            if expanded.is_dir():
                wrong = "is a directory"
            raise UsageError(f"config {source!r}: {wrong} ({expanded}); give a preset or a YAML file")
        return expanded
    if (presets / f"{source}.yaml").is_file():
        return presets / f"{source}.yaml"
    owners = other_recipes.owners_of_preset(source, presets)
    if owners:
        raise UsageError(other_recipes.refused_preset(owners, source, names))
    offered = names()
    known = ", ".join(offered) or f"none in {presets}"
    raise UsageError(
        f"preset {source!r} does not exist{did_you_mean(nearest(source, offered))}; presets are {known}. "
        "A file is recognised by its .yaml ending."
    )


def read_tree(path: Path) -> Tree:
    """Read one YAML file strictly."""
    tree, _ = _read_source(path, str(path))
    return tree


def _check_keys_of_source(
    cls: type, tree: Tree, path: Path, places: Places, presets: Path, names: Callable[[], Sequence[str]]
) -> None:
    """Refuse unknown keys. A preset or file of another recipe is refused with that recipe's name."""
    try:
        check_keys(cls, tree, str(path), places)
    except UsageError as error:
        owners = other_recipes.owners(tree, presets)
        if path.parent == presets:
            if owners:
                raise UsageError(other_recipes.refused_preset(owners, path.stem, names)) from None
            raise UsageError(f"{error}{other_recipes.offered(names)}") from None
        if owners:
            raise UsageError(
                f"{error}. Every option in the file belongs to {other_recipes.shown(owners)}: "
                f"{other_recipes.commands(owners, str(path))}"
            ) from None
        raise


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


def from_tree(cls: type[C], tree: Mapping[str, Any], where: str, places: Places = NOWHERE) -> C:
    """Validate a nested mapping into ``cls``: types, ranges, and the checks of each group."""
    from pydantic import ValidationError

    kinds = option_types(cls)
    # Before pydantic, which would convert what `refusal` refuses.
    for key, value in flatten(tree).items():
        if key not in kinds:
            continue
        reason = refusal(kinds[key], value) or refusals.impossible_text(key, value)
        # An empty path would be the working directory.
        if not reason and value == "" and key not in MAY_BE_EMPTY and flatten(defaults_tree(cls)).get(key) != "":
            reason = "'' is refused: a value is required, and a shell variable that is not set has none"
        if reason:
            where_key = place_of(where, places, key.split("."))
            raise UsageError(f"{where_key}: {key}: {reason}; {how_to_correct(where, key)}")
    try:
        return _validator(cls).validate_python(dict(tree))
    except ValidationError as error:
        # For a union pydantic reports each member. `refusal` has checked literals already, except in lists.
        found = [e for e in error.errors() if e["type"] != "literal_error"] or error.errors()
        text = "\n".join(_explain(cls, e, where, places) for e in found)
        causes = [e.get("ctx", {}).get("error") for e in found]
        parts = [cause for cause in causes if isinstance(cause, WithoutEffectError)]
        if parts:
            idle = {option: value for part in parts for option, value in part.options.items()}
            raise WithoutEffectError(text, idle, parts=parts) from None
        raise UsageError(text) from None


@cache
def _validator(cls: type[C]) -> TypeAdapter[C]:
    """Return pydantic's validator of a config. It takes 50 ms to build, and a start uses it twice."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _explain(cls: type, error: Any, where: str, places: Places) -> str:
    # pydantic puts the members of a union into the location, between the names of fields.
    names = {name for option in option_names(cls) for name in option.split(".")}
    parts = [str(part) for part in error["loc"] if part in names or isinstance(part, int)]
    key = ".".join(parts)
    there = place_of(where, places, parts)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        # From a group's own check, with a complete text.
        if not key or message.startswith((f"{key}.", f"{key}:", f"{key}=")):
            return f"{there}: {message}"
        return f"{there}: {key}: {message}"
    # pydantic names the bound of the range, which is infinite for a positive number.
    value = error.get("input")
    if isinstance(value, float) and not math.isfinite(value):
        message = "a finite value is required"
    if error["type"] in ("tuple_type", "list_type"):
        message = f"a list is required, as in [{value}]"
    # pydantic speaks of an input, which is an option here.
    message = re.sub(r"^Input should be (.*)", r"a value \1 is required", message)
    # An element such as betas.1 is set with --betas.
    flag = ".".join(part for part in parts if not part.isdigit())
    return f"{there}: {key}: {value!r} is refused: {message}; {how_to_correct(where, flag)}"
