"""``accel-train check``: read the launch file and the recipe's config as a start would, and run nothing."""

from __future__ import annotations

import glob
import json
import os
import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from accel_train.commands.bundled import find_recipe, folder, import_recipe
from accel_train.commands.launch import Launch, read_machine, refuse_unfinished
from accel_train.config import UsageError, expand_path
from accel_train.data.sampler import accumulation_steps
from accel_train.launch_files.machine_config import MachineConfig
from accel_train.launch_files.other_launchers import refuse_other_launchers
from accel_train.launch_files.requested import (
    Requested,
    notices,
    refuse_accumulation,
    refuse_experiment_settings,
    refuse_unsupported,
)
from accel_train.linting import reporting
from accel_train.linting.fixing import fix_file, undo, unused_copy
from accel_train.linting.host import facts_of, layout_of_file, read_host, unknown_host, visible_devices
from accel_train.linting.table import Found, ignored_names, lint
from accel_train.options.loading import Loaded, config_of
from accel_train.options.refusals import refuse_moved, unset_variables
from accel_train.options.tree import flatten, to_tree
from accel_train.runtime.accelerator import refuse_zero_contradictions, strategy_family
from accel_train.runtime.distributed_options import ddp_handlers

DATA = "data"
"""The group of options that names data, in every recipe."""
DATA_FILES = {
    *(".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow"),
    *(".npy", ".npz", ".pt", ".h5", ".hdf5", ".safetensors", ".zip", ".tar"),
}
"""File extensions that no Hub id has."""
MOST_ROUNDS = 10
"""Maximum number of rounds of ``--fix``. Two are enough for the current rules."""


@dataclass(frozen=True)
class Checked:
    """A launch file and an experiment, read together."""

    origin: str
    """Where the machine comes from."""
    machine: MachineConfig
    recipe: Path
    loaded: Loaded[Any]
    accumulation: int
    is_elsewhere: bool
    """True if the launch file asks for accelerators and this machine has none."""
    found: list[Found]

    @property
    def exit_code(self) -> int:
        """2, as for every usage error, if a rule of the severity error finds something."""
        return 2 if any(rule.severity == "error" for rule, _ in self.found) else 0


def check(request: Launch, ignored: Sequence[str] = ()) -> str:
    """Return the output of ``accel-train check``. Raises the ``UsageError`` of a start up to its first connection."""
    return describe(request, read(request, ignored))


def run(request: Launch, *, ignored: Sequence[str] = (), as_json: bool = False, fix: bool = False) -> int:
    """Print the result of a check, and return the exit code. With ``fix``, change the YAML file first."""
    checked = read(request, ignored)
    if fix:
        checked = _fix(request, ignored, checked)
    print(_json(checked) if as_json else describe(request, checked))
    return checked.exit_code


def read(request: Launch, ignored: Sequence[str] = ()) -> Checked:
    """Read launch file and experiment, and apply the rules of the linter. ``ignored`` are names of rules.

    Calls the recipe's ``main`` and leaves it once it has read its config, so this is the config of a real start.
    """
    # Imported here, because the recipe imports it in any case.
    from accel_train.startup import refuse_options, refuse_strategy

    silenced = ignored_names(os.environ, ignored)
    path, machine, assumption = read_machine(request)
    refuse_unfinished(machine, request)
    path_of_recipe = find_recipe(request.recipe)
    recipe = import_recipe(path_of_recipe)
    processes = machine.num_processes or 1
    # The recipe asks for the world size while it reads its options.
    with _world_size(processes):
        loaded = config_of(recipe.main, request.arguments)
    if loaded is None:
        raise UsageError(
            f"recipe {request.recipe!r}: its main ended without a config; a recipe first reads it with "
            "accel_train.options.loading.load_config"
        )
    config: Any = loaded.config
    if loaded.path is not None:
        refuse_moved(loaded.path, config.output_dir, loaded.changed)
    refuse_options(config)
    # Refuses a global batch that is smaller than the number of processes.
    accumulation = accumulation_steps(config.global_batch_size, processes, config.micro_batch_size)
    _refuse_contradictions(machine, config, accumulation, str(machine.path))
    # Accelerate does not wrap the model of one process with a DDP file.
    refuse_strategy(config, "single" if machine.strategy == "ddp" and processes == 1 else machine.strategy)
    has_devices = bool(visible_devices())
    layout = layout_of_file(machine, has_devices=has_devices)
    host = read_host(config.output_dir, os.environ)
    # A laptop or a login node says nothing about the machine that will train.
    elsewhere = layout.device != "cpu" and not has_devices
    if elsewhere:
        host = unknown_host()
    found = lint(facts_of(config, layout, os.environ, host), silenced)
    return Checked(assumption or str(path), machine, path_of_recipe, loaded, accumulation, elsewhere, found)


