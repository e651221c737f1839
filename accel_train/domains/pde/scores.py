"""Evaluation of predicted fields: metrics over all processes and panels for pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.datasets import Batch
from accel_train.domains.pde import fields, losses, options, rollout
from accel_train.domains.pde.baselines import BASELINES, baseline_names, baselines
from accel_train.domains.pde.data.assets import FieldTask
from accel_train.domains.pde.data.rows import FieldData, FieldRows
from accel_train.domains.pde.options import EvaluationConfig, ObjectiveConfig
from accel_train.domains.pde.pictures import Lines, Panel
from accel_train.domains.pde.residual import refinement
from accel_train.metrics.early_stopping import EarlyStopping
from accel_train.metrics.evaluation import first_samples, heldout_batches, samples_at_once, weighted_sums
from accel_train.metrics.progress import Labels

SHIFTS = (1, -1, 2, 3)
"""Shifts of a periodic field, in points. Each gives another estimate of the same step."""
# Taken from the front, as many as there are candidates: the first five span the range, the others refine it.
NOISES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.001, 0.005, 0.02, 0.05)
"""Noise scales relative to the field's size, for the candidates beyond the shifts."""
MEAN = "mean_nrmse"
LABELS = Labels(loss_of="task", own_summary=True)
"""Of the loss. The evaluation prints a table of its own."""
Panels = list[Panel | Lines]
"""Pictures of one task, in a row of fields.png."""


def evaluate_task(
    accelerator: Accelerator,
    forward: Callable[..., Any],
    data: FieldData,
    number: int,
    options: EvaluationConfig,
    at_once: int,
    residual_steps: int,
    seed: int,
) -> tuple[dict[str, float], Panels]:
    """Return the metrics of task ``number`` and the panels of its first sample. Every process calls it.

    A forward has at most ``at_once`` samples.
    """
    task = data.tasks[number]
    heldout = data.heldout[task.name]
    batches = heldout_batches(accelerator, heldout, options.samples, at_once)
    sums_of = partial(error_sums, forward, number, task, residual_steps, seed)
    sums = weighted_sums(accelerator, batches, sums_of)
    metrics = row_metrics(task, sums["plain"], sums.get("refined"))
    if task.has_time:
        step_of = partial(losses.stepper, forward, dt=task.dt, task=number, grid=task.grid)
        found, panels = evaluate_rollouts(accelerator, task, heldout, options, at_once, step_of, seed)
        return metrics | found, panels
    # Every process predicts it, though one draws it: the forward of a sharded model is a collective.
    first = first_samples(accelerator, heldout, 1)
    predicted = losses.predict(forward, first, number, task.grid)
    return metrics, row_panels(task, first, predicted.fields)


def row_sums(task: FieldTask, prediction: Tensor, batch: Batch) -> Tensor:
    """Sum the weighted errors of a batch for ``row_metrics``: (6,) float64.

    ``prediction`` (B, C', H, W) and the batch are normalised. Errors are of physical fields, in ``Scale.unit`` of the
    target.
    """
    weight = batch["weight"]
    input_scale, target_scale = task.common_scales()
    # Of physical fields: a normalised one has another zero, and with it another relative error.
    predicted = target_scale.denormalise(prediction.float())
    target = target_scale.denormalise(batch["target"])
    gap = torch.zeros_like(weight)
    if task.conserved:
        before = input_scale.denormalise(batch["input"])
        gap = fields.conservation_gap(predicted, before, input_scale)
    per_sample = (
        torch.ones_like(weight),
        fields.relative_l2(predicted, target),
        fields.squared_error(predicted, target),
        fields.mean_square(target),
        fields.spectral_error(predicted, target),
        gap,
    )
    # fp64, because sums over many samples are added over batches and processes in any order.
    errors = torch.stack(per_sample).double()  # (6, B)
    return (errors * weight.double()).sum(1)


def error_sums(
    model: Callable[..., Any], number: int, task: FieldTask, residual_steps: int, seed: int, batch: Batch
) -> dict[str, Tensor]:
    """Predict a batch of task ``number`` and compute ``row_sums``, keyed by the arguments of ``row_metrics``.

    A model with a residual network also gets the sums of its refined prediction.
    """
    predicted, log_size, correct = losses.predict(model, batch, number, task.grid)
    sums = {"plain": row_sums(task, predicted, batch)}
    if log_size is not None:
        sample = batch["sample"]
        refined = refinement.refine(correct, predicted, log_size, residual_steps, seed, sample)
        sums["refined"] = row_sums(task, refined, batch)
    return sums


