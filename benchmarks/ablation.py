"""The effect of a preset's options, one by one and all together: `accel-train compare --ablate` as a result file.

    python -m benchmarks.ablation mmdit --output benchmarks/results/ablation_mmdit_cpu.json    # half an hour
    python -m benchmarks.ablation pde --output benchmarks/results/ablation_pde_cpu.json

Each run is a separate process; runs alternate and share seed, data, global batch and number of steps. Speed is that of
the loop after the warm-up, saves and log lines included, by wall time and by processor time of the main process. Losses
and the recipe's own metrics are those of the last step. An option that does equal work must leave them unchanged within
the tolerance of `accel-train compare`. Options that skip work or change the rounding are labelled so and are exempt.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from accel_train.compare.comparison import Request
from accel_train.options.strict_yaml import read_yaml
from accel_train.options.tree import overlaid
from benchmarks.method import ROOT, Row, largest, on_cpu, row, write_results

SKIPS = {
    "objective.inverse_every": "skips work: inverse losses in one step of several",
    "objective.queries": "skips work: fewer points decoded",
}
"""Options that are faster because they do less work, with what they leave out."""
ROUNDS_ELSEWHERE = {"precision": "another precision"}
"""Options that change the result by design, with the reason."""
ON_TOP = {
    "mmdit": ("compile.mode=off,on", "precision=fp32,bf16"),
    "pde": ("compile.mode=off,on", "precision=fp32,bf16", "activation_checkpointing.mode=none,full"),
}
"""Options varied on top of the optimised preset, which sets none of them, in at most `ROUNDS_ON_TOP` rounds."""
ON_A_GPU = ("precision=bf16,fp16", "attention=auto,flex")
"""Options varied on top of the optimised preset on a GPU only."""
ROUNDS_ON_TOP = 2
CHECKPOINTED = "activation checkpointing with a doubled micro-batch"
EQUAL_WORK = "all at equal work (without `objective.inverse_every` and `objective.queries`)"
COMBINED: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "mmdit": {CHECKPOINTED: ("baseline", {"activation_checkpointing.mode": "full", "micro_batch_size": 32})},
    "pde": {
        EQUAL_WORK: ("optimized", {"objective.inverse_every": 1, "objective.queries": None}),
        CHECKPOINTED: ("baseline", {"activation_checkpointing.mode": "full", "micro_batch_size": 16}),
    },
}
"""Combinations compared with the baseline, by recipe: a preset and the options changed in it."""
ABSENT = {
    "FSDP2": "needs two GPUs; what it exchanges on CPU processes is under Scaling",
    "optimizer state in host memory": "needs a GPU: on a CPU it is there already; G8",
}
WITHOUT_A_GPU = {
    "fp16 against bf16": "needs a GPU: loss scaling has no CPU form",
    "FlexAttention": "needs a GPU: no backward on a CPU",
}
"""Measurements that need a GPU, with the reason; added to `ABSENT` in runs on a CPU."""
QUALITY = {"mmdit": ("loss", "l2t_nll", "t2l_cosine"), "pde": ("loss", "mean_nrmse")}
"""Metrics at the last step that must not get worse, by recipe."""
AT_MOST = "<= 0.03"
"""How much worse all options together may make a metric of `QUALITY`, relative to the baseline."""
EQUAL = f"<= {Request.tolerance:g}"
"""How much an option with equal work may change a metric of `QUALITY`, relative to the baseline."""
COUNTED_UP = ("t2l_cosine",)
"""Metrics for which higher is better."""


def compare(recipe: str, sides: Sequence[str], rounds: int, max_steps: int | None) -> dict[str, Any]:
    """Run `accel-train compare` with the positional arguments ``sides`` and return the content of its compare.json."""
    command = [sys.executable, "-m", "accel_train.cli", "compare", f"recipes/{recipe}.py", *sides]
    command += ["--max_steps", str(max_steps)] if max_steps else []
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "compare"
        given = [*command, "--rounds", str(rounds), "--output", str(output)]
        subprocess.run(given, cwd=ROOT, check=True)
        return json.loads((output / "compare.json").read_text())


def ratios(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> list[float]:
    """Return ``first`` over ``other`` for a metric, by round. For a time, a value above 1 means ``other`` is faster."""
    return [a / b for a, b in zip(first["values"][name], other["values"][name], strict=True)]


def worse(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> list[float]:
    """Return by how much a metric is worse in ``other``, by round, relative to its value in ``first``."""
    sign = -1 if name in COUNTED_UP else 1
    pairs = zip(first["values"][name], other["values"][name], strict=True)
    return [sign * (b - a) / abs(a) for a, b in pairs]


def apart(recipe: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest relative difference to ``first`` over all metrics of `QUALITY` and all rounds."""
    return largest(abs(value) for name in QUALITY[recipe] for value in worse(first, other, name))


def unequal(name: str) -> str | None:
    """Return why an option may change the metrics, or None if it may not. ``name`` as in `accel-train compare`."""
    option = re.split("[:=]", name)[0]
    return SKIPS.get(option) or ROUNDS_ELSEWHERE.get(option)