def describe(request: Launch, checked: Checked) -> str:
    """Describe the launch file and the experiment, with notices and findings, for a person."""
    machine = checked.machine
    config: Any = checked.loaded.config
    processes = machine.num_processes or 1
    lines = [
        f"machine: {checked.origin}",
        f"  strategy {machine.strategy}, {processes} process(es) on {machine.num_machines} machine(s)",
    ]
    lines += [f"  note: {note}" for note in _notes(machine)]
    largest, rest = divmod(config.global_batch_size, processes * checked.accumulation)
    size = f"at most {largest + 1}" if rest else str(largest)
    lines += [
        f"experiment: {shlex.join([request.recipe, *request.arguments])}",
        f"  global batch {config.global_batch_size} = {processes} process(es) x {checked.accumulation} micro-batch(es) "
        f"of {size}; precision {config.precision}",
    ]
    # Two hundred defaults would hide the ten options that somebody has set.
    chosen = checked.loaded.describe(with_defaults=False).splitlines()
    lines += [f"  {line}" for line in chosen]
    command = shlex.join(["python", str(checked.recipe), *request.arguments, "--print_config"])
    lines.append(f"  and {len(checked.loaded.origins) - len(chosen)} options at their defaults: {command}")
    lines += [f"  warning: {text}" for text in [*_unset(checked), *missing_data(checked.loaded)]]
    lines.append("nothing was run; launch file and options are consistent; the data were not checked")
    if checked.is_elsewhere:
        lines.append("this machine has no accelerator: rules about cores, memory and disks were not applied")
    return "\n".join([*lines, *reporting.describe(checked.found)])


def missing_data(loaded: Loaded[Any]) -> list[str]:
    """Describe each path of data that a start would not find here. Hub ids and words such as demo are no paths."""
    missing: list[str] = []
    for name, value in flatten(to_tree(loaded.config)).items():
        group, _, option = name.partition(".")
        # A start creates its own directories.
        if group != DATA or option.endswith("_dir") or _is_made(loaded.config, name):
            continue
        is_path = _is_named_as_path
        if option.endswith(("path", "paths")):
            is_path = _is_path
        sources = value
        if not isinstance(value, (list, tuple)):
            sources = (value,)
        missing += [
            f"{name}: {source}: there is no such file or folder on this machine, and a start needs it"
            for source in sources
            if isinstance(source, str) and is_path(source) and not _is_here(expand_path(source))
        ]
    return missing


def _is_made(config: object, name: str) -> bool:
    """Return True for the ``path`` of a group which declares that a start creates it."""
    group, _, option = name.rpartition(".")
    return option == "path" and getattr(attrgetter(group)(config), "makes_path", False)


def _is_path(value: str) -> bool:
    """Return True if a source of data can only be a path."""
    if "=" in value or "://" in value:
        return False
    return _is_named_as_path(value) or value.count("/") > 1 or Path(value).suffix.lower() in DATA_FILES


def _is_named_as_path(value: str) -> bool:
    return value.startswith(("/", "./", "../", "~"))


def _is_here(path: Path) -> bool:
    # First as it is: brackets in a name are a pattern to glob.
    return path.exists() or bool(glob.glob(str(path), recursive=True))


def _notes(machine: MachineConfig) -> list[str]:
    return notices(machine, os.environ) + _multi_cpu_note(machine) + _other_launcher_note(machine)


def _unset(checked: Checked) -> list[str]:
    """Describe paths with a variable that is not set here: a start would refuse them, maybe on another machine."""
    return unset_variables(flatten(to_tree(checked.loaded.config)))


def _json(checked: Checked) -> str:
    config: Any = checked.loaded.config
    return json.dumps(
        {
            "strategy": checked.machine.strategy,
            "num_processes": checked.machine.num_processes or 1,
            "num_machines": checked.machine.num_machines,
            "global_batch_size": config.global_batch_size,
            "accumulation_steps": checked.accumulation,
            "notes": [*_notes(checked.machine), *_unset(checked)],
            "missing_data": missing_data(checked.loaded),
            "findings": reporting.as_json(checked.found),
        },
        indent=2,
    )


