"""Sections of the page below its curves: evaluations, samples, events and options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from accel_train.metrics.records import plain
from accel_train.store.names import REPORT
from accel_train.watching.html_report.events import Event, events_of
from accel_train.watching.html_report.markup import clock, details, section, table
from accel_train.watching.html_report.samples import samples_html
from accel_train.watching.run_files import RunFiles
from accel_train.watching.run_state import Extremum, Metric, RunState

EVENTS_LISTED = 200
"""Maximum number of rows in the table of events. The newest are kept."""


@dataclass(frozen=True)
class ReportedRun:
    """A run with its name in the report."""

    name: str
    files: RunFiles
    state: RunState


def evaluations(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the newest, the lowest and the highest value of each metric."""
    head = ["run", "metric", "latest (step)", "lowest (step)", "highest (step)"]
    rows: list[Sequence[str]] = []
    for run in runs:
        rows += [[run.name, *_metric_row(metric)] for metric in run.state.metrics]
    if not rows:
        return []
    # The only evaluation is its own extremum.
    if all(row[2] == row[3] == row[4] for row in rows):
        head = head[:3]
    # One run needs no name.
    if len(runs) == 1:
        head = head[1:]
        rows = [row[1:] for row in rows]
    shown = [row[: len(head)] for row in rows]
    return section("Evaluations", table(head, shown))


def _metric_row(metric: Metric) -> list[str]:
    lowest = _extremum(metric.lowest)
    highest = _extremum(metric.highest)
    # Set only if the run has an option that says which way is better.
    if metric.best is not None:
        if metric.best == metric.lowest:
            lowest += " best"
        else:
            highest += " best"
    return [metric.name, _extremum(metric.latest), lowest, highest]


def _extremum(extremum: Extremum | None) -> str:
    if extremum is None:
        return "-"
    return f"{extremum.value:.5g} ({extremum.step:,})"


def samples(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the samples written by the recipe of each run."""
    parts: list[str] = []
    for run in runs:
        found = samples_html(run.files.directory / REPORT)
        if found and len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        parts += found
    return section("Samples", parts)


def events(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the events of each run in the order of its file, folded away."""
    parts: list[str] = []
    for run in runs:
        run_events = events_of(run.files.records)
        rows = [_event_row(event) for event in run_events[-EVENTS_LISTED:]]
        if not rows:
            continue
        summary = f"Events of {run.name} ({len(run_events)})"
        # A page that leaves something out says so.
        if len(rows) < len(run_events):
            summary = f"Events of {run.name}, the last {len(rows)} of {len(run_events)}"
        parts += details(summary, table(["step", "event", "time (UTC)", "what"], rows))
    return section("Events", parts)


def _event_row(event: Event) -> list[str]:
    return [f"{event.step:,}", event.kind, clock(event.time), event.text]


def options(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the options in which runs differ, then all options of each, folded away."""
    parts: list[str] = []
    # The short table comes first, because runs are compared for their differences.
    if len(runs) > 1:
        parts += _differing_options(runs)
    for run in runs:
        rows = [[name, _value(run.files.options, name)] for name in run.files.options]
        if rows:
            parts += details(f"All options of {run.name} ({len(rows)})", table(["option", "value"], rows))
    return section("Options", parts)


def _differing_options(runs: Sequence[ReportedRun]) -> list[str]:
    trees = [run.files.options for run in runs]
    # A dict keeps the order of the config, which a set would lose.
    names = dict.fromkeys(name for tree in trees for name in tree)
    rows: list[Sequence[str]] = []
    for name in names:
        values = [_value(tree, name) for tree in trees]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return []
    return table(["differing option", *(run.name for run in runs)], rows)


def _value(tree: Mapping[str, Any], name: str) -> str:
    return json.dumps(plain(tree.get(name)), ensure_ascii=False)
