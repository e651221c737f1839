"""The layout for a number of devices: a launch file, its processes and the arguments of the recipe."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.anywhere.flags import Request
from accel_train.config import UsageError, expand_path
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.launch_files.parents import tied_to_parent
from accel_train.planning.writing import LAUNCH, PRESET, launch_text

CPU_FILE = "distributed_type: {kind}\nuse_cpu: true\nnum_processes: {processes}\n"


@dataclass(frozen=True)
class Layout:
    """Launch file, number of processes and arguments of one start."""

    file: Path
    strategy: str
    processes: int
    arguments: tuple[str, ...]
    """Preset and flags for the recipe."""

    def __str__(self) -> str:
        return f"{self.strategy} on {self.processes} process{'' if self.processes == 1 else 'es'}"


class Layouts:
    """Choose a layout for each number of devices. A plan is made only once per number of processes."""

    def __init__(self, request: Request, options: Mapping[str, Any], folder: Path, *, on_cpu: bool) -> None:
        """Read the launch files.

        ``options`` are the recipe's by dotted name, ``folder`` takes generated launch files, and ``on_cpu`` says that
        there is no accelerator. Raises ``UsageError``.
        """
        self._request = request
        self._batch = int(options["global_batch_size"])
        self._folder = folder
        self._on_cpu = on_cpu
        self._files = _read_files(request.config_files)
        self._planned: dict[int, Layout] = {}

    @property
    def least(self) -> int:
        """Devices required by the smallest layout."""
        return min((processes for processes, _, _ in self._files), default=1)

    def processes(self, devices: int) -> int:
        """Return the processes of the layout for ``devices``, or 0 if none fits so few."""
        if self._files:
            return max((processes for processes, _, _ in self._files if processes <= devices), default=0)
        # A process without samples would be refused, so there are at most as many as samples of a step.
        processes = min(devices, self._batch)
        # A plan divides the global batch into equal shares.
        while self._request.vram_gib is not None and processes and self._batch % processes:
            processes -= 1
        return processes

    def choose(self, devices: int) -> Layout:
        """Return the layout for ``devices``, using ``processes`` of them. Raises ``UsageError`` if planning fails."""
        processes = self.processes(devices)
        for number, path, strategy in self._files:
            if number == processes:
                return Layout(path, strategy, processes, self._request.arguments)
        if self._request.vram_gib is None:
            return self._without_a_plan(processes)
        if processes not in self._planned:
            self._planned[processes] = self._plan(processes)
        return self._planned[processes]

    def _without_a_plan(self, processes: int) -> Layout:
        strategy, cpu_type = "ddp", "MULTI_CPU"
        if processes == 1:
            strategy, cpu_type = "single", "NO"
        text = launch_text(strategy, processes)
        # The bundled files are for GPUs, and a rehearsal adapts them.
        if self._on_cpu and not self._request.rehearse:
            text = CPU_FILE.format(kind=cpu_type, processes=processes)
        path = self._folder / f"{strategy}_{processes}.yaml"
        path.write_text(text)
        return Layout(path, strategy, processes, self._request.arguments)

    def _plan(self, processes: int) -> Layout:
        place = self._folder / f"plan_{processes}"
        command = ["plan", "--gpus", str(processes), "--vram_gib", f"{self._request.vram_gib:g}", "--write", str(place)]
        words = [*command, self._request.recipe, *self._request.arguments]
        print(f"accel-train run: planning for {processes} device(s)", file=sys.stderr, flush=True)
        # In a separate process, because a search imports torch and the recipe, and holds simulated models.
        done = subprocess.run(
            tied_to_parent([sys.executable, "-m", "accel_train.cli", *words], signal.SIGKILL),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            output = (done.stdout + done.stderr).strip()
            raise UsageError(f"no plan for {processes} device(s): accel-train {shlex.join(words)} said:\n{output}")
        machine = read_machine_config(place / LAUNCH)
        # The plan's preset replaces the given one. Flags are kept, because --overwrite and the like are in no preset.
        flags = list(self._request.arguments)
        if flags and not flags[0].startswith("-"):
            flags.pop(0)
        return Layout(place / LAUNCH, machine.strategy, processes, (str(place / PRESET), *flags))


def _read_files(files: Sequence[str]) -> list[tuple[int, Path, str]]:
    """Return processes, path and strategy of each launch file. Raises ``UsageError``."""
    found: dict[int, tuple[int, Path, str]] = {}
    for text in files:
        path = expand_path(text)
        machine = read_machine_config(path)
        processes = machine.num_processes
        if machine.num_machines > 1:
            raise UsageError(
                f"config_file: {path} is for {machine.num_machines} machines, and `run --anywhere` manages one; start "
                "it with `accel-train launch` on each"
            )
        if processes is None:
            raise UsageError(f"config_file: {path} has no num_processes, by which a file is chosen; add the line")
        if processes in found:
            raise UsageError(
                f"config_file: {found[processes][1]} and {path} both have {processes} processes; one file for each "
                "number is required. Leave one out"
            )
        found[processes] = processes, path, machine.strategy
    return list(found.values())
