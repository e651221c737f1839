"""A picture of a run, drawn from ``metrics.jsonl``."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from accel_train.atomic_files import replace_file
from accel_train.metrics.progress import LOSS_OF
from accel_train.metrics.records import read_metrics

Records = Sequence[Mapping[str, Any]]

HEAD = ("event", "step", "time", "elapsed_seconds", "processor_seconds")
NOT_DRAWN = ("seconds", "samples", "steps", "tokens", "count")
"""Last word of evaluation values that say how an evaluation was done, not what came out."""

EVALUATION_UNITS = {"nll": "nats per token", "accuracy": "fraction", "cosine": "cosine similarity"}
SMOOTH_FROM = 40
"""Points from which a noisy curve gets a smoothed one over it."""


@dataclass
class Series:
    """One line of a panel."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])

    def add(self, step: int, value: object) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
            self.steps.append(step)
            self.values.append(float(value))


@dataclass
class Panel:
    """One set of axes; lines by label, or text."""

    title: str
    unit: str
    lines: dict[str, Series]
    smooth: bool = False
    from_zero: bool = False
    last_value: bool = False
    text: str = ""

    def drawn(self) -> dict[str, Series]:
        """The lines of two points or more: a single one is no curve."""
        return {label: series for label, series in self.lines.items() if len(series.values) > 1}