def words(name: str) -> str:
    """Return the text of an option for the table, with the reason if it may change the metrics."""
    reason = unequal(name)
    return f"`{name}`" + (f" ({reason})" if reason else "")


def record(
    recipe: str, option: str, first: Mapping[str, Any], other: Mapping[str, Any], reason: str | None
) -> dict[str, Any]:
    """Return an entry of the table; ``reason`` says why the option may change the metrics, None if it may not."""
    speed = row("ablation", "speed", ratios(first, other, "loop_step_seconds"))
    processor = row("ablation", "processor time", ratios(first, other, "loop_step_cpu_seconds"))
    memory = "memory_peak_gib" if "memory_peak_gib" in other["values"] else "process_rss_gib"
    return {
        "option": option,
        "speed": [speed.value, speed.interval],
        "processor": [processor.value, processor.interval],
        "memory": median([1 / r for r in ratios(first, other, memory)]),
        "worse": {name: median(worse(first, other, name)) for name in QUALITY[recipe]},
        "apart": apart(recipe, first, other),
        "unequal": reason,
    }


def rows_of(
    recipe: str,
    found: Mapping[str, Any],
    on_top: Sequence[Mapping[str, Any]],
    combined: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the rows (all options together, and equality of the metrics) and the table of single options.

    ``found`` is the ablation, ``on_top`` the comparisons with the optimised preset, and ``combined`` those of
    `COMBINED` with the baseline, by name.
    """
    first, *single, last = found["variants"]
    reasons = [reason for variant in single if (reason := unequal(variant["name"]))]
    table = [record(recipe, words(v["name"]), first, v, unequal(v["name"])) for v in single]
    for name, pair in combined.items():
        plain, changed = pair["variants"]
        table.append(record(recipe, name, plain, changed, None))
    table.append(record(recipe, "all together", first, last, "; ".join(reasons) or None))
    for varied in on_top:
        plain, *others = varied["variants"]
        table += [record(recipe, f"on top of all: {words(v['name'])}", plain, v, unequal(v["name"])) for v in others]
    figures = {name: worse(first, last, name) for name in QUALITY[recipe]}
    held = {f"{line['option']}: change of a figure": line["apart"] for line in table if line["unequal"] is None}
    return [
        row("ablation", f"{recipe}: speed of all options together", ratios(first, last, "loop_step_seconds")),
        row("ablation", f"{recipe}: the same in processor time", ratios(first, last, "loop_step_cpu_seconds")),
        *(row("ablation", f"{recipe}: {n} worse by, as a share", v, "", AT_MOST) for n, v in figures.items()),
        *(row("ablation", f"{name}, largest, as a share", change, "", EQUAL) for name, change in held.items()),
    ], table


def write_preset(recipe: str, side: str, changes: Mapping[str, Any], folder: Path) -> Path:
    """Write the preset ``{recipe}_{side}`` with ``changes`` into ``folder`` and return the path of the file."""
    preset: dict[str, Any] = read_yaml(ROOT / "recipes" / "presets" / f"{recipe}_{side}.yaml")
    path = folder / "changed.yaml"
    path.write_text(json.dumps(overlaid(preset, changes)))  # JSON is valid YAML and keeps numbers apart from strings
    return path


def compare_changed(recipe: str, baseline: str, side: str, changes: Mapping[str, Any], *how: Any) -> dict[str, Any]:
    """Compare ``baseline`` with the preset ``{recipe}_{side}`` changed by ``changes``; ``how``: rounds, max_steps."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(recipe, [baseline, str(write_preset(recipe, side, changes, Path(folder)))], *how)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ablation and write the result. Returns 1 if a metric is worse, or differs more, than allowed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=QUALITY)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max_steps", type=int, help="steps of every run; default: those of the presets")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda also tries options that need a GPU"
    )
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    if not gpu:
        on_cpu()
    elif not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here")
    recipe, presets = options.recipe, [f"{options.recipe}_baseline", f"{options.recipe}_optimized"]
    rounds, steps = options.rounds, options.max_steps
    found = compare(recipe, [*presets, "--ablate"], rounds, steps)
    combined = {
        name: compare_changed(recipe, presets[0], *changed, rounds, steps) for name, changed in COMBINED[recipe].items()
    }
    tried = [*ON_TOP[recipe], *(ON_A_GPU if gpu else ())]
    on_top = [compare(recipe, [presets[1], "--vary", varied], min(rounds, ROUNDS_ON_TOP), steps) for varied in tried]
    rows, table = rows_of(recipe, found, on_top, combined)
    about = {"recipe": recipe, "rounds": found["rounds"], "window": found["window"], "options": table}
    title = f"Options of recipes/{recipe}.py, one by one"
    absent = ABSENT if gpu else ABSENT | WITHOUT_A_GPU
    passed = write_results(options.output, title, rows, {"ablation": about}, absent, gpu=gpu)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
