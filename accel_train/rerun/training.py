"""Train recorded steps again: a directory to resume in like the run's own, and the process that trains in it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.compare.runs import run_once
from accel_train.config import UsageError, expand_path
from accel_train.options.tree import Tree, tree_text
from accel_train.rerun.starts import Start
from accel_train.store import manifest
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import CONFIG_FILE, METRICS_FILE
from accel_train.store.run_file import write_run

if TYPE_CHECKING:
    from accel_train.rerun.recorded import RecordedRun

THREADS = "OMP_NUM_THREADS"
PROGRAM = Path(__file__).parent / "samples" / "observed_run.py"
"""Runs a recipe and observes it."""
MOST_SAVES = 20
"""Largest number of saves from the first compared checkpoint to the end. Older checkpoints are left out beyond it."""


@dataclass(frozen=True)
class Machine:
    """Options of ``accel-train launch``."""

    config_file: str | None = None
    num_processes: int | None = None

    def command(self, recipe: Path, arguments: Sequence[str], interpreter: str = sys.executable) -> list[str]:
        """Return the command to run the recipe on this machine."""
        head = [interpreter, "-m", "accel_train.cli", "launch"]
        if self.config_file is not None:
            # The strict reader refuses an invalid file before anything else is done.
            from accel_train.launch_files.machine_config import read_machine_config

            path = expand_path(self.config_file)
            read_machine_config(path, num_processes=self.num_processes)
            head += ["--config_file", str(path)]
        if self.num_processes is not None:
            head += ["--num_processes", str(self.num_processes)]
        return [*head, str(recipe), *arguments]


def train(command: Sequence[str], log: Path, threads: int | None = None, save_seconds: float | None = None) -> None:
    """Run a recipe to its end with its output in ``log``. ``save_seconds`` and errors are as in ``run_once``.

    ``threads`` is for a start without a checkpoint. A resume restores the number by itself.
    """
    environment: dict[str, str] = {}
    # A number that the user has set stays, and shows as a difference of the layout.
    if threads is not None and THREADS not in os.environ:
        environment[THREADS] = str(threads)
    run_once(command, log, environment=environment, save_seconds=save_seconds)


def recorded_threads(starts: Sequence[Start]) -> int | None:
    """Return the number of torch threads of the first start on a CPU, or None."""
    for start in starts:
        threads = start.environment.get("torch_threads")
        if start.environment.get("device") == "cpu" and isinstance(threads, int):
            return threads
    return None


def steps_to_save(saved: Sequence[int], last: int) -> tuple[int, list[int]]:
    """Return ``save_every`` for a window up to ``last``, and the steps of ``saved`` to be saved with it.

    A run saves at multiples of one number only, and always at its end. If saving all of the steps again would need too
    many saves, only the newest of them are saved.
    """
    # The last step is saved in any case.
    inner = [step for step in saved if step < last]
    kept = list(saved)
    # The oldest are given up, since later weights carry on an earlier difference.
    every = math.gcd(*inner)
    while inner and (last - inner[0]) // every > MOST_SAVES:
        kept.remove(inner.pop(0))
        every = math.gcd(*inner)
    return every, kept


def build_directory(
    directory: Path, run: RecordedRun, checkpoint: Checkpoint | None, options: Tree, save_every: int
) -> Path:
    """Create a run directory to continue from ``checkpoint``, and return the path of its config.

    With None it begins at step 0, with the values derived by the run's first start. The files of the checkpoint are
    linked one by one: deleting or replacing one affects only the link.
    """
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True)
    # Bound to its options like the run itself, so that a difference is refused and not trained.
    saved = dict(run.saved) | {"trained": True}
    # The run's queue for the Hub does not belong to this directory.
    saved.pop("hub", None)
    if checkpoint is not None:
        link_checkpoint(checkpoint, checkpoints)
        for name in ("experiment", "resolved"):
            saved[name] = checkpoint.manifest.get(name, saved[name])
    write_run(directory, saved)
    # A recipe may read its earlier evaluations there. The new start drops the lines beyond the checkpoint.
    log = run.directory / METRICS_FILE
    if log.is_file():
        (directory / METRICS_FILE).write_bytes(log.read_bytes())
    config = directory / CONFIG_FILE
    here = _writing_here(options, directory, save_every)
    config.write_text(tree_text(here), encoding="utf-8")
    return config


def link_checkpoint(checkpoint: Checkpoint, folder: Path) -> Path:
    """Create a checkpoint in ``folder`` of links to the files of another."""
    target = folder / manifest.checkpoint_name(checkpoint.step)
    for name in (manifest.MANIFEST, *checkpoint.manifest["files"]):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # Resolved, because the run itself may hold links.
        file.symlink_to(checkpoint.file(name).resolve())
    return target


def _writing_here(options: Tree, directory: Path, save_every: int) -> Tree:
    """Return the options with all output going to ``directory`` alone, and every save kept."""
    checkpoints: dict[str, Any] = dict(options["checkpoints"])
    for name in checkpoints:
        # Retention would delete what is to be compared, and strip what is linked.
        if name.startswith("keep_"):
            checkpoints[name] = type(checkpoints[name])(0)
    # Saves by the clock or by epochs have no counterpart to compare with.
    checkpoints |= {"save_every": save_every, "save_every_minutes": 0, "save_every_epochs": 0, "pinned": []}
    logs = {name: value for name, value in options["log"].items() if name not in ("project", "run_name")}
    # A replay must neither push to the run's repository nor appear in its tracker.
    changed = {
        "output_dir": str(directory),
        "checkpoints": checkpoints,
        "hub": {"repo_id": None},
        "log": logs | {"trackers": [], "progress_bar": "off"},
    }
    # The range of a profile may lie beyond the end of the replay, which is then refused.
    if "profile" in options:
        changed["profile"] = {"steps": None}
    return options | changed


def set_length(options: Tree, steps: int) -> Tree:
    """Return the options of a run of ``steps`` optimizer steps."""
    if "max_steps" not in options:
        raise UsageError("the recipe of this run has no option max_steps, so it cannot be ended at a given step")
    return options | {"max_steps": steps, "max_epochs": None}


def log_steps(options: Tree, steps: Sequence[int], last: int) -> Tree:
    """Return the options of a run up to ``last``, logging at least ``steps``.

    A run also logs its first and last step. An earlier end of the recorded run may thus be a logged step in between.
    """
    regular = [step for step in steps if step not in (1, last)]
    # The gcd of nothing is 0, which is no interval.
    every = math.gcd(*regular) or last
    return options | {"log": options["log"] | {"log_every": every}}
