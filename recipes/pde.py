"""Train a neural operator for partial differential equations on latent tokens.

    accelerate launch recipes/pde.py                                              # advection and Darcy flow, generated
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/pde.py --data.path pdebench/ --data.tasks ...

A field is encoded to tokens, a transformer advances the tokens by one step in time (or solves the equation), a decoder
gives the new field at any points. Each step of the optimizer belongs to one task.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import experiment, loop, rng
from accel_train.config import PositiveInt, expand_path, load_config, to_tree
from accel_train.data import heldout, task_sampler
from accel_train.domains.models import token_blocks
from accel_train.domains.pde import (
    equations,
    fields,
    flops,
    operator_learning,
    pictures,
    prediction,
    residual_diffusion,
    rows,
    scores,
    tokens,
    transformer,
)
from accel_train.metrics import early_stopping, evaluation, logs, recorder, records
from accel_train.runtime.exiting import one_run, run_main
from accel_train.training import accumulation, ema, optimizers, schedules

logger = logging.getLogger("recipes.pde")
DEFAULT_PRESET = "pde_demo"


# ---------------------------------------------------------------------------------------------------------- config
@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """Neural PDE operator on latent tokens: several equations, one transformer."""

    output_dir: str = "runs/pde-demo"
    model: transformer.PdeModelConfig = field(default_factory=transformer.PdeModelConfig)
    data: equations.PdeDataConfig = field(default_factory=equations.PdeDataConfig)
    task_weights: tuple[PositiveInt, ...] | None = None
    """Steps of each task of data.tasks in a block of steps. None: one of each."""
    objective: operator_learning.ObjectiveConfig = field(default_factory=operator_learning.ObjectiveConfig)
    evaluation: operator_learning.EvaluationConfig = field(default_factory=operator_learning.EvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.refuse_unread()
        operator_learning.check_residual(self.objective, self.evaluation, self.model.residual_depth)


# ------------------------------------------------------------------------------------------------------------ loss
def prepare(
    config: Config, batch: accumulation.Batch, step: int, task: rows.FieldTask, terms: set[str]
) -> tuple[accumulation.Batch, dict[str, Tensor]]:
    """Inputs of the model and the weight of each loss term. Draws are keyed by sample, never by process."""
    options, batch = config.objective, dict(batch)

    def draws(stream: str, *shape: int) -> Tensor:
        return rng.uniform(rng.sample_keys(config.seed, stream, step, batch["occurrence"]), shape)

    if options.flip and not task.has_time:
        for name in ("input", "target"):
            batch[name] = operator_learning.mirrored(batch[name], draws("flip", 2), options.flip)
    grid = tokens.coordinates([n for n in task.grid if n > 1], batch["input"].device)
    inputs = operator_learning.with_queries(options, batch, grid, draws, terms)
    if "residual" in terms:
        inputs |= residual_diffusion.drawn(batch, config.seed, step, config.global_batch_size, options.residual_steps)
    if options.drop_path:
        inputs["keep"] = token_blocks.drop_path(draws("drop_path", sum(config.model.stages)), options.drop_path)
    return inputs, dict.fromkeys(operator_learning.TERMS, batch["weight"].sum())


def parts_of(terms: set[str], freeze: bool) -> transformer.Parts | None:
    """What the model must compute for these terms. None: a prediction without gradient, and what it misses."""
    operator = "prediction" in terms
    parts = transformer.Parts("reconstruction" in terms, "reencoding" in terms, operator, operator, not freeze)
    return None if "residual" in terms else parts


def loss_sums(
    model: nn.Module, inputs: accumulation.Batch, number: int, task: rows.FieldTask, terms: set[str], freeze: bool
) -> dict[str, Tensor]:
    """Sums of ``operator_learning.TERMS`` over a micro-batch, in fp32; divided by the global weights elsewhere."""
    if (parts := parts_of(terms, freeze)) is None:
        found, size, correct = prediction.predict(model, inputs, number, task.grid)
        assert size is not None, "Config has seen to it"
        losses = {
            "residual": residual_diffusion.losses(
                correct, inputs["target"] - found, size, inputs["time"], inputs["noise"]
            )
        }
    else:
        target = inputs["target"] if terms & {"latent", "reconstruction", "reencoding"} else None
        given = inputs["parameters"], inputs["dt"], number, inputs.get("queries"), parts, inputs.get("keep")
        losses = losses_of(model(inputs["input"], target, *given), inputs, task, terms)
    nothing = torch.zeros_like(inputs["weight"])
    return {term: (losses.get(term, nothing) * inputs["weight"]).sum() for term in operator_learning.TERMS}


def losses_of(out: Any, inputs: accumulation.Batch, task: rows.FieldTask, terms: set[str]) -> dict[str, Tensor]:
    """The terms of the first two stages, of each sample."""
    losses, count = dict[str, Tensor](), inputs["sought"].shape[-1]
    if out.prediction is not None:
        predicted, edge = out.prediction[..., :count], out.prediction[..., count:]
        losses["prediction"] = fields.squared_error(predicted, inputs["sought"])
        if "spectral" in terms:
            losses["spectral"] = fields.spectral_loss(predicted.unflatten(-1, task.grid), inputs["target"])
        if "conservation" in terms:
            physical = task.target.denormalise(predicted, 1), task.input.denormalise(inputs["given"], 1)
            losses["conservation"] = fields.conservation_gap(*physical)
        if "boundary" in terms:
            losses["boundary"] = fields.squared_error(edge, task.target.normalise(torch.zeros_like(edge), 1))
    if "latent" in terms:
        losses["latent"] = fields.squared_error(out.predicted_latent, out.target_latent.detach())
    if "reconstruction" in terms:
        both = (out.input_reconstruction, inputs["given"]), (out.target_reconstruction, inputs["sought"])
        errors = [fields.squared_error(made[..., :count], true) for made, true in both]
        losses["reconstruction"] = torch.stack(errors).sum(0)
    if "reencoding" in terms:
        losses["reencoding"] = fields.squared_error(out.reencoded, out.target_latent.detach())
    return losses


# ------------------------------------------------------------------------------------------------------ evaluation
def task_shape(task: rows.FieldTask) -> transformer.TaskShape:
    """What the model must know of a task of the data."""
    return transformer.TaskShape(
        task.name, task.input_channels, task.target_channels, task.grid, len(task.parameters),
        periodic=task.boundary == "periodic", same_fields=task.has_time,
    )  # fmt: skip


def evaluate(
    config: Config, accelerator: Accelerator, model: nn.Module, average: ema.Ema, data: rows.FieldData
) -> dict[str, float]:
    """Held-out figures of every task and pictures, with the averaged weights. All ranks."""
    options, figures, pictured = config.evaluation, dict[str, float](), list[tuple[str, Any]]()
    place = accelerator.process_index, accelerator.num_processes, accelerator.device
    forward = evaluation.interruptible(model)  # a stop ends it between two forwards
    with evaluation.evaluating(model, average):
        for number, task in enumerate(data.tasks):
            rowset = data.heldout[task.name]
            batches = heldout.heldout_batches(rowset, options.samples, options.batch_size, *place)
            draws = config.objective.residual_steps, config.seed
            sums_of = partial(scores.error_sums, forward, number, task, *draws)
            figures |= scores.row_figures(task, **evaluation.weighted_sums(accelerator, batches, sums_of))
            if task.has_time:
                step_of = partial(prediction.stepper, forward, dt=task.dt, task=number, grid=task.grid)
                found, panels = scores.rolled_out(accelerator, task, rowset, options, step_of, config.seed)
                figures |= found
            else:
                first = next(heldout.heldout_batches(rowset, 1, 1, 0, 1, accelerator.device))
                found, _, _ = prediction.predict(forward, first, number, task.grid)
                panels = scores.row_panels(task, first, found)
            pictured.append((task.name, panels))
    figures[scores.MEAN] = scores.mean_nrmse(data, figures)
    if accelerator.is_main_process:
        figures |= scores.baseline_figures(data, options.samples)
        pictures.write_fields(expand_path(config.output_dir) / "fields.png", pictured)
    logs.info(logger, *scores.table(data, figures))
    return figures


# ------------------------------------------------------------------------------------------------------------ main
@one_run
def main(argv: Sequence[str]) -> int:
    """Every process runs it. Raises ``UsageError`` (exit code 2) before a model is built."""
    config = load_config(Config, argv, presets=Path(__file__).parent / "presets", default_preset=DEFAULT_PRESET).config
    accelerator = experiment.start(config)
    device = accelerator.device
    data = experiment.prepare_data(accelerator, partial(equations.prepare_pde, config.data))
    sizes, tasks = data.train.sizes, data.tasks
    order = task_sampler.TaskSampler(sizes, config.global_batch_size, config.seed, config.task_weights)
    operator_learning.check_tasks(config.objective, config.evaluation, tasks)
    lengths = experiment.lengths(config, accelerator, sum(sizes))
    words = operator_learning.check_stages(config.objective, config.schedule.warmup_steps, *lengths)
    found = sum(sizes), data.fingerprint, [*data.notices, *words]
    metrics = scores.metric_names(data, refined=config.model.residual_depth > 0)
    opened = experiment.open_experiment(config, accelerator, *found, metrics=metrics)
    patience, operator_from = config.evaluation.patience, config.objective.autoencode_steps
    early = early_stopping.EarlyStopping(patience, "mean_nrmse", opened.run.directory, opened.start_step, operator_from)
    if opened.finished or (early.exhausted and not config.evaluate_only):
        return experiment.nothing_to_do(config, accelerator, opened)

    shape = transformer.PdeTransformerConfig(tuple(map(task_shape, tasks)), config.model)
    model = experiment.build_model(config, accelerator, transformer.PdeTransformer, shape)
    needs = shape.attention_needs(device, config.precision, config.micro_batch_size)
    freezable = operator_learning.freezable(config.objective, model)
    prepared = experiment.prepare(config, accelerator, opened, model, needs, freezable)
    model, optimizer, average, guard, _ = prepared
    held_out = partial(evaluate, config, accelerator, model, average, data)
    if config.evaluate_only:
        recorder.write_report(accelerator, opened.run.directory, opened.start_step, held_out())
        return 0

    def write_extras(directory: Path) -> None:
        """What prediction from the checkpoint needs beside the weights."""
        records.write_json(directory / "config.json", to_tree(shape))
        data.assets.save(directory / "assets")

    freeze = config.objective.freeze_autoencoder
    with loop.Training(config, accelerator, opened, prepared, data.train, order, write_extras) as training:
        for batches in training:
            step = batches.step
            number = order.task_of_step(step)
            task = tasks[number]
            coefficients = operator_learning.coefficients(config.objective, step, task.conserved, task.boundary)
            terms = operator_learning.used(coefficients)
            optimizers.set_frozen(optimizer, operator_learning.frozen_parts(config.objective, step))
            place = operator_learning.place_in_schedule(config.objective, step, opened.decay_steps)
            optimizers.set_learning_rate(optimizer, schedules.learning_rate_factor(opened.schedule, *place))

            cut = [prepare(config, batch, step, task, terms) for batch in batches.micro_batches]
            window = accumulation.GradientWindow(accelerator, model, cut, coefficients, step, config.sync, guard)
            for inputs in window:  # gradients stay local until the last micro-batch
                window.backward(loss_sums(model, inputs, number, task, terms, freeze))
            result = window.finish(config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            average.update(step)

            points = math.prod(shape.grid(shape.tasks[number]).cells)
            parts, queries = parts_of(terms, freeze), config.objective.queries
            work = flops.training_flops_per_sample(shape, number, queries, parts)
            training.report(
                batches,
                result,
                task=task.name,
                tokens=result.weights["prediction"] * points,
                padded_tokens=config.global_batch_size * points,
                flops=config.global_batch_size * work,
            )
            training.save_if_due(result)  # before the evaluation: one that fails loses nothing
            if config.evaluation.due(batches.done, opened.max_steps):
                metrics = training.evaluate(held_out)
                if early.ended(batches.done, metrics):
                    training.end()
    return loop.finish(training)


if __name__ == "__main__":
    run_main(main)
