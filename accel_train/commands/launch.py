"""Start a recipe from a strictly read launch file, on the real machine or as a rehearsal on CPU processes.

Accelerate itself prepares the environment of the processes (``accelerate.utils.launch``), so a recipe cannot tell this
launcher from ``accelerate launch``. This one adds strict reading, signals forwarded to the recipe, and exit codes:
torchrun turns a worker's 2 or 75 into 1.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

from accel_train.commands.bundled import find_recipe
from accel_train.config import MACHINE_FILE_VARIABLE, REHEARSAL_VARIABLE, UsageError, expand_path
from accel_train.launch_files.machine_config import (
    DEFAULT_PORT,
    MachineConfig,
    default_machine_config_path,
    read_machine_config,
    simulated_machine,
    visible_machine,
)
from accel_train.launch_files.other_launchers import refuse_other_launchers
from accel_train.launch_files.parents import EXIT_CODE_VARIABLE, end_with_parent
from accel_train.launch_files.processes import (
    refuse_launch_without_device,
    refuse_missing_processes,
    refuse_rank_and_port,
    refuse_shared_devices,
)
from accel_train.launch_files.rendezvous import check_rendezvous, refuse_placeholder, wait_for_machine_0
from accel_train.launch_files.requested import THREADS_UNASKED_VARIABLE, THREADS_VARIABLE
from accel_train.runtime.exiting import (
    EXIT_AGAIN,
    EXIT_PREEMPTED,
    STARTED_AGAIN_VARIABLE,
    reported_exit_code,
)

# Received signal -> forwarded signal. SIGUSR1 would end torchrun and leave its workers running.
FORWARDED: dict[signal.Signals, signal.Signals] = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,
}


TORCHRUN = "accel_train.cli.torchrun"
"""Module in place of ``torch.distributed.run``."""
WITHOUT_FILE = "no --config_file and no default file of `accelerate config`"


class Early(NamedTuple):
    """Message and exit code of a launch that is asked to stop before its program handles signals."""

    text: str
    code: int


STOPPED_EARLY = Early(
    "asked to stop before training began; start the same command again to resume (exit code 75)", EXIT_PREEMPTED
)


@dataclass(frozen=True)
class Launch:
    """A recipe, its arguments and the machine."""

    config_file: str | None
    """None takes the default file of `accelerate config`, or without one the visible accelerators."""
    recipe: str
    arguments: tuple[str, ...] = ()
    num_processes: int | None = None
    """Total over all machines. None takes the number in the file."""
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None


def launch(request: Launch, *, rehearsal: bool = False, early: Early = STOPPED_EARLY) -> int:
    """Run the recipe to its end and return its exit code (0 done, 2 usage error, 75 preempted, else 1)."""
    # Entered before the slow import of Accelerate, so that a signal meanwhile gives exit code 75.
    with _SignalRelay(early) as relay:
        command, environment, place = _prepare(request, rehearsal=rehearsal)
        code = _run(command, environment, relay)
        while code == EXIT_AGAIN:
            # First, so that a stop from here on ends the launcher. None is lost between the check and the new start.
            relay.begin_again()
            # The launchers of other machines have ended with an error, and this one would wait for them.
            if relay.stopped or place is not None:
                code = EXIT_PREEMPTED
                break
            print("accel-train launch: starting again", file=sys.stderr, flush=True)
            code = _run(command, environment | {STARTED_AGAIN_VARIABLE: "1"}, relay)
        if code == EXIT_PREEMPTED and place is not None:
            # Only process 0 says how the run has ended, on its own machine.
            print(
                f"{place}: stopped; start the same command again on every machine (exit code {code})", file=sys.stderr
            )
        return code


def _prepare(request: Launch, *, rehearsal: bool) -> tuple[list[str], dict[str, str], str | None]:
    """Return the command, its environment and, of several machines, the name of this one. Raises ``UsageError``."""
    path, machine, assumption = read_machine(request)
    if assumption is not None:
        print(assumption, flush=True)
    refuse_other_launchers(machine)
    recipe = find_recipe(request.recipe)
    if rehearsal and request.main_process_port is None and machine.num_machines == 1:
        # A real run on this machine may use the port in the file.
        request = replace(request, main_process_port=free_port())
    machine, flags = with_flags(machine, request)
    check_rendezvous(machine, flags)
    settings = accelerate_settings(path, machine, request)
    environment = launch_environment(path, machine, settings)
    if rehearsal:
        from accel_train.runtime.rehearsal import adapt

        banner = adapt(machine, environment, settings.num_processes, request.arguments)
        print("\n".join(banner), flush=True)
        environment[REHEARSAL_VARIABLE] = "1"
    else:
        _refuse_missing_devices(path, machine, settings)
    place = _meet(machine) if machine.num_machines > 1 else None
    command = torchrun_command(settings, single=machine.strategy == "single" and not rehearsal)
    return [*command, str(recipe), *request.arguments], environment, place


def _meet(machine: MachineConfig) -> str:
    """Wait for machine 0, and return the name of this one. torchrun waits for the others without a word."""
    place = f"machine {machine.machine_rank} of {machine.num_machines}"
    print(
        f"{place}: the processes start once every machine has started this command and reaches "
        f"{machine.main_process_ip}:{machine.main_process_port or DEFAULT_PORT}",
        flush=True,
    )
    wait_for_machine_0(machine)
    return place


def _refuse_missing_devices(path: Path | None, machine: MachineConfig, settings: Any) -> None:
    """Refuse before a process starts what every process would refuse: settings for devices that are not here."""
    import torch

    if not torch.accelerator.is_available():
        refuse_launch_without_device(machine, str(path))
    elif not machine.use_cpu and machine.strategy != "single":
        refuse_shared_devices(int(settings.nproc_per_node), torch.accelerator.device_count())


def launch_environment(path: Path | None, machine: MachineConfig, settings: Any) -> dict[str, str]:
    """Return Accelerate's environment, with notes for the recipe about the file and the threads."""
    environment = accelerate_environment(settings)
    # Accelerate's environment for several processes leaves it out, and the run would take a GPU.
    if machine.use_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    if THREADS_VARIABLE not in os.environ:
        environment[THREADS_UNASKED_VARIABLE] = "1"
    # Inherited if another launch started this one.
    environment.pop(MACHINE_FILE_VARIABLE, None)
    if path is not None:
        environment[MACHINE_FILE_VARIABLE] = str(path)
    return environment


