"""A page of the monitor as lines of text, for any width, with or without colours and Unicode."""

from __future__ import annotations

import itertools
import textwrap
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_train.metrics.progress import format_seconds
from accel_train.training.memory.description import described
from accel_train.watching.alerts import Alert
from accel_train.watching.run_state import Extremum, Loss, Metric, RunState, gpu_in_words, means

NAME_WIDTH = 12
BAR_WIDTH = 24
BLOCKS = "▁▂▃▄▅▆▇█"
BLOCKS_IN_ASCII = "_.-~=+*#"
STATUS_STYLE = {
    "starting": "yellow",
    "training": "green",
    "silent": "red",
    "finished": "green",
    "stopped": "yellow",
    "crashed": "red",
    "unrecorded": "yellow",
}
STYLES = {"bold": "1", "red": "1;31", "green": "1;32", "yellow": "1;33", "dim": "2"}


@dataclass(frozen=True)
class Watched:
    """A run with its alerts, for a page."""

    state: RunState
    alerts: Sequence[Alert]


@dataclass(frozen=True)
class Terminal:
    """Capabilities of the output."""

    width: int
    unicode: bool
    color: bool


@dataclass(frozen=True)
class Line:
    """A line of the page with one style."""

    text: str
    style: str = ""


def page(runs: Sequence[Watched], now: float, terminal: Terminal) -> list[str]:
    """Return the page, no line of it wider than the terminal."""
    alerts = sum(len(run.alerts) for run in runs)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    lines = [Line(f"{_count(len(runs), 'run')}, {_count(alerts, 'alert')}  {clock}", "dim")]
    # Above all runs, so that a terminal too short for the page still shows them.
    for run in runs:
        name = ""
        if len(runs) > 1:
            name = f"{run.state.name} "
        for alert in run.alerts:
            lines += [Line(text, "red") for text in _alert(name, alert, terminal.width)]
    for run in runs:
        lines.append(Line(""))
        lines += _run_lines(run.state, terminal)
    return [_shown(line, terminal) for line in lines]


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "s"
    return f"{number} {noun}{plural}"


def _run_lines(state: RunState, terminal: Terminal) -> list[Line]:
    lines = [Line(_headline(state), STATUS_STYLE[state.status])]
    directory = _shortened(state.directory, terminal.width - NAME_WIDTH - 2)
    rows = [("directory", directory)]
    # The reason for an alert is shown above already.
    if state.reason and state.status not in ("crashed", "silent"):
        rows.append(("", state.reason))
    rows.append(("progress", _progress(state, terminal)))
    rows += [("loss", text) for text in _losses(state.losses, terminal)]
    if state.speed is not None:
        rows.append(("throughput", _speed(state)))
    if state.memory_gib:
        rows.append(("memory", _memory(state.memory_gib)))
    room = max(1, terminal.width - NAME_WIDTH - 2)
    # Without the totals, which the newest training line has.
    parts = {name: state.memory_by_category.get(name) for name in ("held_bytes", "host_bytes")}
    rows += [("", text) for text in textwrap.wrap(described(parts), room)]
    if state.gpu:
        rows.append(("gpu", gpu_in_words(state.gpu)))
    rows.append(("checkpoint", _checkpoint(state)))
    for name, text in rows:
        lines.append(Line(f"  {name:<{NAME_WIDTH - 2}}  {text}"))
    # Last, as the longest part, because a short terminal cuts off the end of the page.
    lines += [Line(text) for text in _metric_table(state.metrics, terminal.width)]
    return lines


def _headline(state: RunState) -> str:
    text = f"{state.name}: {state.status}"
    # The age of a finished run's last line says nothing about its training.
    if state.last_line_seconds is not None and state.status in ("training", "starting", "silent"):
        text += f", last line {_age(state.last_line_seconds)}"
    return text


def _memory(memory_gib: Mapping[str, float]) -> str:
    parts: list[str] = []
    for name, size in memory_gib.items():
        words = name.removesuffix("_gib").replace("_", " ")
        parts.append(f"{words} {size:.2f} GiB")
    return ", ".join(parts)


