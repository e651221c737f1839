"""Runs of a recipe in subprocesses: read its options, run it to the end, read the result."""

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
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO, Any, NoReturn, Protocol

from accel_train.config import UsageError, expand_path, in_one_process, refuse_unwritable
from accel_train.launch_files.parents import tied_to_parent
from accel_train.metrics.gates import GATES_VARIABLE
from accel_train.metrics.records import last_pass, read_evaluation, read_metrics
from accel_train.options.help_text import requested_topic
from accel_train.store.names import REPORT

Line = Mapping[str, Any]
"""One line of ``metrics.jsonl``."""
Options = Mapping[str, Any]
"""Dotted option -> its value."""

# Number of output lines shown for a failed run.
LINES_SHOWN = 20
# Time between SIGTERM and SIGKILL for the processes of an interrupted run that nobody continues.
GRACE_SECONDS = 10.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A line of --print_config: name, Python literal, origin.
OPTION = re.compile(r"(?P<name>[A-Za-z_][\w.]*): (?P<value>.*\S) *  # .*")
USAGE_ERROR = re.compile(r".*error \(wrong usage, exit code 2\): ", re.DOTALL)
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
# Fields of an environment line that differ from run to run.
NOT_HARDWARE = ("event", "time", "elapsed_seconds", "processor_seconds", "command", "recipe")


class RunFailedError(RuntimeError):
    """A run exited with a code other than 0, or without the files of a run."""


class InterruptedRunError(Exception):
    """This process received a stop signal."""


class Child(Protocol):
    """The part of ``subprocess.Popen`` that is used here."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class Variant:
    """One side of the comparison."""

    letter: str
    name: str
    """Preset, file, or ``key=value``."""
    source: str
    flags: tuple[str, ...]
    config: Options
    """Every dotted option, as resolved by the recipe."""


@dataclass(frozen=True)
class Run:
    """Result of one finished run."""

    letter: str
    round: int
    directory: Path
    seconds: float
    """Wall time of its process, including imports, data and compilation."""
    cpu_seconds: float
    """CPU time of all its processes, independent of other load on the machine."""
    lines: Sequence[Line]
    """Training lines of ``metrics.jsonl`` by rising step, at least one."""
    evaluation: Mapping[str, float]
    """Numbers in ``evaluation.json`` without ``step``. Empty if the recipe writes none."""
    fingerprint: str | None
    """Fingerprint of the data in ``run.json``. None if the recipe writes none."""
    environment: Mapping[str, Any]
    """Versions and hardware recorded by the run."""
    options: Options = field(default_factory=dict[str, Any])
    """Options in ``run.json``. Empty if the recipe writes none."""

    @property
    def last_step(self) -> int:
        return int(self.lines[-1]["step"])


def read_config(recipe: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the recipe with ``--print_config`` and return every dotted option with its value.

    Takes a few seconds for the recipe's imports. For arguments with ``--help`` it prints the recipe's help and ends
    with exit code 0. Raises ``UsageError`` with the recipe's own message if it refuses the arguments, and for a file
    without a recipe.
    """
    command = [sys.executable, str(recipe), *arguments, "--print_config"]
    with in_one_process():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode == 2:
        raise UsageError(USAGE_ERROR.sub("", output.strip()))
    if done.returncode == 0 and requested_topic(arguments) is not None:
        print(done.stdout, end="", flush=True)
        raise SystemExit(0)
    options: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        match = OPTION.fullmatch(line)
        if match:
            options[match["name"]] = _literal(match["value"])
    if done.returncode or not options:
        raise UsageError(
            f"recipe {str(recipe)!r}: it does not print its options with --print_config (exit code {done.returncode}); "
            f"a recipe reads its config with accel_train.options.loading.load_config\n{_tail(output)}"
        )
    return options


def _literal(text: str) -> Any:
    """Evaluate a Python literal. Return any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def folder_for_runs(kept: str | None, option: str, command: str) -> AbstractContextManager[str]:
    """Return a context manager for the directory ``kept``, created if missing, or for a temporary one if it is None.

    Raises ``UsageError`` for a file, and for a directory that is not empty or not writable. ``option`` is the flag that
    the error names, and ``command`` is part of the temporary directory's name.
    """
    if kept is None:
        # A run that is being killed may still create files while they are deleted.
        return tempfile.TemporaryDirectory(prefix=f"accel-train-{command}-", ignore_cleanup_errors=True)
    path = expand_path(kept)
    place = f"--{option} {path}"
    if path.exists() and not path.is_dir():
        raise UsageError(f"{place} is a file; give a directory that does not exist or is empty")
    with refuse_unwritable(place):
        path.mkdir(parents=True, exist_ok=True)
        taken = any(path.iterdir())
    if taken:
        raise UsageError(f"{place} is not empty; give another directory, or delete it first")
    return nullcontext(str(path))


def start_child(words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command that ends when this process does. It writes to ``output`` and reads no input."""
    return subprocess.Popen(
        # If this process is killed, it cannot end its run, so the kernel has to.
        tied_to_parent(words),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        # A group of its own can be ended as a whole, and Ctrl-C reaches only this process.
        start_new_session=True,
    )


