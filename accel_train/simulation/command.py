"""``accel-train simulate``: run a recipe on fake tensors once for each number of processes, and report its step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from accel_train.commands.bundled import find_recipe
from accel_train.commands.launch import Launch, accelerate_settings, launch_environment, read_machine
from accel_train.config import REHEARSAL_VARIABLE, UsageError, refuse_unwritable
from accel_train.cost_model.networks import GPUS_PER_MACHINE
from accel_train.cost_model.scaling import Scaling
from accel_train.cost_model.steps import Timing, timing_of
from accel_train.launch_files.machine_config import MachineConfig
from accel_train.launch_files.parents import tied_to_parent
from accel_train.simulation.flags import DEVICE_TYPE, REPORT, REQUEST, Options
from accel_train.simulation.refusals import refuse_machine
from accel_train.simulation.report import Simulated, describe, draw, picture_path, progress, scaling_of, table

PORT = 29500
"""Port in the environment of the simulated launch. Nothing listens on it or connects to it."""


def simulate(recipe: str, arguments: Sequence[str], options: Options) -> str:
    """Return the output of the command. Raises ``UsageError`` if the start would be refused, or cannot be simulated."""
    if options.picture is not None:
        picture_path(options.picture)
    requests = _requests(recipe, arguments, options)
    # First, so that a wrong device is refused before the simulation, which takes time.
    timing = _timing(requests, options)
    if timing is not None and options.device_type is None and timing.is_cpu:
        options = replace(options, device_type="cpu")
    simulations = _simulate_all(requests, timing, options)
    scaling = _scaling(simulations, options)
    text = _text(simulations, scaling, options)
    if options.picture is not None:
        _draw(simulations[-1], scaling, options.picture, text)
    return text


def _simulate_all(requests: Sequence[Launch], timing: Timing | None, options: Options) -> list[Simulated]:
    """Simulate each number of processes, with a line on stderr for each of several, because some take minutes.

    If a signal or an error ends this, print what is finished before it, so that the results are not lost.
    """
    finished: list[Simulated] = []
    try:
        for request in requests:
            simulated = _simulate_one(request, options)
            if timing is not None:
                simulated = replace(simulated, timed=timing.of(simulated.counted, is_another=simulated.is_another))
            finished.append(simulated)
            if len(requests) > 1:
                print(progress(simulated.counted), file=sys.stderr, flush=True)
    except BaseException:
        if finished:
            print(_text(finished, _scaling(finished, options), options), flush=True)
            counts = f"{len(finished)} of {len(requests)} numbers of processes"
            print(f"only {counts} were simulated", file=sys.stderr, flush=True)
        raise
    return finished


def _scaling(simulations: Sequence[Simulated], options: Options) -> Scaling | None:
    return scaling_of(simulations, is_weak=options.micro_batches is not None)


def _requests(recipe: str, arguments: Sequence[str], options: Options) -> list[Launch]:
    """Build one launch request for each number of processes."""
    words = tuple(arguments)
    return [
        Launch(options.config_file, recipe, words, num_processes=number, main_process_port=PORT)
        for number in options.num_processes
    ]


def _timing(requests: Sequence[Launch], options: Options) -> Timing | None:
    """Return the device and the machines to time the step for, None without ``--device``. Raises ``UsageError``."""
    if options.device is None:
        return None
    gpus = options.gpus_per_machine or _gpus_of_file(requests[0]) or GPUS_PER_MACHINE
    timing = timing_of(options.device, options.link, gpus)
    numbers = [read_machine(request, simulated=True)[1].num_processes or 1 for request in requests]
    for number in numbers:
        timing.machines.refuse(number)
    if options.link is not None:
        timing.machines.refuse_idle(numbers)
    return timing


def _gpus_of_file(request: Launch) -> int | None:
    """Return the GPUs per machine of a launch file for several machines, None for one machine.

    The number of processes on the command line does not change it.
    """
    machine = read_machine(replace(request, num_processes=None), simulated=True)[1]
    if machine.num_machines == 1 or machine.num_processes is None:
        return None
    return machine.num_processes // machine.num_machines


def _text(simulations: Sequence[Simulated], scaling: Scaling | None, options: Options) -> str:
    if options.as_json:
        return json.dumps([simulated.as_json(scaling) for simulated in simulations], indent=2)
    if len(simulations) == 1:
        return describe(simulations[0])
    return table(simulations, scaling)


def _draw(simulated: Simulated, scaling: Scaling | None, picture: str, text: str) -> None:
    """Draw ``--picture``. If that fails, print ``text`` before the error, so that the result is not lost."""
    try:
        with refuse_unwritable(f"picture: {picture}"):
            draw(simulated, scaling, picture_path(picture))
    except UsageError:
        print(text, flush=True)
        raise


def _simulate_one(request: Launch, options: Options) -> Simulated:
    """Simulate in a separate process. Raises ``UsageError`` if that process refuses."""
    with tempfile.TemporaryDirectory(prefix="accel-train-simulate-") as place:
        folder = Path(place)
        words, environment, assumption = worker_command(request, options, folder)
        done = subprocess.run(
            tied_to_parent(words, signal.SIGKILL), env=environment, capture_output=True, text=True, check=False
        )
        if not (folder / REPORT).is_file():
            _end_without_report(request.recipe, done)
        report: dict[str, Any] = json.loads((folder / REPORT).read_text())
    if "refused" in report:
        raise UsageError(report["refused"])
    notes = [assumption] if assumption else []
    return Simulated(report["counted"], report["curve"], (*notes, *report["notes"]), is_another=report["is_another"])


def _end_without_report(recipe: str, done: subprocess.CompletedProcess[str]) -> NoReturn:
    """End the command as its worker ended. A refusal would be in a report, so the worker answered a flag or failed."""
    if done.returncode == 0:
        # A flag such as --help or --print_config, whose output comes from the recipe.
        print(done.stdout, end="", flush=True)
        raise SystemExit(0)
    refuse_killed(recipe, done.returncode)
    raise RuntimeError(f"the simulation of {recipe} failed:\n{done.stdout[-2000:]}\n{done.stderr}")


def refuse_killed(recipe: str, returncode: int) -> None:
    """Raise ``UsageError`` if the worker was ended by a signal."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        raise UsageError(
            f"recipe {recipe!r}: its simulation was ended by {name}, which the system also sends if memory runs out "
            "(its log says so: dmesg); more free memory of this machine is required. End other programs, or give a "
            "smaller --num_processes"
        )


