"""Simulate each candidate in a process of its own, forked from this one after all imports.

A new process would import torch and the recipe again: five seconds of CPU for each candidate.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_train.commands.bundled import find_recipe, folder, import_recipe
from accel_train.config import UsageError
from accel_train.launch_files.parents import killed_with_parent, tied_to_parent
from accel_train.options.loading import Loaded, config_of
from accel_train.planning.candidates import LAUNCH_FILES, Candidate
from accel_train.simulation.flags import REPORT, DeviceType
from accel_train.simulation.flags import Options as SimulationOptions

LARGEST = 3
"""Micro-batches of a simulated step: the first, one for all in the middle, and the last."""
OUTPUT = "output.txt"
SECONDS_BETWEEN_LINES = 30
IMPORTED = (
    "accelerate.commands.launch",
    "accel_train.simulation.command",
    "accel_train.simulation.worker",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed.fake_pg",
)
"""Modules that torch and Accelerate import during a simulation. Imported here once for all candidates."""


class Simulator:
    """Simulates one recipe with its arguments on a number of processes."""

    def __init__(self, recipe: str, arguments: Sequence[str], processes: int, step: int | None = None) -> None:
        self.recipe = recipe
        self._arguments = tuple(arguments)
        self._processes = processes
        self._step = step
        self._uncompiled: tuple[str, ...] = ()
        self.device_type: DeviceType = "cuda"

    def read_config(self) -> Loaded[Any]:
        """Return the config of a start of the recipe. Its modules are then imported for all candidates."""
        for name in IMPORTED:
            importlib.import_module(name)
        loaded = config_of(import_recipe(find_recipe(self.recipe)).main, self._arguments)
        if loaded is None:
            raise UsageError(f"recipe {self.recipe!r}: its main ended without a config; a recipe first reads it")
        # A simulation cannot show compiled blocks, and memory and time of uncompiled ones are an upper bound.
        if loaded.config.compile.mode != "off":
            self._uncompiled = _flags_of_defaults("compile", type(loaded.config.compile)())
        return loaded

    def count(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return the fields of ``simulation.step.Counted``. Raises ``UsageError`` if a start would refuse it."""
        counted = self._count(candidate)
        # Empty where the micro-batches differ, because then none of them can stand for the others.
        if not counted["work"]:
            raise UsageError(
                f"recipe {self.recipe!r}: its micro-batches run different numbers of forwards, and a plan requires "
                "equal ones, because a few of them stand for all; simulate single values: accel-train simulate"
            )
        return counted

    def _count(self, candidate: Candidate) -> Mapping[str, Any]:
        # Imported here, because they import the launcher and much else that a plan does not need.
        from accel_train.commands.launch import Launch
        from accel_train.simulation.command import PORT, refuse_killed, worker_command

        request = Launch(
            str(folder("accelerate_configs") / LAUNCH_FILES[candidate.strategy]),
            self.recipe,
            (*self._arguments, *candidate.flags(), *self._uncompiled),
            num_processes=self._processes,
            # Given, or every candidate would bind a free port that nothing uses.
            main_process_port=PORT,
        )
        options = SimulationOptions(
            config_file=None,
            num_processes=(None,),
            step=self._step,
            micro_batches=None,
            as_json=False,
            picture=None,
            device_type=self.device_type,
            largest=LARGEST,
        )
        with tempfile.TemporaryDirectory(prefix="accel-train-plan-") as place:
            words, environment, _ = worker_command(request, options, Path(place))
            output, returncode = run_apart(words, environment, Path(place))
            report = Path(place) / REPORT
            # Only a simulation that crashed leaves none: refusals are reports too.
            if not report.is_file():
                refuse_killed(self.recipe, returncode)
                raise RuntimeError(f"the simulation of {self.recipe} with {candidate} failed:\n{output[-4000:]}")
            found: dict[str, Any] = json.loads(report.read_text())
        if "refused" in found:
            raise UsageError(found["refused"])
        return found["counted"]


def _flags_of_defaults(group: str, defaults: Any) -> tuple[str, ...]:
    """Return flags that reset every option of a group, including those that a start refuses without the others."""
    words: list[str] = []
    for name, value in asdict(defaults).items():
        words += [f"--{group}.{name}", str(value).lower()]
    return tuple(words)


def run_apart(words: Sequence[str], environment: Mapping[str, str], place: Path) -> tuple[str, int]:
    """Run the worker of a simulation to its end in a process of its own. Returns its output and its exit code."""
    # Imported here, because it imports the simulation and much else that a plan does not need.
    from accel_train.simulation import worker

    output = place / OUTPUT
    with output.open("wb") as file:
        if _can_fork():
            returncode = _fork(lambda: worker.main([str(place)]), environment, output, file.fileno())
        else:
            with _report_wait(output):
                done = subprocess.run(
                    tied_to_parent(words, signal.SIGKILL),
                    env=dict(environment),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            returncode = done.returncode
    return output.read_text(errors="replace"), returncode


def _can_fork() -> bool:
    """Return True if this process has one thread. A child lacks the others, and would wait for their locks forever."""
    # Only Linux lists threads there. Elsewhere a new process is started.
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


@contextmanager
def _report_wait(output: Path) -> Generator[None]:
    """Print every 30 s what a simulation wrote last: one that waits for the Hub is silent for minutes otherwise."""
    started = time.monotonic()
    done = threading.Event()

    def report() -> None:
        while not done.wait(SECONDS_BETWEEN_LINES):
            lines = output.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed yet")
            print(f"simulating for {time.monotonic() - started:.0f} s: {last[:200]}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="wait for a simulation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # A later fork requires that only one thread is left.
        thread.join()


def _fork(work: Callable[[], int], environment: Mapping[str, str], output: Path, descriptor: int) -> int:
    """Call ``work`` in a child with this environment. Returns its exit code, or minus the signal that ended it."""
    # What is buffered here would be printed by the child as well.
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(work, environment, descriptor)
    try:
        with _report_wait(output):
            _, status = os.waitpid(child, 0)
    except BaseException:
        # Whatever ended the wait, such as Ctrl-C, the child must not simulate on by itself.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(status)


def _become(work: Callable[[], int], environment: Mapping[str, str], output: int) -> None:
    """Run ``work`` in the child and end it. Does not return."""
    code = 1
    try:
        killed_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        # The environment is that of a launched process, without what only the planner's own has.
        os.environ.clear()
        os.environ.update(environment)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skips the parent's cleanup, such as that of its temporary folders.
        os._exit(code)
