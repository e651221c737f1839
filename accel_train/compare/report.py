"""Results of a comparison: lines for the terminal, ``compare.json`` and ``compare.png``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from accel_train.compare import picture
from accel_train.compare.figures import (
    EQUAL_TIME,
    LINES_AT_EQUAL_TIME,
    WITHIN_A_RUN,
    Effect,
    is_about_machine,
)
from accel_train.compare.result import Plan, Result
from accel_train.compare.runs import Run
from accel_train.config import expand_path
from accel_train.metrics.bootstrap import LEVEL, ROUNDS_FOR_LEVEL, Estimate, coverage_of_range, estimate
from accel_train.metrics.environment import command_line, git_commit, package_versions
from accel_train.metrics.gates import ratio
from accel_train.metrics.records import write_json

EQUAL_SHOWN = ("seed", "global_batch_size", "max_steps", "max_epochs")


# ---------------------------------------------------------------------------------------------------------- terminal
def header(plan: Plan, output: Path) -> list[str]:
    """Describe the runs before they start."""
    runs = plan.rounds * len(plan.variants)
    lines = [f"{plan.recipe}: {plan.rounds} round(s) of {len(plan.variants)} runs in turns, {runs} runs, in {output}"]
    lines += [f"  {v.letter}  {v.name}" for v in plan.variants]
    differences = plan.differences()
    # The variants of an ablation are named after the differences already.
    if not plan.is_ablation:
        lines += [f"differs  {name}: {' | '.join(map(repr, values))}" for name, values in differences.items()]
    if not differences:
        lines.append("differs  nothing: the result is the noise of this machine")
    if any("--hub.repo_id" in v.flags for v in plan.variants):
        lines.append("hub.repo_id is set to None: a comparison pushes nothing")
    same: list[str] = []
    for name in EQUAL_SHOWN:
        value = plan.variants[0].config.get(name)
        if name == "seed" and plan.seeds:
            same.append(f"in each round its seed of {', '.join(map(str, plan.seeds))}")
        elif value is not None and name not in differences:
            same.append(f"{name} {value}")
    lines.append(f"equal    {', '.join(same)}")
    lines.append(f"the output of each run is in {output}/round_N/LETTER.log")
    return lines


def text(result: Result) -> list[str]:
    """Return the table, notes on its intervals, and the gates."""
    if result.plan.is_ablation:
        table = _ablation_table(result)
    elif result.plan.key is not None:
        table = _vary_table(result)
    else:
        table = _pair_table(result)
    lines = ["", *table, "", *_seed_lines(result), *_notes(result)]
    if any(result.decisions):
        lines += ["", *_gate_lines(result)]
    return lines


def _pair_table(result: Result) -> list[str]:
    (found,) = result.effects
    interval = f"[{LEVEL:.0%} interval]"
    if 1 < result.plan.rounds < ROUNDS_FOR_LEVEL:
        # The bootstrap interval of so few values is their range.
        interval = "[range]"
    rows = [["metric", "A", "B", "B against A", interval, "reading"]]
    for effect in found:
        values = [_short(effect.a), _short(effect.b), _size(effect), _interval(effect)]
        rows.append([effect.metric, *values, effect.reading])
    return _aligned(rows)


def _seed_lines(result: Result) -> list[str]:
    """Return a table with mean and standard deviation over the seeds, for everything but times and memory."""
    if len(result.plan.seeds) < 2:
        return []
    rows = [
        [f"mean and standard deviation over {len(result.plan.seeds)} seeds", *(v.letter for v in result.plan.variants)]
    ]
    for name in result.values[0]:
        if not is_about_machine(name):
            columns = [values[name] for values in result.values]
            rows.append(
                [name, *(f"{_short(float(np.mean(c)))} +- {_short(float(np.std(c, ddof=1)))}" for c in columns)]
            )
    return [*_aligned(rows), ""]


def _size(effect: Effect) -> str:
    if effect.form == "ratio":
        return f"x {_short(effect.estimate.median)}"
    return _short(effect.estimate.median, signed=True)


def _ablation_table(result: Result) -> list[str]:
    """Show the effect of each option by itself on time, memory and loss, and in the last line that of all options."""
    first, *others = result.plan.variants
    rows = [[f"against {first.name}", "step time", "with saves and logs", "processor time", "memory", "loss"]]
    for variant, found in zip(others, result.effects, strict=True):
        effect_of = {effect.metric: effect for effect in found}
        # The first exists on CUDA only, the second on CPU only.
        memory = effect_of.get("memory_peak_gib") or effect_of.get("process_rss_gib")
        times = [effect_of.get(name) for name in ("step_seconds", "loop_step_seconds", "loop_step_cpu_seconds")]
        cells = [_ratio_cell(effect) for effect in (*times, memory)]
        rows.append([variant.name, *cells, _loss_cell(effect_of.get("loss"))])
    return _aligned(rows)


def _ratio_cell(effect: Effect | None) -> str:
    if effect is None:
        return "-"
    cell = f"{_size(effect)} {_interval(effect)}"
    if effect.reading == "no effect":
        cell += " no effect"
    return cell


def _loss_cell(effect: Effect | None) -> str:
    if effect is None:
        return "-"
    if effect.reading.startswith("equal"):
        return effect.reading
    return _size(effect)


def _vary_table(result: Result) -> list[str]:
    """Show the median of every metric, a column for each value, and the throughput relative to the first value."""
    effects = [{effect.metric: effect for effect in found} for found in result.effects]
    columns = [variant.name.removeprefix(f"{result.plan.key}=") for variant in result.plan.variants]
    rows = [["metric", *columns]]
    for name, values in result.values[0].items():
        cells = [_short(median(values))]
        for other, effect_of in zip(result.values[1:], effects, strict=True):
            cell = _short(median(other[name]))
            if effect_of[name].reading.startswith(("lower", "higher")) and not _is_of_seeds(result):
                cell += "*"
            cells.append(cell)
        rows.append([name, *cells])
    # A star instead of words, because the table has a column for each value.
    note = "* differs from the first value: the interval of the ratio excludes 1, or that of the difference 0"
    if _is_of_seeds(result):
        note = "a row shows how far apart the seeds are"
    return [f"{result.plan.key}; {note}", "", *_aligned(rows), "", *_speed_lines(result), *best_lines(result)]


def _speed_lines(result: Result) -> list[str]:
    """Return the throughput of each setting relative to the first."""
    first, *others = result.plan.variants
    lines: list[str] = []
    for variant, effects in zip(others, result.effects, strict=True):
        for effect in effects:
            if effect.metric == "samples_per_second":
                cell = f"{_size(effect)} {_interval(effect)}"
                lines.append(f"{variant.name}: {cell} the samples per second of {first.name} ({effect.reading})")
    return lines


def _is_of_seeds(result: Result) -> bool:
    """Return True if the seed is varied. Rounds then repeat each seed's losses, so their intervals mean nothing."""
    return result.plan.key == "seed"


