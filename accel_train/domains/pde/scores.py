"""How good predicted fields are: figures over all processes, and panels to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.domains.pde import fields, residual_diffusion, rollout
from accel_train.domains.pde import prediction as pde_prediction
from accel_train.domains.pde.baselines import baseline_names, baselines
from accel_train.domains.pde.operator_learning import EvaluationConfig, ObjectiveConfig
from accel_train.domains.pde.pictures import Lines, Panel
from accel_train.domains.pde.rows import FieldData, FieldRows, FieldTask
from accel_train.metrics.early_stopping import EarlyStopping
from accel_train.metrics.evaluation import weighted_sums

SHIFTS = (1, -1, 2, 3)
"""Points by which a periodic field is moved for another estimate of the same step."""
NOISES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.001, 0.005, 0.02, 0.05)
"""Of the field's size: for the candidates that moving does not give."""
MEAN = "mean_nrmse"


def row_sums(task: FieldTask, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """(6,) float64: sums over a batch's samples, by their weights, of what ``row_figures`` divides.

    ``prediction`` (B, C', H, W) and the batch are normalised, errors are of physical units.
    """
    found, true = task.target.denormalise(prediction.float()), task.target.denormalise(batch["target"])
    given = task.input.denormalise(batch["input"])
    gap = fields.conservation_gap(found, given) if task.conserved else torch.zeros_like(batch["weight"])
    each = (
        torch.ones_like(batch["weight"]),
        fields.relative_l2(found, true),
        fields.squared_error(found, true),
        fields.mean_square(true),
        fields.spectral_error(found, true),
        gap,
    )
    return (torch.stack(each).double() * batch["weight"].double()).sum(1)


def error_sums(
    model: Callable[..., Any], number: int, task: FieldTask, residual_steps: int, seed: int, batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """``row_sums`` of what the model predicts for a batch of task ``number``: plain, and refined where it has a
    residual. Keyed as ``row_figures`` takes them."""
    found, size, correct = pde_prediction.predict(model, batch, number, task.grid)
    sums = {"plain": row_sums(task, found, batch)}
    if size is None:
        return sums
    refined = residual_diffusion.refined(correct, found, size, residual_steps, seed, batch["sample"])
    return sums | {"refined": row_sums(task, refined, batch)}


def row_figures(task: FieldTask, plain: Tensor, refined: Tensor | None = None) -> dict[str, float]:
    """From the sums over all processes: ``TASK_nrmse`` is the mean of each sample's root mean squared error over its
    root mean square, as PDEBench has it; ``TASK_nrmse_pooled`` the same of all samples as one field. ``refined`` are
    the sums of refined predictions, for ``TASK_refined_gain`` and its like."""
    count, relative, squared, square, spectral, gap = plain.tolist()
    figures = {
        f"{task.name}_nrmse": relative / count,
        f"{task.name}_nrmse_pooled": fields.nrmse(squared, square),
        f"{task.name}_spectral_error": spectral / count,
    }
    figures |= {f"{task.name}_conservation_gap": gap / count} if task.conserved else {}
    if refined is None:
        return figures
    return figures | {
        f"{task.name}_refined_nrmse": float(refined[1]) / count,
        f"{task.name}_refined_spectral_error": float(refined[4]) / count,
        f"{task.name}_refined_gain": 1 - float(refined[1]) / max(relative, 1e-12),
    }


Place = tuple[int, int, torch.device]
"""Rank, number of processes, device."""


class Rollouts:
    """Some held-out trajectories of one task, rolled out by a model."""

    def __init__(self, task: FieldTask, rows: FieldRows, wanted: Tensor, count: int, device: torch.device):
        """Trajectories ``wanted`` (B,) of the first ``count``; those beyond are repetitions, which weigh nothing."""
        self.task, self.sample = task, wanted.clamp(max=count - 1)
        self.weight = (wanted < count).double().to(device)
        read = [rows.trajectory(int(index)) for index in self.sample]
        self.truth = torch.stack([trajectory.fields for trajectory in read]).to(device)  # (B, T, C, H, W)
        self.parameters = torch.stack([trajectory.parameters for trajectory in read]).to(device)

    def plain(self, step: rollout.Step) -> Tensor:
        """(B, T - 1, C, H, W): one step after another."""
        return rollout.rollout(step, self.truth[:, 0], self.truth.shape[1] - 1)

    def conditioned(self, step: rollout.Step, config: rollout.ConditioningConfig, seed: int) -> Tensor:
        """The same with the choice of what conserves best, seeing no truth. For tasks that conserve."""
        periodic = self.task.boundary == "periodic"
        moved = [rollout.shifted(step, (0, by)) for by in SHIFTS] if periodic else []
        noisy = [rollout.perturbed(step, scale, seed, self.sample.to(self.truth.device)) for scale in NOISES]
        proposals = [rollout.plain(step), *moved, *noisy]

        def score(first: Tensor, ahead: Tensor) -> Tensor:
            given = self.task.input.denormalise(first)
            seen = self.task.target.denormalise(ahead).unbind(1)
            return torch.stack([fields.conservation_gap(one, given) for one in seen]).mean(0)

        return rollout.conditioned_rollout(proposals, step, score, self.truth[:, 0], self.truth.shape[1] - 1, config)

    def sums(self, found: Tensor) -> Tensor:
        """(3, T - 1) float64: over the samples, of the weights, the relative error and the conservation gap at each
        time."""
        truth, made = self.task.target.denormalise(self.truth), self.task.target.denormalise(found)
        times = range(made.shape[1])
        error = torch.stack([fields.relative_l2(made[:, t], truth[:, t + 1]) for t in times])
        gap = torch.stack([fields.conservation_gap(made[:, t], truth[:, 0]) for t in times])
        each = torch.stack([torch.ones_like(error), error, gap]).double()  # (3, T - 1, B)
        return (each * self.weight).sum(-1)

    def panels(self, found: Tensor) -> list[Panel]:
        """The first trajectory: of 1-D fields space against time, of 2-D fields the last time. Truth, prediction,
        error."""
        truth = self.task.target.denormalise(self.truth[0])[1:, 0].cpu()
        made = self.task.target.denormalise(found[0])[:, 0].cpu()
        if self.task.grid[0] == 1:
            truth, made, down = truth[:, 0], made[:, 0], "step in time"
        else:
            truth, made, down = truth[-1], made[-1], "y (points)"
        named = [("rollout: truth", truth, "u"), ("prediction", made, "u")]
        return [*(Panel(*panel, down) for panel in named), _error_panel(made, truth, down)]


def rollout_batches(task: FieldTask, rows: FieldRows, options: EvaluationConfig, place: Place) -> Iterator[Rollouts]:
    """This process's share of the first ``options.trajectories``, in batches; all processes have equally many."""
    rank, world_size, device = place
    count = min(options.trajectories, rows.samples)
    mine = torch.arange(-(-count // world_size)) * world_size + rank
    return (Rollouts(task, rows, wanted, count, device) for wanted in mine.split(options.batch_size))


def rolled_out(
    accelerator: Accelerator,
    task: FieldTask,
    rows: FieldRows,
    options: EvaluationConfig,
    step_of: Callable[[Tensor], rollout.Step],
    seed: int,
) -> tuple[dict[str, float], list[Panel | Lines]]:
    """``rollout_figures`` of held-out trajectories, and what to look at: the first one, and the error against time.

    ``step_of`` makes a step for samples with these parameters (B, P). All ranks.
    """
    panels: list[Panel | Lines] = []

    def sums_of(paths: Rollouts) -> dict[str, Tensor]:
        step = step_of(paths.parameters)
        made = paths.plain(step)
        panels.extend([] if panels else paths.panels(made))
        chosen = {"conditioned": paths.sums(paths.conditioned(step, options.conditioning, seed))}
        return {"rollout": paths.sums(made)} | (chosen if task.conserved else {})

    place = accelerator.process_index, accelerator.num_processes, accelerator.device
    sums = weighted_sums(accelerator, rollout_batches(task, rows, options, place), sums_of)
    lines = {name: (error / weight).tolist() for name, (weight, error, _) in sums.items()}
    times = [task.dt * (1 + number) for number in range(sums["rollout"].shape[1])]
    panels.append(Lines("rollout: error against time", "time", "nRMSE", times, lines))
    return rollout_figures(task, sums["rollout"], sums.get("conditioned")), panels


def rollout_figures(task: FieldTask, plain: Tensor, conditioned: Tensor | None) -> dict[str, float]:
    """From sums over all processes (3, T - 1): errors over all times and at the last, and what the choice gained."""
    name, (weight, error, gap) = task.name, plain
    mean = error / weight
    figures = {f"{name}_rollout_nrmse": float(mean.mean()), f"{name}_rollout_nrmse_last": float(mean[-1])}
    figures |= {f"{name}_rollout_conservation_gap": float((gap / weight).mean())} if task.conserved else {}
    if conditioned is None:
        return figures
    better = conditioned[1] / conditioned[0]
    return figures | {
        f"{name}_conditioned_nrmse": float(better.mean()),
        f"{name}_conditioned_gain": float(1 - better.mean() / mean.mean()),
        f"{name}_conditioned_conservation_gap": float((conditioned[2] / conditioned[0]).mean()),
    }


def row_panels(task: FieldTask, batch: Mapping[str, Tensor], prediction: Tensor) -> list[Panel]:
    """The first sample of a 2-D task: input, truth, prediction, error."""
    given = task.input.denormalise(batch["input"][0])[0].cpu()
    true = task.target.denormalise(batch["target"][0])[0].cpu()
    found = task.target.denormalise(prediction[0].float())[0].cpu()
    pairs = [Panel("truth", true, "u"), Panel("prediction", found, "u"), _error_panel(found, true)]
    return [Panel("input", given, "a"), *pairs]


def _error_panel(found: Tensor, true: Tensor, down: str = "y (points)") -> Panel:
    """Signed, with the nRMSE of what is shown."""
    nrmse = float((found - true).double().norm() / true.double().norm().clamp_min(1e-12))
    return Panel(f"error (nRMSE {nrmse:.3g})", found - true, "e", down, signed=True)


@lru_cache(maxsize=1)
def baseline_figures(data: FieldData, samples: int) -> Mapping[str, float]:
    """``TASK_persistence_nrmse``, ``TASK_training_mean_nrmse`` and ``TASK_linear_fit_nrmse``: what needs no model.

    On the first ``samples`` held-out rows of each task, as the model. One process; some seconds, once for a run.
    """
    found: dict[str, float] = {}
    for task in data.tasks:
        rows, physical = (data.training[task.name], data.heldout[task.name]), task.target.denormalise
        scores = baselines(*rows, physical, same_fields=task.has_time, samples=samples)
        found |= {f"{task.name}_{name}_nrmse": score for name, score in scores.items()}
    return found


def metric_names(data: FieldData, refined: bool) -> list[str]:
    """Everything that an evaluation on this data reports: made by the functions that report it, of sums of 1.

    ``refined``: the model has a residual stage.
    """
    names: list[str] = []
    for task in data.tasks:
        rows, times = torch.ones(6), torch.ones(3, 1)
        names += row_figures(task, rows, rows if refined else None)
        names += rollout_figures(task, times, times if task.conserved else None) if task.has_time else []
        kinds = baseline_names(data.training[task.name], same_fields=task.has_time)
        names += [f"{task.name}_{kind}_nrmse" for kind in kinds]
    return [*names, MEAN]


def early_stopping(
    evaluation: EvaluationConfig, objective: ObjectiveConfig, directory: Path, start_step: int
) -> EarlyStopping:
    """On the mean of all tasks; evaluations before the operator learns do not count."""
    return EarlyStopping(evaluation.patience, MEAN, directory, start_step, after=objective.autoencode_steps)


def table(data: FieldData, figures: Mapping[str, float]) -> list[str]:
    """The model beside what needs none, a line for each task."""
    lines: list[str] = []
    for task in data.tasks:
        others = {
            key.removeprefix(f"{task.name}_").removesuffix("_nrmse").replace("_", " "): value
            for key, value in figures.items()
            if key.startswith(f"{task.name}_") and key.endswith(("persistence_nrmse", "mean_nrmse", "fit_nrmse"))
        }
        beside = ", ".join(f"{name} {value:.4f}" for name, value in others.items())
        refined = figures.get(f"{task.name}_refined_nrmse")
        own = f"nRMSE {figures[f'{task.name}_nrmse']:.4f}" + ("" if refined is None else f", refined {refined:.4f}")
        lines.append(f"{task.name}: {own}" + (f"; {beside}" if beside else ""))
    return lines


def mean_nrmse(data: FieldData, figures: Mapping[str, float]) -> float:
    """The geometric mean over the tasks: what early stopping and ``keep_best`` look at."""
    return math.exp(sum(math.log(max(figures[f"{task.name}_nrmse"], 1e-12)) for task in data.tasks) / len(data.tasks))
