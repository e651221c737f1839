"""Files of a plan, for ``accelerate launch``: ``launch.yaml`` describes the machine, ``preset.yaml`` the experiment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from accel_train.commands.bundled import folder
from accel_train.config import UsageError, expand_path, refuse_unusable_folder, refuse_unwritable
from accel_train.options.loading import Loaded
from accel_train.options.tree import Tree, experiment_tree, flatten, overlaid, tree_text
from accel_train.planning.candidates import BLOCKS, LAUNCH_FILES, MICRO_BATCH, MODE, Candidate
from accel_train.store.atomic_files import replace_file

LAUNCH = "launch.yaml"
PRESET = "preset.yaml"
OUTPUT = "output_dir"


def paths_in(directory: str) -> tuple[Path, Path]:
    """Return the paths of launch file and preset. Raises ``UsageError`` if one exists already or cannot be created."""
    place = expand_path(directory)
    # The directory itself need not exist, and then its nearest parent decides.
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"write: {place}: {existing} cannot be written into; a directory of yours is required")
    refuse_unusable_folder(f"write: {place}", place)
    paths = place / LAUNCH, place / PRESET
    for path in paths:
        if path.exists():
            raise UsageError(f"write: {path} exists; a directory without it is required. Delete it, or give another")
    return paths


def write(directory: str, command: str, candidate: Candidate, gpus: int, loaded: Loaded[Any]) -> tuple[Path, Path]:
    """Write both files into ``directory`` and return their paths. Raises ``UsageError`` if it cannot."""
    # Checked again: the search since the first check may have taken minutes.
    launch, preset = paths_in(directory)
    # An argument may have several lines, and each has to stay a comment.
    head = "".join(f"# {line}\n" for line in f"Written by: {command}".splitlines())
    texts = {launch: launch_text(candidate.strategy, gpus), preset: tree_text(planned_tree(loaded, candidate))}
    with refuse_unwritable(f"write: {launch.parent}"):
        launch.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            replace_file(path, (head + text).encode())
    return launch, preset


def launch_text(strategy: str, gpus: int) -> str:
    """Return the bundled launch file of a strategy with its number of processes, without its explanation."""
    text = (folder("accelerate_configs") / LAUNCH_FILES[strategy]).read_text()
    lines = text.splitlines(keepends=True)
    # The comment at the top is about when to use the file. Those between the keys are about the keys.
    while lines[0].startswith("#"):
        lines.pop(0)
    return re.sub(r"(?m)^num_processes: .*$", f"num_processes: {gpus}", "".join(lines))


def is_relative(loaded: Loaded[Any]) -> bool:
    """Return True if an option that the preset holds is a path relative to the current directory."""
    values = flatten(experiment_tree(loaded.config))
    given = {name: value for name, value in values.items() if loaded.origins.get(name) != "default"}
    paths = [value for name, value in given.items() if isinstance(value, str) and name != OUTPUT and value]
    # An output directory need not exist. Of other values, only an existing file is known to be a path.
    places = [value for value in paths if Path(value).exists()]
    if OUTPUT in given:
        places.append(given[OUTPUT])
    return not all(value.startswith("~") or Path(value).is_absolute() for value in places)


def planned_tree(loaded: Loaded[Any], candidate: Candidate) -> Tree:
    """Return the options set by preset, file or flags, with the planned values."""
    values = flatten(experiment_tree(loaded.config))
    # Defaults stay out of the file: a later release may improve them.
    kept = {name: value for name, value in values.items() if loaded.origins.get(name) != "default"}
    kept |= {MICRO_BATCH: candidate.micro_batch_size, MODE: candidate.mode}
    if candidate.blocks is not None:
        kept[BLOCKS] = candidate.blocks
    return overlaid({}, kept)
