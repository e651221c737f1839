"""Rollouts of held-out trajectories: their errors against the truth, and a beam search that does not see it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.domains.pde import fields, rollout
from accel_train.domains.pde.data.assets import FieldTask
from accel_train.domains.pde.options import ConditioningConfig, EvaluationConfig
from accel_train.domains.pde.pictures import DOWN, STEPS, Lines, Panel, Panels, error_panel, titled
from accel_train.domains.pde.scoring.chosen import scored_samples
from accel_train.metrics import logs
from accel_train.metrics.evaluation import samples_at_once, weighted_sums

if TYPE_CHECKING:
    from accel_train.domains.pde.data.rows import FieldData, FieldRows

logger = logging.getLogger(__name__)

SHIFTS = (1, -1, 2, 3)
"""Shifts of a periodic field, in points. Each gives a different estimate of the same step."""
# Candidates take them from the front: the first five span the range, the others refine it.
NOISES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.001, 0.005, 0.02, 0.05)
"""Noise scales relative to the field's size, for the candidates beyond the shifts."""


Place = tuple[int, int, torch.device]
"""Rank, number of processes, device."""


class Rollouts:
    """Some held-out trajectories of one task, rolled out by a model."""

    def __init__(self, task: FieldTask, rows: FieldRows, sample: Tensor, weight: Tensor, device: torch.device):
        """Read trajectories ``sample`` (B,). ``weight`` (B,) is 0 for a repeated one, which fills up a batch."""
        self.task = task
        self.sample = sample
        self.weight = weight.double().to(device)
        trajectories = [rows.trajectory(int(index)) for index in self.sample]
        truth = torch.stack([trajectory.fields for trajectory in trajectories])
        self.truth = truth.to(device)  # (B, T, C, H, W)
        parameters = torch.stack([trajectory.parameters for trajectory in trajectories])
        self.parameters = parameters.to(device)  # (B, P)

    def plain(self, step: rollout.Step) -> Tensor:
        """Roll out step by step: (B, T - 1, C, H, W)."""
        steps = self.truth.shape[1] - 1
        return rollout.rollout(step, self.truth[:, 0], steps)

    def conditioned(self, step: rollout.Step, config: ConditioningConfig, seed: int) -> Tensor:
        """Roll out by beam search for the best conservation, without the truth, in a task with a conserved integral."""
        sample = self.sample.to(self.truth.device)
        proposals = [rollout.plain(step)]
        if self.task.boundary == "periodic":
            # A periodic equation is invariant under shifts, but a model that divides a grid into patches is not.
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
        """Sum the errors over the samples, at each time, for ``rollout_metrics``: (4, T - 1) float64."""
        _, scale = self.task.common_scales()
        truth = scale.denormalise(self.truth)
        states = scale.denormalise(predicted)
        least = fields.least_squares(scale, truth).mean()
        per_time: list[Tensor] = []
        start = truth[:, 0]
        for time in range(states.shape[1]):
            state = states[:, time]
            target = truth[:, time + 1]
            squared_error = fields.squared_error(state, target)
            error, has_size = fields.relative_l2(squared_error, fields.mean_square(target), least)
            # Compared with the first fields, because losses accumulate over time.
            gap = fields.conservation_gap(state, start, scale)
            per_time.append(torch.stack((torch.ones_like(error), has_size, error, gap)))
        per_sample = torch.stack(per_time, dim=1).double()  # (4, T - 1, B)
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
            # Step 0 is the input.
            down, first = STEPS, 1
        else:
            truth = truth[-1]
            states = states[-1]
            down, first = DOWN, 0
        names = ("rollout: truth", "prediction", "error")
        title, of_states, of_error = (titled(name, 0, self.task.target_channels) for name in names)
        return [
            Panel(title, truth, "u", down, first=first),
            Panel(of_states, states, "u", down, first=first),
            error_panel(states, truth, of_error, down, first),
        ]


def rollout_batches(task: FieldTask, rows: FieldRows, chosen: Tensor, at_once: int, place: Place) -> Iterator[Rollouts]:
    """Yield this process's share of the trajectories ``chosen`` (n,), in the same number of batches on each process."""
    rank, world_size, device = place
    count = len(chosen)
    # Rounded up on every process: the forward of a sharded model is a collective, so all must run equally many batches.
    share = math.ceil(count / world_size)
    own = torch.arange(share) * world_size + rank
    for wanted in own.split(samples_at_once(at_once)):
        # Past the end, the last trajectory is repeated with weight 0.
        sample = chosen[wanted.clamp(max=count - 1)]
        yield Rollouts(task, rows, sample, wanted < count, device)


def evaluate_rollouts(
    accelerator: Accelerator,
    task: FieldTask,
    data: FieldData,
    options: EvaluationConfig,
    at_once: int,
    step_of: Callable[[Tensor], rollout.Step],
    seed: int,
) -> tuple[dict[str, float], Panels]:
    """Roll out held-out trajectories. Returns ``rollout_metrics`` and panels of one trajectory and of the error.

    ``step_of`` builds the step for samples with given parameters (B, P). Collective: every process calls it.
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
    chosen = scored_samples(data, task.name, options.trajectories)
    batches = rollout_batches(task, data.heldout[task.name], chosen, at_once, place)
    sums = weighted_sums(accelerator, batches, sums_of)
    fields_of_rollouts, counted, *_ = sums["rollout"].sum(1).tolist()
    if counted < fields_of_rollouts:
        left_out = f"{fields_of_rollouts - counted:.0f} of {fields_of_rollouts:.0f}"
        logs.info(logger, f"{task.name}: {left_out} fields of the rollouts are 0 everywhere: left out of their nRMSE")
    panels.append(_error_lines(task, sums))
    return rollout_metrics(task, sums["rollout"], sums.get("conditioned")), panels


def _error_lines(task: FieldTask, sums: Mapping[str, Tensor]) -> Lines:
    """Show the error at each time, with a curve for each kind of rollout in ``sums``."""
    lines = {name: (error / counted).tolist() for name, (_, counted, error, _) in sums.items()}
    steps = sums["rollout"].shape[1]
    times = [task.dt * (1 + number) for number in range(steps)]
    return Lines("rollout: error against time", "time", "nRMSE", times, lines)


def rollout_metrics(task: FieldTask, plain: Tensor, conditioned: Tensor | None) -> dict[str, float]:
    """Compute the rollout metrics of a task from ``Rollouts.sums`` over all processes.

    They are the error over all times and at the last one, and with ``conditioned`` the gain of the beam search. A time
    at which all fields are zero has no error and is left out of the mean.
    """
    name = task.name
    weight, counted, error, gap = plain
    nrmse = error / counted
    # Not `nanmean`, so that the mean of a diverged rollout is NaN.
    mean = nrmse[counted > 0].mean()
    metrics = {
        f"{name}_rollout_nrmse": float(mean),
        f"{name}_rollout_nrmse_last": float(nrmse[-1]),
    }
    if task.conserved:
        metrics[f"{name}_rollout_conservation_gap"] = float((gap / weight).mean())
    if conditioned is not None:
        weight, counted, error, gap = conditioned
        conditioned_mean = (error / counted)[counted > 0].mean()
        metrics[f"{name}_conditioned_nrmse"] = float(conditioned_mean)
        metrics[f"{name}_conditioned_gain"] = float(1 - conditioned_mean / mean)
        metrics[f"{name}_conditioned_conservation_gap"] = float((gap / weight).mean())
    return metrics
