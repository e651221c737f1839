"""The two checkpoints of a paired test: found, compared by their options and data, and evaluated."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.commands.bundled import import_recipe
from accel_train.commands.places import find_place, newest_at
from accel_train.compare.runs import RunFailedError
from accel_train.config import UsageError
from accel_train.metrics.records import evaluated_report, read_evaluation, read_metrics
from accel_train.options.loading import config_of
from accel_train.options.tree import Tree, flatten, to_tree, tree_text
from accel_train.rerun import recorded, training
from accel_train.rerun.better.paired_test import Direction
from accel_train.rerun.recorded import RecordedRun
from accel_train.store import strict_json
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import EVALUATION_FILE, METRICS_FILE, REPORT
from accel_train.store.run_file import is_covered, recall
from accel_train.wording import shown

GROUP = "evaluation."
"""Prefix of the options that say how a recipe evaluates."""
WHEN = ("evaluation.every",)
"""Options of the group that say when to evaluate, which changes no result."""
FINGERPRINT = "data_fingerprint"


@dataclass(frozen=True)
class Side:
    """One checkpoint with its run."""

    letter: str
    run: RecordedRun
    checkpoint: Checkpoint
    options: Tree
    """Nested options of the checkpoint."""

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the data. None for a checkpoint without one."""
        return self.checkpoint.manifest.get("experiment", {}).get(FINGERPRINT)


@dataclass(frozen=True)
class Evaluated:
    """Result of the evaluation of one side."""

    metrics: Mapping[str, float]
    calls: Sequence[Any]
    """Sums of each call of the evaluation, a ``ratios.Recorded``."""


@dataclass(frozen=True)
class Resolved:
    """Options with the flags of the command, and declarations of the recipe."""

    options: Tree
    decided_by: Mapping[str, Direction]


def find_side(letter: str, text: str) -> Side:
    """Find the checkpoint at a path: the newest one of a run that verifies, or the one named.

    Prints which ones are passed over. Raises ``UsageError``.
    """
    place = find_place(text)
    checkpoint, reasons = newest_at(text)
    for reason in reasons:
        print(f"passed over: {reason}", file=sys.stderr, flush=True)
    # A checkpoint that was copied out of its run has everything but the log.
    saved: Mapping[str, Any] | None = checkpoint.manifest
    records: Sequence[Mapping[str, Any]] = []
    if place.run is not None:
        saved, _ = recall(place.run)
        log = place.run / METRICS_FILE
        records = read_metrics(log) if log.is_file() else []
    if saved is None or not saved.get("experiment"):
        raise UsageError(f"{text}: neither its run.json nor its manifest has the options; give a run that has trained")
    directory = place.run or checkpoint.path.parent
    kept = {key: saved.get(key, {}) for key in ("run_id", "experiment", "resolved")}
    run = RecordedRun(text, directory, kept, records, [(checkpoint.step, checkpoint.path)])
    return Side(letter, run, checkpoint, recorded.options_at(run, checkpoint))


def find_recipe(a: Side, b: Side, given: str | None) -> Path:
    """Return the recipe of both. Raises ``UsageError`` if they have different ones, or if ``--recipe`` is needed."""
    # By the recorded recipe of each, as two recipes may have metrics of the same name.
    ours = recorded.recipe_of(a.run, given)
    theirs = recorded.recipe_of(b.run, given)
    if ours != theirs:
        raise UsageError(
            f"A was trained by {ours.name}, B by {theirs.name}; their held-out losses cannot be compared: give two "
            "checkpoints of one recipe"
        )
    return ours


def resolve(side: Side, recipe: Path, seed: int, flags: Sequence[str], folder: Path) -> Resolved:
    """Return the options of an evaluation, as the recipe reads them. Both sides have one seed, which keys the noise.

    Raises ``UsageError`` for flags refused by the recipe, and for those changing more than an evaluation.
    """
    config = folder / f"{side.letter}.yaml"
    # Nothing may be read from, or pushed to, the place of the run itself.
    here = {"seed": seed, "output_dir": str(folder / "unused"), "hub": side.options["hub"] | {"repo_id": None}}
    config.write_text(tree_text(side.options | here), encoding="utf-8")
    loaded = config_of(import_recipe(recipe).main, [str(config), *flags])
    if loaded is None:
        raise UsageError(f"recipe {str(recipe)!r}: its main ended without a config, so its options are unknown")
    free = loaded.config.run_options().free_to_change
    given = [name for name, origin in loaded.origins.items() if origin == "command line"]
    for name in given:
        if not is_covered(name, free):
            raise UsageError(f"--{name}: the checkpoints were trained with it; flags may only change {GROUP}*")
    return Resolved(to_tree(loaded.config), loaded.config.recipe.decided_by)


def refuse_different(a: Side, b: Side, options_a: Tree, options_b: Tree) -> None:
    """Raise ``UsageError`` if the data or the evaluations differ, with the values of both sides."""
    if a.fingerprint != b.fingerprint:
        raise UsageError(
            f"A was trained with data of fingerprint {shown(a.fingerprint)}, B with {shown(b.fingerprint)}: their "
            "held-out samples differ, so no difference can be paired; give two checkpoints of the same data"
        )
    ours = flatten(options_a)
    theirs = flatten(options_b)
    # One side may be older, and lack an option that the other has.
    either = sorted(ours.keys() | theirs.keys())
    names = [name for name in either if name.startswith(GROUP) and name not in WHEN]
    different = [name for name in names if ours.get(name) != theirs.get(name)]
    if different:
        listed = "\n  ".join(f"--{name}: {ours.get(name)!r} in A, {theirs.get(name)!r} in B" for name in different)
        raise UsageError(f"the evaluations differ; give a value for both:\n  {listed}")


def evaluate(side: Side, recipe: Path, options: Tree, folder: Path) -> Evaluated:
    """Evaluate a checkpoint sample by sample, in one process on this machine, and return its metrics and sums.

    Everything is written below ``folder``, which must be empty. Raises like ``compare.runs.run_once``.
    """
    directory = folder / "run"
    # A step that is never reached, so that nothing is saved.
    config = training.build_directory(
        directory, side.run, side.checkpoint, options, save_every=side.checkpoint.step + 1
    )
    path = folder / "sums.json"
    order = json.dumps({"by_sample": {"path": str(path)}})
    words = [sys.executable, str(training.PROGRAM), order, str(recipe), str(config)]
    # The other side's seed is no change of the experiment here: nothing is trained.
    flags = ["--evaluate_only", "true", "--resume", "must", "--allow", "seed"]
    training.train([*words, *flags], folder / "log")
    # The data of the run may have changed since the checkpoint.
    report = evaluated_report(directory / REPORT, side.checkpoint.step)
    if report is None:
        raise RunFailedError(f"the evaluation of {side.letter} has written no {EVALUATION_FILE}")
    return Evaluated(read_evaluation(report), strict_json.read_object(path)["calls"])
