"""Refused options: those that give way to flags, and additions to messages about the file or a resumed run."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accel_train.config import GIVES_WAY, UsageError, WithoutEffectError, cut, expand_path, too_long, unset_variable
from accel_train.options.flags import refusal
from accel_train.options.tree import INVOCATION_OPTIONS, Tree, defaults_tree, flatten
from accel_train.store.names import CONFIG_FILE, RUN_FILE

OUTPUT_DIR = "output_dir"
INIT_FROM = "init_from"
PLACES = ("path", "paths", "_dir", "resume", "init_from", ".source", ".vae", "output", "file")
"""Suffixes of the names of options that are or may be paths."""


def impossible_text(key: str, value: object) -> str | None:
    """Return a message if an option's text cannot be written to a file or cannot be a path. None if it is possible."""
    if not isinstance(value, str):
        return None
    if "\0" in value:
        return f"{cut(value)} is refused: text without the character NUL is required"
    # Bytes of a command line that are not UTF-8 arrive as surrogates, and no file of the run could hold them.
    found = re.search("[\ud800-\udfff]+", value)
    if found:
        # For a path, only the name that contains them.
        part = value[value.rfind("/", 0, found.start()) + 1 : found.end()]
        return f"{cut(value)} is refused: text in valid UTF-8 is required, and {part!r} is not valid"
    if not key.endswith(PLACES):
        return None
    return too_long(value)


def missing_default(preset: str, presets: Path, names: Callable[[], Sequence[str]]) -> None:
    """Raise ``UsageError`` if the default preset, which is read if the command line names none, does not exist."""
    path = presets / f"{preset}.yaml"
    # A path to a file is read as on the command line.
    if path.is_file() or Path(preset).name != preset or Path(preset).suffix:
        return
    offered = names()
    choice = "start with a YAML file of the options"
    if offered:
        choice = f"start with one of {', '.join(offered)}"
    raise UsageError(
        f"{path}: no such file, and it is read when the command line has no preset; write it, {choice}, or name "
        "another one in the recipe: load_config(default_preset=...)"
    )


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the default of every dotted option."""
    own = {name: getattr(cls, name) for name in INVOCATION_OPTIONS if hasattr(cls, name)}
    return own | flatten(defaults_tree(cls))


def given_way(
    error: UsageError, source: str, base: Mapping[str, Any], changes: Mapping[str, Any], flags: Mapping[str, Any]
) -> dict[str, str]:
    """Return the options that give way because ``changes`` leave them without effect, each with its new origin.

    ``base`` has the values of the file ``source``, and ``changes`` those of ``--smoke`` and of ``flags``. Empty if the
    error stands, because it is of another kind or because one flag leaves another without effect.
    """
    if not isinstance(error, WithoutEffectError):
        return {}
    giving_way: dict[str, str] = {}
    for part in error.parts:
        cause = _cause(part, changes, flags)
        # A trial of the whole command, --smoke drops the flags of what it switches off.
        if cause != "--smoke" and not flags.keys().isdisjoint(part.options):
            return {}
        for option in part.options:
            place = source
            if option in changes:
                place = "--smoke"
            if option in flags:
                place = "the command line"
            giving_way[option] = f"{changes.get(option, base[option])!r} of {place}{GIVES_WAY}{cause}"
    return giving_way


def _cause(error: WithoutEffectError, changes: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    """Return the cause that leaves the options of an error without effect: a flag, or ``--smoke``."""
    places = {key: named_at(key, changes[key], str(error)) for key in changes if key not in error.options}
    causes = {key: place for key, place in places.items() if place is not None}
    by_flags = [key for key in causes if key in flags]
    if by_flags:
        # The first one named is the cause, since the remedy after it may name further options.
        return f"--{min(by_flags, key=causes.__getitem__)}"
    if causes:
        return "--smoke"
    return "the command line"


def named_at(key: str, value: Any, text: str) -> int | None:
    """Return the offset at which a message names an option, None if it does not."""
    *_, name = key.split(".")
    # An option of the same group is named without it, beside its value.
    named = rf"(?<![\w.]){re.escape(key)}\b|(?<![\w.]){name} {re.escape(str(value).lower())}\b"
    return next((found.start() for found in re.finditer(named, text)), None)


def set_elsewhere(
    error: UsageError, tree: Tree, changes: Mapping[str, Any], source: str, kinds: Mapping[str, Any]
) -> UsageError:
    """Return a refusal of flags that also tells which of its options are from the file or preset, with their flags."""
    notes: list[str] = []
    for key, value in flatten(tree).items():
        if key in changes or named_at(key, value, str(error)) is None:
            continue
        flag = f"--{key}"
        if refusal(kinds[key], None) is None:
            flag = f"{flag} None"
        notes.append(f"{key} is from {source}: {flag} changes it")
    if not notes:
        return error
    return UsageError(f"{error} ({'; '.join(notes)})")


@contextmanager
def at_a_resume(cls: type, tree: Tree, arguments: Sequence[str]) -> Generator[None]:
    """Add to a refusal that a run which began with the refused value also needs ``--allow`` for the corrected one.

    A resume compares its options with those of the run, and would refuse the corrected value next.
    """
    try:
        yield
    except UsageError as error:
        directory = _directory(cls, tree, arguments)
        saved = _options_of_run(cls, directory)
        began = {key: value for key, value in saved.items() if _is_compared(cls, key, value)}
        named = {key: place for key in began if (place := named_at(key, began[key], str(error))) is not None}
        if isinstance(error, WithoutEffectError):
            names = [option for option in error.options if option in began]
        else:
            # A message names the wrong option first. Others that it names may stay.
            names = sorted(named, key=lambda key: named[key])[:1]
        if not names or "--overwrite" in arguments or _gives_others(saved, arguments, str(error)):
            raise
        values = ", ".join(f"{name} {began[name]!r}" for name in names)
        raise UsageError(
            f"{str(error).rstrip('.')}. The run in {directory} began with {values}: to resume it, correct that and "
            f"give --allow {' '.join(names)} as well"
        ) from None


def _gives_others(saved: Mapping[str, Any], arguments: Sequence[str], text: str) -> bool:
    """Return True if a message names a flag whose value differs from that of the run, so that the flag is wrong."""
    for name, word in _flags(arguments):
        if named_at(name, word, text) is not None and not (name in saved and _is_written_as(saved[name], word)):
            return True
    return False


def _is_written_as(value: Any, word: str) -> bool:
    try:
        return float(word) == value
    except ValueError:
        return word.lower() == str(value).lower()


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag with the word after it, which may be another flag. Flags may not have been parsed yet."""
    words = [part for word in arguments for part in word.split("=", 1)]
    for flag, word in itertools.pairwise([*words, ""]):
        if flag.startswith("--"):
            yield flag.removeprefix("--"), word


