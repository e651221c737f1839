"""Refused options: which of them give way to flags, and what a message adds about the file or about a resumed run."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accel_train.config import GIVES_WAY, UsageError, WithoutEffectError, expand_path
from accel_train.options.flags import refusal
from accel_train.options.tree import INVOCATION_OPTIONS, Tree, defaults_tree, flatten

OUTPUT_DIR = "output_dir"


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the default of every dotted option."""
    own = {name: getattr(cls, name) for name in INVOCATION_OPTIONS if hasattr(cls, name)}
    return own | flatten(defaults_tree(cls))


def given_way(
    error: UsageError, source: str, base: Mapping[str, Any], changes: Mapping[str, Any], flags: Mapping[str, Any]
) -> dict[str, str]:
    """Return the options that ``changes`` leave without effect, each with a text for its origin: they give way.

    ``base`` has the values of the file ``source``, and ``changes`` those of ``--smoke`` and of ``flags``. Empty if the
    error stands: it is another one, or another flag leaves a flag without effect.
    """
    if not isinstance(error, WithoutEffectError):
        return {}
    text = str(error)
    causes = [key for key in changes if key not in error.options and named_at(key, changes[key], text) is not None]
    by_flags = [f"--{key}" for key in causes if key in flags]
    cause = "the command line"
    if causes:
        cause = next(iter(by_flags), "--smoke")
    # A trial of the whole command drops the flags of what it switches off.
    if cause != "--smoke" and not flags.keys().isdisjoint(error.options):
        return {}
    found: dict[str, str] = {}
    for option in error.options:
        place = source
        if option in changes:
            place = "--smoke"
        if option in flags:
            place = "the command line"
        found[option] = f"{changes.get(option, base[option])!r} of {place}{GIVES_WAY}{cause}"
    return found


def named_at(key: str, value: Any, text: str) -> int | None:
    """Return where a message names an option, None if it does not."""
    *_, name = key.split(".")
    # An option of the same group is named without it, beside its value.
    named = rf"(?<![\w.]){re.escape(key)}\b|(?<![\w.]){name} {re.escape(str(value).lower())}\b"
    return next((found.start() for found in re.finditer(named, text)), None)


def set_elsewhere(
    error: UsageError, tree: Tree, changes: Mapping[str, Any], source: str, kinds: Mapping[str, Any]
) -> UsageError:
    """Return a refusal of flags that names the options of the file or preset in it, each with its own flag."""
    found: list[str] = []
    for key, value in flatten(tree).items():
        if key in changes or named_at(key, value, str(error)) is None:
            continue
        flag = f"--{key}"
        if refusal(kinds[key], None) is None:
            flag = f"{flag} None"
        found.append(f"{key} is from {source}: {flag} changes it")
    if not found:
        return error
    return UsageError(f"{error} ({'; '.join(found)})")


@contextmanager
def at_a_resume(cls: type, tree: Tree, arguments: Sequence[str]) -> Generator[None]:
    """Add to a refusal that a run which began with the value needs ``--allow`` as well, once it is corrected.

    A resume compares its options with those of the run, and would refuse the corrected one next.
    """
    try:
        yield
    except UsageError as error:
        directory = _directory(cls, tree, arguments)
        began = _compared_options(cls, directory)
        named = {key: place for key in began if (place := named_at(key, began[key], str(error))) is not None}
        if isinstance(error, WithoutEffectError):
            names = [option for option in error.options if option in began]
        else:
            # A message begins with what is wrong. The others may stay.
            names = sorted(named, key=lambda key: named[key])[:1]
        if not names or "--overwrite" in arguments:
            raise
        values = ", ".join(f"{name} {began[name]!r}" for name in names)
        raise UsageError(
            f"{str(error).rstrip('.')}. The run in {directory} began with {values}: to resume it, correct that and "
            f"give --allow {' '.join(names)} as well"
        ) from None


def _directory(cls: type, tree: Tree, arguments: Sequence[str]) -> Path:
    """Return the directory of the run. The flags may not have been read yet."""
    found = str(tree.get(OUTPUT_DIR) or getattr(cls, OUTPUT_DIR, ""))
    words = [part for word in arguments for part in word.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name == f"--{OUTPUT_DIR}":
            found = value
    return expand_path(found)


def _compared_options(cls: Any, directory: Path) -> dict[str, Any]:
    """Return the options of a run that a resume compares, other than its defaults. Empty for no run."""
    saved: Any = {}
    # A damaged file is reported by the start itself.
    with suppress(OSError, ValueError):
        saved = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    if not hasattr(cls, "may_change_on_resume") or not isinstance(saved, dict) or not saved.get("trained"):
        return {}
    defaults = defaults_of(cls)
    options = {
        key: value
        for key, value in dict(saved.get("experiment", {})).items()
        if key in defaults and value != defaults[key]
    }
    return {key: value for key, value in options.items() if not cls.may_change_on_resume(key)}
