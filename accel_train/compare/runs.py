"""Runs of a recipe in subprocesses of their own: what its options are, one run to its end, what it left behind."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from accel_train.config import UsageError
from accel_train.metrics.curves import last_pass
from accel_train.metrics.gates import GATES_VARIABLE
from accel_train.metrics.records import NON_FINITE, read_metrics

LINES_SHOWN = 20
"""Of the output of a run that failed."""
SECONDS_TO_LEAVE = 10.0
"""Between SIGTERM and SIGKILL for the processes of a run that is broken off."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OPTION = re.compile(r"(?P<name>[A-Za-z_][\w.]*): (?P<value>.*\S) *  # .*")
"""A line of ``--print_config``: name, Python literal, origin."""
USAGE = re.compile(r".*error \(wrong usage, exit code 2\): ", re.DOTALL)
ENDS_WITH_ITS_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: kept by exec
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Run before the command: if this process is killed, so that it can end nothing, the kernel does. A program and not
``preexec_fn``, which is not safe in a process with threads, and numpy starts some."""


class RunFailedError(RuntimeError):
    """A run ended by itself with another exit code than 0, or without the files of a run."""


class InterruptedRunError(Exception):
    """This process was asked to end."""


@dataclass(frozen=True)
class Variant:
    """One side of the comparison."""

    letter: str
    name: str
    """Preset, file, or ``key=value``."""
    source: str
    flags: tuple[str, ...]
    config: Mapping[str, Any]
    """Every dotted option as the recipe resolves it."""


@dataclass(frozen=True)
class Run:
    """What one finished run left behind."""

    letter: str
    round: int
    directory: Path
    seconds: float
    """From the start of its process to the end, by our clock: imports, data and compilation included."""
    cpu_seconds: float
    """Processor time of all its processes meanwhile: what it cost, whatever else ran on the machine."""
    lines: Sequence[Mapping[str, Any]]
    """Training lines of ``metrics.jsonl``, by rising step; at least one."""
    evaluation: Mapping[str, float]
    """Numbers of ``evaluation.json`` without ``step``; empty where the recipe wrote none."""
    fingerprint: str | None
    """Of the data, as ``run.json`` has it; None where the recipe writes none."""
    environment: Mapping[str, Any]
    """Versions and hardware, as the run itself recorded them."""

    @property
    def last_step(self) -> int:
        return int(self.lines[-1]["step"])


def read_config(recipe: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Every dotted option and its value, as the recipe itself resolves ``arguments``; it is run, never imported.

    A few seconds: the recipe's imports. Raises ``UsageError`` with the recipe's own words for what it refuses, and for
    a file that is no recipe.
    """
    command = [sys.executable, str(recipe), *arguments, "--print_config"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise UsageError(USAGE.sub("", (done.stdout + done.stderr).strip()))
    options = dict(_option(found) for line in done.stdout.splitlines() if (found := OPTION.fullmatch(line)))
    if done.returncode or not options:
        raise UsageError(
            f"recipe {str(recipe)!r}: it does not print its options with --print_config (exit code {done.returncode}); "
            f"a recipe reads its config with accel_train.config.load_config\n{_tail(done.stdout + done.stderr)}"
        )
    return options


def _option(found: re.Match[str]) -> tuple[str, Any]:
    try:
        return found["name"], ast.literal_eval(found["value"])
    except (ValueError, SyntaxError):
        return found["name"], found["value"]


def run_once(command: Sequence[str], log: Path, gates: Sequence[str] = ()) -> tuple[float, float]:
    """Run ``command`` to its end with its output in ``log``; seconds by the clock and of processor time.

    ``gates`` are for the run to refuse (``refuse_unknown_gates``). Whatever ends this function ends the processes it
    started. Raises with the last lines of the output:
    ``UsageError`` where the recipe refused its options, ``RunFailedError`` for every other exit code but 0.
    """
    started, used = time.perf_counter(), _cpu_seconds_of_children()
    with log.open("wb") as output:
        child = subprocess.Popen(
            _ending_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, GATES_VARIABLE: "\n".join(gates)},
            start_new_session=True,  # so that its whole group can be ended, and Ctrl-C reaches us alone
        )
        try:
            code = child.wait()
        except BaseException:
            _end_group(child)
            raise
    if code:
        raise (UsageError if code == 2 else RunFailedError)(
            f"the run ended with exit code {code}: {shlex.join(command)}\nthe last lines of {log}:\n"
            f"{_tail(log.read_text(errors='replace'))}"
        )
    return time.perf_counter() - started, _cpu_seconds_of_children() - used


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that have ended, with their own ended children
    return usage.ru_utime + usage.ru_stime


def _ending_with_us(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", ENDS_WITH_ITS_PARENT, *command] if sys.platform == "linux" else list(command)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, so that a launcher passes it on; SIGKILL for what has not left by then."""
    for number, patience in ((signal.SIGTERM, SECONDS_TO_LEAVE), (signal.SIGKILL, SECONDS_TO_LEAVE)):
        try:
            os.killpg(child.pid, number)
            child.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-LINES_SHOWN:]) or "  (it printed nothing)"


@contextmanager
def ending_as_exception() -> Generator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise ``InterruptedRunError``, so that ``finally`` is reached. Main thread."""
    before = {number: signal.signal(number, _interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    for other in ENDING:  # a second one must not break off the ending
        signal.signal(other, signal.SIG_IGN)
    raise InterruptedRunError(signal.Signals(number).name)


def read_run(letter: str, number: int, directory: Path, seconds: float, cpu_seconds: float) -> Run:
    """Read what the run in ``directory`` wrote. Raises ``RunFailedError`` where it has no training line."""
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise RunFailedError(f"the run wrote no {path}; a recipe records with accel_train.metrics.recorder")
    records = read_metrics(path)
    lines = [r for r in last_pass(records, "train") if isinstance(r.get("step_seconds"), (int, float))]
    if not lines:
        raise RunFailedError(f"{path} has no training line with step_seconds; the fields are those of docs/metrics.md")
    environment = next((r for r in records if r.get("event") == "environment"), {})
    experiment = _read_json(directory / "run.json").get("experiment", {})
    return Run(
        letter,
        number,
        directory,
        seconds,
        cpu_seconds,
        lines,
        _numbers(_read_json(directory / "evaluation.json")),
        experiment.get("data_fingerprint"),
        {
            k: v
            for k, v in environment.items()
            if k not in ("event", "time", "elapsed_seconds", "processor_seconds", "command")
        },
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in values.items() if k != "step"}
    return {k: float(v) for k, v in numbers.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
