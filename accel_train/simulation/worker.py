"""Simulating process: ``python -m accel_train.simulation.worker FOLDER``, in the environment of a launch.

It reads ``request.json`` in the folder and writes ``report.json``: the counts, or the reason for a refusal.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.cost_model.devices import rated
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.data.sampler import StepSampler
from accel_train.options.loading import config_of
from accel_train.simulated import simulating
from accel_train.simulation.flags import REPORT, REQUEST, DeviceType
from accel_train.simulation.ledger import Ledger
from accel_train.simulation.refusals import refuse_config
from accel_train.simulation.step import FakeStep, StepCounted
from accel_train.simulation.zero.engine import connecting

OFFLOADED = (
    "offload: host memory is counted apart. The peak has the copies that DeepSpeed makes of it on a GPU, but not what "
    "other streams keep"
)
SUBSTITUTED = "which a start refuses"
"""Part of the note on a global batch that replaces the config's without being asked for. Identifies that note."""
POINTS = 400
"""Approximate number of points of the memory curve over the step."""


def main(argv: Sequence[str]) -> int:
    """Simulate the request, as rank 0. Returns 0, or 2 if it cannot be simulated."""
    folder = Path(argv[0])
    request = json.loads((folder / REQUEST).read_text())
    sys.argv[0] = request["recipe"]  # the name in its --help
    report: dict[str, Any]
    try:
        result, notes = simulate_recipe(**request, place=folder)
        report = {"counted": dataclasses.asdict(result.counted), "curve": curve(result.ledger), "notes": notes}
        report["is_another"] = any(SUBSTITUTED in note for note in notes)
    except UsageError as error:
        report = {"refused": str(error)}
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        report = {"refused": _reads_values(error, request["recipe"])}
    (folder / REPORT).write_text(json.dumps(report))
    return 2 if "refused" in report else 0