def row_metrics(task: FieldTask, plain: Tensor, refined: Tensor | None = None) -> dict[str, float]:
    """Compute the metrics of a task from ``row_sums`` over all processes.

    ``TASK_nrmse`` is the mean over samples of each one's root mean squared error over its root mean square, of all
    channels together; with a single one that of PDEBench. ``TASK_nrmse_pooled`` treats all samples as one field.
    ``refined`` are the sums of refined predictions, for ``TASK_refined_nrmse``, its spectral error and its gain.
    """
    name = task.name
    count, relative, squared, square, spectral, gap = plain.tolist()
    metrics = {
        f"{name}_nrmse": relative / count,
        f"{name}_nrmse_pooled": fields.nrmse(squared, square),
        f"{name}_spectral_error": spectral / count,
    }
    if task.conserved:
        metrics[f"{name}_conservation_gap"] = gap / count
    if refined is not None:
        _, refined_relative, _, _, refined_spectral, _ = refined.tolist()
        metrics[f"{name}_refined_nrmse"] = refined_relative / count
        metrics[f"{name}_refined_spectral_error"] = refined_spectral / count
        metrics[f"{name}_refined_gain"] = 1 - refined_relative / max(relative, 1e-12)
    return metrics


Place = tuple[int, int, torch.device]
"""Rank, number of processes, device."""


class Rollouts:
    """Some held-out trajectories of one task, rolled out by a model."""

    def __init__(self, task: FieldTask, rows: FieldRows, wanted: Tensor, count: int, device: torch.device):
        """Read trajectories ``wanted`` (B,). An index of ``count`` or more repeats the last one with weight 0."""
        self.task = task
        self.sample = wanted.clamp(max=count - 1)
        # 0 for the repeated ones, which other processes count.
        self.weight = (wanted < count).double().to(device)
        trajectories = [rows.trajectory(int(index)) for index in self.sample]
        truth = torch.stack([trajectory.fields for trajectory in trajectories])
        self.truth = truth.to(device)  # (B, T, C, H, W)
        parameters = torch.stack([trajectory.parameters for trajectory in trajectories])
        self.parameters = parameters.to(device)  # (B, P)

    def plain(self, step: rollout.Step) -> Tensor:
        """Roll out step by step: (B, T - 1, C, H, W)."""
        steps = self.truth.shape[1] - 1
        return rollout.rollout(step, self.truth[:, 0], steps)

    def conditioned(self, step: rollout.Step, config: options.ConditioningConfig, seed: int) -> Tensor:
        """Roll out by beam search for the best conservation, without the truth. For tasks with a conserved integral."""
        sample = self.sample.to(self.truth.device)
        proposals = [rollout.plain(step)]
        if self.task.boundary == "periodic":
            # A periodic equation does not know where the origin is, but a model that was trained on a grid does.
            proposals += [rollout.shifted(step, (0, by)) for by in SHIFTS]
        proposals += [rollout.perturbed(step, scale, seed, sample) for scale in NOISES]

        input_scale, target_scale = self.task.common_scales()

        def score(first: Tensor, ahead: Tensor) -> Tensor:
            # The integral of the first fields is known, and the equation keeps it: no truth is needed.
            reference = input_scale.denormalise(first)
            states = target_scale.denormalise(ahead).unbind(1)
            gaps = [fields.conservation_gap(state, reference, input_scale) for state in states]
            return torch.stack(gaps).mean(0)

        start = self.truth[:, 0]
        steps = self.truth.shape[1] - 1
        return rollout.conditioned_rollout(proposals, step, score, start, steps, config)

    def sums(self, predicted: Tensor) -> Tensor:
        """Sum weight, relative error and conservation gap over the samples, at each time: (3, T - 1) float64."""
        _, scale = self.task.common_scales()
        truth = scale.denormalise(self.truth)
        states = scale.denormalise(predicted)
        errors: list[Tensor] = []
        gaps: list[Tensor] = []
        start = truth[:, 0]
        for time in range(states.shape[1]):
            state = states[:, time]
            errors.append(fields.relative_l2(state, truth[:, time + 1]))
            # Against the first fields: what is lost adds up over time.
            gaps.append(fields.conservation_gap(state, start, scale))
        error = torch.stack(errors)  # (T - 1, B)
        gap = torch.stack(gaps)
        ones = torch.ones_like(error)
        per_sample = torch.stack([ones, error, gap]).double()  # (3, T - 1, B)
        return (per_sample * self.weight).sum(-1)

    def panels(self, predicted: Tensor) -> list[Panel]:
        """Show truth, prediction and error of the first trajectory: over all times in 1-D, the last time in 2-D."""
        truth = self.task.target.denormalise(self.truth[0])
        truth = truth[1:, 0].cpu()  # (T - 1, H, W), of the first field
        states = self.task.target.denormalise(predicted[0])
        states = states[:, 0].cpu()
        if self.task.grid[0] == 1:
            truth = truth[:, 0]
            states = states[:, 0]
            down = "step in time"
        else:
            truth = truth[-1]
            states = states[-1]
            down = "y (points)"
        return [
            Panel("rollout: truth", truth, "u", down),
            Panel("prediction", states, "u", down),
            _error_panel(states, truth, down),
        ]