def best_lines(result: Result) -> list[str]:
    """Name the setting with the highest throughput and those indistinguishable from it."""
    throughput = [values.get("samples_per_second") for values in result.values]
    known = {index: values for index, values in enumerate(throughput) if values}
    if not known:
        return []
    medians = {index: median(values) for index, values in known.items()}
    best = max(medians, key=medians.__getitem__)
    names = [variant.name for variant in result.plan.variants]
    close: list[str] = []
    for index, values in known.items():
        # Compared round by round, because the runs of one round share the noise of the machine.
        pairs = zip(known[best], values, strict=True)
        speedup = estimate([ratio(x, y) for x, y in pairs])
        if index != best and (speedup.low is None or speedup.includes(1.0)):
            close.append(names[index])
    line = f"best throughput: {names[best]}, {_short(medians[best])} samples per second"
    if close:
        line += f"; indistinguishable from {', '.join(close)}"
    return [line]


def _notes(result: Result) -> list[str]:
    """Explain the measured steps, the data, the intervals and the losses."""
    notes = [f"{result.window}; {_data_note(result)}", _interval_note(result)]
    if EQUAL_TIME not in result.values[0]:
        notes.append(
            f"{EQUAL_TIME} is left out: it needs {LINES_AT_EQUAL_TIME} log lines in the last tenth of each run"
        )
    seeds = ", of one seed, as is the evaluation: another seed changes them"
    if _is_of_seeds(result) or result.plan.seeds:
        seeds = ""
    notes.append(
        f"losses are at step {result.window.last} (loss_last_tenth: mean of {len(result.window.tail())} log line(s) of "
        f"each run){seeds}; within {result.plan.tolerance:g} of A they are equal"
    )
    return notes


def _data_note(result: Result) -> str:
    fingerprints = {run.fingerprint for run in chain.from_iterable(result.rounds.runs)}
    if len(fingerprints) > 1:
        return "the seed changes the data" if result.plan.seeds else "the varied option changes the data"
    fingerprint = result.rounds.runs[0][0].fingerprint
    if not fingerprint:
        return "the recipe records no fingerprint of its data"
    return f"data {fingerprint[:12]} in every run"


