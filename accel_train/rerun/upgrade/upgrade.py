"""``accel-train replay --upgrade``: train a window of a run here and in another environment, and compare the two."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_train.compare.runs import InterruptedRunError, RunFailedError, stop_signals_raise
from accel_train.config import expand_path
from accel_train.rerun import agreement, recorded, replay, weights
from accel_train.rerun.receipt import Result, write_receipt
from accel_train.rerun.replay import Request
from accel_train.rerun.samples import again
from accel_train.rerun.samples.again import Beginning
from accel_train.rerun.upgrade import report
from accel_train.rerun.upgrade.environment import open_environment, this_environment
from accel_train.rerun.upgrade.report import Comparison, Located
from accel_train.rerun.upgrade.sides import NAMES, Side, Trained
from accel_train.rerun.upgrade.traces import Difference, first_difference

ROUNDS = 3
"""Most recordings in one environment. The second one confirms the first, and keeps the outputs that differ."""


@dataclass(frozen=True)
class _Window:
    """The steps to train, and their beginning."""

    beginning: Beginning
    first: int
    last: int


def upgrade(request: Request, place: str) -> int:
    """Compare a window in two environments, print and write the receipt. Return 0 if it is the same, else 1.

    Raises ``UsageError``. Main thread only, because it handles the stop signals.
    """
    first, last = request.window
    # Entered first, so that a signal leaves nothing behind.
    with tempfile.TemporaryDirectory(prefix="accel-train-upgrade-") as name, stop_signals_raise():
        folder = Path(name)
        try:
            environments = (this_environment(), open_environment(place))
            run = replay.open_run(request.run, first, last, folder)
            recipe = recorded.recipe_of(run, request.recipe)
            beginning = again.find_beginning(run, recipe, first, f"--steps {request.steps}")
            sides = [
                Side(side, environment, request.machine, folder / side)
                for side, environment in zip(NAMES, environments, strict=True)
            ]
            print("\n".join(report.head(sides, beginning, first, last)), flush=True)
            found = _compare(request, _Window(beginning, first, last), sides)
            path = expand_path(request.receipt or f"upgrade-{run.run_id}-{first}-{last}.json")
            write_receipt(
                path, run.run_id, recipe, beginning.checkpoint, found.starts, found.result, report.as_json(found)
            )
        except RunFailedError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        except InterruptedRunError as signal_name:
            print(f"interrupted by {signal_name}: nothing is compared", file=sys.stderr, flush=True)
            return 1
    print("\n".join(report.lines(found)), flush=True)
    print(f"receipt: {path}", flush=True)
    return 1 if found.result.verdict == "different" else 0


def _compare(request: Request, window: _Window, sides: Sequence[Side]) -> Comparison:
    """Train both sides and, if they differ, record the first step that does."""
    here, there = trained = [side.train(window.beginning, window.last) for side in sides]
    rows = agreement.rows_of(here.run.lines("train"), there.run.lines("train"))
    # The copied log has the lines up to the beginning, which neither side has trained.
    rows = [row for row in rows if row.step > window.beginning.step]
    saved = [dict(one.run.checkpoints)[window.last] for one in trained]
    end = weights.compare_weights(window.last, saved[0], saved[1], NAMES)
    starts = [one.run.last_start() for one in trained]
    reasons = agreement.reasons_for_other_bits(starts[:1], starts[1])
    verdict = agreement.verdict(rows, [end], reasons, request.tolerance)
    result = Result(
        (window.first, window.last), window.beginning.step, rows, [end], reasons, request.tolerance, verdict
    )
    differing = {row.step: list(row.differing) for row in rows}
    for step, parts in here.states.items():
        differing.setdefault(step, []).extend(report.unequal(parts, there.states.get(step, {})))
    first = min((step for step, names in differing.items() if names), default=None)
    located: Located | None = None
    if first is not None:
        located = Located(first, differing[first])
        if first > window.beginning.step:
            located = _locate(located, window, sides, trained)
    return Comparison(
        environments=[side.environment for side in sides],
        starts={side: [start] for side, start in zip(NAMES, starts, strict=True)},
        result=result,
        located=located,
        as_recorded=_as_recorded(window, here),
    )


def _as_recorded(window: _Window, here: Trained) -> int | None:
    """Return the first logged step with other bits in the run itself, 0 for none, None without a logged step."""
    wanted = window.beginning.run.lines("train")
    logged = {step: line for step, line in wanted.items() if window.beginning.step < step <= window.last}
    if not logged:
        return None
    rows = agreement.rows_of(logged, here.run.lines("train"))
    return next((row.step for row in rows if row.differing), 0)


def _locate(located: Located, window: _Window, sides: Sequence[Side], trained: Sequence[Trained]) -> Located:
    """Record the operators of the step in both environments until two recordings agree on the first difference."""
    layout = trained[0].run.last_start().environment
    if layout.get("world_size") != 1:
        return located.because("operators are recorded in one process only; give --num_processes 1")
    found: Difference | None = None
    for number in range(ROUNDS):
        before = found
        for side, name in zip(sides, ("here", "there"), strict=True):
            keep = None if found is None else getattr(found, name)[0]
            side.record(window.beginning, window.last, located.step, keep)
        found = first_difference(sides[0].recorded(), sides[1].recorded())
        if number and found == before:
            break
    return report.locate(located, found, sides, trained)