def read_machine(request: Launch, *, simulated: bool = False) -> tuple[Path | None, MachineConfig, str | None]:
    """Return the launch file, the machine, and without ``--config_file`` a line about the file or devices used.

    With ``simulated`` neither the devices here nor the ``gpu_ids`` of the file count.
    Raises ``UsageError`` for a bad file, and for flags that are out of range.
    """
    path, machine, assumption = _file_or_devices(request, simulated=simulated)
    refuse_rank_and_port(machine.num_machines, request.machine_rank, request.main_process_port)
    # A file by `accelerate config` may hold an address, which does no harm.
    if request.main_process_ip is not None and machine.num_machines == 1:
        raise UsageError(
            f"--main_process_ip {request.main_process_ip}: has no effect, because num_machines is 1 in {machine.path}; "
            "set num_machines there, and num_processes of all machines, or leave it out"
        )
    return path, machine, assumption


def _file_or_devices(request: Launch, *, simulated: bool) -> tuple[Path | None, MachineConfig, str | None]:
    if request.config_file is not None:
        path = expand_path(request.config_file)
        return path, read_machine_config(path, num_processes=request.num_processes, simulated=simulated), None
    default = default_machine_config_path()
    if default is not None:
        machine = read_machine_config(default, num_processes=request.num_processes, simulated=simulated)
        return default, machine, f"no --config_file: {default} is read, the default file of `accelerate config`"
    for name in ("machine_rank", "main_process_ip"):
        value = getattr(request, name)
        if value is not None:
            raise UsageError(
                f"{name}: {value} without --config_file: several machines need a launch file; copy "
                "accelerate_configs/multi_node.yaml and give it with --config_file"
            )
    if simulated:
        machine = simulated_machine(request.num_processes)
        return None, machine, f"{WITHOUT_FILE}: {_processes(machine)}"
    machine = visible_machine(request.num_processes)
    return None, machine, _describe_visible(machine, request)


def _processes(machine: MachineConfig) -> str:
    return "one process" if machine.num_processes == 1 else f"{machine.num_processes} processes, DDP"


def _describe_visible(machine: MachineConfig, request: Launch) -> str:
    device = "CPU" if machine.use_cpu else "accelerator"
    if request.num_processes is not None:
        reason = "as --num_processes says"
    elif machine.use_cpu:
        reason = "no accelerator is visible"
    else:
        reason = "as many as there are accelerators"
    return f"{WITHOUT_FILE}: {_processes(machine)}, {device} ({reason})"


def refuse_unfinished(machine: MachineConfig, request: Launch) -> None:
    """Refuse a launch file in which something is left to fill in, and no flag gives it."""
    refuse_missing_processes(machine)
    refuse_placeholder(*with_flags(machine, request))