def _directory(cls: type, tree: Tree, arguments: Sequence[str]) -> Path:
    """Return the directory of the run."""
    found = str(tree.get(OUTPUT_DIR) or getattr(cls, OUTPUT_DIR, ""))
    return expand_path(dict(_flags(arguments)).get(OUTPUT_DIR, found))


def _options_of_run(cls: type, directory: Path) -> dict[str, Any]:
    """Return the options that a run began with, as far as they still exist. Empty if there is no run."""
    saved: Any = {}
    # A damaged file is reported by the start itself.
    with suppress(OSError, ValueError):
        saved = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    if not hasattr(cls, "may_change_on_resume") or not isinstance(saved, dict) or not saved.get("trained"):
        return {}
    defaults = defaults_of(cls)
    return {key: value for key, value in dict(saved.get("experiment", {})).items() if key in defaults}


def refuse_places(file: Path, values: Mapping[str, object], changed: Container[str]) -> None:
    """Raise ``UsageError`` for paths that a start on this host cannot take. ``values`` are the dotted options.

    A command that only reads them may run on another machine, without the variables in its paths.
    """
    refuse_moved(file, values.get(OUTPUT_DIR), changed)
    is_saved = file.name == CONFIG_FILE and any(file.parent.glob("checkpoints/checkpoint_*"))
    if is_saved and INIT_FROM not in changed and not values.get("overwrite"):
        # The run resumes with weights of its own.
        values = {key: value for key, value in values.items() if key != INIT_FROM}
    refuse_unset(values)


def refuse_unset(values: Mapping[str, object]) -> None:
    """Raise ``UsageError`` for the first option whose path has a variable that is not set on this host."""
    for text in unset_variables(values):
        raise UsageError(text)


def unset_variables(values: Mapping[str, object]) -> list[str]:
    """Describe each option whose path has a variable that is not set on this host."""
    found: list[str] = []
    for key, value in values.items():
        if not key.endswith(PLACES):
            continue
        paths: Sequence[object] = [value]
        if isinstance(value, (list, tuple)):
            paths = value
        reasons = [unset_variable(path) for path in paths if isinstance(path, str)]
        found += [f"{key}: {reason}" for reason in reasons if reason]
    return found


def refuse_moved(file: Path, output_dir: object, changed: Container[str]) -> None:
    """Raise ``UsageError`` if ``file`` is the config of a run that was moved, copied or renamed since.

    ``output_dir`` is as the file has it. A start would train or evaluate in that other directory, unless the option is
    among those that are ``changed``.
    """
    if OUTPUT_DIR in changed:
        return
    run = file.parent
    if file.name != CONFIG_FILE or not (run / RUN_FILE).is_file() or not isinstance(output_dir, str):
        return
    written = expand_path(output_dir)
    # A directory may have two names, by a link or a second mount.
    if written.resolve() == run.resolve() or (written.is_dir() and written.samefile(run)):
        return
    place = output_dir if written == Path(output_dir) else f"{output_dir}, here {written},"
    raise UsageError(
        f"{file}: output_dir: {place} is not {run}, the directory of the run that contains the file: the run has been "
        f"moved or copied, or was started from another working directory; give --output_dir {shlex.quote(str(run))} to "
        "continue it, or another --output_dir for a new run"
    )


def _is_compared(cls: Any, key: str, value: Any) -> bool:
    """Return True for an option that a resume compares, with a value other than its default."""
    return value != defaults_of(cls)[key] and not cls.may_change_on_resume(key)
