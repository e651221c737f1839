"""What a preset's options give, each by itself and all together: `accel-train compare --ablate`, as a result file.

    python -m benchmarks.ablation mmdit --output benchmarks/results/ablation_mmdit_cpu.json    # half an hour
    python -m benchmarks.ablation pde --output benchmarks/results/ablation_pde_cpu.json

Every run is a process of its own, in turns, equal in seed, data, global batch and steps. Speed is that of the loop
with its saves and log lines, after the warm-up, by the clock and by the main process's processor time; losses and the
recipe's own figures are at the last step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.method import ROOT, Row, row, write_results

SKIPS = {
    "objective.inverse_every": "skips work: inverse losses in one step of several",
    "objective.queries": "skips work: fewer points decoded",
}
"""Options that are faster because they do less, and what they leave out."""
ON_TOP = {
    "mmdit": ("compile.mode=off,on", "precision=fp32,bf16"),
    "pde": ("compile.mode=off,on", "precision=fp32,bf16", "activation_checkpointing.mode=none,full"),
}
"""Tried on the optimised preset, which has none of them, in `ROUNDS_ON_TOP` rounds."""
ROUNDS_ON_TOP = 2
QUALITY = {"mmdit": ("loss", "l2t_nll", "t2l_cosine"), "pde": ("loss", "mean_nrmse")}
"""Of each recipe, what must not get worse; the loss is that of the last step."""
AT_MOST = "<= 0.03"
"""Of each figure of `QUALITY`: how much worse all options together may make it, as a share."""
COUNTED_UP = ("t2l_cosine",)
"""Figures of which more is better."""


def compare(recipe: str, sides: Sequence[str], rounds: int, max_steps: int | None) -> dict[str, Any]:
    """The comparison's own JSON; ``sides`` are what `accel-train compare` takes."""
    command = [sys.executable, "-m", "accel_train.cli", "compare", f"recipes/{recipe}.py", *sides]
    command += ["--max_steps", str(max_steps)] if max_steps else []
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "compare"
        given = [*command, "--rounds", str(rounds), "--output", str(output)]
        subprocess.run(given, cwd=ROOT, check=True)
        return json.loads((output / "compare.json").read_text())


def ratios(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> list[float]:
    """Of a time, first over other: above 1 is faster."""
    return [a / b for a, b in zip(first["values"][name], other["values"][name], strict=True)]


def worse(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> list[float]:
    """How much worse a figure is, as a share of the baseline's."""
    sign = -1 if name in COUNTED_UP else 1
    pairs = zip(first["values"][name], other["values"][name], strict=True)
    return [sign * (b - a) / abs(a) for a, b in pairs]


def words(name: str) -> str:
    """An option as the table has it, with what it leaves out."""
    skipped = SKIPS.get(name.partition(":")[0])
    return f"`{name}`" + (f" ({skipped})" if skipped else "")


def record(recipe: str, option: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    speed = row("ablation", "speed", ratios(first, other, "loop_step_seconds"))
    processor = row("ablation", "processor time", ratios(first, other, "loop_step_cpu_seconds"))
    memory = "memory_peak_gib" if "memory_peak_gib" in other["values"] else "process_rss_gib"
    return {
        "option": option,
        "speed": [speed.value, speed.interval],
        "processor": [processor.value, processor.interval],
        "memory": median([1 / r for r in ratios(first, other, memory)]),
        "worse": {name: median(worse(first, other, name)) for name in QUALITY[recipe]},
    }


def rows_of(
    recipe: str, found: Mapping[str, Any], on_top: Sequence[Mapping[str, Any]]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows of all options together, and the table. ``found`` is the ablation, ``on_top`` what was varied."""
    first, *single, last = found["variants"]
    table = [record(recipe, words(variant["name"]), first, variant) for variant in single]
    table.append(record(recipe, "all together", first, last))
    for varied in on_top:
        plain, *others = varied["variants"]
        table += [record(recipe, f"on top of all: {words(v['name'])}", plain, v) for v in others]
    figures = {name: worse(first, last, name) for name in QUALITY[recipe]}
    return [
        row("ablation", f"{recipe}: speed of all options together", ratios(first, last, "loop_step_seconds")),
        row("ablation", f"{recipe}: the same in processor time", ratios(first, last, "loop_step_cpu_seconds")),
        *(row("ablation", f"{recipe}: {n} worse by, as a share", v, "", AT_MOST) for n, v in figures.items()),
    ], table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and write the result; exit code 1 where a quality is worse than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=QUALITY)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max_steps", type=int, help="of every run; as the presets say")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    recipe, presets = options.recipe, [f"{options.recipe}_baseline", f"{options.recipe}_optimized"]
    rounds, steps = options.rounds, options.max_steps
    found = compare(recipe, [*presets, "--ablate"], rounds, steps)
    less = min(rounds, ROUNDS_ON_TOP)
    on_top = [compare(recipe, [presets[1], "--vary", varied], less, steps) for varied in ON_TOP[recipe]]
    rows, table = rows_of(recipe, found, on_top)
    about = {"recipe": recipe, "rounds": found["rounds"], "window": found["window"], "options": table}
    passed = write_results(options.output, f"Options of recipes/{recipe}.py, one by one", rows, {"ablation": about})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
