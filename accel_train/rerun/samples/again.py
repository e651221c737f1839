"""Rerun of a recorded run from one of its checkpoints, in an observed process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.options.tree import Tree
from accel_train.rerun import changes, recorded, training
from accel_train.rerun.recorded import RecordedRun
from accel_train.store import strict_json
from accel_train.store.manifest import Checkpoint, checkpoint_name
from accel_train.wording import shortened

OBSERVED = "observed.json"
MOST_BYTES = 8 << 30
"""Largest file of observations: it may record each operator of a step with many micro-batches."""
Command = Callable[[Path, Sequence[str]], list[str]]


def plain_command(program: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command of one process, without a launcher."""
    return [sys.executable, str(program), *arguments]


@dataclass(frozen=True)
class Beginning:
    """A run, and the state to begin with."""

    run: RecordedRun
    recipe: Path
    checkpoint: Checkpoint | None
    """None: step 0."""
    batches: Mapping[str, Any] | None = None
    """``batch_schedule`` in place of the recorded one. None or empty: as recorded."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def __str__(self) -> str:
        return "step 0" if self.checkpoint is None else checkpoint_name(self.checkpoint.step)


def find_beginning(run: RecordedRun, recipe: Path, step: int, option: str) -> Beginning:
    """Return the newest state of the run after at most ``step`` steps, and print which newer ones are passed over.

    Raises ``UsageError``, naming ``option``, if there is none.
    """
    checkpoint, reasons = run.newest_at(step)
    for reason in reasons:
        # On stderr, because standard output may be JSON.
        print(f"passed over: {reason}", file=sys.stderr, flush=True)
    # A run that began from another one's checkpoint has no step 0.
    if checkpoint is None and run.saved.get("origin") is not None:
        steps = shortened([str(saved) for saved, _ in run.checkpoints], 12)
        raise UsageError(
            f"{option}: {run.directory} began from another run's checkpoint, and has none at or before step {step} "
            f"from which it can continue; it has {steps}; use the run that it began from"
        )
    return Beginning(run, recipe, checkpoint)


def observe(
    beginning: Beginning,
    last: int,
    request: Mapping[str, Any],
    folder: Path,
    command: Command = plain_command,
    log_every: int | None = None,
) -> dict[str, Any]:
    """Train from the beginning up to ``last`` at most, observed as requested, and return the observations.

    Everything is written below ``folder``, which must be empty: the run in its ``run``, with a save of step ``last``.
    ``command`` makes the command line from a program and its arguments. ``log_every`` None logs only the ends.
    Raises like ``compare.runs.run_once``.
    """
    run = beginning.run
    options = _options(beginning, last, log_every or last)
    config = training.build_directory(folder / "run", run, beginning.checkpoint, options, save_every=last)
    # The run would otherwise begin again at step 0 where its checkpoint cannot be loaded.
    resume = "auto" if beginning.checkpoint is None else "must"
    path = folder / OBSERVED
    words = {name: dict(values) | {"path": str(path)} for name, values in request.items()}
    arguments = [json.dumps(words), str(beginning.recipe), str(config), "--resume", resume]
    if beginning.batches:
        arguments += ["--allow", changes.BATCHES]
    threads = None
    # A resume restores the number of threads by itself.
    if beginning.checkpoint is None:
        threads = training.recorded_threads(run.starts(1, last))
    training.train(command(training.PROGRAM, arguments), folder / "log", threads)
    return strict_json.read_object(path, MOST_BYTES)


def _options(beginning: Beginning, last: int, log_every: int) -> Tree:
    options = training.set_length(recorded.options_at(beginning.run, beginning.checkpoint), last)
    # Logging has no effect on the steps.
    options |= {"log": options["log"] | {"log_every": log_every}}
    if beginning.batches:
        options |= {changes.BATCHES: beginning.batches}
    return options