def _progress(state: RunState, terminal: Terminal) -> str:
    parts = [f"step {state.step}"]
    # Without a length, as in a custom script, there is no fraction of it to show.
    if state.max_steps:
        # A run whose length was reduced is past its end.
        share = min(1.0, state.step / state.max_steps)
        full, empty = ("█", "░") if terminal.unicode else ("#", ".")
        # The step and the time left have to fit beside it.
        width = min(BAR_WIDTH, terminal.width // 4)
        done = int(share * width)
        bar = full * done + empty * (width - done)
        parts = [bar, f"{share:.0%}", f"step {state.step}/{state.max_steps}"]
    if state.eta_seconds is not None:
        parts.append(f"ETA {format_seconds(state.eta_seconds)}")
    return "  ".join(parts)


def _losses(losses: Sequence[Loss], terminal: Terminal) -> list[str]:
    """Return the newest value of each loss, with the curves below each other."""
    texts = [f"{loss.mode} {loss.value:.4g} at step {loss.step}".strip() for loss in losses]
    width = max(map(len, texts), default=0)
    room = max(0, terminal.width - NAME_WIDTH - 4 - width)
    shown: list[str] = []
    for text, loss in zip(texts, losses, strict=True):
        # Coarser if there is less room, so that it still reaches back to the first step.
        curve = sparkline(means(loss.curve, room), terminal.unicode)
        shown.append(f"{text:<{width}}  {curve}".rstrip())
    return shown


def sparkline(values: Sequence[float], unicode: bool) -> str:
    """Draw values as one line of bars between their lowest and their highest. Empty for fewer than two."""
    if len(values) < 2:
        return ""
    blocks = BLOCKS
    if not unicode:
        blocks = BLOCKS_IN_ASCII
    low = min(values)
    span = max(values) - low
    # A constant is drawn as a low line.
    if not span:
        return blocks[0] * len(values)
    highest = len(blocks) - 1
    levels = [round((value - low) / span * highest) for value in values]
    return "".join(blocks[level] for level in levels)


def _speed(state: RunState) -> str:
    speed = state.speed
    assert speed is not None, "asked for by the caller"
    text = f"{speed.samples_per_second:.4g} samples/s, median {speed.median_samples_per_second:.4g}"
    return f"{text} ({speed.change:+.0%})"


def _checkpoint(state: RunState) -> str:
    if state.checkpoint_step is None:
        return "none yet"
    if state.checkpoint_seconds is None:
        return f"step {state.checkpoint_step}, of unknown age"
    return f"step {state.checkpoint_step}, {_age(state.checkpoint_seconds)}"


def _metric_table(metrics: Sequence[Metric], width: int) -> list[str]:
    if not metrics:
        return []
    rows = [("evaluation", f"at step {metrics[0].latest.step}", "lowest (step)", "highest (step)")]
    rows += [_metric_row(metric) for metric in metrics]
    # The only evaluation is its own extremum.
    if all(metric.lowest == metric.highest for metric in metrics):
        rows = [row[:2] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Names are shortened rather than values, and at the front, because their ends differ more often.
    room = width - sum(widths[1:]) - 2 * len(widths)
    widths[0] = min(widths[0], max(NAME_WIDTH, room))
    lines: list[str] = []
    for name, *values in rows:
        cells = map(str.ljust, (_shortened(name, widths[0]), *values), widths)
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _metric_row(metric: Metric) -> tuple[str, ...]:
    lowest = _extremum(metric.lowest)
    highest = _extremum(metric.highest)
    if metric.best is not None and metric.best == metric.lowest:
        lowest += " best"
    elif metric.best is not None:
        highest += " best"
    return metric.name, f"{metric.latest.value:.4g}", lowest, highest


def _extremum(extremum: Extremum | None) -> str:
    if extremum is None:
        return "-"
    return f"{extremum.value:.4g} ({extremum.step})"


def _alert(name: str, alert: Alert, width: int) -> list[str]:
    text = f"ALERT {name}{alert.kind}"
    if alert.step is not None:
        text += f" at step {alert.step}"
    text += f": {alert.message}"
    # Wrapped, while other lines are cut, because its end may say what to do.
    return textwrap.wrap(text, max(20, width), subsequent_indent="  ")


def _age(seconds: float) -> str:
    return f"{format_seconds(seconds)} ago"


def _shortened(path: str, width: int) -> str:
    """Return the path, cut at the front if it is too long, because its end tells runs apart."""
    if len(path) <= width:
        return path
    return "..." + path[-max(0, width - 3) :]


def _cut(text: str, width: int) -> str:
    """Return the text, cut at the end if it is wider than ``width`` columns."""
    widths = [_columns(letter) for letter in text]
    if sum(widths) <= width:
        return text
    ends = itertools.accumulate(widths)
    fitting = sum(end <= width - 3 for end in ends)
    return text[:fitting] + "..."


def _columns(letter: str) -> int:
    """Return the columns of a character: 2 if wide, as in Chinese, 0 for a combining accent, else 1."""
    if unicodedata.combining(letter):
        return 0
    is_wide = unicodedata.east_asian_width(letter) in ("W", "F")
    return 2 if is_wide else 1


def _shown(line: Line, terminal: Terminal) -> str:
    # Names and messages come from files, and a control character could change the terminal.
    text = "".join(letter if letter.isprintable() else "?" for letter in line.text)
    if not terminal.unicode:
        text = text.encode("ascii", "replace").decode()
    text = _cut(text, terminal.width)
    style = STYLES.get(line.style)
    if not terminal.color or style is None:
        return text
    return f"\x1b[{style}m{text}\x1b[0m"
