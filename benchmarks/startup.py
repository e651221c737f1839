"""Processor time of a start: commands without training, imports, and README's command up to the log line of step 1.

    python -m benchmarks.startup --output benchmarks/results/startup_cpu.json

Each start is a process of its own, and all take turns. A time is user and system time of the process and its children,
which other work on the machine disturbs less than wall time. On idle cores, the wall time of a start on one thread is
little longer. The cache is warm: one start of each before the first round has prepared data and written help texts. The
lower bounds are what cannot be avoided: importing torch and Accelerate, the first step of a raw loop, and the launcher
with an empty script. Shares of the imports are from `python -X importtime`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from benchmarks.method import ROOT, Rounds, Row, in_turns, on_cpu, parser_of, row, write_results

RAW_LOOP = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
plain = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
accelerator.backward(model(torch.randn(4, 8)).sum())
optimizer.step()
"""
ANSWERS = {
    "accel-train": ["-m", "accel_train.cli"],
    "accel-train --help": ["-m", "accel_train.cli", "--help"],
    "mmdit.py --help": ["recipes/mmdit.py", "--help"],
    "causal_lm.py --help": ["recipes/causal_lm.py", "--help"],
}
"""Arguments of Python for commands that train nothing."""
TARGETS = {
    "accel-train": "<= 0.3",
    "accel-train --help": "<= 0.3",
    "mmdit.py --help": "<= 0.7",
    "causal_lm.py --help": "<= 0.7",
}
FLOORS = {
    "import torch": ["-c", "import torch"],
    "import accelerate": ["-c", "import accelerate"],
    "a raw loop with Accelerate, to its first step": ["-c", RAW_LOOP],
}
PACKAGES = ("torch", "accelerate", "huggingface_hub", "accel_train")
"""Packages whose share in the imports is reported."""


def processor_seconds() -> float:
    """Return user and system seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment(cache: Path) -> dict[str, str]:
    return os.environ | {"ACCEL_TRAIN_CACHE": str(cache), "PYTHONPATH": str(ROOT)}


def run_to_end(arguments: list[str], cache: Path) -> None:
    """Run Python with these arguments to its end. Raises RuntimeError unless the exit code is 0 or 2."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(cache), capture_output=True, text=True, check=False)
    # argparse exits with 2 if the command is missing.
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{command}: {done.stderr}")


def launcher() -> list[str]:
    return ["-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]


def first_step(arguments: list[str], cache: Path) -> None:
    """Start a training and kill it at the log line of step 1. Raises RuntimeError if it ends before."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *arguments, "--output_dir", folder]
        shown: list[str] = []
        with subprocess.Popen(
            command, cwd=ROOT, env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                shown.append(text)
                if text.startswith("step 1/"):
                    break
            else:
                raise RuntimeError(f"{command} ended before its first step: {''.join(shown)}")
            # A launcher waits for the training process, its child, so the time of both is counted.
            for process_of_run in psutil.Process(process.pid).children() or [process]:
                process_of_run.kill()
            process.stdout.read()


def import_shares(recipe: str, cache: Path) -> dict[str, float]:
    """Return the share of each package of `PACKAGES` in the time of all imports of a recipe."""
    module = f"import sys; sys.path.insert(0, 'recipes'); import {recipe}"
    command = [sys.executable, "-X", "importtime", "-c", module]
    done = subprocess.run(command, cwd=ROOT, env=environment(cache), capture_output=True, text=True, check=True)
    seconds: dict[str, float] = {}
    for text in done.stderr.splitlines():
        # import time: self [us] | cumulative | imported package
        parts = text.removeprefix("import time:").split("|")
        if len(parts) != 3 or not parts[0].strip().isdigit():
            continue
        package = parts[2].strip().partition(".")[0]
        seconds[package] = seconds.get(package, 0.0) + int(parts[0]) / 1e6
    return {package: seconds.get(package, 0.0) / sum(seconds.values()) for package in PACKAGES}


def ways(cache: Path, empty: Path) -> dict[str, Callable[[], object]]:
    """Return every start to time, by name."""
    runs: dict[str, Callable[[], object]] = {n: partial(run_to_end, a, cache) for n, a in (ANSWERS | FLOORS).items()}
    runs["the imports of mmdit.py"] = partial(
        run_to_end, ["-c", "import sys; sys.path.insert(0, 'recipes'); import mmdit"], cache
    )
    runs["accelerate launch of an empty script"] = partial(run_to_end, [*launcher(), str(empty)], cache)
    runs["accelerate launch mmdit.py, to step 1"] = partial(first_step, [*launcher(), "recipes/mmdit.py"], cache)
    runs["python mmdit.py, to step 1"] = partial(first_step, ["recipes/mmdit.py"], cache)
    return runs


def rows_of(found: Rounds, shares: list[dict[str, float]]) -> list[Row]:
    """Return the rows: seconds of each start, seconds over the raw loop, and shares of the imports in percent."""
    targets = TARGETS | {"accelerate launch mmdit.py, to step 1": "<= 8"}
    rows = [row("startup", name, seconds, "s", targets.get(name)) for name, seconds in found.seconds.items()]
    over = found.differences("python mmdit.py, to step 1", "a raw loop with Accelerate, to its first step")
    rows.append(row("startup", "python mmdit.py over the raw loop, to the first step", over, "s"))
    for package in PACKAGES:
        values = [100 * share[package] for share in shares]
        rows.append(row("startup", f"share of {package} in the imports of mmdit.py", values, "%"))
    return rows


def main() -> int:
    """Measure, print and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=7)
    options = parser.parse_args()
    on_cpu()
    rounds = 1 if options.tiny else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.touch()
        cache = Path(folder) / "cache"
        found = in_turns(ways(cache, empty), rounds, warm_up=1, clock=processor_seconds)
        shares = [import_shares("mmdit", cache) for _ in range(rounds)]
    rows = rows_of(found, shares)
    met = write_results(options.output, "Processor time of a start", rows, found.summary())
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