def _interval_note(result: Result) -> str:
    count = result.plan.rounds
    each = ""
    if result.plan.seeds:
        each = ", each with a seed of its own"
    if count >= ROUNDS_FOR_LEVEL:
        return f"medians of {count} rounds{each}, with bootstrap {LEVEL:.0%} intervals over the rounds"
    if count > 1:
        return (
            f"medians of {count} rounds{each}; with so few, an interval is the range of the rounds, which contains the "
            f"true median in {coverage_of_range(count):.0%} of cases; {ROUNDS_FOR_LEVEL} rounds raise this to "
            f"{coverage_of_range(ROUNDS_FOR_LEVEL):.0%}"
        )
    values = result.values[0]
    counts = [len(values[name]) for name in WITHIN_A_RUN if name in values]
    within = max(counts, default=1)
    if within == 1:
        return "1 round: there are no intervals"
    return f"1 round: intervals are over {within} log intervals of one run each, so noise between runs is not in them"


def _gate_lines(result: Result) -> list[str]:
    several = result.plan.key is not None or result.plan.is_ablation
    lines: list[str] = []
    for variant, decisions in zip(result.plan.variants[1:], result.decisions, strict=True):
        for decision in decisions:
            gate = decision.gate.text
            if several:
                gate = f"{variant.name}: {gate}"
            value = f"{_short(decision.value.median)} {_brackets(decision.value)}".rstrip()
            lines.append(f"gate {gate}: {value} {decision.verdict}: {decision.reason}")
    return lines


def _interval(effect: Effect) -> str:
    return _brackets(effect.estimate, signed=effect.form == "difference") or "-"


def _brackets(value: Estimate, *, signed: bool = False) -> str:
    if value.low is None or value.high is None:
        return ""
    return f"[{_short(value.low, signed=signed)}, {_short(value.high, signed=signed)}]"


def _short(value: float, *, signed: bool = False) -> str:
    return f"{value:+.4g}" if signed else f"{value:.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines: list[str] = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines


# ------------------------------------------------------------------------------------------------------------- files
def write(result: Result, output: Path) -> list[Path]:
    """Write ``compare.json`` and ``compare.png`` into ``output``."""
    write_json(output / "compare.json", as_json(result))
    picture.draw(result.plan.variants, result.rounds.runs, result.window, output / "compare.png")
    return [output / "compare.json", output / "compare.png"]


def as_json(result: Result) -> dict[str, Any]:
    """Return the whole result and its environment. Values are per round, or per log interval of a single round."""
    plan = result.plan
    # Any run will do: unless the varied option changes the data, all have one fingerprint.
    first = result.rounds.runs[0][0]
    return {
        "schema": 1,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command_line(sys.argv),
        "git_commit": git_commit(expand_path(plan.recipe).parent),
        "versions": package_versions(),
        "environment": dict(first.environment),
        "recipe": plan.recipe,
        "rounds": plan.rounds,
        "rounds_asked": result.rounds.asked,
        "cut_short": result.rounds.cut_short,
        "seeds": list(plan.seeds),
        "varied": plan.key,
        "tolerance": plan.tolerance,
        "data_fingerprint": first.fingerprint,
        "window": asdict(result.window),
        "variants": _variants_json(result),
        "differences": plan.differences(),
        "effects": _effects_json(result),
        "best": best_lines(result) if plan.key else None,
        "gates": _gates_json(result),
        "runs": [_run_json(run) for run in chain.from_iterable(result.rounds.runs)],
    }


def _variants_json(result: Result) -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = []
    for variant, values in zip(result.plan.variants, result.values, strict=True):
        variants.append(asdict(variant) | {"values": dict(values)})
    return variants


def _effects_json(result: Result) -> dict[str, Any]:
    """Map letter -> metric -> effect."""
    by_letter: dict[str, Any] = {}
    for variant, effects in zip(result.plan.variants[1:], result.effects, strict=True):
        of_variant: dict[str, Any] = {}
        for effect in effects:
            of_variant[effect.metric] = asdict(effect) | {"interval_level": LEVEL}
        by_letter[variant.letter] = of_variant
    return by_letter


def _gates_json(result: Result) -> dict[str, Any]:
    """Map letter -> decisions."""
    by_letter: dict[str, Any] = {}
    for variant, decisions in zip(result.plan.variants[1:], result.decisions, strict=True):
        by_letter[variant.letter] = [asdict(decision) for decision in decisions]
    return by_letter


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "round": run.round,
        "letter": run.letter,
        "directory": str(run.directory),
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
    }