def run_once(
    command: Sequence[str],
    log: Path,
    gates: Sequence[str] = (),
    environment: Mapping[str, str] = NO_VARIABLES,
    save_seconds: float | None = None,
) -> tuple[float, float]:
    """Run ``command`` to its end with its output in ``log``. Return wall time and CPU time in seconds.

    The run itself checks ``gates`` (``refuse_unknown_gates``). ``environment`` is added to the variables of this
    process without those of a launcher. An exception here, such as that of a stop signal, also ends the processes of
    the run. ``save_seconds`` is the time that a run that can be continued has to save before it is killed.

    Raises ``UsageError`` if the run refuses its options (exit code 2), and ``RunFailedError`` for any other exit code
    except 0. Both show the last lines of the output.
    """
    started = time.perf_counter()
    # The system counts all children so far, so the run's share is a difference.
    cpu_before = _cpu_seconds_of_children()
    child: subprocess.Popen[bytes] | None = None
    with log.open("wb") as output:
        try:
            # With the variables of a launcher it would wait for the other processes of that.
            with stop_signals_held(), in_one_process():
                child = start_child(command, output, {**os.environ, **environment, GATES_VARIABLE: "\n".join(gates)})
            code = child.wait()
        except BaseException:
            if child is not None:
                _end_group(child, save_seconds)
            raise
    if code:
        failure = UsageError if code == 2 else RunFailedError
        raise failure(
            f"the run ended with exit code {code}: {shlex.join(command)}\nthe last lines of {log}:\n"
            # A run that was killed may have ended in the middle of a character.
            f"{_tail(log.read_text(errors='replace'))}"
        )
    seconds = time.perf_counter() - started
    cpu_seconds = _cpu_seconds_of_children() - cpu_before
    return seconds, cpu_seconds


def _cpu_seconds_of_children() -> float:
    """Return the CPU time of ended children, including their own ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end_group(child: subprocess.Popen[bytes], save_seconds: float | None) -> None:
    """Send SIGTERM (a launcher forwards it), then SIGKILL to processes still alive."""
    grace_seconds = GRACE_SECONDS
    if save_seconds is not None:
        grace_seconds = save_seconds
        text = f"the run is asked to save and stop; it is killed if it has not ended in {save_seconds:g} s"
        print(text, file=sys.stderr, flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            # SIGKILL follows in any case: workers of the group may outlive the launcher that has just ended.
            os.killpg(child.pid, number)
            child.wait(grace_seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def report_failure(error: RunFailedError | InterruptedRunError, result: str) -> int:
    """Print why a command ends early, and return its exit code. ``result`` describes what is left after a signal."""
    text = f"error: {error}"
    if isinstance(error, InterruptedRunError):
        text = f"interrupted by {error}: {result}"
    print(text, file=sys.stderr, flush=True)
    return 1


def kill_family(child: Child) -> None:
    """Kill a command and its descendants, if it is still running."""
    import psutil

    if child.poll() is not None:
        return
    family: list[psutil.Process] = []
    # Listed first: once the parent is gone, nothing connects them with it.
    with suppress(psutil.Error):
        family = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGKILL)
    child.wait()
    # A launcher that is killed forwards nothing to its processes.
    for process in family:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(family, timeout=10)


def _tail(text: str) -> str:
    """Return the last lines of an output, indented."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return "  (it printed nothing)"
    return "\n".join(f"  {line}" for line in lines[-LINES_SHOWN:])


@contextmanager
def _on_stop_signals(handler: Callable[[int, FrameType | None], object]) -> Generator[None]:
    # Ignored signals stay ignored: nohup ignores SIGHUP, and a shell makes background processes ignore SIGINT.
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def stop_signals_raise() -> Generator[None]:
    """Raise ``InterruptedRunError`` on SIGINT, SIGTERM and SIGHUP, so that ``finally`` runs. Main thread only.

    A signal that this process ignores, as under nohup, stays ignored.
    """
    with _on_stop_signals(_interrupt):
        yield


@contextmanager
def stop_signals_held() -> Generator[None]:
    """Hold stop signals until the end of the body: an exception while a process starts would lose track of it.

    Main thread only. A process started in the body has the usual handlers.
    """
    arrived: list[int] = []
    with _on_stop_signals(lambda number, _: arrived.append(number)):
        yield
    for number in arrived:
        signal.raise_signal(number)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the cleanup.
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise InterruptedRunError(signal.Signals(number).name)


def read_run(letter: str, number: int, directory: Path, seconds: float, cpu_seconds: float) -> Run:
    """Read the files of the run in ``directory``.

    Raises ``RunFailedError`` if there is no training line, or if the run restarted by itself.
    """
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise RunFailedError(f"the run wrote no {path}; a recipe records with accel_train.metrics.recorder")
    records = read_metrics(path)
    trained = last_pass(records, "train")
    lines = [line for line in trained if isinstance(line.get("step_seconds"), (int, float))]
    if not lines:
        raise RunFailedError(f"{path} has no training line with step_seconds; docs/metrics.md lists the fields")
    _refuse_another_start(path, records)
    started = [record for record in records if record.get("event") == "environment"]
    environment = started[0] if started else {}
    hardware = {name: value for name, value in environment.items() if name not in NOT_HARDWARE}
    experiment = _read_json(directory / "run.json").get("experiment", {})
    return Run(
        letter=letter,
        round=number,
        directory=directory,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        lines=lines,
        evaluation=read_evaluation(directory / REPORT),
        fingerprint=experiment.get("data_fingerprint"),
        environment=hardware,
        options=experiment,
    )


def _refuse_another_start(path: Path, records: Sequence[Line]) -> None:
    """Raise ``RunFailedError`` for a restart after a training line, because it resets the clocks of later lines."""
    has_trained = False
    cause = ""
    for record in records:
        event = record.get("event")
        if event in ("out_of_memory", "rollback"):
            cause = f" after {event} at step {record.get('step')}"
        if event == "environment" and has_trained:
            raise RunFailedError(
                f"{path}: the run started again by itself{cause}, so its times are those of several starts and cannot "
                "be compared; give a micro-batch that fits in every run (--set micro_batch_size=N) and options whose "
                "steps stay finite"
            )
        has_trained = has_trained or event == "train"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))
