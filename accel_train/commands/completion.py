"""``accel-train completion``: completions after the name of each recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

from accel_train.commands import bundled
from accel_train.options import completion
from accel_train.options.loading import preset_names


def recipes_with_options(recipes: Sequence[str]) -> dict[str, Callable[[argparse.ArgumentParser], None]]:
    """Map each recipe, a path or the name of a bundled one, to a function adding its presets and options to a parser.

    Imports the recipes. Raises ``UsageError`` for a missing one.
    """
    found: dict[str, Callable[[argparse.ArgumentParser], None]] = {}
    for recipe in recipes:
        path = bundled.find_recipe(recipe)
        config = bundled.import_recipe(path).Config
        found[recipe] = partial(
            completion.add_options, cls=config, presets=preset_names(config, path.parent / "presets")
        )
    return found