def _fix(request: Launch, ignored: Sequence[str], checked: Checked) -> Checked:
    """Change the YAML file of the command line as findings propose, print the diff, and return the new result.

    A change may cause a finding of another rule, so the rules are applied again until they change nothing.
    """
    path = checked.loaded.path
    assert path is not None
    bundled = folder("recipes").resolve()
    if bundled in path.resolve().parents:
        raise UsageError(
            f"--fix: {path} is a bundled preset, which all runs share and every new version replaces; copy it, as in "
            f"`cp {shlex.quote(str(path))} my.yaml`, and give my.yaml instead"
        )
    copy = unused_copy(path)
    changes: dict[str, object] = {}
    tried: set[tuple[str, str]] = set()
    difference = ""
    for _ in range(MOST_ROUNDS):
        # Two rules that disagree about an option would change it back and forth.
        more = {option: value for option, value in _changes(checked).items() if (option, str(value)) not in tried}
        if not more:
            break
        tried |= {(option, str(value)) for option, value in more.items()}
        changes |= more
        difference, checked = _apply(request, ignored, path, changes, copy)
    for rule, finding in checked.found:
        if finding.change is not None and checked.loaded.origins.get(finding.change[0]) == "command line":
            option, value = finding.change
            print(f"{rule.name}: --{option} is given on the command line: give {value} there")
    if changes:
        print(f"{difference}\n{path} is changed; the original is kept as {copy.name}")
    else:
        print(f"nothing to fix in {path}")
    return checked


def _changes(checked: Checked) -> dict[str, object]:
    """Return the changes that findings propose for the file. Of several for one option, the first counts."""
    changes: dict[str, object] = {}
    for _, finding in checked.found:
        if finding.change is not None and checked.loaded.origins.get(finding.change[0]) != "command line":
            changes.setdefault(*finding.change)
    return changes


def _apply(
    request: Launch, ignored: Sequence[str], path: Path, changes: Mapping[str, object], copy: Path
) -> tuple[str, Checked]:
    """Change the file and read it again. Undo everything if that fails, or if a start would refuse the file."""
    try:
        difference = fix_file(path, changes, copy)
    except UsageError:
        undo(path, copy)
        raise
    try:
        return difference, read(request, ignored)
    except UsageError as error:
        undo(path, copy)
        raise UsageError(
            f"--fix: {path} is left as it was, because a start would refuse the changed file: {error}"
        ) from None


@contextmanager
def _world_size(processes: int) -> Generator[None]:
    """Set the number of processes as a launcher would, for ``--smoke`` to read."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        # Restored for callers that continue, such as tests and notebooks.
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def _multi_cpu_note(machine: MachineConfig) -> list[str]:
    """Warn of a number of processes that `accel-train launch` obeys and `accelerate launch` ignores."""
    if machine.distributed_type != "MULTI_CPU" or machine.mpirun_hostfile or (machine.num_processes or 1) == 1:
        return []
    return [
        f"num_processes: {machine.num_processes} with MULTI_CPU starts ONE process under `accelerate launch`; "
        f"use `accel-train launch` or `torchrun --nproc_per_node {machine.num_processes}`"
    ]


def _other_launcher_note(machine: MachineConfig) -> list[str]:
    """Warn of a file that `accelerate launch` obeys and `accel-train launch` refuses."""
    try:
        refuse_other_launchers(machine)
    except UsageError as error:
        return [f"for `accelerate launch` only: {error}"]
    return []


def _refuse_contradictions(machine: MachineConfig, config: Any, accumulation: int, source: str) -> None:
    """Refuse settings of the launch file that contradict the experiment, as a start does by its environment."""
    strategy = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(machine.distributed_type)
    requested = Requested(machine, source, machine.num_processes, strategy, rehearsal=False)
    environment = {
        "ACCELERATE_MIXED_PRECISION": machine.mixed_precision or "no",
        "ACCELERATE_DYNAMO_BACKEND": machine.dynamo.backend,
    }
    refuse_experiment_settings(requested, environment, config.precision)
    refuse_unsupported(requested, environment)
    ddp_handlers(
        config.distributed,
        strategy_family(requested, machine.num_processes or 1),
        precision=config.precision,
        on_device=not machine.use_cpu,
        accumulation_steps=accumulation,
    )
    if machine.deepspeed is None:
        return
    values = dict(machine.deepspeed.config_values or {})
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        value = getattr(machine.deepspeed, key)
        if value is not None:
            values[key] = value
    # Accelerate passes this one to the processes in its own environment variable, not with the DeepSpeed settings.
    steps = values.pop("gradient_accumulation_steps", 1)
    refuse_accumulation(requested, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(steps)}, accumulation)
    generated = {
        "gradient_clipping": float(config.optimizer.max_grad_norm),
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
    }
    # The number of processes may be left to a flag of the launcher.
    if machine.num_processes is not None:
        generated["train_batch_size"] = config.micro_batch_size * machine.num_processes
    refuse_zero_contradictions(values, generated, config.precision, source)
