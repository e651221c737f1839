"""The two trainings of a window: one in this environment, one in the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.rerun import recorded
from accel_train.rerun.agreement import Sides
from accel_train.rerun.recorded import RecordedRun
from accel_train.rerun.samples import again
from accel_train.rerun.samples.again import Beginning
from accel_train.rerun.starts import Line
from accel_train.rerun.training import Machine
from accel_train.rerun.upgrade.environment import Environment
from accel_train.rerun.upgrade.operators import kept_path
from accel_train.rerun.upgrade.traces import Recorded, Trace, unstable_values

NAMES: Sides = ("here", "upgraded")


@dataclass(frozen=True)
class Trained:
    """A training of the window."""

    run: RecordedRun
    states: Mapping[int, Mapping[str, int]]
    """Step -> part of the state -> hash after it. The first step is the one it began with."""


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
        return Trained(recorded.open_run(str(self.folder / "window" / "run")), states)

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