def simulate_recipe(
    recipe: str,
    arguments: Sequence[str],
    step: int | None = None,
    micro_batches: int | None = None,
    device_type: DeviceType = "cuda",
    largest: int | None = None,
    device: str | None = None,
    place: Path | None = None,
) -> tuple[StepCounted, list[str]]:
    """Run the recipe's ``main`` on fake tensors until a step is counted, as rank 0 of ``WORLD_SIZE``.

    ``step`` None is the middle of the run. With ``micro_batches`` the global batch grows with the number of processes.
    ``largest`` limits the step to that many of its micro-batches, those with the most bytes. The run directory is a
    temporary one in ``place``, which the command deletes even if this process was killed.
    Returns the counts, and notes on differences from a real start. Raises ``UsageError`` if it cannot be simulated.
    """
    module = import_recipe(find_recipe(recipe))
    loaded = config_of(module.main, arguments)
    if loaded is None:
        raise UsageError(f"recipe {recipe!r}: its main ended without a config; a recipe first reads it (load_config)")
    # Refused before `main` builds the model.
    refuse_config(loaded.config)
    if device is not None:
        # Refuses a device without units for this precision before the simulation, which takes time.
        rated(device, loaded.config.precision, 1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # In a launch with one process, it is set only for strategies that need a process group.
    if "WORLD_SIZE" in os.environ:
        _connect(world_size)
    flags, notes = _global_batch(loaded.config, world_size, micro_batches)
    with tempfile.TemporaryDirectory(prefix="accel-train-simulate-", dir=place) as directory:
        # A temporary directory, so that the real run is neither touched nor resumed.
        # After the user's own flags, because the last of several equal flags wins.
        words = [*arguments, *flags, "--output_dir", directory, *_without_resume(loaded.config.resume, notes)]
        try:
            fake = FakeStep(step, device_type, largest=largest)
            with connecting(), simulating(fake), _samples_repeated(bool(flags)):
                module.main(words)
        except StepCounted as found:
            if found.counted.host:
                notes.append(OFFLOADED)
            return found, notes
    raise UsageError(
        f"recipe {recipe!r}: its main ended before the first step (an option that only prepares); a "
        "start that trains is required. Leave that option out"
    )


def _connect(world_size: int) -> None:
    # This import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def _without_resume(resume: str, notes: list[str]) -> list[str]:
    """Return flags that turn ``resume`` off, and add a note: the simulation's own directory has no run to resume."""
    if resume == "auto":
        return []
    notes.append(f"resume: {resume}: left out, since a simulation reads no run and no checkpoint")
    return ["--resume", "auto"]


def _global_batch(config: Any, processes: int, micro_batches: int | None) -> tuple[list[str], list[str]]:
    """Return flags that change the global batch, and a note about it.

    Both are empty unless ``micro_batches`` asks for another one, or a start would refuse the config's.
    """
    asked = config.global_batch_size
    if micro_batches is None and asked >= processes:
        return [], []
    _refuse_schedule(config, processes, micro_batches)
    size = processes * config.micro_batch_size * (micro_batches or 1)
    if size == asked:
        return [], []
    note = f"global_batch_size: {size:,} instead of {asked:,}, as --micro_batches says"
    if micro_batches is None:
        note = (
            f"global_batch_size: {asked:,} is smaller than {processes:,} processes, {SUBSTITUTED}: simulated "
            f"with {size:,}, one micro-batch of {config.micro_batch_size} on each"
        )
    flags = ["--global_batch_size", str(size)]
    if config.micro_batch_is_auto:
        # Otherwise "auto" would again choose a process's whole share, and there would be only one micro-batch.
        flags += ["--micro_batch_size", str(config.micro_batch_size)]
    return flags, [note]


def _refuse_schedule(config: Any, processes: int, micro_batches: int | None) -> None:
    """Raise ``UsageError`` for a batch schedule: its later steps would not have the global batch of the simulation."""
    sizes = config.batch_schedule.sizes
    if not sizes:
        return
    sets = f"batch_schedule.sizes {list(sizes)} sets that of later steps"
    if micro_batches is not None:
        raise UsageError(
            f"micro_batches: {micro_batches}: it takes the place of global_batch_size, and {sets}: only one of "
            "them may be given; leave --micro_batches out, or the schedule"
        )
    raise UsageError(
        f"global_batch_size: {config.global_batch_size:,} is smaller than {processes:,} processes, {SUBSTITUTED}, and "
        f"{sets}, so that no other can replace it: a sample for each process is required; give fewer "
        "--num_processes or a larger --global_batch_size, or leave the schedule out"
    )


@contextmanager
def _samples_repeated(repeated: bool) -> Generator[None]:
    """In the body, accept a global batch larger than the dataset, with samples from several epochs."""
    if not repeated:
        yield
        return
    with ExitStack() as relaxed:
        for sampler in (StepSampler, TaskSampler):
            relaxed.enter_context(mock.patch.object(sampler, "refuse_small_data", return_value=None))
        yield


def _reads_values(error: BaseException, recipe: str) -> str:
    """Return the refusal of a step that reads a tensor's value, with the line that reads it. Fake tensors have none."""
    frames = traceback.extract_tb(error.__traceback__)
    # Name the line of the recipe or its model: one in torch or in the simulation's modes would help nobody.
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename]
    own = [frame for frame in own if f"{os.sep}simulation{os.sep}" not in frame.filename]
    where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "torch"
    return (
        f"recipe {recipe!r}: its step reads a value from the device ({where}), and simulated tensors have none; a step "
        "without such a read is required (on a GPU each one waits for the device). Rehearse it instead: accel-train "
        "rehearse"
    )


def curve(ledger: Ledger) -> list[dict[str, Any]]:
    """Return the bytes by category over the step, at a few hundred of its events and at the peak."""
    last = len(ledger.events) - 1
    every = max(1, last // POINTS)
    peak = ledger.peak().event
    points: list[dict[str, Any]] = []
    for number, held in ledger.replay():
        if number % every == 0 or number in (peak, last):
            points.append({"place": ledger.events[number].place, **held})
    return points


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
