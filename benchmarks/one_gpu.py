"""The demo of recipes/mmdit.py under every launch file that one GPU can run, written as JSON.

    python -m benchmarks.one_gpu --output benchmarks/results/one_gpu.json
    python -m benchmarks.one_gpu --dry_run            # the same on CPU: rehearsals, three steps each

First all launch files run concurrently in fp32, untimed, to compare their losses with those of a single process. Then
they run one after the other for 50 steps in bf16, for the time of a step, memory, MFU, the AdamW in use and the data
wait. The output file is written after each run. DeepSpeed launch files are recorded as skipped if deepspeed is not
installed, and so are runs for which ``--limit_seconds`` leaves no time.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from accel_train.metrics.records import read_metrics, write_json
from benchmarks.method import ROOT, SCHEMA, Row, facts, largest_difference, row

LAUNCH_FILES = ("single_gpu", "ddp", "fsdp2", "fsdp2_offload", "zero2_offload", "zero3_offload")
SMALL = "--log.log_every 1 --evaluation.samples 64 --evaluation.timesteps 2 --evaluation.shown 1".split()


def run(name: str, precision: str, steps: int, folder: Path, dry_run: bool) -> dict[str, Any]:
    """Train under one launch file; return values from metrics and log of rank 0, or the error as ``failed``."""
    directory = folder / f"{name}-{precision}"
    how = "rehearse" if dry_run else "launch"
    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    command = [sys.executable, "-m", "accel_train.cli", how, "--config_file", str(file), "--num_processes", "1"]
    command += [str(ROOT / "recipes" / "mmdit.py"), "demo", "--max_steps", str(steps), "--output_dir", str(directory)]
    command += ["--precision", precision, "--schedule.warmup_steps", "2", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).splitlines()
        own = [text for text in said if text.startswith("[rank")]  # torchrun's lines follow the recipe's
        return {"failed": "\n".join(own or said)[-2000:]}
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
    """Return the largest relative difference of the losses of two runs, or None if one has none."""
    if "losses" not in found or "losses" not in reference:
        return None
    return largest_difference(found["losses"], reference["losses"])


def main() -> None:
    """Run everything and print a line for each run. Exits with 1 if a run failed or a loss is not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dry_run", action="store_true", help="on CPU, three steps each")
    parser.add_argument("--limit_seconds", type=float, default=580.0, help="seconds after which no run starts")
    parser.add_argument("--only", nargs="+", default=list(LAUNCH_FILES), choices=LAUNCH_FILES)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry_run shows that the script works")
    began, steps = time.perf_counter(), 3 if options.dry_run else options.steps
    runs: dict[str, Any] = {}
    names = list(options.only)
    if find_spec("deepspeed") is None:
        for name in [n for n in names if n.startswith("zero")]:
            names.remove(name)
            runs |= {f"{name} {p}": {"skipped": "deepspeed is not installed"} for p in ("fp32", "bf16")}

    def record(name: str, result: dict[str, Any]) -> None:
        runs[name] = result
        print_run(name, result)
        if options.output:
            write(options.output, runs, steps, gpu=not options.dry_run)

    with tempfile.TemporaryDirectory() as folder:
        at_once = 1 if options.dry_run else len(names)
        with ThreadPoolExecutor(at_once) as pool:
            started = [pool.submit(run, name, "fp32", steps, Path(folder), options.dry_run) for name in names]
            found = dict(zip(names, (job.result() for job in started), strict=True))
        for name, result in found.items():
            apart = compare(result, found.get("single_gpu", {}))
            record(f"{name} fp32", result | {"loss_difference_to_one_process": apart})
        for name in names:
            if time.perf_counter() - began > options.limit_seconds:
                record(f"{name} bf16", {"skipped": f"{options.limit_seconds:.0f} s were over"})
            else:
                record(f"{name} bf16", run(name, "bf16", steps, Path(folder), options.dry_run))
    raise SystemExit(any("failed" in r or not finite(r) for r in runs.values()))


def write(path: Path, runs: dict[str, Any], steps: int, gpu: bool) -> None:
    """Write the results of the runs so far."""
    absent = {name: r["skipped"] for name, r in runs.items() if "skipped" in r}
    absent |= dict.fromkeys((name for name, r in runs.items() if "failed" in r), "failed")
    report = {"schema": SCHEMA, "title": "Launch files on one GPU", "environment": facts(gpu), "absent": absent}
    write_json(path, report | {"rows": [asdict(found) for found in rows_of(runs)], "steps": steps, "runs": runs})


def finite(result: dict[str, Any]) -> bool:
    """Return True if every logged loss is finite."""
    return all(math.isfinite(loss) for loss in result.get("losses", []))


def rows_of(runs: dict[str, Any]) -> list[Row]:
    """Return rows: memory of each run, the step time of bf16 runs, and the loss difference of fp32 runs."""
    rows: list[Row] = []
    for name, result in runs.items():
        if "step_seconds" not in result:
            continue
        if "memory_peak_gib" in result:
            rows.append(row("presets", f"{name}: memory", result["memory_peak_gib"], "GiB"))
        if "loss_difference_to_one_process" not in result:
            rows.append(row("presets", f"{name}: step", 1e3 * result["step_seconds"], "ms"))
        elif result["loss_difference_to_one_process"] is not None:
            apart = result["loss_difference_to_one_process"]
            rows.append(row("presets", f"{name}: largest relative difference of a loss to one process", apart))
    return rows


def print_run(name: str, result: dict[str, Any]) -> None:
    """Print a line of metrics, or the reason if there are none."""
    if "losses" not in result:
        print(f"{name:<24} {result.get('failed') or result['skipped']}", flush=True)
        return
    memory = result.get("memory_peak_gib", result.get("process_rss_gib", float("nan")))
    apart = result.get("loss_difference_to_one_process")
    print(
        f"{name:<24} {1000 * result['step_seconds']:8.1f} ms/step  {memory:7.2f} GiB  "
        f"mfu {result.get('mfu', float('nan')):.3f}  data wait {result['data_wait_fraction']:.3f}  "
        f"loss {result['losses'][-1]:.3f}" + ("" if apart is None else f"  difference {apart:.1e}"),
        flush=True,
    )


if __name__ == "__main__":
    main()
