"""``accel-train init``: copy a bundled recipe to where it can be changed, or begin a new one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from accel_train.commands import bundled
from accel_train.config import UsageError, expand_path, refuse_unwritable
from accel_train.options.loading import preset_names
from accel_train.wording import did_you_mean, nearest, shortened

SCAFFOLD = "recipe.py"
"""File name of a new recipe."""


def init(directory: str | Path, name: str = "mmdit", *, scaffold: bool = False) -> str:
    """Copy recipe ``name``, its presets and the launch files, and return the next steps as text.

    With ``scaffold``, the recipe is a new one to be filled in. Raises ``UsageError`` for an unknown recipe, and for a
    directory with files in it or without write access.
    """
    names = bundled.recipe_names()
    if name not in names:
        hint = did_you_mean(nearest(name, names))
        raise UsageError(f"--recipe {name}: no such recipe is bundled; there are {', '.join(names)}{hint}")
    target = expand_path(directory)
    # Nothing of the user's is ever overwritten.
    _refuse_used(target)
    recipes = bundled.folder("recipes")
    source = recipes / f"{name}.py"
    if scaffold:
        recipes = recipes / "scaffold"
        source = recipes / SCAFFOLD
    # Only those that this recipe takes: the folder has the presets of all recipes.
    presets = preset_names(bundled.import_recipe(source).Config, recipes / "presets")
    with refuse_unwritable(str(target), "free space, or give a place with write access"):
        _copy([source], target)
        _copy([recipes / "presets" / f"{preset}.yaml" for preset in presets], target / "presets")
        _copy(sorted(bundled.folder("accelerate_configs").glob("*.yaml")), target / "accelerate_configs")
    lines = [
        f"{target}: {source.name}, presets ({', '.join(presets)}) and accelerate_configs; try it in seconds:",
        f"  cd {shlex.quote(str(target))} && accelerate launch {source.name} --smoke",
    ]
    if scaffold:
        lines.append(f"CHANGE in {source.name} marks the data, the model, the loss and the options to replace")
    else:
        lines.append("for a new, short recipe of your own, to be filled in: accel-train init DIRECTORY --scaffold")
    return "\n".join(lines)


def _refuse_used(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; give a directory that does not exist or is empty")
    if target.is_dir():
        there = sorted(path.name for path in target.iterdir())
        if there:
            raise UsageError(
                f"{target} contains {shortened(there, 3)}; give a directory that does not exist or is empty"
            )


def _copy(files: Sequence[Path], target: Path) -> None:
    """Copy text files, and shorten recipes/NAME in their comments to NAME, where the recipe is now."""
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        text = file.read_text(encoding="utf-8").replace(" recipes/", " ")
        (target / file.name).write_text(text, encoding="utf-8")