def accelerate_settings(path: Path | None, machine: MachineConfig, request: Launch) -> Namespace:
    """Return the launch settings after Accelerate's own parser and validation."""
    from accelerate.commands.launch import (
        _validate_launch_command,  # pyright: ignore[reportPrivateUsage]
        launch_command_parser,
    )

    refuse_missing_processes(machine)
    # A file for one process may lack the line, and Accelerate would then have no number.
    request = replace(request, num_processes=machine.num_processes)
    flags = _explicit_flags(machine) if path is None else ["--config_file", str(path)]
    if machine.gpu_ids is None and machine.raw.get("gpu_ids") is not None:
        # The devices named in the file do not count in a simulation.
        flags += ["--gpu_ids", "all"]
    # The experiment sets the precision. The recipe itself compares it with the file.
    flags += ["--mixed_precision", "no"]
    for name in ("num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        value = getattr(request, name)
        if value is not None and f"--{name}" not in flags:
            flags += [f"--{name}", str(value)]
    settings: Any = launch_command_parser().parse_args([*flags, request.recipe, *request.arguments])
    settings, _, _ = _validate_launch_command(settings)
    if settings.main_process_port is None and settings.num_machines == 1:
        # With a fixed port, several launches on one machine would join each other.
        settings.main_process_port = free_port()
    # `accelerate launch` sets this before it calls its helpers. Accelerate's DeepSpeed plugin refuses keys in this list
    # where a DeepSpeed file has to set them.
    deepspeed: Any = machine.raw.get("deepspeed_config") or {}
    settings.deepspeed_fields_from_accelerate_config = ",".join(deepspeed)
    return settings


def _explicit_flags(machine: MachineConfig) -> list[str]:
    """Return the flags of a start without a launch file. Accelerate warns of each missing flag."""
    flags = ["--num_processes", str(machine.num_processes), "--num_machines", "1", "--dynamo_backend", "no"]
    if machine.use_cpu:
        flags.append("--cpu")
    elif machine.strategy == "ddp":
        flags.append("--multi_gpu")
    return flags


def accelerate_environment(settings: Any) -> dict[str, str]:
    """Return the environment from Accelerate's own functions. They also add the torchrun settings to ``settings``."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    if settings.use_deepspeed:
        # torchrun runs on each machine, as for the other strategies. The default is pdsh over SSH.
        settings.deepspeed_multinode_launcher = "standard"
        _, environment = prepare_deepspeed_cmd_env(settings)
    else:
        environment = prepare_multi_gpu_env(settings)
    return {name: str(value) for name, value in environment.items()}


def torchrun_command(settings: Any, single: bool) -> list[str]:
    """Return the command to start the processes of this machine."""
    if single:
        return [sys.executable]
    command = [sys.executable, "-m", TORCHRUN, "--nproc_per_node", str(settings.nproc_per_node)]
    address = "127.0.0.1"
    if settings.num_machines > 1:
        command += ["--nnodes", str(settings.num_machines), "--node_rank", str(settings.machine_rank)]
        address = str(settings.main_process_ip)
    # Without a port torchrun takes 29500.
    port = settings.main_process_port or 29500
    return [*command, "--master_addr", address, "--master_port", str(port)]


def free_port() -> int:
    """Return a currently unused port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_flags(machine: MachineConfig, request: Launch) -> tuple[MachineConfig, frozenset[str]]:
    """Return the machine with the place and the address that flags give, and the names of these flags."""
    values = {name: getattr(request, name) for name in ("machine_rank", "main_process_ip", "main_process_port")}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return replace(machine, **given), frozenset(given)


class _SignalRelay:
    """Forwards signals from the launcher to its child. Before the child exists, a signal ends the launcher."""

    def __init__(self, early: Early) -> None:
        self.stopped = False
        self._early: Early = early
        self._has_said = False
        self._is_starting = False
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: list[signal.Signals] = []
        """Signals that came while the child was being started."""

    def __enter__(self) -> _SignalRelay:
        numbers = set(FORWARDED)
        # nohup ignores SIGHUP for its child.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Start the child and return its exit code."""
        self._is_starting = True
        # The child must end with this process, even if SIGKILL ends it. `tied_to_parent` would delay each start, and
        # threads do no harm here: fork renews the locks this call takes, CPython's and glibc's of malloc and dlopen.
        self._child = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)
        self._is_starting = False
        # In the order in which they came: a second Ctrl-C asks to stop at once.
        for number in self._waiting:
            self._child.send_signal(number)
        self._waiting.clear()
        return self._child.wait()

    def end_early(self) -> int:
        """Print once that the launch ends before its program handles signals, and return the exit code."""
        if not self._has_said:
            print(self._early.text, file=sys.stderr, flush=True)
        self._has_said = True
        return self._early.code

    def begin_again(self) -> None:
        """Forget the ended child. Until the next one starts, a signal ends the launcher."""
        self._child = None

    def _on_signal(self, number: int, _: object) -> None:
        self.stopped = True
        forwarded = FORWARDED[signal.Signals(number)]
        if self._is_starting:
            # The child may run already, and a terminal's Ctrl-C has reached it: this process waits for its save.
            self._waiting.append(forwarded)
        elif self._child is None:
            raise SystemExit(self.end_early())
        else:
            self._child.send_signal(forwarded)


def _run(command: Sequence[str], environment: dict[str, str], relay: _SignalRelay) -> int:
    """Run to the end and forward signals. An exit code reported by a worker overrides torchrun's 1."""
    with tempfile.TemporaryDirectory(prefix="accel-train-") as folder:
        report = Path(folder) / "exit_codes"
        environment = environment | {EXIT_CODE_VARIABLE: str(report)}
        code = relay.run(command, environment)
        reported = reported_exit_code(report, stopped=relay.stopped)
    if code == 0:
        return 0
    if reported == 0 and relay.stopped:
        # torchrun answers a signal with 1, even if every process finished its run.
        return 0
    if reported:
        return reported
    if reported is None and relay.stopped:
        return relay.end_early()
    # A negative code means that a signal killed the child.
    return code if code > 0 else 1
