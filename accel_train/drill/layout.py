"""Layout of the runs: on the devices of the launch file, or as a rehearsal of it on CPU processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.config import UsageError, without_launcher
from accel_train.cores import usable_cores
from accel_train.drill.flags import Options
from accel_train.verification.runs import FILES, environment_on_cpu

if TYPE_CHECKING:
    from accel_train.launch_files.machine_config import MachineConfig


@dataclass(frozen=True)
class Layout:
    """Command and environment that start a run."""

    head: tuple[str, ...]
    """Words of the command before the recipe."""
    environment: Mapping[str, str]
    processes: int
    strategy: str
    on_devices: bool

    @property
    def is_plain(self) -> bool:
        """True for one process without a launcher."""
        return len(self.head) == 1

    @property
    def description(self) -> str:
        """The layout, for people."""
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes, {self.strategy}"
        return f"{processes}, {'on its devices' if self.on_devices else 'on the CPU'}"


def choose_layout(recipe: str, options: Options, folder: Path) -> Layout:
    """Return the layout. Raises ``UsageError`` for an invalid launch file, and for one of several machines."""
    # Here, because both take long to import.
    import torch

    from accel_train.commands.launch import Launch, read_machine

    launch = Launch(options.config_file, recipe, num_processes=options.num_processes)
    path, machine, _ = read_machine(launch)
    if machine.num_machines > 1:
        raise UsageError(
            f"--config_file {machine.path}: num_machines is {machine.num_machines}, and the runs take place on this "
            "machine; give a file for one machine"
        )
    # Decided by the machine, not by the file: a file for GPUs is rehearsed where there are none.
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    processes = machine.num_processes or 1
    if not machine.use_cpu and devices >= processes:
        return _on_devices(path, options, machine, processes)
    # The file may be for more devices than this machine has cores.
    if options.num_processes is None and path is not None:
        processes = 1 if machine.strategy == "single" else 2
    cores, _ = usable_cores()
    environment = environment_on_cpu(max(1, cores // processes))
    if path is None and processes == 1:
        return Layout((sys.executable,), environment, 1, machine.strategy, on_devices=False)
    if path is None:
        # A rehearsal needs a launch file, and a start without one would use DDP.
        path = folder / "launch.yaml"
        path.write_text(f"num_machines: 1\nnum_processes: {processes}\n{FILES['two_processes']}")
    head = _head("rehearse", path, processes)
    return Layout(head, environment, processes, machine.strategy, on_devices=False)


def _on_devices(path: Path | None, options: Options, machine: MachineConfig, processes: int) -> Layout:
    head = _head("launch", path, options.num_processes)
    return Layout(head, without_launcher(os.environ), processes, machine.strategy, on_devices=True)


def _head(command: str, path: Path | None, processes: int | None) -> tuple[str, ...]:
    head = [sys.executable, "-m", "accel_train.cli", command]
    if path is not None:
        head += ["--config_file", str(path)]
    if processes is not None:
        # Also if the file has the same number: the flag is the one that counts.
        head += ["--num_processes", str(processes)]
    return tuple(head)
