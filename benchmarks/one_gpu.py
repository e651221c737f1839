"""Everything about the demo that needs one GPU, in one run, written as JSON.

    python -m benchmarks.one_gpu --output benchmarks/results/one_gpu.json
    python -m benchmarks.one_gpu --dry_run            # the same on CPU: rehearsals, three steps each

For every launch file that one GPU can run: 50 steps of the demo in bf16, the time of a step, memory, MFU, which
AdamW ran and how long the loop waited for data; then fp32 losses of every launch file against one process. DeepSpeed
files are skipped, and say so, where deepspeed is not installed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from accel_train.metrics.records import read_metrics, write_json
from benchmarks.method import ROOT, SCHEMA, Row, facts, row

LAUNCH_FILES = ("single_gpu", "ddp", "fsdp2", "fsdp2_offload", "zero2_offload", "zero3_offload")
SMALL = "--log.log_every 1 --evaluation.samples 64 --evaluation.timesteps 2 --evaluation.shown 1".split()


def run(name: str, precision: str, steps: int, folder: Path, dry_run: bool) -> dict[str, Any]:
    """Train under one launch file; what metrics.jsonl and the log of rank 0 say of it."""
    directory = folder / f"{name}-{precision}"
    how = "rehearse" if dry_run else "launch"
    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    command = [sys.executable, "-m", "accel_train.cli", how, "--config_file", str(file), "--num_processes", "1"]
    command += [str(ROOT / "recipes" / "mmdit.py"), "demo", "--max_steps", str(steps), "--output_dir", str(directory)]
    command += ["--precision", precision, "--schedule.warmup_steps", "2", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        return {"failed": (done.stdout + done.stderr)[-2000:]}
    lines = [r for r in read_metrics(directory / "metrics.jsonl") if r["event"] == "train"]
    log = (directory / "logs" / "rank_0.log").read_text()
    settled = lines[len(lines) // 2 :]
    result: dict[str, Any] = {
        "losses": [r["loss"] for r in lines],
        "step_seconds": statistics.median(r["step_seconds"] for r in settled),
        "samples_per_second": statistics.median(r["samples_per_second"] for r in settled),
        "data_wait_fraction": statistics.median(r["data_wait_fraction"] for r in settled),
        "optimizer": next(iter(re.findall(r"AdamW, [^;]*", log)), None),
        "loader": next(iter(re.findall(r"loader: .*", log)), None),
    }
    for name in ("mfu", "memory_peak_gib", "memory_reserved_gib", "process_rss_gib", "model_tflops_per_second"):
        if name in settled[-1]:
            result[name] = settled[-1][name]
    return result


def compare(found: dict[str, Any], reference: dict[str, Any]) -> float | None:
    """Largest relative difference of the losses of two runs of the same experiment."""
    if "losses" not in found or "losses" not in reference:
        return None
    pairs = zip(reference["losses"], found["losses"], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def main() -> None:
    """Run everything and print a table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dry_run", action="store_true", help="on CPU, three steps each")
    parser.add_argument("--only", nargs="+", default=list(LAUNCH_FILES), choices=LAUNCH_FILES)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry_run shows that the script works")
    steps = 3 if options.dry_run else options.steps
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("bf16", "fp32"):
            for name in options.only:
                if name.startswith("zero") and find_spec("deepspeed") is None:
                    runs[f"{name} {precision}"] = {"skipped": "deepspeed is not installed"}
                else:
                    runs[f"{name} {precision}"] = run(name, precision, steps, Path(folder), options.dry_run)
    for name in options.only:
        runs[f"{name} fp32"]["loss_difference_to_one_process"] = compare(
            runs[f"{name} fp32"], runs.get("single_gpu fp32", {})
        )
    rows = [asdict(found) for found in rows_of(runs)]
    absent = {name: r["skipped"] for name, r in runs.items() if "skipped" in r}
    report = {"schema": SCHEMA, "title": "Launch files on one GPU", "environment": facts(), "absent": absent}
    if options.output:
        write_json(options.output, report | {"rows": rows, "steps": steps, "runs": runs})
    print_table(runs)
    raise SystemExit(any("failed" in r or not finite(r) for r in runs.values()))


def finite(result: dict[str, Any]) -> bool:
    """Every logged loss is a number."""
    return all(math.isfinite(loss) for loss in result.get("losses", []))


def rows_of(runs: dict[str, Any]) -> list[Row]:
    """Step time, memory and distance to one process of each run, for the page."""
    found: list[Row] = []
    for name, result in runs.items():
        if "step_seconds" not in result:
            continue
        found.append(row("presets", f"{name}: step", 1e3 * result["step_seconds"], "ms"))
        if "memory_peak_gib" in result:
            found.append(row("presets", f"{name}: memory", result["memory_peak_gib"], "GiB"))
        if result.get("loss_difference_to_one_process") is not None:
            apart = result["loss_difference_to_one_process"]
            found.append(row("presets", f"{name}: largest relative difference of a loss to one process", apart))
    return found


def print_table(runs: dict[str, Any]) -> None:
    """One line a run."""
    for name, result in runs.items():
        if "losses" not in result:
            print(f"{name:<24} {json.dumps(result)[:160]}")
            continue
        memory = result.get("memory_peak_gib", result.get("process_rss_gib", float("nan")))
        print(
            f"{name:<24} {1000 * result['step_seconds']:8.1f} ms/step  {memory:7.2f} GiB  "
            f"mfu {result.get('mfu', float('nan')):.3f}  data wait {result['data_wait_fraction']:.3f}  "
            f"loss {result['losses'][-1]:.3f}  difference {result.get('loss_difference_to_one_process')}"
        )


if __name__ == "__main__":
    main()
