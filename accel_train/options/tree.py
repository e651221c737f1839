"""Config dataclasses as nested dicts, dotted options and YAML."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeGuard, cast, get_type_hints

import yaml

Tree = dict[str, Any]

INVOCATION_OPTIONS = ("resume", "allow", "overwrite", "evaluate_only")
"""Options of one start, not of the experiment. Never written to config.yaml."""
DEFAULT = "default"
"""Origin of an option left at its default."""


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
    return without_invocation(to_tree(config))


def without_invocation(tree: Tree) -> Tree:
    """Return nested options without those of one invocation."""
    return {key: value for key, value in tree.items() if key not in INVOCATION_OPTIONS}


def defaults_tree(cls: type) -> Tree:
    """Return ``experiment_tree`` of the defaults of a config class. Together they need not be a valid config."""
    tree: Tree = {}
    for field in dataclasses.fields(cls):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if value is not dataclasses.MISSING and field.name not in INVOCATION_OPTIONS:
            tree[field.name] = to_tree(value) if dataclasses.is_dataclass(value) else _plain(value)
    return tree


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text unless it begins with a letter. PyYAML leaves 1e3 bare, which reads as a number."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # None lets PyYAML quote by its own rules, which cover words such as null and yes.
    style = None if text[:1].isalpha() else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def config_text(config: object) -> str:
    """Return the resolved config as YAML for ``load_config``."""
    text = "# Resolved config of this run; valid input for the same recipe.\n"
    return text + tree_text(experiment_tree(config))


def tree_text(tree: Tree) -> str:
    """Return nested options as YAML for ``load_config``."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
    return list(option_types(cls))


def option_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Map each dotted option to its type."""
    leaves: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        if is_group(kind):
            leaves |= option_types(kind, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = kind
    return leaves


def is_group(kind: Any) -> TypeGuard[type]:
    """Check if a field's type is a group of options."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Map each field of one dataclass to its type."""
    # The types of the fields themselves are text if a module postpones its annotations.
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def overlaid(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Return a copy of nested options in which the dotted options ``values`` replace its own."""
    result = copy.deepcopy(tree)
    for option, value in values.items():
        *groups, leaf = option.split(".")
        inner = result
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[leaf] = value
    return result


def origins_of(tree: Tree, source: str, config: object, flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of each option's value in a config: ``flags``, a preset or file, or its default."""
    in_file = flatten(tree)
    # A preset that is named like another origin is shown with its file extension.
    if source in (DEFAULT, "command line"):
        source = f"{source}.yaml"
    origins: dict[str, str] = {}
    for key in flatten(to_tree(config)):
        if key in flags:
            origins[key] = "command line"
        elif any(key == given or key.startswith(f"{given}.") for given in in_file):
            origins[key] = source
        else:
            origins[key] = DEFAULT
    return origins
