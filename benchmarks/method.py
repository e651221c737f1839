"""Shared by all scripts of the suite: rounds in turns, a row with interval and verdict, facts about the machine.

A result file holds rows, from which `docs/performance.md` is generated, the environment in which they were measured,
and details. A row is one measurement against one target. All ways of a comparison run in one process, in turns. A value
is the median over the rounds with a bootstrap interval, and a target is missed only if the interval excludes it.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from accel_train.cores import cpu_name
from accel_train.metrics.bootstrap import estimate
from accel_train.metrics.environment import command_line, git_commit, package_versions
from accel_train.metrics.gates import decide, read_gate
from accel_train.metrics.records import write_json

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SCHEMA = 1
PEERS = ("diffusers", "lightning-fabric", "torchao", "bitsandbytes", "pyarrow", "flash-attn")
REACHED = {"passed": "reached", "not decided": "not decided", "FAILED": "not reached"}
WRITTEN = (":(exclude)benchmarks/results", ":(exclude)docs/performance.md")
"""Git pathspecs that exclude the files written by the suite."""
CPU_ALONE = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
DISTURBED = 1.1
"""A round is dropped if a matrix product before or after it takes more than this multiple of the median time."""


@dataclass(frozen=True)
class Row:
    """One measurement, a line of the page."""

    id: str
    """Group of the row: C1 to C10, G0 to G8, or a name such as `scaling`."""
    name: str
    """Text that says what is measured, and against what."""
    unit: str
    """Unit of the value; `x` for a ratio, `count` for an exact number."""
    value: float
    """Median over the rounds, or the single value."""
    interval: tuple[float, float] | None
    """Interval of the median. None for a count or a single value."""
    rounds: int
    target: str | None
    """Target such as `>= 4.5`. None if the value is only reported."""
    verdict: str
    """Result against the target: passed, not decided, FAILED, or reported."""
    goal: str | None = None
    """Condition hoped for beyond the target. It never fails a row."""
    goal_verdict: str | None = None
    """Result against the goal: reached, not decided, or not reached. None without a goal."""


def row(
    id: str,
    name: str,
    values: float | Sequence[float],
    unit: str = "x",
    target: str | None = None,
    goal: str | None = None,
) -> Row:
    """Return a row from the values of its rounds. A single value, such as a count, is exact and has no interval."""
    values = [float(values)] if isinstance(values, (int, float)) else [float(v) for v in values]
    estimated = estimate(values)
    verdict: str = "reported" if target is None else decide(read_gate(f"value {target}"), values).verdict
    interval = None if estimated.low is None or estimated.high is None else (estimated.low, estimated.high)
    reached = None if goal is None else REACHED[decide(read_gate(f"value {goal}"), values).verdict]
    return Row(id, name, unit, estimated.median, interval, estimated.count, target, verdict, goal, reached)


def cells(measured: Row) -> tuple[str, str, str, str]:
    """Return the texts of a row: value, interval, target and goal, and the verdicts."""
    unit = "" if measured.unit == "count" else f" {measured.unit}"
    between = "" if measured.interval is None else f"{measured.interval[0]:.4g} to {measured.interval[1]:.4g}"
    against = [f"{measured.target}{unit}"] if measured.target else []
    against += [f"goal {measured.goal}{unit}"] if measured.goal else []
    verdict = measured.verdict if measured.target or not measured.goal else ""
    out = [verdict] if verdict else []
    out += [f"goal {measured.goal_verdict}"] if measured.goal else []
    return f"{measured.value:.4g}{unit}", between, ", ".join(against), ", ".join(out)


def line(measured: Row) -> str:
    """Return a row as a line for the console."""
    value, between, against, verdict = cells(measured)
    parts = [value, *([f"({between})"] if between else []), *([f"against {against}"] if against else [])]
    return f"{measured.id:8} {measured.name}: {' '.join(parts)}: {verdict}"


@dataclass(frozen=True)
class Rounds:
    """Seconds of each way in each round that was not disturbed."""

    seconds: dict[str, list[float]]
    of: int
    """Number of rounds that were run, disturbed ones included."""

    def ratios(self, over: str, under: str) -> list[float]:
        """Return the ratio of the times of two ways, by round."""
        return [a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True)]

    def differences(self, of: str, less: str) -> list[float]:
        """Return the difference of the times of two ways in seconds, by round."""
        return [a - b for a, b in zip(self.seconds[of], self.seconds[less], strict=True)]

    def median(self, way: str) -> float:
        """Return the median seconds of a way."""
        return statistics.median(self.seconds[way])

    def summary(self) -> dict[str, Any]:
        """Return the smallest and median seconds of each way, for the details of a result."""
        ways = {way: {"least": min(s), "median": statistics.median(s)} for way, s in self.seconds.items()}
        kept = len(next(iter(self.seconds.values())))
        return {"seconds": ways, "rounds_kept": kept, "rounds": self.of}


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.thread_time, repeats: int = 1) -> float:
    """Return the mean seconds of a call. The default clock is thread time, which other processes hardly affect."""
    started = clock()
    for _ in range(repeats):
        work()
    return (clock() - started) / repeats


def largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if any is NaN, which ``max`` may skip."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def largest_difference(found: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two sequences, element by element. NaN if any value is NaN."""
    return largest(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    repeats: int = 1,
    warm_up: int = 2,
    clock: Callable[[], float] = time.thread_time,
) -> Rounds:
    """Time every way once per round, `repeats` calls each, and return the undisturbed rounds.

    A round is disturbed if a matrix product beside it is slower than `DISTURBED` times its median over the rounds. At
    least half of the rounds remain.
    """
    a = torch.randn(256, 256)
    probe: Callable[[], object] = lambda: a @ a  # noqa: E731
    seconds_of(probe, repeats=200)
    timed: list[dict[str, float]] = []
    probes: list[float] = []
    for number in range(warm_up + rounds):
        before = seconds_of(probe, repeats=100)
        times = {name: seconds_of(work, clock, repeats) for name, work in ways.items()}
        if number >= warm_up:
            timed.append(times)
            probes.append(max(before, seconds_of(probe, repeats=100)))
    usual = statistics.median(probes)
    kept = [times for times, p in zip(timed, probes, strict=True) if p <= DISTURBED * usual]
    return Rounds({name: [times[name] for times in kept] for name in ways}, rounds)


