"""Presets and configs of another recipe are refused with that recipe's name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_train.commands.bundled import import_recipe
from accel_train.config import UsageError
from accel_train.options import other_recipes
from accel_train.options.loading import load_config, preset_names
from accel_train.options.tree import config_text, option_names

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "recipes" / "presets"
RECIPES: dict[str, Any] = {path.name: import_recipe(path).Config for path in sorted((ROOT / "recipes").glob("*.py"))}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def refused(recipe: str, source: str, presets: Path = PRESETS) -> str:
    with pytest.raises(UsageError) as error:
        load_config(RECIPES[recipe], [source], presets=presets)
    return str(error.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_options_read_from_the_text_are_those_of_the_class(recipe: str) -> None:
    assert other_recipes.options_of(ROOT / "recipes" / recipe) == option_names(RECIPES[recipe])


def test_a_preset_of_another_recipe_is_refused_with_its_command() -> None:
    said = refused("mmdit.py", "pde_demo")
    assert said.startswith("pde_demo is a preset of recipes/pde.py: python recipes/pde.py pde_demo. Presets of this")
    own = preset_names(RECIPES["mmdit.py"], PRESETS)
    assert said.endswith(f"Presets of this recipe are {', '.join(own)}")
    assert "pde_demo" not in own


def test_a_project_with_one_recipe_knows_the_shipped_presets(tmp_path: Path) -> None:
    shutil.copytree(PRESETS, tmp_path / "presets", ignore=shutil.ignore_patterns("[!mb]*"))
    shutil.copy(ROOT / "recipes" / "mmdit.py", tmp_path)
    said = refused("mmdit.py", "pde_demo", tmp_path / "presets")
    assert said.startswith("pde_demo is a preset of recipes/pde.py: python recipes/pde.py pde_demo. Presets of this")
    # Its own copy is the recipe that it names, not the shipped file.
    said = refused("pde.py", "base", tmp_path / "presets")
    assert said.startswith(f"base is a preset of {tmp_path}/mmdit.py: python {tmp_path}/mmdit.py base")


@pytest.mark.parametrize("owner", ["pde.py", "lora.py", "causal_lm.py"])
def test_the_config_of_a_run_of_another_recipe_is_refused_with_its_command(owner: str, tmp_path: Path) -> None:
    preset = {"pde.py": "pde_demo", "lora.py": "lora_demo", "causal_lm.py": "causal_lm_demo"}[owner]
    config = load_config(RECIPES[owner], [preset], presets=PRESETS).config
    path = tmp_path / "config.yaml"
    path.write_text(config_text(config))
    said = refused("mmdit.py", str(path))
    assert f"Every option in the file belongs to recipes/{owner}: python recipes/{owner} {path}" in said
    assert "Presets" not in said


def test_an_option_of_an_edited_recipe_gets_no_far_fetched_proposal(tmp_path: Path) -> None:
    config = load_config(RECIPES["mmdit.py"], ["demo"], presets=PRESETS).config
    path = tmp_path / "config.yaml"
    path.write_text(config_text(config).replace("\nmodel:\n", "\nmodel:\n  experts: 4\n"))
    said = refused("mmdit.py", str(path))
    assert "unknown option 'model.experts': 4; this recipe has no such option: remove it, or find its present" in said
    assert "did you mean" not in said
    assert "Every option" not in said


def test_a_recipe_that_is_no_python_has_no_options(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("class Config(:\n")
    assert other_recipes.options_of(broken) == []
