"""Record the starts of a run, and judge whether they make up one trajectory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_train.metrics.records import last_pass, read_metrics, write_json
from accel_train.precision import largest, relative
from accel_train.store import manifest
from accel_train.store.atomic_files import replace_file
from accel_train.store.names import METRICS_FILE, REPORT

RECORD_FILE = "anywhere.json"
PAGE = "anywhere.md"
TOLERANCE = 1e-5
"""Largest relative difference of a loss in fp32 between two layouts."""

REACHED = ("train", "checkpoint", "end")
"""Events of a trained step."""

Line = Mapping[str, Any]
Losses = Mapping[int, float]


@dataclass(frozen=True)
class Segment:
    """One start, from its first to its last step."""

    layout: str
    processes: int
    ended: str
    """Reason of the end: finished, stopped, a change of devices, or a failure with its exit code."""
    run_id: str | None
    """None if the start failed before it had a run directory."""
    resumed_from: int | None
    """Step of the checkpoint resumed from, 0 without one. None if the start did not get as far as training."""
    last_step: int | None
    """Last step in the log, by a training line, a checkpoint or the end of the run."""
    seconds: float
    repeated: Mapping[int, float] = field(default_factory=dict[int, float])
    """Relative difference of the loss by step, for steps that an earlier start had logged too."""
    reached_before: int = 0
    """Last step in the log or in a checkpoint before this start, whatever command trained it."""


@dataclass(frozen=True)
class Observed:
    """State of a run's log and checkpoints at one moment."""

    starts: int = 0
    losses: Losses = field(default_factory=dict[int, float])
    reached: int = 0
    run_id: str | None = None

    @staticmethod
    def read(directory: Path) -> Observed:
        """Read ``metrics.jsonl`` and the names of the checkpoints. Empty if there is none."""
        records = _records(directory)
        starts = sum(record.get("event") == "environment" for record in records)
        # A kill may come between the commit of a checkpoint and its line in the log.
        saved = [step for step, _ in manifest.committed(directory / "checkpoints")]
        reached = max([*_reached(records), *saved], default=0)
        return Observed(starts, losses_of(records), reached, run_id(directory))


def losses_of(records: Sequence[Line]) -> dict[int, float]:
    """Return the logged losses by step. If a step was repeated after a restart, the last loss counts."""
    lines = last_pass(records, "train")
    losses: dict[int, float] = {}
    for line in lines:
        if isinstance(line.get("loss"), (int, float)):
            losses[line["step"]] = float(line["loss"])
    return losses


def _reached(records: Sequence[Line]) -> list[int]:
    # Not every step has a training line.
    return [int(line["step"]) for line in records if line.get("event") in REACHED]


def segment_of(
    directory: Path, before: Observed, *, layout: str, processes: int, ended: str, seconds: float
) -> Segment:
    """Describe the start that has just ended. ``before`` was read before it began."""
    records = _records(directory)
    present = run_id(directory)
    # --overwrite has deleted the log that was read before.
    if before.run_id not in (None, present):
        before = Observed()
    beginnings = [number for number, record in enumerate(records) if record.get("event") == "environment"]
    resumed: int | None = None
    last: int | None = None
    repeated: dict[int, float] = {}
    # A start that failed early has written nothing, and the newest lines are of an earlier one.
    if len(beginnings) > before.starts:
        # After running out of memory or a rollback the launcher starts the run again by itself, in the same segment.
        ends = [*beginnings[1:], len(records)]
        own = records[beginnings[before.starts] :]
        first = records[beginnings[before.starts] : ends[before.starts]]
        resumed = next((int(record["step"]) for record in first if record.get("event") == "resume"), 0)
        losses = losses_of(own)
        last = max([resumed, *_reached(own)])
        # After a rollback the losses are meant to differ.
        if not any(line.get("event") == "rollback" for line in own):
            common = losses.keys() & before.losses.keys()
            repeated = {step: relative(before.losses[step], losses[step]) for step in sorted(common)}
    return Segment(layout, processes, ended, present, resumed, last, seconds, repeated, before.reached)


def run_id(directory: Path) -> str | None:
    """Return the id in ``run.json``, or None without a readable one."""
    try:
        found = json.loads((directory / "run.json").read_text()).get("run_id")
    except (OSError, ValueError, AttributeError):
        # A start repairs a damaged file, or refuses it with what to do.
        return None
    return found if isinstance(found, str) else None


def _records(directory: Path) -> list[dict[str, Any]]:
    path = directory / METRICS_FILE
    return read_metrics(path) if path.is_file() else []


