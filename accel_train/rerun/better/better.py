"""``accel-train better``: which of two checkpoints is better on the same held-out samples, and how sure that is."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_train.compare.runs import InterruptedRunError, RunFailedError, report_failure, stop_signals_raise
from accel_train.config import UsageError
from accel_train.metrics.bootstrap import LEVEL
from accel_train.metrics.records import plain
from accel_train.options.tree import Tree
from accel_train.rerun import recorded
from accel_train.rerun.better import paired_test, ratios, report, sides
from accel_train.rerun.better.paired_test import Difference, Direction, Winner
from accel_train.rerun.better.sides import Evaluated, Side
from accel_train.rerun.receipt import describe_checkpoint
from accel_train.store import atomic_files, commit, strict_json

SCHEMA = 1
EXIT_NOT_RESOLVED = 3


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    a: str
    b: str
    metrics: Sequence[str] = ()
    """Metrics that decide: NAME, or NAME:max if larger is better."""
    recipe: str | None = None
    as_json: bool = False
    flags: Sequence[str] = ()
    """Options of the recipe, for both evaluations."""


def better(request: Request) -> int:
    """Evaluate both, print the differences and the verdict, and return the exit code.

    0: a verdict, which may be that they are equal. 3: not resolved. 1: a failure. Raises ``UsageError``. Main thread
    only, because it handles the stop signals.
    """
    with tempfile.TemporaryDirectory(prefix="accel-train-better-") as folder, stop_signals_raise():
        try:
            return _better(request, Path(folder))
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "nothing is decided")


def _better(request: Request, folder: Path) -> int:
    a = sides.find_side("A", request.a)
    b = sides.find_side("B", request.b)
    recipe = sides.find_recipe(a, b, request.recipe)
    # Everything that can be refused is refused before anything is evaluated.
    seed = a.options["seed"]
    ours = sides.resolve(a, recipe, seed, request.flags, folder)
    theirs = sides.resolve(b, recipe, seed, request.flags, folder)
    sides.refuse_different(a, b, ours.options, theirs.options)
    given = _given(request.metrics, ours.options, theirs.options)
    if not given and not ours.decided_by:
        raise UsageError(
            "--metric is missing: the recipe does not declare which metric decides; give --metric NAME if a smaller "
            "value is better, or --metric NAME:max"
        )
    if not request.as_json:
        print("\n".join(_head(a, b, recipe)), flush=True)
    evaluated_a = _evaluate(a, recipe, ours.options, folder)
    evaluated_b = _evaluate(b, recipe, theirs.options, folder)
    differences = _compare(evaluated_a, evaluated_b, given, ours.decided_by)
    winner = paired_test.decide(differences)
    lines = [*report.table(differences), *report.verdict(differences, winner)]
    if request.as_json:
        lines = [atomic_files.to_json(_content(a, b, recipe, differences, winner)).rstrip()]
    print("\n".join(lines), flush=True)
    return EXIT_NOT_RESOLVED if winner in ("not resolved", "divided") else 0


def _head(a: Side, b: Side, recipe: Path) -> list[str]:
    lines = [f"{side.letter}: run {side.run.run_id}, step {side.checkpoint.step}: {side.run.place}" for side in (a, b)]
    if a.options["seed"] != b.options["seed"]:
        lines.append(f"both are evaluated with the seed of A, {a.options['seed']}, which keys the noise")
    return [*lines, f"evaluated: each held-out sample alone, with recipe {recorded.name_of(recipe)}"]


def _evaluate(side: Side, recipe: Path, options: Tree, folder: Path) -> Evaluated:
    own = folder / side.letter
    own.mkdir()
    return sides.evaluate(side, recipe, options, own)


def _given(given: Sequence[str], ours: Tree, theirs: Tree) -> dict[str, Direction]:
    """Return the metrics that the user has named: those of ``--metric``, else the ``best_metric`` of both runs."""
    if given:
        return dict(map(_direction, given))
    a, b = (options["checkpoints"] for options in (ours, theirs))
    if a["best_metric"] is not None and a["best_metric"] == b["best_metric"]:
        return {a["best_metric"]: a["best_mode"]}
    return {}


def _direction(text: str) -> tuple[str, Direction]:
    name, _, mode = text.partition(":")
    if mode not in ("", "min", "max"):
        raise UsageError(f"--metric {text}: after the colon, min or max is required; give --metric {name}:max")
    return name, "max" if mode == "max" else "min"


def _compare(
    a: Evaluated, b: Evaluated, given: Mapping[str, Direction], declared: Mapping[str, Direction]
) -> list[Difference]:
    """Test every metric that is a mean over samples."""
    if not a.calls:
        raise RunFailedError(
            "the evaluation has no sums over held-out samples: there are none, or the recipe adds them without "
            "loop.heldout_means and metrics.evaluation.weighted_sums"
        )
    if [len(call) for call in a.calls] != [len(call) for call in b.calls]:
        raise RunFailedError("the two evaluations have different numbers of samples")
    ours = ratios.read_sums(a.calls)
    theirs = ratios.read_sums(b.calls)
    # Checked first, because no ratio of sums is found for a value that is not finite.
    wanted = given or paired_test.directions(list(a.metrics), declared)
    _refuse_non_finite(a, b, list(wanted))
    found = ratios.find_metrics(ours, theirs, a.metrics, b.metrics)
    names = [metric.name for metric in found]
    deciding = given or paired_test.directions(names, declared)
    unmeasured = [name for name in wanted if name not in names]
    # Of a recipe's declaration, any one is enough: an evaluation need not have all.
    if not deciding or (given and unmeasured):
        raise UsageError(
            f"--metric: {', '.join(unmeasured or declared)} is not a mean over samples in this evaluation; it has "
            f"{', '.join(names) or 'none'}; give one of these"
        )
    differences: list[Difference] = []
    for metric in found:
        of_a = ratios.estimate(ours, metric)
        of_b = ratios.estimate(theirs, metric)
        differences.append(paired_test.compare(metric.name, of_a, of_b, deciding.get(metric.name), len(deciding)))
    return differences


def _refuse_non_finite(a: Evaluated, b: Evaluated, names: Sequence[str]) -> None:
    for name in names:
        for letter, side in (("A", a), ("B", b)):
            value = side.metrics.get(name, 0.0)
            if not math.isfinite(value):
                raise RunFailedError(f"{name} of {letter} is {value}: no difference can be tested")


def _content(a: Side, b: Side, recipe: Path, differences: Sequence[Difference], winner: Winner) -> strict_json.Json:
    content: dict[str, Any] = {
        "schema": SCHEMA,
        # The name alone: a path would tell about the machine.
        "recipe": {"name": recipe.name, "sha256": commit.hash_file(recipe)},
        "seed": a.options["seed"],
        "level": LEVEL,
        "power": paired_test.POWER,
        "winner": winner,
        "verdict": report.verdict(differences, winner)[0].removeprefix("verdict: "),
        "metrics": [asdict(one) for one in differences],
    }
    for side in (a, b):
        content[side.letter] = {"run_id": side.run.run_id, "step": side.checkpoint.step}
        content[side.letter] |= describe_checkpoint(side.checkpoint)
    return strict_json.sealed(plain(content))
