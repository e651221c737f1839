"""Checks that refuse options which contradict each other, or have no effect on the tasks or in a run of this length."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.config import UsageError, origin_of, refuse_without_effect
from accel_train.domains.pde.options import ConditioningConfig, EvaluationConfig, ObjectiveConfig
from accel_train.domains.pde.shape import PdeModelConfig
from accel_train.training import schedules
from accel_train.training.feedback.options import BalanceConfig
from accel_train.training.schedules import ScheduleConfig


def check_model(model: PdeModelConfig, objective: ObjectiveConfig, checkpoints: CheckpointConfig) -> None:
    """Refuse model options that have no effect in the run."""
    model.refuse_unread()
    if sum(model.stages) == 1:
        because = "on a single block (model.depth, or model.depths of pdet_unet), because the first is never skipped"
        refuse_without_effect(objective, "objective", ["drop_path"], because, "give more blocks")
    check_residual(objective, checkpoints, model.residual_depth)


def check_weights(weights: Sequence[int] | None, tasks: Sequence[str]) -> None:
    """Refuse ``task_weights`` whose length differs from that of ``data.tasks``, and a weight above 1 of a sole task."""
    if weights is None:
        return
    if len(tasks) == 1 and weights[0] > 1 and len(weights) == 1:
        raise UsageError(
            f"task_weights {list(weights)}: has no effect with the only task {tasks[0]}, because it gets all steps. "
            "Leave it at None, or add a task to data.tasks."
        )
    if len(weights) == len(tasks):
        return
    pairs = ", ".join(f"{task} {weight}" for task, weight in zip(tasks, weights, strict=False))
    rest = f"without a weight: {' '.join(tasks[len(weights) :])}"
    if len(weights) > len(tasks):
        rest = f"without a task: {' '.join(map(str, weights[len(tasks) :]))}"
    ones = " ".join(["1"] * len(tasks))
    raise UsageError(
        f"task_weights {list(weights)}: {len(weights)} for {len(tasks)} task(s) of data.tasks ({pairs}; {rest}). One "
        f"for each is required, in their order: give --task_weights {ones} or other whole numbers of steps, or None."
    )


def check_residual(objective: ObjectiveConfig, checkpoints: CheckpointConfig, depth: int) -> None:
    """Refuse a residual stage without a network, and a network without a stage. ``depth`` is model.residual_depth."""
    start = objective.residual_from
    if (start is None) != (depth == 0):
        raise UsageError(
            f"objective.residual_from {start} with model.residual_depth {depth}: the stage needs a network, and the "
            "network a stage. Give both (depth 1 or more), or leave both out."
        )
    # Early stopping would end the run in the middle of its last stage.
    patience, metric = checkpoints.patience, checkpoints.best_metric
    if start is not None and patience is not None and "_refined_" not in str(metric):
        raise UsageError(
            f"checkpoints.patience {patience} with objective.residual_from {start}: {metric} measures the plain "
            "prediction, which does not change in that stage. Give a refined metric, such as --checkpoints.best_metric "
            "TASK_refined_nrmse, or leave one of the two out."
        )


class Task(Protocol):
    """The properties of a `FieldTask` that the checks read."""

    @property
    def name(self) -> str: ...
    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def conserved(self) -> bool: ...
    @property
    def boundary(self) -> str: ...
    @property
    def has_time(self) -> bool: ...


class Options(Protocol):
    """The options of the recipe that the checks read."""

    @property
    def objective(self) -> ObjectiveConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def balance(self) -> BalanceConfig: ...


def check_tasks(config: Options, tasks: Sequence[Task], strides: Mapping[str, int], terms: Collection[str]) -> None:
    """Refuse options that act on a property no task has, and options that need the points left out by a stride.

    ``strides`` gives the distance between the points read from each task's files. ``terms`` are the loss terms that at
    least one step trains.
    """
    config.balance.refuse_single_term(len(terms))
    objective, evaluation = config.objective, config.evaluation
    conserved = any(task.conserved for task in tasks)
    dirichlet = any(task.boundary == "dirichlet" for task in tasks)
    steady = any(not task.has_time for task in tasks)
    timed = any(task.has_time for task in tasks)
    trajectories = _asked_trajectories(config)
    options = (
        (conserved, "objective.conservation_weight", objective.conservation_weight, 0.0, "conserves its integral"),
        (dirichlet, "objective.boundary_weight", objective.boundary_weight, 0.0, "is 0 at the edge (dirichlet)"),
        (steady, "objective.flip", objective.flip, 0.0, "is without time"),
        *((conserved, *option, "conserves its integral") for option in _conditioning(evaluation)),
        (timed, "evaluation.trajectories", trajectories, EvaluationConfig.trajectories, "has time"),
    )
    for applies, name, value, default, what in options:
        if value != default and not applies:
            raise UsageError(
                f"{name} {value}: has no effect, because no task of data.tasks {what}. Leave it at {default}, or add "
                "such a task."
            )
    for task in tasks:
        if strides[task.name] > 1:
            _refuse_moved_points(objective, task, strides[task.name])


def _conditioning(evaluation: EvaluationConfig) -> list[tuple[str, int, Any]]:
    """Return name, value and default of each option of test-time conditioning."""
    return [
        (f"evaluation.conditioning.{field.name}", getattr(evaluation.conditioning, field.name), field.default)
        for field in fields(ConditioningConfig)
    ]


def _asked_trajectories(config: Options) -> int:
    """Return the number of rollouts asked for. A preset's number counts as the default: presets are for any tasks."""
    if origin_of(config, "evaluation.trajectories") in ("command line", "default"):
        return config.evaluation.trajectories
    return EvaluationConfig.trajectories


