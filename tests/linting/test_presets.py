"""A shipped preset with a shipped launch file gives no finding on a machine as they ask for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from accel_train.launch_files.machine_config import read_machine_config
from accel_train.linting import reporting
from accel_train.linting.host import facts_of, layout_of_file
from accel_train.linting.table import lint
from accel_train.options.loading import load_config, preset_names
from recipes import causal_lm, lora, mmdit, pde
from tests.linting.cases import A100, HOST

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "recipes" / "presets"
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
RECIPES: tuple[Any, ...] = (causal_lm, lora, mmdit, pde)
EVERY_PRESET = [(recipe, name) for recipe in RECIPES for name in preset_names(recipe.Config, PRESETS)]


@cache
def config_of(recipe: Any, name: str) -> Any:
    return load_config(recipe.Config, [name], presets=PRESETS).config


def test_all_presets_and_launch_files_are_here() -> None:
    assert {name for _, name in EVERY_PRESET} == {path.stem for path in PRESETS.glob("*.yaml")}
    assert len(LAUNCH_FILES) >= 7


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("has_devices", [True, False], ids=["gpu", "cpu"])
def test_shipped_presets_give_no_finding(file: Path, has_devices: bool) -> None:
    machine = read_machine_config(file)
    layout = layout_of_file(machine, has_devices=has_devices)
    host = replace(HOST, devices=(A100,) * layout.local_processes if layout.device == "cuda" else ())
    for recipe, name in EVERY_PRESET:
        found = lint(facts_of(config_of(recipe, name), layout, {}, host))
        assert not found, f"{name}: {reporting.describe(found)}"


def test_a_smoke_of_each_recipe_gives_no_finding() -> None:
    layout = layout_of_file(read_machine_config(ROOT / "accelerate_configs" / "single_gpu.yaml"), has_devices=True)
    first = dict(reversed(EVERY_PRESET))
    for recipe, name in first.items():
        config = load_config(recipe.Config, [name, "--smoke"], presets=PRESETS).config
        found = lint(facts_of(config, layout, {}, replace(HOST, devices=(A100,))))
        assert not found, f"{name}: {reporting.describe(found)}"
