"""docs/options.md, made of the recipes' own dataclasses: ``python -m tests.options_page`` writes it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_train.experiment import ExperimentConfig
from accel_train.options.help_text import field_texts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "options.md"
HEAD = """# Every option

Generated from the dataclasses by `python -m tests.options_page`, with their defaults; a preset changes some of them
(`--print_config` shows which). `None` on the command line is `null` in YAML. For the syntax of values see
[config.md](config.md), for the effect of each speed option [optimizations.md](optimizations.md).
"""
TABLE = "| Option | Values | Default | Meaning |\n|---|---|---|---|"
NAMES = {int: "integer", float: "number", str: "text", bool: "`True`, `False`", type(None): "`None`"}
COUNTS = {2: "two", 3: "three"}


def values(kind: Any) -> str:
    """The values that a type takes, in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return values(parts[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (typing.Union, types.UnionType):
        return ", ".join(values(part) for part in parts)
    if origin is tuple:
        return f"any number of {values(parts[0])}s" if parts[-1] is Ellipsis else f"{COUNTS[len(parts)]} numbers"
    return NAMES[kind]


def shown(value: Any) -> str:
    """A default as it is typed."""
    if value == ():
        return "none"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default of a field as it is typed, or that it has none."""
    if field.default is not dataclasses.MISSING:
        return shown(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return shown(field.default_factory())
    return "required"


def row(cls: type, field: dataclasses.Field[Any], kind: Any, prefix: str) -> str:
    """One line of a table."""
    name = prefix + field.name
    group, dot, leaf = name.rpartition(".")
    words = f"on or off (`--{group}{dot}no_{leaf}`)" if kind is bool else values(kind)
    return f"| `--{name}` | {words} | {default_of(field)} | {field_texts(cls)[field.name]} |"


def sections(cls: type, prefix: str, skip: set[str]) -> Iterator[str]:
    """The class's own options as a table, then its groups."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    fields = [f for f in dataclasses.fields(cls) if prefix or f.name not in skip]
    leaves = [f for f in fields if not dataclasses.is_dataclass(kinds[f.name])]
    if prefix:
        yield f"### `{prefix[:-1]}`\n\n{inspect.getdoc(cls)}"
    if leaves:
        yield "\n".join([TABLE, *(row(cls, f, kinds[f.name], prefix) for f in leaves)])
    for field in fields:
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from sections(kinds[field.name], f"{prefix}{field.name}.", skip)


def page() -> str:
    """The whole page."""
    parts = [HEAD.rstrip(), "## In every recipe", *sections(ExperimentConfig, "", set())]
    shared = {f.name for f in dataclasses.fields(ExperimentConfig)}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        config = importlib.import_module(f"recipes.{path.stem}").Config
        parts += [f"## `recipes/{path.name}`", *sections(config, "", shared)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
