"""Recipes, presets and launch files that come with the package, in a wheel or in a checkout."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_train.config import UsageError, bundled_folder, expand_path
from accel_train.wording import did_you_mean, nearest


def folder(name: str) -> Path:
    """Return the directory ``recipes`` or ``accelerate_configs``. Raises ``UsageError`` if there is none."""
    place = bundled_folder(name)
    if place is None:
        raise UsageError(f"{name}: not in this installation of accel_train; install its wheel, or a whole checkout")
    return place


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(path.stem for path in folder("recipes").glob("*.py"))


def find_recipe(text: str) -> Path:
    """Return the path of a recipe, given as a path or as the name of a bundled one.

    A file takes precedence over a name. Raises ``UsageError`` for a text that is neither.
    """
    path = expand_path(text)
    if path.suffix in (".yaml", ".yml", ".json"):
        raise UsageError(
            f"recipe {text!r}: not a recipe; a Python file is required, and options follow it: RECIPE {text}"
        )
    if path.is_file():
        return path
    names = recipe_names()
    if text in names:
        return folder("recipes") / f"{text}.py"
    hint = ""
    if os.sep not in text:
        hint = did_you_mean(nearest(text, names))
    raise UsageError(
        f"recipe {text!r}: there is no such file; give the path of a recipe, or the name of a bundled one: "
        f"{', '.join(names)}{hint}"
    )


def run_recipe(words: Sequence[str], observed: AbstractContextManager[None]) -> None:
    """Run a recipe with its arguments as ``python RECIPE ARGUMENTS`` does, within ``observed``."""
    sys.argv = list(words)
    # As Python itself sets it for a script, so that a recipe can import the files beside it.
    sys.path[0] = str(Path(words[0]).resolve().parent)
    with observed:
        runpy.run_path(words[0], run_name="__main__")


def import_recipe(path: Path) -> ModuleType:
    """Import the recipe as a module, with its folder at the front of ``sys.path``, as Python does for a script.

    Raises ``UsageError`` for a file without ``main``.
    """
    # Left there, because a recipe may import a file beside it only when its ``main`` runs.
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.insert(0, beside)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module there to resolve annotations.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "main"):
        raise UsageError(f"recipe {str(path)!r}: it defines no main; a recipe has a function main(argv)")
    return module


def declaration_of(path: Path) -> Any:
    """Import a recipe and return what its Config declares, an ``experiment.Recipe``, or None."""
    return getattr(getattr(import_recipe(path), "Config", None), "recipe", None)


def recipes_with_options(recipes: Sequence[str]) -> dict[str, Callable[[argparse.ArgumentParser], None]]:
    """Map each recipe, a path or a bundled name, to a function that adds its presets and options to a parser.

    Imports the recipes. Raises ``UsageError`` for a missing one.
    """
    # Imported here, because finding a recipe needs no options.
    from accel_train.options import completion
    from accel_train.options.loading import preset_names

    found: dict[str, Callable[[argparse.ArgumentParser], None]] = {}
    for recipe in recipes:
        path = find_recipe(recipe)
        config = import_recipe(path).Config
        found[recipe] = partial(
            completion.add_options, cls=config, presets=preset_names(config, path.parent / "presets")
        )
    return found
