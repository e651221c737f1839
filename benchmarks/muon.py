"""Muon with AdamW against AdamW alone: the demo of recipes/pde.py, both at the same few learning rates.

    python -m benchmarks.muon --output benchmarks/results/muon_cpu.json      # two runs at a time, one core each

The question is whether Muon reaches AdamW's final loss at its best learning rate, and after how many steps and seconds.
The loss is smoothed over the log lines of 150 steps. Both use the same schedule over the same steps, so that its end
lowers the loss of both. The two runs at one learning rate are concurrent, so that other load on the machine affects
both alike. Seconds are processor time since the first log line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from accel_train.metrics.records import last_pass, read_metrics
from benchmarks.method import ROOT, Row, on_cpu, row, write_results

OPTIMIZERS = ("adamw", "muon")
RATES = (7.5e-4, 1.5e-3, 3e-3)
"""Half the learning rate of the demo, the demo's own, and twice that."""
SMOOTHED_STEPS = 150


def start(optimizer: str, lr: float, directory: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start one run in the background, on one thread, with its output in ``directory``.log."""
    command = [sys.executable, "recipes/pde.py", "--optimizer.name", optimizer, "--optimizer.lr", str(lr)]
    command += ["--output_dir", str(directory), "--log.log_every", "10", *options.flags]
    command += ["--max_steps", str(options.max_steps)] if options.max_steps else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (directory.with_suffix(".log")).open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def curve(directory: Path) -> list[tuple[int, float, float]]:
    """Return (step, processor seconds since the first log line, smoothed loss) of each log line."""
    lines = last_pass(read_metrics(directory / "metrics.jsonl"), "train")
    begin = float(lines[0]["processor_seconds"])
    points = [(int(x["step"]), float(x["processor_seconds"]) - begin, float(x["loss"])) for x in lines]
    return [
        (step, seconds, fmean(loss for s, _, loss in points if step - SMOOTHED_STEPS < s <= step))
        for step, seconds, _ in points
        if step >= min(SMOOTHED_STEPS, points[-1][0])
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep and write the result. Returns 1 if a run fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--max_steps", type=int, help="steps of every run; default: those of the demo")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("flags", nargs="*", help="further options of the recipe, after --")
    options = parser.parse_args(arguments)
    on_cpu()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for lr in options.rates:
            names = {optimizer: Path(place) / f"{optimizer}-{lr:g}" for optimizer in OPTIMIZERS}
            started = {name: start(name, lr, directory, options) for name, directory in names.items()}
            try:
                codes = {name: process.wait() for name, process in started.items()}
            finally:
                for process in started.values():
                    process.kill()  # if the wait was interrupted
                    process.wait()
            for name, code in codes.items():
                if code:
                    print(names[name].with_suffix(".log").read_text(), file=sys.stderr)
                    return 1
                evaluation = json.loads((names[name] / "report" / "evaluation.json").read_text())
                points = curve(names[name])
                runs.append({"optimizer": name, "lr": lr, "points": points, "mean_nrmse": evaluation["mean_nrmse"]})
                print(
                    f"{name} at {lr:g}: loss {points[-1][2]:.5f}, mean nRMSE {evaluation['mean_nrmse']:.4f}", flush=True
                )
    rows, table = judged(runs)
    words = (
        f"The demo of recipes/pde.py at {len(options.rates)} learning rates; loss smoothed over {SMOOTHED_STEPS} steps."
    )
    write_results(options.output, "Muon against AdamW", rows, {"muon": {"words": words, "runs": table}})
    return 0


def judged(runs: Sequence[dict[str, Any]]) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the rows, and an entry of the table for each run. ``points`` of a run are from `curve`."""
    adamw, muon = ([run for run in runs if run["optimizer"] == name] for name in OPTIMIZERS)
    best = min(adamw, key=lambda run: run["points"][-1][2])
    aim = best["points"][-1][2]
    table: list[dict[str, Any]] = []
    for run in runs:
        reached = next(((step, seconds) for step, seconds, loss in run["points"] if loss <= aim), (None, None))
        table.append(
            {"optimizer": run["optimizer"], "lr": run["lr"], "loss": run["points"][-1][2]}
            | {"mean_nrmse": run["mean_nrmse"], "step": reached[0], "seconds": reached[1]}
        )
    own = next(line for line in table if line["optimizer"] == "adamw" and line["lr"] == best["lr"])  # has a step
    arrived = [line for line in table if line["optimizer"] == "muon" and line["step"]]
    rows = [
        row("muon", "loss at the end, best of Muon over best of AdamW", min(r["points"][-1][2] for r in muon) / aim),
        row(
            "muon",
            "held-out error, best of Muon over best of AdamW",
            min(r["mean_nrmse"] for r in muon) / min(r["mean_nrmse"] for r in adamw),
        ),
    ]
    if arrived:
        steps, seconds = min(line["step"] for line in arrived), min(line["seconds"] for line in arrived)
        rows.append(row("muon", "steps to AdamW's best loss, Muon over AdamW", steps / own["step"]))
        rows.append(row("muon", "seconds to AdamW's best loss, Muon over AdamW", seconds / own["seconds"]))
    return rows, table


if __name__ == "__main__":
    sys.exit(main())
