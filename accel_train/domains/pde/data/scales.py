"""Tasks of trained weights: their normalisation, and the modules that the tasks of a new run start from.

A resume or an evaluation has exactly the tasks of its checkpoint, whatever ``--allow`` says. A new run from the weights
of another (``init_from``) may have other tasks, and keeps the scales of the tasks that both have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import UsageError
from accel_train.domains.pde.data.assets import FieldAssets, FieldTask, load_field_assets
from accel_train.domains.pde.fields import Scale
from accel_train.store.run_file import experiment_options
from accel_train.wording import shortened

SCALES = ("input", "target", "parameter", "logarithmic")
"""Fields of a task that are computed from its training rows."""
KIND = ("input_channels", "target_channels", "parameters", "has_time")
"""Fields of a task that determine which quantities its scales describe."""
SHAPE = ("grid", "boundary", "conserved", "dt")
"""The other fields of a task. A new run may differ in them from the weights that it starts from."""
SAME_STEP = 1e-6
"""Largest relative difference of two steps in time that count as equal."""
NEW = "new"
"""Entry of ``init_tasks`` for a task with modules of its own, from initial values."""


class Origins(NamedTuple):
    """Where the modules of a start come from."""

    of_tasks: tuple[int | None, ...]
    """For each task, the index of the task of the initial weights whose modules it takes, or None for new modules."""
    same_tasks: bool
    """True if these are the tasks of the weights, in their order."""


@dataclass(frozen=True)
class TrainedScales:
    """Tasks that the weights a run starts from were trained on."""

    place: Path
    """The checkpoint or another directory with the weights."""
    tasks: FieldAssets
    resumes: bool
    """False: a new run starts from the weights."""
    init_tasks: tuple[str, ...] | None = None
    """Option of that name: for each task of the run a task of the weights, or ``new``. None: `origins` chooses."""

    def task_for(self, task: FieldTask, origin: int | None) -> FieldTask:
        """Return a task of the data with the normalisation of the weights, if it starts from its own modules there.

        `origin` is of `Origins.of_tasks`. Raises `UsageError` for a resume if the task differs in kind or shape from
        the one in the checkpoint.
        """
        trained = None if origin is None else self.tasks.tasks[origin]
        if trained is None or trained.name != task.name or (not self.resumes and _differences(trained, task, KIND)):
            return task
        scales = {name: getattr(trained, name) for name in SCALES}
        scaled = replace(task, **scales)
        different = _differences(trained, scaled, [*KIND, *SHAPE])
        if self.resumes and different:
            raise UsageError(
                f"--data.path: {different[0]} in the checkpoint {self.place}. To resume or to evaluate it, data of "
                "the same kind are required, whatever --allow and --data.changed say: give such data, read with the "
                "--data options of the run, or give another --output_dir; a new run starts from these weights with "
                f"--init_from {self.place}."
            )
        return scaled

    def origins(self, tasks: Sequence[FieldTask]) -> Origins:
        """Choose the trained task whose modules each task starts from.

        Without ``init_tasks``, it is the trained task with the same name. A task with a new name starts from the first
        one of the same shapes that no other task starts from, or else with new modules. Raises `UsageError` if the
        shapes of a task differ from those of its name, or from those that ``init_tasks`` names for it.
        """
        names = [task.name for task in self.tasks.tasks]
        if self.resumes:
            return Origins(tuple(range(len(names))), same_tasks=True)
        wanted = self.init_tasks
        if wanted is None:
            wanted = tuple(task.name if task.name in names else "" for task in tasks)
        chosen = [names.index(name) if name in names else None for name in wanted]
        for task, number in zip(tasks, chosen, strict=True):
            if number is not None:
                self._refuse_other_shapes(task, self.tasks.tasks[number])
        if self.init_tasks is None:
            for place, task in enumerate(tasks):
                if chosen[place] is None:
                    free = (n for n, other in enumerate(self.tasks.tasks) if n not in chosen and _fits(task, other))
                    chosen[place] = next(free, None)
        same_names = [task.name for task in tasks] == names and chosen == [*range(len(names))]
        differ = any(_differences(*pair, KIND) for pair in zip(self.tasks.tasks, tasks, strict=False))
        return Origins(tuple(chosen), same_names and not differ)

    def _refuse_other_shapes(self, own: FieldTask, trained: FieldTask) -> None:
        here, there = _shapes(own), _shapes(trained)
        different = [f"{name} {here[name]} here and {there[name]} there" for name in here if here[name] != there[name]]
        if different:
            raise UsageError(
                f"--init_from: task {own.name} would start from the modules of {trained.name} in {self.place}, which "
                f"have other shapes: {', '.join(different)}. The data must match in these, with any grid and time "
                f"step: give such data, or --init_tasks with {NEW} instead of {own.name}, for new modules."
            )

    def notices(self, origin: int | None, own: FieldTask) -> Iterator[str]:
        """Yield notices about a task: where its modules come from, and differences in scales or grid.

        `origin` is of `Origins.of_tasks`. `own` is the task with the normalisation of its training files.
        """
        others = " ".join(task.name for task in self.tasks.tasks)
        if origin is None:
            yield (
                f"{own.name}: starts with newly initialised modules of its own and with the shared blocks of "
                f"{self.place}, which was trained on {others}"
            )
            return
        trained = self.tasks.tasks[origin]
        if trained.name != own.name:
            yield (
                f"{own.name}: starts from the modules of {trained.name} in {self.place}, with a normalisation of its "
                f"own; --init_tasks chooses another task of {others}, or {NEW} modules"
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


def trained_scales(
    weights: WeightsAssets | None, tasks: Sequence[str], init_tasks: tuple[str, ...] | None = None
) -> TrainedScales | None:
    """Read the tasks that the initial weights were trained on, and compare their names with `tasks`.

    Raises `UsageError` for a resume if the tasks, their order or a given ``init_tasks`` differ, and for a new run
    unless ``init_tasks`` names a task of the weights, or ``new``, for each of `tasks`. Returns None without such
    weights.
    """
    given = f"--init_tasks {' '.join(init_tasks or ())}"
    if weights is None:
        if init_tasks is not None:
            raise UsageError(
                f"{given}: the tasks of the weights of --init_from are required, from assets/fields.json beside them. "
                "Give --init_from with a run or a checkpoint of recipes/pde.py, or leave --init_tasks out."
            )
        return None
    trained = TrainedScales(weights.folder.parent, load_field_assets(weights.folder), weights.resumes, init_tasks)
    names = [task.name for task in trained.tasks.tasks]
    if weights.resumes and list(tasks) != names:
        raise UsageError(
            f"--data.tasks {' '.join(tasks)}: the checkpoint {trained.place} was trained on {' '.join(names)}. To "
            "resume or to evaluate it, the same tasks in the same order are required, whatever --allow says, because "
            f"each task has its own modules, found by its position: give --data.tasks {' '.join(names)}, or another "
            "--output_dir for other tasks."
        )
    if weights.resumes:
        _refuse_other_modules(trained)
    elif init_tasks is not None:
        unknown = [name for name in init_tasks if name not in (*names, NEW)]
        if unknown or len(init_tasks) != len(tasks):
            raise UsageError(
                f"{given}: for each task of data.tasks ({' '.join(tasks)}), in their order, one of {' '.join(names)}, "
                f"on which {trained.place} was trained, or {NEW} is required. Give {len(tasks)} of these."
            )
    return trained


def _refuse_other_modules(trained: TrainedScales) -> None:
    """Raise `UsageError` if a resume names other ``init_tasks`` than its run: they have no effect, even if allowed."""
    began = experiment_options(trained.place).get("init_tasks")
    given = trained.init_tasks
    if given is None or (began is not None and list(given) == list(began)):
        return
    back = "leave --init_tasks out"
    if began is not None:
        back = f"give --init_tasks {' '.join(began)}, as the run began,"
    raise UsageError(
        f"--init_tasks {' '.join(given)}: has no effect on a resume or an evaluation, whatever --allow says: its "
        f"modules are those of the checkpoint {trained.place}; {back} to continue, or give an unused --output_dir "
        "with --init_from for a new run from other modules."
    )


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


def _fits(own: FieldTask, trained: FieldTask) -> bool:
    return _shapes(own) == _shapes(trained)


def _differences(trained: FieldTask, task: FieldTask, names: Sequence[str]) -> list[str]:
    """Describe those fields in `names` that differ, with both values."""
    lines: list[str] = []
    for name in names:
        before, now = getattr(trained, name), getattr(task, name)
        # Time steps computed from coordinates may differ in their last digits.
        same_step = name == "dt" and math.isclose(before, now, rel_tol=SAME_STEP)
        if before != now and not same_step:
            lines.append(f"{name} of task {task.name} is {now}, but {before}")
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
        yield f"parameters read as logarithms: {before} (here {now})"


def _described(scale: Scale) -> str:
    means, deviations = (shortened([f"{number:.4g}" for number in numbers], 3) for numbers in (scale.mean, scale.std))
    return f"mean {means}, std {deviations}"