@dataclass(frozen=True)
class Verdict:
    """Judgement on whether the starts make up one trajectory, with the compared values."""

    problems: tuple[str, ...]
    """Reasons against it. Empty if it is one trajectory."""
    steps: int
    """Last step reached."""
    layouts: tuple[str, ...]
    """Layouts without duplicates, in order of first use."""
    repeated: int
    """Logged steps that were trained more than once, after a failure."""
    largest_difference: float
    """Largest relative difference between the losses of a repeated step."""


def judge(segments: Sequence[Segment], precision: str) -> Verdict:
    """Check that every start continued the same run from a step that an earlier one had reached."""
    trained = [segment for segment in segments if segment.resumed_from is not None]
    problems: list[str] = []
    reached = 0
    for number, segment in enumerate(trained, start=1):
        begin = segment.resumed_from or 0
        # Compared with the previous start: numbers begin at 1, indices at 0.
        if number > 1 and segment.run_id != trained[number - 2].run_id:
            problems.append(f"start {number} belongs to another run, {segment.run_id}")
        # The run may be older than this command, which then vouches for what follows.
        if number == 1:
            reached = begin
        # Another command may have trained it in between.
        reached = max(reached, segment.reached_before)
        if begin > reached:
            problems.append(f"start {number} began at step {begin}, and no start before it got beyond {reached}")
        reached = max(reached, segment.last_step or 0)
    differences = [value for segment in trained for value in segment.repeated.values()]
    worst = largest(differences)
    # In a lower precision the layout decides how sums are rounded, so the difference is only reported.
    if precision == "fp32" and worst > TOLERANCE:
        problems.append(
            f"a repeated step has another loss: {worst:.1e} relative, and at most {TOLERANCE:.0e} is allowed"
        )
    layouts = tuple(dict.fromkeys(segment.layout for segment in trained))
    return Verdict(tuple(problems), reached, layouts, len(differences), worst)


def load(directory: Path) -> list[Segment]:
    """Return the segments of earlier calls of the command for the same run, or none."""
    try:
        content = json.loads((directory / RECORD_FILE).read_text())
        segments = [Segment(**_with_steps(entry)) for entry in content["segments"]]
    except (OSError, ValueError, KeyError, TypeError):
        # Only the record of earlier starts is lost, which is no reason to end a run.
        return []
    # Leaves out segments of a run that --overwrite has replaced since.
    present = run_id(directory)
    return [segment for segment in segments if segment.run_id in (present, None)]


def _with_steps(entry: Line) -> dict[str, Any]:
    # The keys of a JSON object are texts, and so are infinite values.
    return {**entry, "repeated": {int(step): float(value) for step, value in entry["repeated"].items()}}


def save(directory: Path, segments: Sequence[Segment], precision: str) -> Verdict:
    """Write the record and its page below ``directory``, which must exist, and return the verdict."""
    verdict = judge(segments, precision)
    write_json(
        directory / RECORD_FILE,
        {"verdict": asdict(verdict), "segments": [asdict(segment) for segment in segments]},
    )
    report = directory / REPORT
    report.mkdir(exist_ok=True)
    replace_file(report / PAGE, page(segments, verdict).encode())
    return verdict


def page(segments: Sequence[Segment], verdict: Verdict) -> str:
    """Build the page about a run's starts, in Markdown."""
    rows = ["| start | layout | from step | to step | minutes | ended |", "|---|---|---|---|---|---|"]
    for number, segment in enumerate(segments, start=1):
        first = "-" if segment.resumed_from is None else str(segment.resumed_from)
        last = "-" if segment.last_step is None else str(segment.last_step)
        minutes = f"{segment.seconds / 60:.1f}"
        rows.append(f"| {number} | {segment.layout} | {first} | {last} | {minutes} | {segment.ended} |")
    table = "\n".join(rows)
    return f"# One run over {len(segments)} start(s)\n\n{describe(verdict)}\n\n{table}\n"


def describe(verdict: Verdict) -> str:
    """Return the verdict in one sentence or one line for each problem."""
    if verdict.problems:
        return "Not one trajectory: " + "; ".join(verdict.problems) + "."
    text = f"One trajectory of {verdict.steps} steps on {len(verdict.layouts)} layout(s)"
    if verdict.repeated:
        text += (
            f"; {verdict.repeated} logged step(s) were trained again after a failure, with losses equal within "
            f"{verdict.largest_difference:.1e}"
        )
    return text + "."
