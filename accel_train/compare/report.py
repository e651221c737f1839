"""What a comparison says: lines for the terminal, ``compare.json`` and ``compare.png``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from accel_train.compare.figures import (
    LINES_AT_EQUAL_TIME,
    WITHIN_A_RUN,
    Effect,
    Observations,
    Window,
    interval_seconds,
    window_of,
)
from accel_train.compare.runs import Run, Variant
from accel_train.config import expand_path
from accel_train.metrics.bootstrap import LEVEL, ROUNDS_FOR_LEVEL, coverage_of_range, estimate
from accel_train.metrics.curves import SMOOTH_FROM, smoothed
from accel_train.metrics.environment import command_line, git_commit, package_versions
from accel_train.metrics.gates import Decision, over
from accel_train.metrics.records import write_json

EQUAL_SHOWN = ("seed", "global_batch_size", "max_steps", "max_epochs")


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    recipe: str
    variants: Sequence[Variant]
    """The first is the one that all others are held against."""
    key: str | None
    """The varied option."""
    rounds: int
    tolerance: float

    @property
    def is_ablation(self) -> bool:
        """Between first and last, the first with single options of the last."""
        return self.key is None and len(self.variants) > 2

    def differences(self) -> dict[str, list[Any]]:
        """Each option that is not the same in all variants, with its values; ``output_dir`` is left out."""
        names = dict.fromkeys(name for v in self.variants for name in v.config if name != "output_dir")
        values = {name: [v.config.get(name) for v in self.variants] for name in names}
        return {name: several for name, several in values.items() if any(v != several[0] for v in several)}


@dataclass(frozen=True)
class Result:
    """What came out. Lists over the variants are in their order; ``effects`` and ``decisions`` lack the first."""

    plan: Plan
    rounds: Sequence[Sequence[Run]]
    window: Window
    values: Sequence[Observations]
    effects: Sequence[Sequence[Effect]]
    decisions: Sequence[Sequence[Decision]]


# ---------------------------------------------------------------------------------------------------------- terminal
def header(plan: Plan, output: Path) -> list[str]:
    """What will be run, before it is."""
    runs = plan.rounds * len(plan.variants)
    lines = [f"{plan.recipe}: {plan.rounds} round(s) of {len(plan.variants)} runs in turns, {runs} runs, in {output}"]
    lines += [f"  {v.letter}  {v.name}" for v in plan.variants]
    differences = plan.differences()
    if not plan.is_ablation:  # there, the variants' names say it
        lines += [f"differs  {name}: {' | '.join(map(repr, values))}" for name, values in differences.items()]
    if not differences:
        lines.append("differs  nothing: what comes out is the noise of this machine")
    config = plan.variants[0].config
    same = [f"{n} {config[n]}" for n in EQUAL_SHOWN if config.get(n) is not None and n not in differences]
    pushes = any("--hub.repo_id" in v.flags for v in plan.variants)
    if pushes:
        lines.append("hub.repo_id is set to None: a comparison pushes nothing")
    return [*lines, f"equal    {', '.join(same)}", f"the output of each run is in {output}/round_N/LETTER.log"]


def text(result: Result) -> list[str]:
    """The table, what its intervals are worth, and the gates."""
    pair = result.plan.key is None and not result.plan.is_ablation
    table = _pair_table(result) if pair else _ablation_table(result) if result.plan.is_ablation else _vary_table(result)
    return ["", *table, "", *_notes(result), *(["", *_gate_lines(result)] if any(result.decisions) else [])]


def _pair_table(result: Result) -> list[str]:
    (found,) = result.effects
    few = 1 < result.plan.rounds < ROUNDS_FOR_LEVEL
    rows = [["metric", "A", "B", "B against A", "[range]" if few else f"[{LEVEL:.0%} interval]", "reading"]]
    for effect in found:
        sign = "x " if effect.form == "ratio" else ""
        middle = f"{sign}{_short(effect.estimate.median, signed=not sign)}"
        rows.append([effect.metric, _short(effect.a), _short(effect.b), middle, _interval(effect), effect.reading])
    return _aligned(rows)


def _ablation_table(result: Result) -> list[str]:
    """A line for each option by itself, the last for all together: its effect on time, memory and loss."""
    first, *others = result.plan.variants
    rows = [[f"against {first.name}", "step time", "with saves and logs", "processor time", "memory", "loss"]]
    for variant, found in zip(others, result.effects, strict=True):
        effect_of = {effect.metric: effect for effect in found}
        memory = "memory_peak_gib" if "memory_peak_gib" in effect_of else "process_rss_gib"
        cells = [
            f"x {_short(e.estimate.median)} {_interval(e)}{' no effect' if e.reading == 'no effect' else ''}"
            if (e := effect_of.get(name))
            else "-"
            for name in ("step_seconds", "loop_step_seconds", "loop_step_cpu_seconds", memory)
        ]
        loss = effect_of.get("loss")
        rows.append([variant.name, *cells, "-" if loss is None else _loss(loss)])
    return _aligned(rows)


def _loss(effect: Effect) -> str:
    return effect.reading if effect.reading.startswith("equal") else _short(effect.estimate.median, signed=True)


def _vary_table(result: Result) -> list[str]:
    """Medians of every metric, one column for each value, and throughput against the first value."""
    variants = result.plan.variants
    rows = [["metric", *(v.name.partition("=")[2] for v in variants)]]
    for name in result.values[0]:
        cells = [_short(median(values[name])) if name in values else "-" for values in result.values]
        for column, found in enumerate(result.effects, start=1):
            reading = next((e.reading for e in found if e.metric == name), "")
            cells[column] += "*" if reading.startswith(("lower", "higher")) else ""
        rows.append([name, *cells])
    lines = [
        f"{result.plan.key}; * differs from the first value: the interval of their ratio or difference excludes none"
    ]
    lines += ["", *_aligned(rows), ""]
    for variant, found in zip(variants[1:], result.effects, strict=True):
        for effect in (e for e in found if e.metric == "samples_per_second"):
            lines.append(
                f"{variant.name}: x {_short(effect.estimate.median)} {_interval(effect)} the samples per second of "
                f"{variants[0].name} ({effect.reading})"
            )
    return [*lines, *best_lines(result)]


def best_lines(result: Result) -> list[str]:
    """The setting of highest throughput, and those that this comparison cannot tell from it."""
    rates = [values.get("samples_per_second") for values in result.values]
    known = {index: rate for index, rate in enumerate(rates) if rate}
    if not known:
        return []
    best = max(known, key=lambda index: median(known[index]))
    names = [v.name for v in result.plan.variants]
    others = {i: estimate([over(x, y) for x, y in zip(known[best], known[i], strict=True)]) for i in known if i != best}
    close = [names[i] for i, e in others.items() if e.low is None or e.includes(1.0)]
    remark = f"; not told apart from {', '.join(close)}" if close else ""
    return [f"best throughput: {names[best]}, {_short(median(known[best]))} samples per second{remark}"]


def _notes(result: Result) -> list[str]:
    count, first = result.plan.rounds, result.rounds[0][0]
    if count == 1:
        counts = {len(result.values[0][n]) for n in WITHIN_A_RUN if n in result.values[0]}
        within = max(counts, default=1)
        worth = (
            f"1 round: intervals are over {within} log intervals of one run each, so noise between runs is not in them"
            if within > 1
            else "1 round: there are no intervals"
        )
    elif count < ROUNDS_FOR_LEVEL:
        worth = (
            f"medians of {count} rounds; with so few an interval is the range of the rounds, which holds the true "
            f"median in {coverage_of_range(count):.0%} of cases; {ROUNDS_FOR_LEVEL} rounds make it "
            f"{coverage_of_range(ROUNDS_FOR_LEVEL):.0%}"
        )
    else:
        worth = f"medians of {count} rounds with bootstrap {LEVEL:.0%} intervals over the rounds"
    data = (
        f"data {first.fingerprint[:12]} in every run"
        if first.fingerprint
        else "the recipe records no fingerprint of its data"
    )
    if result.plan.key and len({run.fingerprint for runs in result.rounds for run in runs}) > 1:
        data = "data are not the same, by the varied option"
    few, last, tail = "loss_equal_time" not in result.values[0], result.window.last, len(result.window.tail())
    return [
        f"{result.window}; {data}",
        worth,
        *(
            [f"loss_equal_time is left out: it needs {LINES_AT_EQUAL_TIME} log lines in the last tenth of each run"]
            * few
        ),
        f"losses are at step {last} (loss_last_tenth: mean of {tail} log line(s) of each run), of one seed like the "
        f"evaluation: another seed moves them; within {result.plan.tolerance:g} of A they are equal",
    ]


def _gate_lines(result: Result) -> list[str]:
    lines: list[str] = []
    for variant, decisions in zip(result.plan.variants[1:], result.decisions, strict=True):
        for d in decisions:
            low, high = d.value.low, d.value.high
            interval = "" if low is None or high is None else f" [{_short(low)}, {_short(high)}]"
            name = f"{variant.name}: " if result.plan.key or result.plan.is_ablation else ""
            lines.append(f"gate {name}{d.gate.text}: {_short(d.value.median)}{interval} {d.verdict}: {d.reason}")
    return lines


def _interval(effect: Effect) -> str:
    low, high = effect.estimate.low, effect.estimate.high
    if low is None or high is None:
        return "-"
    signed = effect.form == "difference"
    return f"[{_short(low, signed=signed)}, {_short(high, signed=signed)}]"


def _short(value: float, *, signed: bool = False) -> str:
    return f"{value:{'+' if signed else ''}.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


# ------------------------------------------------------------------------------------------------------------- files
def write(result: Result, output: Path) -> list[Path]:
    """``compare.json`` and ``compare.png`` in ``output``."""
    write_json(output / "compare.json", as_json(result))
    draw(result, output / "compare.png")
    return [output / "compare.json", output / "compare.png"]


def as_json(result: Result) -> dict[str, Any]:
    """Everything, with what it was measured on; values by round (or by log interval where there is one round)."""
    plan = result.plan
    letters = [v.letter for v in plan.variants]
    return {
        "schema": 1,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command_line(sys.argv),
        "git_commit": git_commit(expand_path(plan.recipe).parent),
        "versions": package_versions(),
        "environment": dict(result.rounds[0][0].environment),
        "recipe": plan.recipe,
        "rounds": plan.rounds,
        "varied": plan.key,
        "tolerance": plan.tolerance,
        "data_fingerprint": result.rounds[0][0].fingerprint,
        "window": asdict(result.window),
        "variants": [asdict(v) | {"values": dict(o)} for v, o in zip(plan.variants, result.values, strict=True)],
        "differences": plan.differences(),
        "effects": {
            letter: {e.metric: _effect_json(e) for e in found}
            for letter, found in zip(letters[1:], result.effects, strict=True)
        },
        "best": best_lines(result) if plan.key else None,
        "gates": {
            letter: [asdict(d) for d in decisions]
            for letter, decisions in zip(letters[1:], result.decisions, strict=True)
        },
        "runs": [
            {"round": run.round, "letter": run.letter, "directory": str(run.directory)}
            | {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds}
            for runs in result.rounds
            for run in runs
        ],
    }


def _effect_json(effect: Effect) -> dict[str, Any]:
    return asdict(effect) | {"interval_level": LEVEL}


def draw(result: Result, path: Path) -> None:
    """Step time by step, loss by step and loss by clock; a thin line for each round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.3), dpi=110, layout="constrained")
    panels: Any = figure.subplots(1, 3)
    titles = (("Step time", "step", "ms per step"), ("Loss", "step", "loss"), ("Loss by clock", "seconds", "loss"))
    for axis, (title, below, beside) in zip(panels, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(below, fontsize=8)
        axis.set_ylabel(beside, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(True, alpha=0.25)
    for index, variant in enumerate(result.plan.variants):
        for number, runs in enumerate(result.rounds):
            label = f"{variant.letter}  {variant.name}" if number == 0 else None
            _draw_run(panels, runs[index], {"color": f"C{index % 10}", "alpha": 0.6, "linewidth": 1.0, "label": label})
    panels[0].axvline(result.window.first, color="0.55", linestyle=":", label="warm-up ends")
    panels[0].set_ylim(bottom=0, top=_ceiling(result))
    for axis in panels:
        axis.legend(fontsize=7.5, loc="best", framealpha=0.85)  # the default warns where the machine is busy
    figure.savefig(path, format="png")


def _draw_run(panels: Any, run: Run, style: Mapping[str, Any]) -> None:
    own = window_of([run])  # every log line of this run, not only those that all runs have
    every = Window(0, own.last, (0, *(int(line["step"]) for line in run.lines)))
    times = [1000 * seconds for seconds in interval_seconds(run, every)]
    panels[0].step([0, *every.points[1:]], [times[0], *times], where="pre", **style)
    known = [line for line in run.lines if isinstance(line.get("loss"), (int, float)) and isfinite(line["loss"])]
    losses = [float(line["loss"]) for line in known]
    for axis, along in ((panels[1], "step"), (panels[2], "elapsed_seconds")):
        places = [line.get(along, 0.0) for line in known]
        if len(losses) < SMOOTH_FROM:
            axis.plot(places, losses, marker="o", markersize=4, **style)
            continue
        axis.plot(places, smoothed(losses), **style)
        if run.round == 1:
            axis.plot(places, losses, color=style["color"], linewidth=0.7, alpha=0.25)


def _ceiling(result: Result) -> float:
    """Of the first panel: the measured part fills it, and the first step, which may take a minute, leaves it."""
    window = result.window
    slowest = [s for runs in result.rounds for run in runs for s in interval_seconds(run, window)]
    return max(1.6e3 * sorted(slowest)[ceil(0.9 * len(slowest)) - 1], 1e-3)
