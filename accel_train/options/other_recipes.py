"""Recipes that a preset or config belongs to, among the shipped ones and those beside the started one.

A recipe is parsed with ``ast``, because its import would load its model. Only for messages: takes 0.2 s of CPU.
"""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accel_train.config import bundled_folder
from accel_train.options.strict_yaml import YamlError, read_yaml
from accel_train.options.tree import flatten

_LIBRARY = Path(__file__).parents[2]


def owners(tree: Mapping[str, Any], presets: Path) -> list[Path]:
    """Return the recipes that have every option in ``tree``. ``presets`` is the folder of this recipe's presets."""
    if _has_dotted_key(tree):
        # No recipe reads it, whatever options it seems to name.
        return []
    named = flatten(tree)
    return [path for path in _recipes(presets) if named.keys() <= {*options_of(path)}]


def _has_dotted_key(tree: Mapping[str, Any]) -> bool:
    return any("." in key or (isinstance(value, Mapping) and _has_dotted_key(value)) for key, value in tree.items())


def owners_of_preset(name: str, presets: Path) -> list[Path]:
    """Return the recipes that a shipped preset belongs to. Empty if there is no such preset."""
    shipped = bundled_folder("recipes")
    if shipped is None:
        return []
    try:
        tree = read_yaml(shipped / "presets" / f"{name}.yaml")
    except (OSError, YamlError):
        return []
    return owners(tree, presets)


def shown(recipes: Sequence[Path]) -> str:
    """Name recipes in a message, as seen from the working directory."""
    return " or ".join(_from_here(recipe) for recipe in recipes)


def commands(recipes: Sequence[Path], source: str) -> str:
    """Return the command to start each recipe with ``source``."""
    return " or ".join(shlex.join(["python", _from_here(recipe), source]) for recipe in recipes)


@cache
def options_of(recipe: Path) -> list[str]:
    """Return the dotted options of the ``Config`` in a recipe's file. Empty without one."""
    return _options(recipe, "Config") or []


def _recipes(presets: Path) -> list[Path]:
    shipped = bundled_folder("recipes")
    folders = [presets.parent] if shipped is None else [presets.parent, shipped]
    # A file beside this recipe takes precedence over the shipped one of the same name.
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            found.setdefault(path.name, path)
    return list(found.values())


def _from_here(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


@dataclass(frozen=True)
class _Module:
    classes: Mapping[str, ast.ClassDef]
    imported: Mapping[str, str]
    """Full dotted name, by imported name."""


@cache
def _module(path: Path) -> _Module:
    """Read the classes and imports of a file. Both are empty if it is not Python."""
    try:
        body = ast.parse(path.read_text("utf-8")).body
    except (OSError, SyntaxError, ValueError):
        body = []
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    imported: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return _Module(classes, imported)


def _options(path: Path, name: str) -> list[str] | None:
    """Return the options of class ``name`` as seen from a file. None if it is no class of a file that can be found."""
    module = _module(path)
    if name not in module.classes:
        first, _, rest = name.partition(".")
        if first not in module.imported:
            return None
        package, _, leaf = f"{module.imported[first]}.{rest}".strip(".").rpartition(".")
        file = _file_of(package, path)
        return None if file is None else _options(file, leaf)
    node = module.classes[name]
    options: list[str] = []
    for base in node.bases:
        options += _options(path, ast.unparse(base)) or []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            options += _options_of_field(path, field.target.id, field.annotation)
    # A field that a recipe redefines keeps its place.
    return list(dict.fromkeys(options))


def _options_of_field(path: Path, name: str, kind: ast.expr) -> list[str]:
    if ast.unparse(kind).startswith("ClassVar"):
        # A declaration of the recipe, not an option.
        return []
    group = _options(path, ast.unparse(kind)) if isinstance(kind, (ast.Name, ast.Attribute)) else None
    return [name] if group is None else [f"{name}.{option}" for option in group]


def _file_of(module: str, importer: Path) -> Path | None:
    """Find the file of a module of this package, or of one beside the importer."""
    below = Path(*module.split(".")).with_suffix(".py")
    return next((root / below for root in (_LIBRARY, importer.parent) if (root / below).is_file()), None)


def refused_preset(owners: Sequence[Path], preset: str, names: Callable[[], Sequence[str]]) -> str:
    """Return the error for a preset of other recipes."""
    return f"{preset} is a preset of {shown(owners)}: {commands(owners, preset)}{offered(names)}"


def offered(names: Callable[[], Sequence[str]]) -> str:
    """Return the presets of this recipe, for the end of an error."""
    # Empty if the only preset of a recipe is the one that is refused.
    listed = ", ".join(names())
    return f". Presets of this recipe are {listed}" if listed else ""
