"""Recipes whose training data hold samples out of scale, and their runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from accel_train.rerun import training
from tests import zygote
from tests.distributed.launching import DEMOS, RECIPE, Finished, Layout, command, environment
from tests.rerun import recording

FIELDS = {
    "mmdit": ("accel_train.domains.text.dataset", "TextLatentDataset", "latent"),
    "pde": ("accel_train.domains.pde.data.rows", "JoinedRows", "target"),
}
"""Module, dataset and field that is out of scale."""
SCALE = 1000.0
SOURCE = """
import importlib
import runpy

POISONED = {poisoned}
dataset = getattr(importlib.import_module({module!r}), {name!r})
read = dataset.batch

def poisoned(self, indices):
    batch = read(self, indices)
    for row, index in enumerate(indices):
        if index in POISONED:
            batch[{field!r}][row] *= float({scale!r})
    return batch

dataset.batch = poisoned
runpy.run_path({recipe!r}, run_name="__main__")
"""


def write_recipe(path: Path, recipe: str, poisoned: Sequence[int], scale: float = SCALE) -> Path:
    """A file that runs a recipe on data of which some training samples are a thousand times too large, or NaN."""
    module, name, field = FIELDS[recipe]
    source = str(RECIPE.with_stem(recipe))
    values = {"poisoned": set(poisoned), "scale": str(scale), "recipe": source}
    path.write_text(SOURCE.format(module=module, name=name, field=field, **values))
    return path


def record(path: Path, recipe: str, directory: Path, *flags: str, code: int = 0) -> Finished:
    """Train 12 steps of the recipe in ``path``, with a checkpoint every two. It has to exit with ``code``."""
    preset, small = DEMOS[recipe]
    length = "--max_steps 12 --checkpoints.save_every 2 --checkpoints.keep_last 0".split()
    arguments = [preset, *small, *recording.TINY[recipe], *length, *flags, "--output_dir", str(directory)]
    words = command(Layout("single", 1, recipe), arguments, directory.parent, path)
    done = zygote.run(words, env=environment())
    assert done.returncode == code, done.stdout[-4000:]
    return Finished(directory, done.stdout, done.returncode)


def fork_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have observed runs go on in forked processes, with no change but the time."""
    launched = training.run_once

    def run(words: Sequence[str], log: Path, **more: object) -> tuple[float, float]:
        if words[1] != str(training.PROGRAM):
            return launched(words, log, **more)  # pyright: ignore[reportArgumentType]
        done = zygote.run(words, env=environment())
        log.write_text(done.stdout)
        assert done.returncode == 0, done.stdout[-4000:]
        return 0.0, 0.0

    monkeypatch.setattr(training, "run_once", run)
