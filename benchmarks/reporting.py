"""Share of default metrics and health checks in a step, and a check of the logged rates against a separate clock.

    python -m benchmarks.reporting --output benchmarks/results/reporting_cpu.json

The unchanged demo of recipes/mmdit.py, with a save and an evaluation halfway, on one process and on two under DDP. The
cost is the host's time in the reports of a step (throughput, losses by time, norms by part, comparisons of the
processes, reading the losses at a log point) and in its step guard, over the time of the steps. On a CPU the host does
all the work, so none of this is hidden. The rates are compared with a clock that starts with the loop, stops at its
last log point, and pauses during saves and evaluations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from accel_train import loop
from accel_train.metrics.records import read_metrics
from benchmarks.method import ROOT, Row, parser_of, row, write_results
from recipes import mmdit

STEPS = 100
TARGET = "<= 0.01"
COUNTED = {
    "reports": ("begin_step", "step"),
    "prepared.guard": ("watch", "check"),
}
"""Methods whose time is the cost, by attribute of the training."""


class Clock:
    """Sum of the seconds spent in some methods. Nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` with the time of its calls added to ``seconds``."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self._depth += 1
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - began

        return call


@contextmanager
def observing(found: dict[str, Any], training: Any, prepared: Any, _: Any) -> Generator[None]:
    """Time the methods of a training and its steps; an observer for ``loop.observed``. Writes to ``found``."""
    cost, elsewhere = Clock(), Clock()
    for attribute, names in COUNTED.items():
        for name in names:
            target = attrgetter(attribute)(training)
            setattr(target, name, cost.timed(getattr(target, name)))
    training._save = elsewhere.timed(training._save)
    training.evaluate = elsewhere.timed(training.evaluate)
    steps = training.steps
    read = training.reports.throughput.read
    began = 0.0

    def started() -> Iterator[Any]:
        nonlocal began
        began = time.perf_counter()
        yield from steps

    def read_with_the_clock() -> dict[str, float]:
        """Stop the clock at each read: a rate does not cover what follows it in its step."""
        values = read()
        found["seconds"] = time.perf_counter() - began - elsewhere.seconds
        found["cost_seconds"] = cost.seconds
        return values

    training.steps = started()
    training.reports.throughput.read = read_with_the_clock
    yield


def train(folder: Path, steps: int, flags: list[str]) -> dict[str, Any]:
    """Train the demo in this process; return seconds by the clock, seconds of the cost and logged seconds."""
    found: dict[str, Any] = {}
    half = str(steps // 2)
    words = ["demo", "--output_dir", str(folder), "--max_steps", str(steps), "--log.log_every", half, *flags]
    words += ["--checkpoints.save_every", half, "--evaluation.every", half, "--evaluation.samples", "16"]
    with loop.observed(lambda *inner: observing(found, *inner)):
        assert mmdit.main(words) == 0
    lines = {line["step"]: line for line in read_metrics(folder / "metrics.jsonl") if line["event"] == "train"}
    # A log line averages over at least the last 50 steps: each half of a full run, or a shorter run as a whole.
    halves = [lines[steps // 2], lines[steps]] if steps == STEPS else [lines[steps]]
    mean = sum(line["step_seconds"] for line in halves) / len(halves)
    return found | {"logged_seconds": mean * steps}


def measure(processes: int, steps: int, flags: list[str]) -> dict[str, Any]:
    """Run `train` on new processes under torchrun; return the result of rank 0. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += ["-m", "benchmarks.reporting", "--worker", folder, "--steps", str(steps), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        path = Path(folder) / "found.json"
        if not path.exists():
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(path.read_text())


def rows_of(processes: int, found: list[dict[str, Any]]) -> list[Row]:
    """Return the rows for this number of processes; ``found`` has one result per round."""
    where = "one process" if processes == 1 else f"{processes} processes under DDP"
    share = [each["cost_seconds"] / each["seconds"] for each in found]
    off = [abs(each["logged_seconds"] / each["seconds"] - 1) for each in found]
    return [
        row("reporting", f"Reports and health checks over the time of the steps, {where}", share, "x", TARGET),
        row("reporting", f"Logged time of the steps against a clock beside them, off by, {where}", off, "x", TARGET),
    ]


def main() -> int:
    """Measure on one process and on two, and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--worker", type=Path, help="be one of the processes, and write into this directory")
    parser.add_argument("--steps", type=int, default=STEPS, choices=range(2, STEPS + 1), metavar=f"2 to {STEPS}")
    options, flags = parser.parse_known_args()
    if options.worker is not None:
        found = train(options.worker / "run", options.steps, flags)
        if os.environ.get("RANK", "0") == "0":
            (options.worker / "found.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # gloo's threads race with the end of the interpreter
    rounds, steps = (1, 4) if options.tiny else (options.rounds, options.steps)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for processes in (1, 2):
        found = [measure(processes, steps, flags) for _ in range(rounds)]
        details[str(processes)] = found
        rows += rows_of(processes, found)
    return 0 if write_results(options.output, "Reports and health checks", rows, details) else 1


if __name__ == "__main__":
    raise SystemExit(main())
