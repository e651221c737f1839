"""What a start imports: commands that only answer load nothing heavy, and a known help text is shown at once."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
HEAVY = {
    *("torch", "numpy", "accelerate", "transformers", "tokenizers", "datasets", "diffusers", "peft", "safetensors"),
    *("deepspeed", "bitsandbytes", "matplotlib", "PIL", "scipy", "sklearn", "pyarrow", "huggingface_hub"),
    *("pydantic", "tyro", "shtab"),
}
"""Packages that no answer on the command line needs."""
REPORT = f"""
import atexit, os, sys
atexit.register(lambda: print("loaded:", *sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr))
"""
"""Start of a program that reports at its end what it has loaded."""

CONFIG = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """A recipe of a test."""

    steps: int = 3
    """Steps of the run. A run that is stopped and started again continues where it was and ends at the same step."""
'''
RECIPE = """
from pathlib import Path

from accel_train.runtime.exiting import before_imports, run_main

if __name__ == "__main__":
    before_imports()

from options import Config

from accel_train.options.loading import load_config


def main(argv):
    print(load_config(Config, argv, presets=Path(__file__).parent / "presets").config)


if __name__ == "__main__":
    run_main(main)
"""


def start(*arguments: str, cache: Path, cwd: Path = ROOT, **variables: str) -> tuple[str, list[str], int]:
    """Run Python and return what it printed, the heavy packages that it loaded, and its exit code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCEL_TRAIN_CACHE": str(cache)} | variables
    # The interpreter runs this module first wherever it finds it.
    hook = cache.parent / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(REPORT)
    environment["PYTHONPATH"] = f"{hook}{os.pathsep}{ROOT}"
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    loaded = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("loaded:")]
    assert len(loaded) == 1, done.stderr
    return done.stdout, loaded[0], done.returncode


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    (folder / "presets").mkdir(parents=True)
    (folder / "presets" / "demo.yaml").write_text("steps: 10\n")
    (folder / "options.py").write_text(CONFIG)
    path = folder / "recipe.py"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("--help",), 0), (("check", "--help"), 0)])
def test_a_command_that_answers_loads_nothing_heavy(arguments: tuple[str, ...], code: int, cache: Path) -> None:
    _, loaded, exit_code = start("-m", "accel_train.cli", *arguments, cache=cache)
    assert (loaded, exit_code) == ([], code)


def test_the_help_of_a_recipe_is_shown_again_without_its_imports(cache: Path) -> None:
    first, loaded, code = start("recipes/mmdit.py", "--help", cache=cache)
    assert ({"torch", "accelerate", "tyro"} <= set(loaded), code) == (True, 0)
    assert "--model.size" in first
    assert start("recipes/mmdit.py", "--help", cache=cache) == (first, [], 0)


def test_every_recipe_answers_help_before_its_other_imports() -> None:
    for path in RECIPES:
        _, future, first, guard, *rest = ast.parse(path.read_text()).body
        assert ast.unparse(future) == "from __future__ import annotations", path
        assert ast.unparse(first).startswith("from accel_train.runtime.exiting import before_imports"), path
        assert ast.unparse(guard) == "if __name__ == '__main__':\n    before_imports()", path
        assert rest, path


def test_a_help_text_follows_its_sources(recipe: Path, cache: Path) -> None:
    def shown() -> tuple[str, bool]:
        """The text, and whether it came from the cache."""
        text, loaded, code = start("recipe.py", "--help", cwd=recipe.parent, cache=cache)
        assert code == 0
        return text, "tyro" not in loaded

    text, known = shown()
    assert ("Steps of the run." in text, "(default: 10)" in text, known) == (True, True, False)
    assert shown() == (text, True)

    # A module of the recipe's own.
    (recipe.parent / "options.py").write_text(CONFIG.replace("Steps of the run.", "Length."))
    text, known = shown()
    assert ("Length." in text, known) == (True, False)
    assert shown() == (text, True)

    # The recipe itself.
    recipe.write_text(RECIPE + "# changed\n")
    assert shown() == (text, False)
    assert shown() == (text, True)

    # The values of the preset, and the list of presets.
    (recipe.parent / "presets" / "demo.yaml").write_text("steps: 20\n")
    text, known = shown()
    assert ("(default: 20)" in text, known) == (True, False)
    (recipe.parent / "presets" / "large.yaml").write_text("steps: 1000\n")
    text, known = shown()
    assert ("(demo, large)" in text, known) == (True, False)

    # A damaged entry is written anew.
    (entry,) = (cache / "help").iterdir()
    entry.write_text(entry.read_text()[:-20])
    assert shown() == (text, False)
    assert shown() == (text, True)

    # Another version of any package.
    content = json.loads(entry.read_text())
    entry.write_text(json.dumps(content | {"packages": [*content["packages"], "other-1.0.dist-info"]}))
    assert shown() == (text, False)


def test_a_help_text_is_that_of_its_command_line_and_terminal(recipe: Path, cache: Path) -> None:
    def shown(*arguments: str, **variables: str) -> str:
        text, _, code = start("recipe.py", *arguments, cwd=recipe.parent, cache=cache, **variables)
        assert code == 0
        return text

    wide = shown("--help", COLUMNS="120")
    narrow = shown("--help", COLUMNS="60")
    boxes = [max(len(line) for line in text.splitlines() if line.startswith("│")) for text in (narrow, wide)]
    assert boxes[0] <= 60 < boxes[1] <= 120
    assert shown("--help", COLUMNS="120") == wide
    everything = shown("--help", "all", COLUMNS="120")
    assert everything != wide
    # Of the processes of a host the first one prints.
    assert shown("--help", LOCAL_RANK="1", COLUMNS="120") == ""
    assert shown("--help", LOCAL_RANK="0", COLUMNS="120") == wide


def test_a_start_that_asks_for_no_help_is_not_answered_from_the_cache(recipe: Path, cache: Path) -> None:
    text, _, _ = start("recipe.py", cwd=recipe.parent, cache=cache)
    assert text == "Config(steps=10)\n"
    assert not (cache / "help").exists()
    _, _, code = start("recipe.py", "--help", "nothing", cwd=recipe.parent, cache=cache)
    assert code == 2
    assert not (cache / "help").exists()


def test_a_cache_that_cannot_be_written_costs_the_text_nothing(recipe: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    text, _, code = start("recipe.py", "--help", cwd=recipe.parent, cache=cache)
    assert ("Steps of the run." in text, code) == (True, 0)


GARBAGE = """
import gc

from accel_train.runtime.exiting import before_imports, run_main

before_imports()
print(gc.isenabled(), gc.get_freeze_count() > 0)


def main(argv):
    print(gc.isenabled(), gc.get_freeze_count() > 0)


run_main(main)
"""


@pytest.mark.parametrize("by_user", [False, True])
def test_no_garbage_is_collected_during_imports(by_user: bool, recipe: Path, cache: Path) -> None:
    """Afterwards what they made is left out of collections; who has disabled the collector finds it disabled."""
    first = "import gc\ngc.disable()\n" if by_user else ""
    recipe.write_text(first + GARBAGE)
    text, _, code = start("recipe.py", cwd=recipe.parent, cache=cache)
    assert (text, code) == (f"False False\n{not by_user} True\n", 0)