def rollout_batches(
    task: FieldTask, rows: FieldRows, trajectories: int, at_once: int, place: Place
) -> Iterator[Rollouts]:
    """Yield this process's share of the first ``trajectories`` in batches, equally many on every process."""
    rank, world_size, device = place
    count = min(trajectories, rows.samples)
    # Rounded up on every process: the forward of a sharded model is a collective, so all must run as many batches.
    share = math.ceil(count / world_size)
    own = torch.arange(share) * world_size + rank
    for wanted in own.split(samples_at_once(at_once)):
        yield Rollouts(task, rows, wanted, count, device)


def evaluate_rollouts(
    accelerator: Accelerator,
    task: FieldTask,
    rows: FieldRows,
    options: EvaluationConfig,
    at_once: int,
    step_of: Callable[[Tensor], rollout.Step],
    seed: int,
) -> tuple[dict[str, float], Panels]:
    """Roll out held-out trajectories. Returns ``rollout_metrics`` and panels of one trajectory and of the error.

    ``step_of`` builds a step for samples with these parameters (B, P). All ranks call it.
    """
    panels: Panels = []

    def sums_of(batch: Rollouts) -> dict[str, Tensor]:
        step = step_of(batch.parameters)
        predicted = batch.plain(step)
        if not panels:  # of the first batch
            panels.extend(batch.panels(predicted))
        sums = {"rollout": batch.sums(predicted)}
        if task.conserved:
            conditioned = batch.conditioned(step, options.conditioning, seed)
            sums["conditioned"] = batch.sums(conditioned)
        return sums

    place = accelerator.process_index, accelerator.num_processes, accelerator.device
    batches = rollout_batches(task, rows, options.trajectories, at_once, place)
    sums = weighted_sums(accelerator, batches, sums_of)
    panels.append(_error_lines(task, sums))
    return rollout_metrics(task, sums["rollout"], sums.get("conditioned")), panels


def _error_lines(task: FieldTask, sums: Mapping[str, Tensor]) -> Lines:
    """Show the error at each time, with a curve for each kind of rollout in ``sums``."""
    lines = {name: (error / weight).tolist() for name, (weight, error, _) in sums.items()}
    steps = sums["rollout"].shape[1]
    times = [task.dt * (1 + number) for number in range(steps)]
    return Lines("rollout: error against time", "time", "nRMSE", times, lines)


def rollout_metrics(task: FieldTask, plain: Tensor, conditioned: Tensor | None) -> dict[str, float]:
    """Compute the rollout metrics of a task from sums (3, T - 1) over all processes.

    They are the error over all times and at the last one, and with ``conditioned`` the gain of the beam search.
    """
    name = task.name
    weight, error, gap = plain
    nrmse = error / weight
    metrics = {
        f"{name}_rollout_nrmse": float(nrmse.mean()),
        f"{name}_rollout_nrmse_last": float(nrmse[-1]),
    }
    if task.conserved:
        metrics[f"{name}_rollout_conservation_gap"] = float((gap / weight).mean())
    if conditioned is not None:
        weight, error, gap = conditioned
        conditioned_nrmse = error / weight
        metrics[f"{name}_conditioned_nrmse"] = float(conditioned_nrmse.mean())
        metrics[f"{name}_conditioned_gain"] = float(1 - conditioned_nrmse.mean() / nrmse.mean())
        metrics[f"{name}_conditioned_conservation_gap"] = float((gap / weight).mean())
    return metrics


