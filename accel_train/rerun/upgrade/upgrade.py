"""``accel-train replay --upgrade``: train a window of a run here and in another environment, and compare the two."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.compare.runs import InterruptedRunError, RunFailedError, report_failure, stop_signals_raise
from accel_train.rerun import agreement, recorded, weights
from accel_train.rerun.receipt import Result, receipt_file, write_receipt
from accel_train.rerun.recorded import RecordedRun
from accel_train.rerun.samples import again
from accel_train.rerun.samples.again import Beginning
from accel_train.rerun.starts import Line
from accel_train.rerun.training import Machine
from accel_train.rerun.upgrade import report
from accel_train.rerun.upgrade.environment import Environment, open_environment, this_environment
from accel_train.rerun.upgrade.operators import kept_path
from accel_train.rerun.upgrade.report import NAMES, Comparison, Located
from accel_train.rerun.upgrade.traces import Difference, Recorded, Trace, first_difference, unstable_values

if TYPE_CHECKING:
    from accel_train.rerun.replay import Request

ROUNDS = 3
"""Most recordings in one environment. The second one confirms the first, and keeps the outputs that differ."""


@dataclass(frozen=True)
class Trained:
    """A training of the window."""

    run: RecordedRun
    states: Mapping[int, Mapping[str, int]]
    """Step -> part of the state -> hash after it. The first step is the one it began with."""
    checkpoint: Path
    """The checkpoint at the end."""


@dataclass
class Side:
    """One environment, and what was recorded of a step in it."""

    name: str
    environment: Environment
    machine: Machine
    folder: Path
    recordings: list[Trace] = field(default_factory=list[Trace])
    kept: Path | None = None
    """Outputs of the operator that the last recording was told to keep."""
    line: Line = field(default_factory=dict[str, Any])
    """Log line of the recorded step."""

    def train(self, beginning: Beginning, last: int) -> Trained:
        """Train the window, with a line for each step. Raises like ``compare.runs.run_once``."""
        found = self._observe(beginning, last, {"fingerprints": {}}, "window")
        states = {int(step): parts for step, parts in found["states"].items()}
        run = recorded.open_run(str(self.folder / "window" / "run"))
        saved = dict(run.checkpoints)
        if last not in saved:
            raise RunFailedError(
                f"{self.name}, the recipe ended by itself at step {run.last_step}, so there is no step {last} to "
                "compare; give a window that ends there"
            )
        return Trained(run, states, saved[last])

    def record(self, beginning: Beginning, last: int, step: int, keep: int | None) -> None:
        """Train up to ``step`` again and record its operators, with the outputs of the one at position ``keep``."""
        name = f"recording-{len(self.recordings)}"
        found = self._observe(beginning, last, {"operators": {"step": step, "keep": keep}}, name)
        self.recordings.append(found["operators"])
        path = kept_path(str(self.folder / name / again.OBSERVED))
        self.kept = path if path.is_file() else None
        self.line = recorded.open_run(str(self.folder / name / "run")).lines("train").get(step, {})

    def recorded(self) -> Recorded:
        """Return the first recording, with the values that a later one did not confirm."""
        first, *others = self.recordings
        unstable = frozenset[Any]().union(*(unstable_values(first, other) for other in others))
        return Recorded(first, unstable)

    def _observe(self, beginning: Beginning, last: int, request: Mapping[str, Any], name: str) -> dict[str, Any]:
        return again.observe(beginning, last, request, self.folder / name, self._command, log_every=1)

    def _command(self, program: Path, arguments: Sequence[str]) -> list[str]:
        return self.machine.command(program, arguments, self.environment.interpreter)


@dataclass(frozen=True)
class _Window:
    """The steps to train, and their beginning."""

    beginning: Beginning
    first: int
    last: int


def upgrade(request: Request, place: str) -> int:
    """Compare a window in two environments, print and write the receipt. Return 1 for ``different``, else 0.

    Raises ``UsageError``. Main thread only, because it handles the stop signals.
    """
    first, last = request.window
    # Entered first, so that a signal leaves nothing behind.
    with tempfile.TemporaryDirectory(prefix="accel-train-upgrade-") as name, stop_signals_raise():
        folder = Path(name)
        try:
            environments = (this_environment(), open_environment(place))
            run = recorded.open_window(request.run, first, last, folder)
            recipe = recorded.recipe_of(run, request.recipe)
            beginning = again.find_beginning(run, recipe, first, f"--steps {request.steps}")
            sides = [
                Side(side, environment, request.machine, folder / side)
                for side, environment in zip(NAMES, environments, strict=True)
            ]
            path = receipt_file(request.receipt, f"upgrade-{run.run_id}-{first}-{last}.json")
            print("\n".join(report.head(sides, beginning, first, last)), flush=True)
            found = _compare(request, _Window(beginning, first, last), sides)
            write_receipt(
                path, run.run_id, recipe, beginning.checkpoint, found.starts, found.result, report.as_json(found)
            )
        except (RunFailedError, InterruptedRunError) as error:
            return report_failure(error, "nothing is compared")
    print("\n".join(report.lines(found)), flush=True)
    print(f"receipt: {path}", flush=True)
    return 1 if found.result.verdict == "different" else 0


def _compare(request: Request, window: _Window, sides: Sequence[Side]) -> Comparison:
    """Train both sides and, if they differ, record the first step that does."""
    here, there = trained = [side.train(window.beginning, window.last) for side in sides]
    rows = agreement.rows_of(here.run.lines("train"), there.run.lines("train"))
    # The copied log has the lines up to the beginning, which neither side has trained.
    rows = [row for row in rows if row.step > window.beginning.step]
    end = weights.compare_weights(window.last, here.checkpoint, there.checkpoint, NAMES)
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
    """Return the first logged step that differs from the run itself, 0 for none, None without a logged step."""
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
        # The kept outputs are those of another operator.
        for side in sides:
            side.kept = None
    return report.locate(located, found, sides, trained)
