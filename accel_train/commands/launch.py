"""Start a recipe from a launch file, read strictly first: on the real machine, or as a rehearsal on CPU processes.

The environment of the processes is Accelerate's own work (``accelerate.utils.launch``), so that a recipe cannot tell
our launcher from ``accelerate launch``. Ours adds the strict reading, signals that reach the recipe, and exit codes
that survive: torchrun turns a worker's 2 or 75 into 1.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path
from accel_train.launch_files.machine_config import (
    MachineConfig,
    check_rendezvous,
    default_machine_config_path,
    read_machine_config,
    visible_machine,
)
from accel_train.launch_files.requested import (
    MACHINE_FILE_VARIABLE,
    REHEARSAL_VARIABLE,
    THREADS_UNASKED_VARIABLE,
    THREADS_VARIABLE,
)
from accel_train.runtime.exiting import EXIT_CODE_VARIABLE, EXIT_PREEMPTED, reported_exit_code

FORWARDED: dict[signal.Signals, signal.Signals] = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,
}
"""As what a signal is passed on: SIGUSR1 would end torchrun and leave the workers behind."""
PR_SET_PDEATHSIG = 1
STOPPED_EARLY = "asked to stop before training began; start again to go on (exit code 75)"


@dataclass(frozen=True)
class Launch:
    """What to start where."""

    config_file: str | None
    """None: the default file of `accelerate config` where there is one, else the accelerators that are visible."""
    recipe: str
    arguments: tuple[str, ...] = ()
    num_processes: int | None = None
    """Over all machines; None as the file says."""
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None


def launch(request: Launch, *, rehearsal: bool = False) -> int:
    """Run the recipe to its end and return its exit code (0 done, 2 wrong usage, 75 preempted, else 1)."""
    with _Relay() as relay:  # before Accelerate is imported, which takes a while
        command, environment = _prepared(request, rehearsal=rehearsal)
        return _run(command, environment, relay)


def _prepared(request: Launch, *, rehearsal: bool) -> tuple[list[str], dict[str, str]]:
    """The command to run and its environment. Raises ``UsageError``."""
    path, machine, words = read_machine(request)
    if words is not None:
        print(words, flush=True)
    if not expand_path(request.recipe).is_file():
        raise UsageError(f"recipe {request.recipe!r}: there is no such file; give the path of a recipe")
    if rehearsal and request.main_process_port is None and machine.num_machines == 1:
        request = replace(request, main_process_port=free_port())  # the file's may be that of a run beside this one
    _check_meeting_point(machine, request)
    settings = accelerate_settings(path, machine, request)
    environment = accelerate_environment(settings)
    if machine.use_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    if THREADS_VARIABLE not in os.environ:
        environment[THREADS_UNASKED_VARIABLE] = "1"
    environment.pop(MACHINE_FILE_VARIABLE, None)  # of a launch around this one
    if path is not None:
        environment[MACHINE_FILE_VARIABLE] = str(path)
    if rehearsal:
        from accel_train.runtime import rehearsal as rehearsals

        for line in rehearsals.adapt(machine, environment, settings.num_processes):
            print(line, flush=True)
        environment[REHEARSAL_VARIABLE] = "1"
    command = torchrun_command(settings, single=machine.strategy == "single" and not rehearsal)
    return [*command, str(expand_path(request.recipe)), *request.arguments], environment


def read_machine(request: Launch) -> tuple[Path | None, MachineConfig, str | None]:
    """The launch file, the machine, and where no file was named one line that says what is taken instead."""
    if request.config_file is not None:
        path = expand_path(request.config_file)
        return path, read_machine_config(path, num_processes=request.num_processes), None
    if (default := default_machine_config_path()) is not None:
        machine = read_machine_config(default, num_processes=request.num_processes)
        return default, machine, f"no --config_file: {default} is read, the default file of `accelerate config`"
    for name in ("machine_rank", "main_process_ip"):
        if (value := getattr(request, name)) is not None:
            raise UsageError(
                f"{name}: {value} without --config_file: several machines need a launch file; copy "
                "accelerate_configs/multi_node.yaml and give it with --config_file"
            )
    machine = visible_machine(request.num_processes)
    kind = "accelerator" if not machine.use_cpu else "CPU"
    processes = "one process" if machine.num_processes == 1 else f"{machine.num_processes} processes, DDP"
    asked = "as --num_processes says" if request.num_processes is not None else "as many as there are accelerators"
    if request.num_processes is None and machine.use_cpu:
        asked = "no accelerator is visible"
    return None, machine, f"no --config_file and no default file of `accelerate config`: {processes}, {kind} ({asked})"


def accelerate_settings(path: Path | None, machine: MachineConfig, request: Launch) -> Namespace:
    """The launch settings as Accelerate's own parser and validation see them."""
    from accelerate.commands.launch import (
        _validate_launch_command,  # pyright: ignore[reportPrivateUsage]
        launch_command_parser,
    )

    flags = ["--config_file", str(path)] if path is not None else _flags_instead_of_a_file(machine)
    flags += ["--mixed_precision", "no"]
    for name in ("num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        if (value := getattr(request, name)) is not None and f"--{name}" not in flags:
            flags += [f"--{name}", str(value)]
    settings: Any = launch_command_parser().parse_args([*flags, request.recipe, *request.arguments])
    settings, _, _ = _validate_launch_command(settings)
    if settings.num_processes in (None, 0):
        settings.num_processes = machine.num_processes or 1
    if settings.main_process_port is None and settings.num_machines == 1:
        settings.main_process_port = free_port()  # several launches on one machine must not meet
    given: Any = machine.raw.get("deepspeed_config") or {}
    settings.deepspeed_fields_from_accelerate_config = ",".join(given)
    return settings


def _flags_instead_of_a_file(machine: MachineConfig) -> list[str]:
    """All that Accelerate would say it had to assume."""
    flags = ["--num_processes", str(machine.num_processes), "--num_machines", "1", "--dynamo_backend", "no"]
    kind = ["--cpu"] if machine.use_cpu else ["--multi_gpu"] if machine.strategy == "ddp" else []
    return [*flags, *kind]


def accelerate_environment(settings: Any) -> dict[str, str]:
    """Environment of every process, by Accelerate's own functions; fills in the torchrun settings as well."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    if settings.use_deepspeed:
        settings.deepspeed_multinode_launcher = "standard"  # torchrun on each machine, as for the other strategies
        _, environment = prepare_deepspeed_cmd_env(settings)
    else:
        environment = prepare_multi_gpu_env(settings)
    return {k: str(v) for k, v in environment.items()}


def torchrun_command(settings: Any, single: bool) -> list[str]:
    """The command that starts the processes of this machine."""
    if single:
        return [sys.executable]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(settings.nproc_per_node)]
    if settings.num_machines > 1:
        command += ["--nnodes", str(settings.num_machines), "--node_rank", str(settings.machine_rank)]
        return [*command, "--master_addr", str(settings.main_process_ip), "--master_port", _port(settings)]
    return [*command, "--master_addr", "127.0.0.1", "--master_port", _port(settings)]


def _port(settings: Any) -> str:
    return str(settings.main_process_port or 29500)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_meeting_point(machine: MachineConfig, request: Launch) -> None:
    changes = {
        name: getattr(request, name)
        for name in ("machine_rank", "main_process_ip", "main_process_port")
        if getattr(request, name) is not None
    }
    machine = replace(machine, **changes)
    if machine.machine_rank >= machine.num_machines:
        raise UsageError(
            f"machine_rank: {machine.machine_rank} must be below num_machines: {machine.num_machines}; machines count "
            "from 0"
        )
    check_rendezvous(machine)


def _end_with_the_launcher() -> None:
    """In the child: the launcher's death, even by SIGKILL, counts as SIGTERM, so that nobody trains unwatched."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class _Relay:
    """Passes the signals that this launcher gets on to its child; before there is one, a signal ends the launcher."""

    def __init__(self) -> None:
        self.stopped = False
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Relay:
        heard = [s for s in FORWARDED if s != signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]  # nohup
        self._previous = {s: signal.signal(s, self._on_signal) for s in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait_for(self, child: subprocess.Popen[bytes]) -> int:
        """The child's exit code."""
        self._child = child
        return child.wait()

    def _on_signal(self, number: int, _: object) -> None:
        self.stopped = True
        if self._child is None:  # one that is just being started ends with this process
            print(STOPPED_EARLY, file=sys.stderr, flush=True)
            raise SystemExit(EXIT_PREEMPTED)
        self._child.send_signal(FORWARDED[signal.Signals(number)])


def _run(command: Sequence[str], environment: dict[str, str], relay: _Relay) -> int:
    """Run to the end, passing signals on; the exit code that a worker reported wins over torchrun's 1."""
    with tempfile.TemporaryDirectory(prefix="accel-train-") as folder:
        reported = Path(folder) / "exit_codes"
        child = subprocess.Popen(
            command, env=environment | {EXIT_CODE_VARIABLE: str(reported)}, preexec_fn=_end_with_the_launcher
        )
        code = relay.wait_for(child)
        said = reported_exit_code(reported, stopped=relay.stopped)
    if code == 0:
        return 0
    if said is None and relay.stopped:
        print(STOPPED_EARLY, file=sys.stderr, flush=True)
        return EXIT_PREEMPTED
    return said or (code if code > 0 else 1)