def plot_curves(metrics_jsonl: str | os.PathLike[str], png_path: str | os.PathLike[str]) -> Path:
    """Draw loss, loss terms, evaluations, learning rate, gradient norm, throughput, step time and memory.

    Main process only. What a run does not have gets no panel; a run with no training line yet gets a picture
    that says so. Vertical lines mark resumes and losses that were not finite. The file is replaced whole.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    records = read_metrics(metrics_jsonl)
    panels = panels_of(records)
    columns = min(len(panels), 2 if len(panels) <= 4 else 3) or 1
    rows = ceil(len(panels) / columns) or 1
    figure = Figure(figsize=(max(4.9 * columns, 7.0), 3.1 * rows + 0.7), dpi=110, layout="constrained")
    figure.suptitle(_title(records, Path(metrics_jsonl)), fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    used = list(axes[: len(panels)])
    for axis, panel in zip(used, panels, strict=True):
        _draw(axis, panel)
    used = [axis for axis, panel in zip(used, panels, strict=True) if not panel.text]
    _draw_marks(used, _marks(records))
    for axis in used:
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.set_xlim(0, 1.02 * max(_last_step(records), 1))
        if (labels := len(axis.get_legend_handles_labels()[1])) > 1 or axis.get_title() != "Learning rate":
            axis.legend(fontsize=7.5 if labels <= 5 else 5.5, loc="best", framealpha=0.85)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if not panels:
        axes[0].text(0.5, 0.5, "no training line yet", ha="center", va="center", color="0.4")
    path = Path(png_path)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())
    return path


def panels_of(records: Records) -> list[Panel]:
    """What there is to draw, in order: losses, evaluations, then how the run went."""
    losses, course = _train_panels(last_pass(records, "train"))
    evaluations = _evaluation_panels(last_pass(records, "evaluation"))
    return [panel for panel in losses + evaluations + course if panel.drawn() or panel.text]


def last_pass(records: Records, event: str) -> list[Mapping[str, Any]]:
    """The lines of ``event`` by rising step; what was done again after a restart counts as last done."""
    lines: list[Mapping[str, Any]] = []
    for record in records:
        step = record.get("step")
        if record.get("event") == event and isinstance(step, int):
            while lines and lines[-1]["step"] >= step:
                lines.pop()
            lines.append(record)
    return lines


def _column(lines: Records, key: str, scale: float = 1.0) -> Series:
    series = Series()
    for line in lines:
        value = line.get(key)
        series.add(line["step"], value * scale if isinstance(value, (int, float)) else None)
    return series


def _keys(lines: Records) -> list[str]:
    return list(dict.fromkeys(key for line in lines for key in line if key not in HEAD))


def _by_kind(lines: Records, key: str, label: str) -> dict[str, Series]:
    """A line for each mode or task, where the steps are of several: their losses have nothing in common."""
    of = next((name for name in LOSS_OF if any(name in line for line in lines)), None)
    kinds = sorted({str(line[of]) for line in lines if of in line}) if of else []
    if len(kinds) < 2:
        return {label: _column(lines, key)}
    return {kind: _column([line for line in lines if str(line.get(of or "")) == kind], key) for kind in kinds}


def _train_panels(lines: Records) -> tuple[list[Panel], list[Panel]]:
    terms = [key for key in _keys(lines) if key.startswith("loss_") or key.endswith("_loss")]
    memory = [key for key in _keys(lines) if key.endswith("_gib")]
    losses = [
        Panel("Loss", "loss", _by_kind(lines, "loss", "training loss"), smooth=True),
        Panel("Loss terms", "loss", {key: _column(lines, key) for key in terms}, smooth=True),
    ]
    norm, lr = _by_kind(lines, "grad_norm", "grad_norm"), _column(lines, "lr")
    used = {_words(key.removesuffix("_gib")): _column(lines, key) for key in memory}
    return losses, [
        Panel("Gradient norm", "L2 norm before clipping", norm, smooth=True),
        Panel("Learning rate", "learning rate", {"lr": lr}, from_zero=True),
        _throughput_panel(lines),
        _step_time_panel(lines),
        Panel("Memory", "GiB", used, from_zero=True),
    ]


def _step_time_panel(lines: Records) -> Panel:
    whole, waiting = _column(lines, "step_seconds", 1000.0), Series()
    for line in lines:
        seconds, fraction = line.get("step_seconds"), line.get("data_wait_fraction")
        if isinstance(seconds, (int, float)) and isinstance(fraction, (int, float)):
            waiting.add(line["step"], 1000 * seconds * fraction)
    parts = {"whole step": whole, "of it waiting for data": waiting}
    return Panel("Step time", "ms per step", parts, from_zero=True)


def _throughput_panel(lines: Records) -> Panel:
    samples, tokens = _column(lines, "samples_per_second"), _column(lines, "tokens_per_second")
    label = "samples/s"
    if any(tokens.values):
        label += f" (median {_short(median(samples.values or [0]))}; {_short(median(tokens.values))} tokens/s)"
    return Panel("Throughput", "samples per second", {label: samples}, from_zero=True)


def _evaluation_panels(lines: Records) -> list[Panel]:
    """One panel for each last word of a name: ``l2t_nll`` and ``l2t_nll_shuffled`` are compared in one. Of a single
    evaluation the values in words."""
    panels: dict[str, Panel] = {}
    names = {key: key.removesuffix("_shuffled").rsplit("_", 1)[-1] for key in _keys(lines)}
    names = {key: kind for key, kind in names.items() if kind not in NOT_DRAWN}
    if len(lines) == 1:
        values = [f"{_words(k)}: {lines[0][k]:.4g}" for k in names if isinstance(lines[0][k], (int, float))]
        return [Panel(f"Evaluation at step {lines[0]['step']:,}", "", {}, text="\n".join(values))] if values else []
    for key, kind in names.items():
        unit = EVALUATION_UNITS.get(kind, kind)
        name = "NLL" if kind == "nll" else kind
        panel = panels.setdefault(kind, Panel(f"Evaluation: {name}", unit, {}, last_value=True))
        panel.lines[_words(key)] = _column(lines, key)
    return list(panels.values())


def _marks(records: Records) -> list[tuple[int, str, str]]:
    """(step, label, colour) of the vertical lines."""
    resumes = sorted({r["step"] for r in records if r.get("event") == "resume" and isinstance(r.get("step"), int)})
    train = last_pass(records, "train")
    broken = [r["step"] for r in train if isinstance(r.get("loss"), float) and not isfinite(r["loss"])]
    return [(s, "resumed", "0.55") for s in resumes] + [(s, "loss not finite", "tab:red") for s in broken]


def _draw(axis: Any, panel: Panel) -> None:
    lines = panel.drawn()
    axis.set_title(panel.title, fontsize=10)
    if panel.text:
        axis.set_axis_off()
        axis.text(0.02, 0.98, panel.text, fontsize=7, va="top", transform=axis.transAxes)
        return
    colours: dict[str, str] = {}
    for label, series in lines.items():
        partner = label.removesuffix(" shuffled")  # the same colour, dashed
        colour = colours.setdefault(partner, f"C{len(colours)}")
        _draw_series(axis, series, panel, label, {"color": colour, "linestyle": "-" if label == partner else "--"})
    _set_scale(axis, panel, [v for series in lines.values() for v in series.values])
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(True, alpha=0.25)


def _draw_series(axis: Any, series: Series, panel: Panel, label: str, style: dict[str, str]) -> None:
    if panel.last_value:
        label += f": {series.values[-1]:.4g}"
    if panel.smooth and len(series.values) >= SMOOTH_FROM:
        axis.plot(series.steps, series.values, linewidth=0.8, alpha=0.3, **style)
        axis.plot(series.steps, smoothed(series.values), linewidth=1.7, label=f"{label} (smoothed)", **style)
        return
    face = "white" if style["linestyle"] == "--" else style["color"]
    marker = "o" if len(series.values) <= 30 else ""
    axis.plot(
        series.steps,
        series.values,
        linewidth=1.5,
        marker=marker,
        markersize=4,
        markerfacecolor=face,
        label=label,
        **style,
    )


def _draw_marks(axes: Sequence[Any], marks: Iterable[tuple[int, str, str]]) -> None:
    """The vertical lines go into every panel, their names into the first panel's legend only."""
    named: set[str] = set()
    for step, label, colour in marks:
        for axis in axes:
            name = label if axis is axes[0] and label not in named else None
            axis.axvline(step, color=colour, linestyle=":", linewidth=1.2, label=name)
        named.add(label)


def _set_scale(axis: Any, panel: Panel, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if panel.smooth and low > 0 and high > 10 * low:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif panel.from_zero and low >= 0:
        axis.set_ylim(0, 1.25 * high if high > 0 else 1.0)
    if panel.title == "Learning rate":
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        axis.yaxis.get_offset_text().set_fontsize(8)


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential average over about a fiftieth of the curve, corrected for its start."""
    decay = 1 - 1 / max(2.0, len(values) / 50)
    total = weight = 0.0
    result: list[float] = []
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        result.append(total / weight)
    return result


def _title(records: Records, path: Path) -> str:
    facts = next((r for r in reversed(records) if r.get("event") == "environment"), {})
    about = [f"step {_last_step(records):,}"]
    if "strategy" in facts:
        about.append(f"{facts['strategy']} × {facts.get('world_size', 1)}")
    about += [str(facts[key]) for key in ("precision", "device_name") if facts.get(key)]
    return f"{path.resolve().parent.name}\n{' · '.join(about)}"


def _last_step(records: Records) -> int:
    return max((r["step"] for r in records if isinstance(r.get("step"), int)), default=0)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _short(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"
