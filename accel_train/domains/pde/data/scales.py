"""Normalisation that belongs to trained weights: a run that starts from them keeps it for its own data.

A resume or an evaluation has exactly the tasks of its checkpoint, whatever ``--allow`` says. A new run from the weights
of another (``init_from``) keeps the scales of the tasks that both have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import UsageError
from accel_train.domains.pde.data.assets import FieldAssets, FieldTask, load_field_assets
from accel_train.domains.pde.fields import Scale
from accel_train.wording import shortened

SCALES = ("input", "target", "parameter", "logarithmic")
"""Fields of a task that are computed from its training rows."""
KIND = ("input_channels", "target_channels", "parameters", "has_time")
"""Fields of a task that determine which quantities its scales describe."""
SHAPE = ("grid", "boundary", "conserved", "dt")
"""The other fields of a task. A new run may differ in them from the weights that it starts from."""
SAME_STEP = 1e-6
"""Largest relative difference of two steps in time that count as equal."""


@dataclass(frozen=True)
class TrainedScales:
    """Tasks that the weights a run starts from were trained on."""

    place: Path
    """The checkpoint or another directory with the weights."""
    tasks: FieldAssets
    resumes: bool
    """False: a new run starts from the weights."""

    def task_for(self, task: FieldTask) -> FieldTask:
        """Return a task of the data with the normalisation of the weights, if they were trained on it.

        Raises `UsageError` for a resume if the task differs in kind or shape from the one in the checkpoint.
        """
        trained = self._find(task.name)
        if trained is None or (not self.resumes and _differences(trained, task, KIND)):
            return task
        scales = {name: getattr(trained, name) for name in SCALES}
        scaled = replace(task, **scales)
        different = _differences(trained, scaled, [*KIND, *SHAPE])
        if self.resumes and different:
            raise UsageError(
                f"--data.path: {different[0]} in the checkpoint {self.place}. To resume or to evaluate it, data of "
                "the same kind are required, whatever --allow and --data.changed say: bring such data, read with the "
                "--data options of the run, or give another --output_dir; a new run starts from these weights with "
                f"--init_from {self.place}."
            )
        return scaled

    def refuse_other_shapes(self, number: int, own: FieldTask) -> None:
        """Raise `UsageError` for a new run if the modules of task `number` differ in shape from the trained ones."""
        trained = self.tasks.tasks[number]
        here, there = _shapes(own), _shapes(trained)
        different = [f"{name} {here[name]} here and {there[name]} there" for name in here if here[name] != there[name]]
        if self.resumes or not different:
            return
        raise UsageError(
            f"--init_from: task {own.name} would start from the modules of {trained.name} in {self.place}, which have "
            f"other shapes: {', '.join(different)}. Data alike in these are required, of any grid and time step: bring "
            "such data, or leave --init_from out."
        )

    def notices(self, number: int, own: FieldTask) -> Iterator[str]:
        """Yield notices about task `number` if scales, modules or grid differ between the trained task and `own`.

        `own` is the task with the normalisation of its training files. A notice gives both values.
        """
        trained = self._find(own.name)
        if trained is None:
            other = self.tasks.tasks[number].name
            yield (
                f"{own.name}: not among the tasks of {self.place}: it starts from the modules of {other}, the task in "
                "its place there, with a normalisation of its own"
            )
        elif not self.resumes and (different := _differences(trained, own, KIND)):
            yield f"{own.name}: {different[0]} in {self.place}: normalised by its own training files"
        else:
            if different := _differences(trained, own, SHAPE):
                yield f"{own.name}: {'; '.join(different)} in {self.place}, from which its modules start"
            if scales := list(_scale_differences(trained, own)):
                yield (
                    f"{own.name}: normalised as the weights of {self.place} were trained, and not by these training "
                    f"files: {'; '.join(scales)}"
                )

    def _find(self, name: str) -> FieldTask | None:
        return next((task for task in self.tasks.tasks if task.name == name), None)


def trained_scales(weights: WeightsAssets | None, tasks: Sequence[str]) -> TrainedScales | None:
    """Read the tasks that the initial weights were trained on, and compare their names with `tasks`.

    Modules are matched to tasks by position. Raises `UsageError` for a resume if the tasks or their order differ, and
    for a new run if the number of tasks differs or a trained task has moved. Returns None without such weights.
    """
    if weights is None:
        return None
    trained = TrainedScales(weights.folder.parent, load_field_assets(weights.folder), weights.resumes)
    names = [task.name for task in trained.tasks.tasks]
    if weights.resumes and list(tasks) != names:
        raise UsageError(
            f"--data.tasks {' '.join(tasks)}: the checkpoint {trained.place} was trained on {' '.join(names)}. To "
            "resume or to evaluate it, the same tasks in the same order are required, whatever --allow says, because "
            f"each has modules of its own, found by its place: give --data.tasks {' '.join(names)}, or another "
            "--output_dir for other tasks."
        )
    start = f"--data.tasks {' '.join(tasks)} with --init_from: {trained.place} was trained on {' '.join(names)}"
    if len(tasks) != len(names):
        raise UsageError(
            f"{start}. Each task has modules of its own, so {len(names)} task(s) are required: give as many, in the "
            "places that they have there; a task of another name may take the place of one."
        )
    moved = [name for number, name in enumerate(tasks) if name in names and names.index(name) != number]
    if moved:
        raise UsageError(
            f"{start}, and a task starts from the modules in its place, which are not those of {moved[0]}. Give "
            f"trained tasks in the places that they have there (--data.tasks {' '.join(names)}); a task of another "
            "name may take the place of one."
        )
    return trained


def _shapes(task: FieldTask) -> dict[str, object]:
    """Return the properties of a task that determine the shapes of its modules, under any model options."""
    boundary = "periodic"
    if task.boundary != boundary:
        boundary = "not periodic"
    return {
        "dimensions": 2 - (task.grid[0] == 1),
        "has_time": task.has_time,
        "input_channels": task.input_channels,
        "target_channels": task.target_channels,
        "number of parameters": len(task.parameters),
        "boundary": boundary,
    }


def _differences(trained: FieldTask, task: FieldTask, names: Sequence[str]) -> list[str]:
    """Describe those fields in `names` that differ, with both values."""
    lines: list[str] = []
    for name in names:
        before, now = getattr(trained, name), getattr(task, name)
        # Time steps computed from coordinates may differ in their last digits.
        same_step = name == "dt" and math.isclose(before, now, rel_tol=SAME_STEP)
        if before != now and not same_step:
            lines.append(f"{name} of task {task.name} is {now}, and {before}")
    return lines


def _scale_differences(trained: FieldTask, own: FieldTask) -> Iterator[str]:
    """Yield each scale that differs, with both values."""
    parts = [
        ("inputs", trained.input, own.input),
        ("targets", trained.target, own.target),
        (f"parameters ({', '.join(own.parameters)})", trained.parameter, own.parameter),
    ]
    # With time, inputs and targets are the same fields.
    if own.has_time:
        parts[:2] = [("fields", trained.input, own.input)]
    for name, before, now in parts:
        if before != now:
            yield f"{name} {_described(before)} (here {_described(now)})"
    if trained.logarithmic != own.logarithmic:
        before, now = (", ".join(compress(task.parameters, task.logarithmic)) or "none" for task in (trained, own))
        yield f"parameters read by their logarithms: {before} (here {now})"


def _described(scale: Scale) -> str:
    means, deviations = (shortened([f"{number:.4g}" for number in numbers], 3) for numbers in (scale.mean, scale.std))
    return f"mean {means}, std {deviations}"
