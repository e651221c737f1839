"""Changes of a branch: any option, except for its samples, its noise and the shape of its model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.config import UsageError
from accel_train.data.options import BatchScheduleConfig
from accel_train.options.tree import Tree, to_tree
from accel_train.store.run_file import is_covered

REFUSED: Mapping[str, str] = {
    "seed": "it decides the samples and the noise, which a branch keeps",
    "global_batch_size": "it decides the samples of each step, which a branch keeps",
    "batch_schedule": "it decides the samples of each step, which a branch keeps",
    "init_from": "a branch has the weights of its checkpoint",
    "model": "the weights of the checkpoint fit its own model",
    "data": "a branch trains on the samples of its run",
}
"""Options and groups kept from the run. Other changes of shape or data are found when they are built."""
BATCHES = "batch_schedule"
NAME_BYTES = 200
OWN: Mapping[str, str] = {
    "resume": "a branch begins at the checkpoint that --at chooses",
    "allow": "a branch allows what its flags change",
    "overwrite": "give an unused --output_dir",
    "evaluate_only": "a branch trains",
    "max_steps": "--steps gives the number of steps after the checkpoint",
    "max_epochs": "--steps gives the number of steps after the checkpoint",
}
"""Options of a recipe set by the command itself."""


def refuse_unchangeable(given: Mapping[str, Any], recorded: Mapping[str, Any], free: Sequence[str]) -> None:
    """Raise ``UsageError`` for a flag that a branch cannot have. Values are by dotted option.

    ``free`` are options and groups without an effect on the trajectory.
    """
    for name, value in given.items():
        if name in OWN:
            raise UsageError(f"--{name} {value}: {OWN[name]}; leave it out")
        # A flag that repeats the value of the run, or decides where data are cached, changes nothing.
        if is_covered(name, free) or recorded.get(name) == value:
            continue
        for refused, reason in REFUSED.items():
            if is_covered(name, [refused]):
                raise UsageError(
                    f"--{name} {value}: {recorded.get(name)!r} in the run, and a branch cannot change it: {reason}; "
                    "leave it out, or train a new run"
                )


def measured_batches(
    options: Tree, manifest: Mapping[str, Any], windows: Mapping[int, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return ``batch_schedule`` with the sizes that the run has measured, up to its end. Empty if it measures none.

    ``manifest``, of one of its checkpoints, decides up to its step. After it, or from the beginning if it is empty, the
    events of the measurements decide, ``windows`` by step.
    """
    recorded: Mapping[str, Any] = options.get(BATCHES, {})
    if not recorded.get("noise_factor"):
        return {}
    stages = [(int(step), int(size)) for step, size in manifest.get("grown", ())]
    for step, window in sorted(windows.items()):
        size = window["next_global_batch_size"]
        if step > manifest.get("step", 0) and size > window["global_batch_size"]:
            stages.append((step, size))
    if not stages:
        return to_tree(BatchScheduleConfig())
    steps, sizes = zip(*stages, strict=True)
    return to_tree(BatchScheduleConfig(steps, sizes, recorded["learning_rate"]))


def directory_name(parent: str, step: int, changes: Mapping[str, Any]) -> str:
    """Return the name of a branch's directory: that of its run, with the step and the changes."""
    name = f"{parent}-at{step}-{label(changes)}"
    # File systems take names of up to 255 bytes, and -control may be appended. A letter may have four bytes.
    return os.fsencode(name)[:NAME_BYTES].decode(errors="ignore")


def label(changes: Mapping[str, Any]) -> str:
    """Return a part of a directory name to tell branches apart: ``lr-0.0003``."""
    words: list[str] = []
    for name, value in changes.items():
        leaf = name.rpartition(".")[2]
        words.append(leaf)
        values: list[Any] = value if isinstance(value, list) else [value]
        words += map(str, values)
    # Values may be paths or have spaces.
    text = "-".join(words) or "unchanged"
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text)
