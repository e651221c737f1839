"""Evaluation of predicted fields: metrics over all processes and panels for pictures."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.datasets import Batch
from accel_train.domains.pde import fields, losses
from accel_train.domains.pde.baselines import BASELINES, baseline_names, baselines
from accel_train.domains.pde.data.assets import FieldTask
from accel_train.domains.pde.data.rows import FieldData
from accel_train.domains.pde.options import EvaluationConfig
from accel_train.domains.pde.pictures import Panel, Panels, error_panel, titled
from accel_train.domains.pde.residual import refinement
from accel_train.domains.pde.scoring.chosen import scored_rows
from accel_train.domains.pde.scoring.trajectories import evaluate_rollouts, rollout_metrics
from accel_train.metrics import logs
from accel_train.metrics.evaluation import first_samples, heldout_batches, weighted_sums
from accel_train.metrics.progress import Labels

logger = logging.getLogger(__name__)

MEAN = "mean_nrmse"
LABELS = Labels(
    loss_of="task",
    units=dict.fromkeys(("nrmse", "pooled", "last", "channels"), "nRMSE")
    | {"error": "relative error", "gap": "relative change of the integral", "gain": "fraction"},
    titles={
        "nrmse": "nRMSE",
        "pooled": "nRMSE, samples as one field",
        "last": "nRMSE, end of a rollout",
        "channels": "nRMSE, mean of channels",
        "error": "spectral error",
        "gap": "conservation gap",
    },
    baselines=BASELINES,
    own_summary=True,
)
"""Labels of the metrics and of the loss. ``own_summary``: the evaluation prints its own table."""


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
    """Return the metrics of task ``number`` and the panels of its first sample. Collective: every process calls it.

    A forward has at most ``at_once`` samples.
    """
    task = data.tasks[number]
    scored = scored_rows(data, task.name, options.samples)
    batches = heldout_batches(accelerator, scored, len(scored), at_once)
    sums_of = partial(error_sums, forward, number, task, residual_steps, seed)
    sums = weighted_sums(accelerator, batches, sums_of)
    metrics = row_metrics(task, **sums)
    logs.info(logger, *zero_notices(task, sums))
    if task.has_time:
        step_of = partial(losses.stepper, forward, dt=task.dt, task=number, grid=task.grid)
        found, panels = evaluate_rollouts(accelerator, task, data, options, at_once, step_of, seed)
        return metrics | found, panels
    # Only one process draws it, but all predict it: the forward of a sharded model is a collective.
    first = first_samples(accelerator, scored, 1)
    predicted = losses.predict(forward, first, number, task.grid)
    return metrics, row_panels(task, first, predicted.fields)


def row_sums(task: FieldTask, prediction: Tensor, batch: Batch) -> Tensor:
    """Sum the weighted errors of a batch for ``row_metrics``: (7,) float64.

    ``prediction`` (B, C', H, W) and the batch are normalised. Errors are of physical fields, in ``Scale.unit`` of the
    target.
    """
    weight = batch["weight"]
    input_scale, scale = task.common_scales()
    # Physical fields, because normalisation moves the zero and so changes relative errors.
    predicted = scale.denormalise(prediction.float())
    target = scale.denormalise(batch["target"])
    gap = torch.zeros_like(weight)
    if task.conserved:
        before = input_scale.denormalise(batch["input"])
        gap = fields.conservation_gap(predicted, before, input_scale)
    squared_error = fields.squared_error(predicted, target)
    square = fields.mean_square(target)
    relative, has_size = fields.relative_l2(squared_error, square, fields.least_squares(scale, target).mean())
    # Also a relative error, to the energy of the target.
    spectral = torch.where(has_size > 0, fields.spectral_error(predicted, target), 0.0)
    per_sample = torch.ones_like(weight), has_size, relative, squared_error, square, spectral, gap
    # In fp64, because batches and processes add up in any order, over many samples.
    errors = torch.stack(per_sample).double()  # (7, B)
    return (errors * weight.double()).sum(1)


def channel_sums(task: FieldTask, prediction: Tensor, batch: Batch) -> Tensor:
    """Sum the relative errors of each channel, and count its nonzero targets, as in ``row_sums``: (2, C') float64."""
    _, scale = task.common_scales()
    predicted = scale.denormalise(prediction.float())
    target = scale.denormalise(batch["target"])
    squared_errors = fields.channel_squares(predicted - target)  # (B, C')
    least = fields.least_squares(scale, target)
    relative, has_size = fields.relative_l2(squared_errors, fields.channel_squares(target), least)
    errors = torch.stack((has_size, relative)).double()  # (2, B, C')
    return (errors * batch["weight"].double()[:, None]).sum(1)


def error_sums(
    model: Callable[..., Any], number: int, task: FieldTask, residual_steps: int, seed: int, batch: Batch
) -> dict[str, Tensor]:
    """Predict a batch of task ``number`` and compute ``row_sums``, keyed by the arguments of ``row_metrics``.

    A model with a residual network also gets the sums of its refined prediction.
    """
    predicted, log_size, correct = losses.predict(model, batch, number, task.grid)
    sums = {"plain": row_sums(task, predicted, batch)}
    if task.target_channels > 1:
        sums["channels"] = channel_sums(task, predicted, batch)
    if log_size is not None:
        sample = batch["sample"]
        refined = refinement.refine(correct, predicted, log_size, residual_steps, seed, sample)
        sums["refined"] = row_sums(task, refined, batch)
    return sums


def row_metrics(
    task: FieldTask, plain: Tensor, refined: Tensor | None = None, channels: Tensor | None = None
) -> dict[str, float]:
    """Compute the metrics of a task from ``row_sums`` over all processes.

    ``TASK_nrmse`` is the mean over samples of root mean squared error over root mean square, for all channels together.
    ``TASK_nrmse_pooled`` treats all samples as one field. ``TASK_evaluated_samples`` counts the samples in the mean:
    all-zero targets are left out. ``refined`` are the sums of refined predictions, for ``TASK_refined_nrmse``, its
    spectral error and its gain. ``channels`` are ``channel_sums``, for ``TASK_nrmse_channelN``, numbered as in the
    files, and their mean ``TASK_nrmse_channels``, as in PDEBench.
    """
    name = task.name
    weight, counted, relative, squared, square, spectral, gap = plain
    metrics = {
        # Divided as tensors: if all targets are zero, 0 / 0 is NaN and not an exception.
        f"{name}_nrmse": float(relative / counted),
        f"{name}_nrmse_pooled": fields.nrmse(float(squared), float(square)),
        f"{name}_spectral_error": float(spectral / counted),
        f"{name}_evaluated_samples": float(counted),
    }
    if task.conserved:
        metrics[f"{name}_conservation_gap"] = float(gap / weight)
    if channels is not None:
        of_channels = channels[1] / channels[0]
        metrics[f"{name}_nrmse_channels"] = float(of_channels[channels[0] > 0].mean())
        metrics |= zip(_nrmse_names(task, f"{name}_nrmse")[1:], of_channels.tolist(), strict=True)
    if refined is not None:
        _, _, refined_relative, _, _, refined_spectral, _ = refined
        metrics[f"{name}_refined_nrmse"] = float(refined_relative / counted)
        metrics[f"{name}_refined_spectral_error"] = float(refined_spectral / counted)
        metrics[f"{name}_refined_gain"] = 1 - float(refined_relative / relative.clamp(min=1e-12))
    return metrics


def target_numbers(task: FieldTask) -> range:
    """Return the target channels' numbers in the files, where the input channels of a steady task come first."""
    first = 0 if task.has_time else task.input_channels
    return range(first, first + task.target_channels)


def zero_notices(task: FieldTask, sums: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield notices about all-zero targets, which nRMSE leaves out. ``sums`` are those of ``error_sums``."""
    rows, counted = sums["plain"][:2].tolist()
    if counted < rows:
        yield (
            f"{task.name}: {rows - counted:.0f} of {rows:.0f} scored targets are 0 everywhere and have no relative "
            "error: they are left out of nRMSE (of the model and the baselines) and of the spectral error"
        )
    if "channels" not in sums:
        return
    for channel, of_channel in zip(target_numbers(task), sums["channels"][0].tolist(), strict=True):
        if of_channel < counted:
            yield (
                f"{task.name}: channel {channel} is 0 everywhere in {rows - of_channel:.0f} of {rows:.0f} scored "
                "targets, which are left out of its nRMSE"
            )


def row_panels(task: FieldTask, batch: Batch, prediction: Tensor) -> Panels:
    """Show input, truth, prediction and error of the first sample of a 2-D task."""
    input = task.input.denormalise(batch["input"][0])[0].cpu()
    target = task.target.denormalise(batch["target"][0])[0].cpu()
    predicted = task.target.denormalise(prediction[0].float())[0].cpu()
    # The first target channel is numbered after those of the input.
    numbered = partial(titled, channel=task.input_channels, channels=task.target_channels)
    return [
        Panel(titled("input", 0, task.input_channels), input, "a"),
        Panel(numbered("truth"), target, "u"),
        Panel(numbered("prediction"), predicted, "u"),
        error_panel(predicted, target, numbered("error")),
    ]


# Once per run: later evaluations have the same data and the same rows.
@lru_cache(maxsize=1)
def baseline_metrics(data: FieldData, samples: int) -> Mapping[str, float]:
    """Score the baselines on ``samples`` held-out rows of each task, the rows of the model's evaluation.

    Returns ``TASK_persistence_nrmse``, ``TASK_training_mean_nrmse`` and ``TASK_linear_fit_nrmse``, and with several
    channels ``TASK_persistence_nrmse_channelN`` and so on. Call it on one process only. It takes seconds once per run.
    """
    metrics: dict[str, float] = {}
    for task in data.tasks:
        _, scale = task.common_scales()
        scored = scored_rows(data, task.name, samples)
        scores = baselines(data.training[task.name], scored, scale, same_fields=task.has_time)
        for name, errors in scores.items():
            keys = _nrmse_names(task, f"{task.name}_{name}_nrmse")
            metrics |= zip(keys, errors, strict=True)
    return metrics


def _nrmse_names(task: FieldTask, name: str) -> list[str]:
    """List the name of the metric over all channels, followed by those per channel if there are several."""
    if task.target_channels == 1:
        return [name]
    return [name, *(f"{name}_channel{channel}" for channel in target_numbers(task))]


def metric_names(data: FieldData, refined: bool) -> list[str]:
    """List every metric of an evaluation on this data, by calling the reporting functions with sums of 1.

    ``refined``: the model has a residual stage. Raises ``UsageError`` if two metrics would have the same name.
    """
    row_ones = torch.ones(7)
    time_ones = torch.ones(4, 1)
    names: list[str] = []
    for task in data.tasks:
        channels = torch.ones(2, task.target_channels)
        several = task.target_channels > 1
        names += row_metrics(task, row_ones, row_ones if refined else None, channels if several else None)
        if task.has_time:
            names += rollout_metrics(task, time_ones, time_ones if task.conserved else None)
        for baseline in baseline_names(data.training[task.name], same_fields=task.has_time):
            names += _nrmse_names(task, f"{task.name}_{baseline}_nrmse")
    names.append(MEAN)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"data.tasks {' '.join(task.name for task in data.tasks)}: the metric {name} would belong to two of "
                "them, or to one and to all; rename a task, in its files as well."
            )
    return names


def table(data: FieldData, metrics: Mapping[str, float]) -> list[str]:
    """Format the model's nRMSE and those of the baselines, one line per task."""
    lines: list[str] = []
    for task in data.tasks:
        line = f"{task.name}: nRMSE {metrics[f'{task.name}_nrmse']:.4f}"
        of_channels = _nrmse_names(task, f"{task.name}_nrmse")[1:]
        if of_channels:
            line += f" (of each channel {' '.join(f'{metrics[name]:.4f}' for name in of_channels)})"
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
    """Compute the geometric mean of nRMSE over the tasks, the metric of early stopping and ``keep_best``."""
    # A halved error counts the same in an easy task and a hard one. In an arithmetic mean, hard tasks would dominate.
    logarithms = [math.log(max(metrics[f"{task.name}_nrmse"], 1e-12)) for task in data.tasks]
    return math.exp(sum(logarithms) / len(logarithms))
