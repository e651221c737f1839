"""The page of a report: its head, its curves, and the data and the script behind them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files as resources
from typing import Any, get_args

from accel_train import __version__
from accel_train.metrics.records import plain
from accel_train.watching.html_report import tables
from accel_train.watching.html_report.charts import BUCKETS, Chart, Curve, charts_of
from accel_train.watching.html_report.drawing import COLORS, LEFT, RIGHT, WIDTH, draw
from accel_train.watching.html_report.events import Event, Kind, events_of
from accel_train.watching.html_report.facts import COMMANDS, facts_of
from accel_train.watching.html_report.markup import clock, command, section
from accel_train.watching.html_report.tables import ReportedRun

GENERATOR = '<meta name="generator" content="accel-train report">'
# With this policy even a mistake in the escaping could neither load nor send anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
ON_CURVES = [kind for kind in get_args(Kind) if kind not in ("start", "end")]
"""Kinds of events to mark on curves. Start and end need no mark: they are the ends of the curve."""


def page_html(runs: Sequence[ReportedRun]) -> str:
    """Return the page."""
    charts = charts_of([(run.name, run.files.records) for run in runs])
    # One axis of steps for all charts, so that events line up.
    last_step = max(run.state.step for run in runs)
    title = escape(", ".join(run.name for run in runs))
    body = [
        f"<h1>{title}</h1>",
        *_heads(runs),
        *section("Curves", _curves(charts, runs, last_step)),
        *tables.evaluations(runs),
        *tables.samples(runs),
        *tables.events(runs),
        *tables.options(runs),
        f"<footer>Written by accel-train {__version__} on {clock(runs[0].files.now)} UTC.</footer>",
        f'<script type="application/json" id="data">{_data(charts, last_step)}</script>',
        f"<script>\n{_resource('page.js')}</script>",
    ]
    parts = ["<!DOCTYPE html>", '<html lang="en">', *_head(title), "<body>", *body, "</body>", "</html>", ""]
    return "\n".join(parts)


def _head(title: str) -> list[str]:
    return [
        "<head>",
        '<meta charset="utf-8">',
        GENERATOR,
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{_resource('page.css')}</style>",
        "</head>",
    ]


def _resource(name: str) -> str:
    """Return the text of a file beside this module, also if the package is installed from a wheel."""
    file = resources("accel_train.watching.html_report") / name
    return file.read_text(encoding="utf-8")


def _heads(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the facts of each run. If there are several, their headings are the legend of the colors."""
    parts: list[str] = []
    for index, run in enumerate(runs):
        parts.append("<section>")
        if len(runs) > 1:
            parts.append(f"<h2>{_swatch(index)}{escape(run.name)}</h2>")
        parts.append('<dl class="facts">')
        for name, text in facts_of(run.files, run.state):
            shown = command(text) if name in COMMANDS else escape(text)
            parts.append(f"<div><dt>{escape(name)}</dt><dd>{shown}</dd></div>")
        parts += ["</dl>", "</section>"]
    return parts


def _swatch(color: int, more: str = "") -> str:
    return f'<span class="swatch c{color % COLORS}{more}"></span>'


def _curves(charts: Sequence[Chart], runs: Sequence[ReportedRun], last_step: int) -> list[str]:
    if not charts:
        return ["<p>No curve yet: that takes two training lines.</p>"]
    events: list[tuple[str, Event]] = []
    for index, run in enumerate(runs):
        color = f"c{index % COLORS}"
        # The colors of a single run are those of its modes, so its events are gray.
        if len(runs) == 1:
            color = ""
        marked = [event for event in events_of(run.files.records) if event.kind in ON_CURVES]
        events += [(color, event) for event in marked]
    parts = [*_controls(charts, bool(events)), *_key_of_events(events), '<div class="charts">']
    for number, chart in enumerate(charts):
        parts += _figure(number, chart, events, last_step)
    return [*parts, "</div>", _notes(charts)]


def _controls(charts: Sequence[Chart], with_events: bool) -> list[str]:
    """Return the switches for parts of all charts. The script unhides them, since they do nothing without it."""
    parts = ['<p class="controls" hidden>']
    if any(curve.smooth for curve in _all_curves(charts)):
        parts += [_switch("raw", "logged points"), _switch("smooth", "smoothed")]
    if with_events:
        parts.append(_switch("events", "events"))
    return [*parts, "</p>"]


def _switch(name: str, text: str) -> str:
    return f'<label><input type="checkbox" data-toggle="{name}" checked> {text}</label>'


def _key_of_events(events: Sequence[tuple[str, Event]]) -> list[str]:
    seen = {event.kind for _, event in events}
    if not seen:
        return []
    kinds = [kind for kind in ON_CURVES if kind in seen]
    keys = [f'<span class="key {kind.replace(" ", "-")}">{kind}</span>' for kind in kinds]
    return ['<p class="events-key">', *keys, "</p>"]


def _figure(number: int, chart: Chart, events: Sequence[tuple[str, Event]], last_step: int) -> list[str]:
    parts = [
        f'<figure class="chart" data-chart="{number}">',
        f"<figcaption>{escape(chart.title)} <small>{escape(chart.unit)}</small></figcaption>",
        draw(chart, events, last_step),
        '<div class="keys">',
    ]
    for index, curve in enumerate(chart.curves):
        parts.append(_key(index, curve))
    return [*parts, "</div>", "</figure>"]


def _key(index: int, curve: Curve) -> str:
    """Return the legend entry of a curve, with its last value and a box that switches the curve off and on."""
    dashes = " dashed" if curve.dashed else ""
    swatch = _swatch(curve.color, dashes)
    last = f'<span class="last">{curve.values[-1]:.4g}</span>'
    box = f'<input type="checkbox" data-curve="{index}" checked>'
    return f"<label>{box}{swatch}{escape(curve.label)} {last}</label>"


def _all_curves(charts: Sequence[Chart]) -> list[Curve]:
    return [curve for chart in charts for curve in chart.curves]


def _notes(charts: Sequence[Chart]) -> str:
    """Return a note on how the curves differ from the logged values."""
    notes: list[str] = []
    curves = _all_curves(charts)
    if any(curve.smooth for curve in curves):
        notes.append("Faint lines are the logged points, strong ones their exponential mean over all logged points.")
    longest = max(curves, key=lambda curve: curve.logged)
    if longest.logged > len(longest.steps):
        notes.append(
            f"Long curves are thinned: each of {BUCKETS} equal stretches keeps its lowest and its highest point, so no "
            f"spike is lost. The longest has {longest.logged:,} logged points; {len(longest.steps):,} are drawn."
        )
    notes.append("Values that are not finite are marked as events and not drawn.")
    return f'<p class="note">{" ".join(notes)}</p>'


def _data(charts: Sequence[Chart], last_step: int) -> str:
    """Return the points of the charts as JSON, for the script and for other programs."""
    described = [_described(chart) for chart in charts]
    # The script needs these to turn the position of the pointer into a step.
    data = {"width": WIDTH, "left": LEFT, "right": RIGHT, "last_step": last_step, "charts": described}
    text = json.dumps(plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A label with </script> must not end the element.
    return text.replace("<", "\\u003c")


def _described(chart: Chart) -> dict[str, Any]:
    curves: list[dict[str, Any]] = []
    for curve in chart.curves:
        points = {"steps": curve.steps, "values": curve.values}
        curves.append({"label": curve.label, "logged": curve.logged, **points})
    return {"title": chart.title, "unit": chart.unit, "curves": curves}
