"""The page of a report, from the runs to HTML. Everything that comes from a file is escaped."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files as resources
from typing import Any

from accel_train import __version__
from accel_train.metrics.records import plain
from accel_train.store.names import REPORT
from accel_train.watching.html_report.charts import BUCKETS, Chart, Curve, charts_of
from accel_train.watching.html_report.drawing import COLORS, LEFT, RIGHT, WIDTH, draw
from accel_train.watching.html_report.events import Event, events_of
from accel_train.watching.html_report.facts import facts_of
from accel_train.watching.html_report.samples import samples_html
from accel_train.watching.run_files import RunFiles
from accel_train.watching.run_state import Extremum, Metric, RunState

GENERATOR = '<meta name="generator" content="accel-train report">'
# Even a mistake in the escaping could neither load nor send anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
EVENTS_LISTED = 200
"""Rows of the table of events. The newest are kept."""
ON_CURVES = ("restart", "save", "evaluation", "warning", "not finite", "stop", "crash")
"""Kinds of events that are marked. Start and end are the ends of the curve."""


@dataclass(frozen=True)
class ReportedRun:
    """A run with its name in the report."""

    name: str
    files: RunFiles
    state: RunState


def page_html(runs: Sequence[ReportedRun]) -> str:
    """Return the page."""
    charts = charts_of([(run.name, run.files.records) for run in runs])
    last_step = max(run.state.step for run in runs)
    title = escape(", ".join(run.name for run in runs))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        GENERATOR,
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{_resource('page.css')}</style>",
        "</head>",
        "<body>",
        f"<h1>{title}</h1>",
        *_heads(runs),
        *_curves(charts, runs, last_step),
        *_metrics(runs),
        *_samples(runs),
        *_events(runs),
        *_options(runs),
        _footer(runs[0].files.now),
        f'<script type="application/json" id="data">{_data(charts, last_step)}</script>',
        f"<script>\n{_resource('page.js')}</script>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


def _resource(name: str) -> str:
    return (resources("accel_train.watching.html_report") / name).read_text(encoding="utf-8")


def _heads(runs: Sequence[ReportedRun]) -> list[str]:
    parts: list[str] = []
    for index, run in enumerate(runs):
        parts.append("<section>")
        if len(runs) > 1:
            parts.append(f'<h2><span class="swatch c{index % COLORS}"></span>{escape(run.name)}</h2>')
        parts.append('<dl class="facts">')
        for name, text in facts_of(run.files, run.state):
            shown = escape(text)
            if name in ("Command", "To resume"):
                shown = _command(text)
            parts.append(f"<div><dt>{escape(name)}</dt><dd>{shown}</dd></div>")
        parts += ["</dl>", "</section>"]
    return parts


def _command(text: str) -> str:
    """Keep each word in one piece: a browser would break a line inside ``--``."""
    words = [f"<span>{escape(word)}</span>" for word in text.split(" ")]
    return f"<code>{' '.join(words)}</code>"


# ------------------------------------------------------------------------------------------------------------- curves
def _curves(charts: Sequence[Chart], runs: Sequence[ReportedRun], last_step: int) -> list[str]:
    if not charts:
        return ["<section><h2>Curves</h2><p>No curve yet: that takes two training lines.</p></section>"]
    events: list[tuple[str, Event]] = []
    for index, run in enumerate(runs):
        # Of one run they are gray, since its colors are those of its modes.
        color = f"c{index % COLORS}" if len(runs) > 1 else ""
        events += [(color, event) for event in events_of(run.files.records) if event.kind in ON_CURVES]
    parts = ["<section>", "<h2>Curves</h2>", *_controls(charts, events), '<div class="charts">']
    for number, chart in enumerate(charts):
        parts.append(f'<figure class="chart" data-chart="{number}">')
        parts.append(f"<figcaption>{escape(chart.title)} <small>{escape(chart.unit)}</small></figcaption>")
        parts += [draw(chart, events, last_step), '<div class="keys">']
        parts += [_key(index, curve) for index, curve in enumerate(chart.curves)]
        parts += ["</div>", "</figure>"]
    return [*parts, "</div>", *_thinning(charts), "</section>"]


def _controls(charts: Sequence[Chart], events: Sequence[tuple[str, Event]]) -> list[str]:
    parts = ['<p class="controls" hidden>']
    if any(curve.smooth for chart in charts for curve in chart.curves):
        parts.append('<label><input type="checkbox" data-toggle="raw" checked> logged points</label>')
        parts.append('<label><input type="checkbox" data-toggle="smooth" checked> smoothed</label>')
    if events:
        parts.append('<label><input type="checkbox" data-toggle="events" checked> events</label>')
    parts.append("</p>")
    kinds = [kind for kind in ON_CURVES if any(event.kind == kind for _, event in events)]
    if kinds:
        keys = [f'<span class="key {kind.replace(" ", "-")}">{kind}</span>' for kind in kinds]
        parts.append(f'<p class="events-key">{" ".join(keys)}</p>')
    return parts


def _key(index: int, curve: Curve) -> str:
    dashed = " dashed" if curve.dashed else ""
    swatch = f'<span class="swatch c{curve.color % COLORS}{dashed}"></span>'
    last = f'<span class="last">{curve.values[-1]:.4g}</span>'
    return f'<label><input type="checkbox" data-curve="{index}" checked>{swatch}{escape(curve.label)} {last}</label>'


def _thinning(charts: Sequence[Chart]) -> list[str]:
    """Say how the page differs from the log."""
    notes: list[str] = []
    curves = [curve for chart in charts for curve in chart.curves]
    if any(curve.smooth for curve in curves):
        notes.append("Faint lines are the logged points, strong ones their exponential mean over all logged points.")
    thinned = max((curve for curve in curves if curve.logged > len(curve.steps)), key=_logged, default=None)
    if thinned is not None:
        notes.append(
            f"Long curves are thinned: each of {BUCKETS} equal stretches keeps its lowest and its highest point, so no "
            f"spike is lost. The longest has {thinned.logged:,} logged points; {len(thinned.steps):,} are drawn."
        )
    notes.append("Values that are not finite are marked as events and not drawn.")
    return [f'<p class="note">{" ".join(notes)}</p>']


def _logged(curve: Curve) -> int:
    return curve.logged


def _data(charts: Sequence[Chart], last_step: int) -> str:
    """Return the points of the charts as JSON, for the script and for whoever wants the numbers."""
    described: list[dict[str, Any]] = []
    for chart in charts:
        curves = [
            {"label": curve.label, "steps": curve.steps, "values": curve.values, "logged": curve.logged}
            for curve in chart.curves
        ]
        described.append({"title": chart.title, "unit": chart.unit, "curves": curves})
    data = {"width": WIDTH, "left": LEFT, "right": RIGHT, "last_step": last_step, "charts": described}
    text = json.dumps(plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A label with </script> must not end the element.
    return text.replace("<", "\\u003c")


# ------------------------------------------------------------------------------------------------------------- tables
def _metrics(runs: Sequence[ReportedRun]) -> list[str]:
    rows = [[run.name, *_metric_row(metric)] for run in runs for metric in run.state.metrics]
    if not rows:
        return []
    head = ["run", "metric", "latest (step)", "lowest (step)", "highest (step)"]
    # One run needs no name, and the only evaluation is its own extremum.
    first = 0 if len(runs) > 1 else 1
    last = 3 if all(row[2] == row[3] == row[4] for row in rows) else 5
    shown = [row[first:last] for row in rows]
    return ["<section>", "<h2>Evaluations</h2>", *_table(head[first:last], shown), "</section>"]


def _metric_row(metric: Metric) -> list[str]:
    row = [metric.name, *(_extremum(one) for one in (metric.latest, metric.lowest, metric.highest))]
    if metric.best is not None:
        row[2 if metric.best == metric.lowest else 3] += " best"
    return row


def _extremum(found: Extremum | None) -> str:
    return "-" if found is None else f"{found.value:.5g} ({found.step:,})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    parts = ['<div class="table"><table>', _row(head, "th"), *(_row(row, "td") for row in rows)]
    return [*parts, "</table></div>"]


def _row(cells: Sequence[str], tag: str) -> str:
    # A phone may break a long name behind an underscore or a dot between letters.
    texts = [re.sub(r"(?<=[a-z])([_.])(?=[a-z])", r"\1<wbr>", escape(cell)) for cell in cells]
    return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"


def _events(runs: Sequence[ReportedRun]) -> list[str]:
    parts: list[str] = []
    for run in runs:
        events = events_of(run.files.records)
        shown = events[-EVENTS_LISTED:]
        rows = [[f"{event.step:,}", event.kind, _clock(event.time), event.text] for event in shown]
        if not rows:
            continue
        name = f" of {escape(run.name)}" if len(runs) > 1 else ""
        cut = f", the last {len(shown)} of {len(events)}" if len(shown) < len(events) else f" ({len(events)})"
        parts.append(f"<details><summary>Events{name}{cut}</summary>")
        parts += [*_table(["step", "event", "time (UTC)", "what"], rows), "</details>"]
    return ["<section>", "<h2>Events</h2>", *parts, "</section>"] if parts else []


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _samples(runs: Sequence[ReportedRun]) -> list[str]:
    parts: list[str] = []
    for run in runs:
        samples = samples_html(run.files.directory / REPORT)
        if samples and len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        parts += samples
    return ["<section>", "<h2>Samples</h2>", *parts, "</section>"] if parts else []


def _options(runs: Sequence[ReportedRun]) -> list[str]:
    """List every option of each run, and before them those in which runs differ."""
    if not any(run.files.options for run in runs):
        return []
    parts = ["<section>", "<h2>Options</h2>"]
    if len(runs) > 1:
        options = [run.files.options for run in runs]
        names = dict.fromkeys(name for one in options for name in one)
        differing = [name for name in names if any(one.get(name) != options[0].get(name) for one in options)]
        rows = [[name, *(_value(one, name) for one in options)] for name in differing]
        parts += [*_table(["differing option", *(run.name for run in runs)], rows)]
    for run in runs:
        rows = [[name, _value(run.files.options, name)] for name in run.files.options]
        summary = f"All options of {escape(run.name)} ({len(rows)})"
        parts += [f"<details><summary>{summary}</summary>", *_table(["option", "value"], rows), "</details>"]
    return [*parts, "</section>"]


def _value(options: Mapping[str, Any], name: str) -> str:
    return json.dumps(plain(options.get(name)), ensure_ascii=False)


def _footer(now: float) -> str:
    return f"<footer>Written by accel-train {__version__} on {_clock(now)} UTC.</footer>"