def worker_command(request: Launch, options: Options, folder: Path) -> tuple[list[str], dict[str, str], str | None]:
    """Write a worker's request to ``folder``. Returns its command, environment and, if any, a note on the machine."""
    path, machine, assumption = read_machine(request, simulated=True)
    refuse_machine(machine)
    # The worker finds the recipe itself. This refuses an unknown name before a process is started.
    find_recipe(request.recipe)
    asked = {
        "recipe": request.recipe,
        "arguments": request.arguments,
        "step": options.step,
        "micro_batches": options.micro_batches,
        "device_type": options.device_type or DEVICE_TYPE,
        "largest": options.largest,
        "device": options.device,
    }
    (folder / REQUEST).write_text(json.dumps(asked))
    words = [sys.executable, "-m", "accel_train.simulation.worker", str(folder)]
    return words, _environment(path, machine, request), assumption


def _environment(path: Path | None, machine: MachineConfig, request: Launch) -> dict[str, str]:
    """Return the environment of rank 0 of a launch on CPUs."""
    processes = machine.num_processes or 1
    # DDP with one process is a plain process. FSDP2 and DeepSpeed have a process group even with one process.
    connected = processes > 1 or machine.strategy not in ("single", "ddp")
    settings = accelerate_settings(path, machine, request)
    environment = launch_environment(path, machine, settings)
    environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    # Without a rehearsal, Accelerate ignores FSDP on CPUs, and a start there refuses launch files for GPUs.
    environment[REHEARSAL_VARIABLE] = "1"
    # Variables of a launcher around this command would be taken for the simulated ones.
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        environment.pop(name, None)
    if connected:
        environment |= {
            "WORLD_SIZE": str(processes),
            "RANK": "0",
            "LOCAL_RANK": "0",
            # 1, because a single process runs on this host and has its memory to itself.
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(PORT),
        }
    return environment