def installed(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def on_cpu() -> None:
    """Hide all GPUs from this process, unless it has already used one, and from its child processes."""
    os.environ.update(CPU_ALONE)


def facts(gpu: bool = False) -> dict[str, Any]:
    """Return hardware, versions, commit, date and command of this run. ``gpu``: a GPU was used, describe it too."""
    versions = package_versions() | {n: v for n in PEERS if (v := installed(n)) is not None}
    entries = {
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "torch_threads": torch.get_num_threads(),
        "versions": dict(sorted(versions.items())),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": measured_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m {module_name()} {command_line(without_folders(sys.argv[1:]))}".rstrip(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    return entries | ({"gpu": gpu_facts()} if gpu else {})


def gpu_facts() -> dict[str, Any]:
    """Return name, driver and CUDA version of the first GPU."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {"name": torch.cuda.get_device_name(0), "driver": driver.stdout.strip(), "cuda": torch.version.cuda}


def measured_commit(root: Path = ROOT) -> str | None:
    """Return the commit, with `-dirty` if a tracked file differs that the suite does not write. None without git."""
    commit = git_commit(root)
    if commit is None or not commit.endswith("-dirty"):
        return commit
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN]
    changed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return commit if changed else commit.removesuffix("-dirty")


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with absolute paths cut to their last part: the folder does not affect a measurement."""
    return [Path(word).name if Path(word).is_absolute() else word for word in arguments]


def module_name() -> str:
    """Return the module name of the running script, as for `python -m`."""
    spec: Any = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name) if spec is not None else Path(sys.argv[0]).stem


def write_results(
    path: Path | None,
    title: str,
    rows: Sequence[Row],
    details: Mapping[str, Any],
    absent: Mapping[str, str] | None = None,
    gpu: bool = False,
) -> bool:
    """Print the rows, write the file if `path` is given, and return True if no target was missed.

    `absent` names peers that did not run, with the reason. `gpu`: a GPU was used.
    """
    for found in rows:
        print(line(found), flush=True)
    for peer, reason in (absent or {}).items():
        print(f"absent: {peer}: {reason}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "title": title, "environment": facts(gpu), "absent": dict(absent or {})}
        write_json(path, content | {"rows": [asdict(r) for r in rows], "details": dict(details)})
    return all(r.verdict != "FAILED" for r in rows)


def parser_of(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every script. ``rounds`` is the default of --rounds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to test that the script works; results mean nothing"
    )
    return parser