def row_panels(task: FieldTask, batch: Batch, prediction: Tensor) -> Panels:
    """Show input, truth, prediction and error of the first sample of a 2-D task."""
    input = task.input.denormalise(batch["input"][0])[0].cpu()
    target = task.target.denormalise(batch["target"][0])[0].cpu()
    predicted = task.target.denormalise(prediction[0].float())[0].cpu()
    return [
        Panel("input", input, "a"),
        Panel("truth", target, "u"),
        Panel("prediction", predicted, "u"),
        _error_panel(predicted, target),
    ]


def _error_panel(predicted: Tensor, target: Tensor, down: str = "y (points)") -> Panel:
    """Show the signed error, with the nRMSE of this panel in the title."""
    error = predicted - target
    # Of a target of zeros. Fields may be as small as fp32 holds.
    size = target.double().norm().clamp_min(torch.finfo(torch.float32).tiny)
    nrmse = float(error.double().norm() / size)
    return Panel(f"error (nRMSE {nrmse:.3g})", error, "e", down, signed=True)


# Once per run: later evaluations have the same data and the same rows.
@lru_cache(maxsize=1)
def baseline_metrics(data: FieldData, samples: int) -> Mapping[str, float]:
    """Score the baselines on the first ``samples`` held-out rows of each task, the rows of the model's evaluation.

    Returns ``TASK_persistence_nrmse``, ``TASK_training_mean_nrmse`` and ``TASK_linear_fit_nrmse``. Call it on one
    process. It takes some seconds, once per run.
    """
    metrics: dict[str, float] = {}
    for task in data.tasks:
        _, scale = task.common_scales()
        scores = baselines(
            data.training[task.name],
            data.heldout[task.name],
            scale.denormalise,
            same_fields=task.has_time,
            samples=samples,
        )
        for name, score in scores.items():
            metrics[f"{task.name}_{name}_nrmse"] = score
    return metrics


def metric_names(data: FieldData, refined: bool) -> list[str]:
    """List every metric of an evaluation on this data, from the reporting functions called with sums of 1.

    ``refined``: the model has a residual stage. Raises ``UsageError`` for tasks whose metrics have one name.
    """
    row_ones = torch.ones(6)
    time_ones = torch.ones(3, 1)
    names: list[str] = []
    for task in data.tasks:
        names += row_metrics(task, row_ones, row_ones if refined else None)
        if task.has_time:
            names += rollout_metrics(task, time_ones, time_ones if task.conserved else None)
        for baseline in baseline_names(data.training[task.name], same_fields=task.has_time):
            names.append(f"{task.name}_{baseline}_nrmse")
    names.append(MEAN)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"data.tasks {' '.join(task.name for task in data.tasks)}: the metric {name} would be that of two of "
                "them, or of one and of all; rename a task, in its files as well."
            )
    return names


def early_stopping(
    evaluation: EvaluationConfig, objective: ObjectiveConfig, directory: Path, start_step: int
) -> EarlyStopping:
    """Build early stopping on the mean of all tasks. Evaluations before the operator stage do not count."""
    return EarlyStopping(evaluation.patience, MEAN, directory, start_step, after=objective.autoencode_steps)


def table(data: FieldData, metrics: Mapping[str, float]) -> list[str]:
    """Format the model's nRMSE next to the baselines', one line per task."""
    lines: list[str] = []
    for task in data.tasks:
        line = f"{task.name}: nRMSE {metrics[f'{task.name}_nrmse']:.4f}"
        refined = metrics.get(f"{task.name}_refined_nrmse")
        if refined is not None:
            line += f", refined {refined:.4f}"
        scores: list[str] = []
        for baseline in BASELINES:
            score = metrics.get(f"{task.name}_{baseline}_nrmse")
            if score is not None:
                scores.append(f"{baseline.replace('_', ' ')} {score:.4f}")
        if scores:
            line += "; " + ", ".join(scores)
        lines.append(line)
    return lines


def mean_nrmse(data: FieldData, metrics: Mapping[str, float]) -> float:
    """Compute the geometric mean over the tasks, the metric of early stopping and ``keep_best``."""
    # A halved error counts the same in an easy task and in a hard one, which an arithmetic mean would hide.
    logarithms = [math.log(max(metrics[f"{task.name}_nrmse"], 1e-12)) for task in data.tasks]
    return math.exp(sum(logarithms) / len(logarithms))
