"""``accel-train check``: read the launch file and the recipe's config as a start would, and run nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.commands.launch import Launch, read_machine
from accel_train.config import UsageError
from accel_train.data.sampler import accumulation_steps
from accel_train.launch_files.machine_config import MachineConfig
from accel_train.launch_files.requested import Requested, notices, refuse_accumulation, refuse_experiment_settings
from accel_train.options.loading import config_of
from accel_train.runtime.accelerator import refuse_zero_contradictions


def check(request: Launch) -> str:
    """Return the output of ``accel-train check``, or raise the ``UsageError`` of a start up to its first connection.

    Calls the recipe's ``main`` and leaves it once it has read its config, so this is the config of a real start.
    """
    path, machine, assumption = read_machine(request)
    path_of_recipe = find_recipe(request.recipe)
    recipe = import_recipe(path_of_recipe)
    processes = machine.num_processes or 1
    # The recipe asks for it while it reads its options.
    with _world_size(processes):
        loaded = config_of(recipe.main, request.arguments)
    if loaded is None:
        raise UsageError(
            f"recipe {request.recipe!r}: its main ended without a config; a recipe first reads it with "
            "accel_train.options.loading.load_config"
        )
    config: Any = loaded.config
    # Refuses a global batch that is smaller than the number of processes.
    accumulation = accumulation_steps(config.global_batch_size, processes, config.micro_batch_size)
    _refuse_contradictions(machine, config, accumulation, str(machine.path))
    notes = notices(machine, os.environ) + _multi_cpu_note(machine)
    lines = [
        f"machine: {assumption or path}",
        f"  strategy {machine.strategy}, {processes} process(es) on {machine.num_machines} machine(s)",
    ]
    lines += [f"  note: {note}" for note in notes]
    largest, rest = divmod(config.global_batch_size, processes * accumulation)
    size = f"at most {largest + 1}" if rest else str(largest)
    lines += [
        f"experiment: {shlex.join([request.recipe, *request.arguments])}",
        f"  global batch {config.global_batch_size} = {processes} process(es) x {accumulation} micro-batch(es) of "
        f"{size}; precision {config.precision}",
    ]
    # Two hundred defaults would hide the ten options that somebody has set.
    chosen = loaded.describe(with_defaults=False).splitlines()
    lines += [f"  {line}" for line in chosen]
    command = shlex.join(["python", str(path_of_recipe), *request.arguments, "--print_config"])
    lines.append(f"  and {len(loaded.origins) - len(chosen)} options at their defaults: {command}")
    lines.append("nothing was run; everything that can be read is consistent")
    return "\n".join(lines)


@contextmanager
def _world_size(processes: int) -> Generator[None]:
    """Set the variable that a launcher would set, which ``--smoke`` reads."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        # As it was, for a caller that goes on: tests, and a notebook.
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def _multi_cpu_note(machine: MachineConfig) -> list[str]:
    """Warn of a file that `accelerate launch` ignores and `accel-train launch` obeys."""
    if machine.distributed_type != "MULTI_CPU" or machine.mpirun_hostfile or (machine.num_processes or 1) == 1:
        return []
    return [
        f"num_processes: {machine.num_processes} with MULTI_CPU starts ONE process under `accelerate launch`; "
        f"use `accel-train launch` or `torchrun --nproc_per_node {machine.num_processes}`"
    ]


def _refuse_contradictions(machine: MachineConfig, config: Any, accumulation: int, source: str) -> None:
    """Refuse settings of the launch file that contradict the experiment, through the environment a start would see."""
    requested = Requested(machine, source, machine.num_processes, None, rehearsal=False)
    environment = {
        "ACCELERATE_MIXED_PRECISION": machine.mixed_precision or "no",
        "ACCELERATE_DYNAMO_BACKEND": machine.dynamo.backend,
    }
    refuse_experiment_settings(requested, environment, config.precision)
    if machine.deepspeed is None:
        return
    values = dict(machine.deepspeed.config_values or {})
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        value = getattr(machine.deepspeed, key)
        if value is not None:
            values[key] = value
    # Accelerate hands this one to the processes in an environment variable of its own, not with the DeepSpeed settings.
    steps = values.pop("gradient_accumulation_steps", 1)
    refuse_accumulation(requested, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(steps)}, accumulation)
    generated = {"gradient_clipping": float(config.optimizer.max_grad_norm)}
    refuse_zero_contradictions(values, generated, config.precision, source)