def _refuse_moved_points(objective: ObjectiveConfig, task: Task, stride: int) -> None:
    """Refuse options that need points at cell centres. With a stride of n, a point is off the centre of its n cells."""
    options = {
        "flip": not task.has_time and task.boundary != "periodic",
        "boundary_weight": task.boundary == "dirichlet",
    }
    space = 1 if task.grid[0] == 1 else 2
    for name, needs_centres in options.items():
        value = getattr(objective, name)
        if value and needs_centres:
            raise UsageError(
                f"objective.{name} {value:g}: with data.resolution_{space}d {task.grid[1]}, one point in {stride} "
                f"along each axis of {task.name} is read, which is not the centre of the cell that it stands for. "
                f"Leave data.resolution_{space}d at None, give files of that resolution, or leave {name} at 0."
            )


def check_stages(objective: ObjectiveConfig, schedule: ScheduleConfig, max_steps: int, decay_steps: int) -> list[str]:
    """Refuse a residual stage too short to learn. Returns notices about stages that begin after the end of the run.

    ``decay_steps`` is the resolved end of the schedule, also where the option is None.
    """
    start = objective.residual_from
    first = objective.autoencode_steps
    ends = f"the run ends before it, at step {max_steps}"
    notices: list[str] = []
    if max_steps <= first:
        notices.append(
            f"objective.autoencode_steps {first}: the operator learns only after it; {ends}, so it learns nothing"
        )
    if start is None:
        return notices
    if max_steps <= start:
        # A notice rather than an error: a short trial of a long run is legitimate.
        notices.append(f"objective.residual_from {start}: {ends}; the residual learns nothing")
    # Without decay_steps, the schedule of a short trial ends with the trial.
    if start < max_steps or schedule.decay_steps is not None:
        _refuse_short_stages(start, schedule, max_steps, decay_steps)
    return notices


def _refuse_short_stages(start: int, schedule: ScheduleConfig, max_steps: int, decay_steps: int) -> None:
    """Refuse a residual stage at ``start`` if the schedule does not fit before it, or after it."""
    warmup = schedule.warmup_steps
    what, end = "run", max_steps
    longer = "raise max_steps"
    if schedule.has_end:
        what, end = "schedule", decay_steps
        longer = "give a later --schedule.decay_steps (to resume, --allow schedule.decay_steps as well)"
    if start < warmup or end - start <= warmup:
        raise UsageError(
            f"objective.residual_from {start}: the learning rate restarts there, and warms up for {warmup} steps "
            f"before and after; the {what} ends at step {end}. Move it, lower schedule.warmup_steps, or {longer}."
        )
    for length in (start, end - start):
        try:
            schedules.check_lengths(schedule, length, f"the {length} steps of a stage")
        except UsageError as error:
            raise UsageError(
                f"objective.residual_from {start}: the schedule restarts there, with {start} steps before and "
                f"{end - start} after: {error}, or move objective.residual_from"
            ) from None
