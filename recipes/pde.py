"""Train a neural operator for partial differential equations on latent tokens.

    accelerate launch recipes/pde.py                                              # advection and Darcy flow, generated
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/pde.py --data.path pdebench/ --data.tasks ...

A transformer advances the tokens of a field by one step in time, or solves the equation. Each step has one task.
"""

from __future__ import annotations

from accel_train.runtime.exiting import before_imports, one_run, run_main

if __name__ == "__main__":
    before_imports()  # answers --help without the imports below, which take seconds

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from accel_train import experiment, loop, preparation, rng, startup
from accel_train.checkpoints.run import assets_of_weights
from accel_train.config import PositiveInt
from accel_train.data.grouping import task_sampler
from accel_train.data.loader import StepBatches
from accel_train.domains.models import token_blocks
from accel_train.domains.pde import (
    checks,
    flops,
    losses,
    operator_learning,
    pictures,
    pipeline,
    scores,
    transfer,
    transformer,
)
from accel_train.domains.pde.data import rows
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.options import EvaluationConfig, ObjectiveConfig
from accel_train.domains.pde.residual import refinement
from accel_train.domains.pde.scoring import chosen
from accel_train.domains.pde.shape import DECIDE_SHAPES, PdeModelConfig, PdeTransformerConfig
from accel_train.metrics import evaluation, logs, records
from accel_train.options.loading import load_config
from accel_train.train_state import TrainState
from accel_train.training import optimizers
from accel_train.training.accumulation import Batch

logger = logging.getLogger("recipes.pde")
PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "pde_demo"


# ---------------------------------------------------------------------------------------------------------- config
@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """Neural PDE operator on latent tokens: several equations, one transformer."""

    recipe: ClassVar = experiment.Recipe(
        free_to_change=("evaluation", "data.cache_dir", "data.cache_mib", "data.changed", "data.workers"),
        decides_shapes=DECIDE_SHAPES,
        labels=scores.LABELS,
        decided_by={"nrmse": "min"},
        loads_with=transformer.PdeTransformer,
        first_options=("model.width", "model.depth", "data.path", "data.tasks", "task_weights", "evaluation.every"),
        pipeline=pipeline.FieldPipeline,
        timesteps={"residual": "time"},
        smoke=lambda config: operator_learning.smoke_values(config.objective),
    )

    output_dir: str = "runs/pde-demo"
    model: PdeModelConfig = field(default_factory=PdeModelConfig)
    data: PdeDataConfig = field(default_factory=PdeDataConfig)
    task_weights: tuple[PositiveInt, ...] | None = None
    """Steps of each task of data.tasks in a block of steps. None: one of each."""
    init_tasks: tuple[str, ...] | None = None
    """Task of init_from whose modules each task of data.tasks starts from, or `new`. None: its own, or one alike."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        checks.check_model(self.model, self.objective, self.checkpoints)
        checks.check_weights(self.task_weights, self.data.tasks)


# ------------------------------------------------------------------------------------------------------------ loss
# A batch holds input, target (B, C, H, W), parameters (B, P), dt, and what the loader adds: weight, sample ... (B,).
def corrupt(config: Config, batch: Batch, step: int, learned: operator_learning.StepObjective) -> tuple[Batch, Tensor]:
    """Return the model's inputs and the weight of every loss term. Draws are keyed by sample, never by process."""
    objective = config.objective
    task = learned.task
    terms = learned.terms

    def draws(stream: str, *shape: int) -> Tensor:
        keys = rng.sample_keys(config.seed, stream, step, batch["occurrence"])
        return rng.uniform(keys, shape)

    if objective.flip and not task.has_time:
        batch = operator_learning.mirror_fields(batch, draws("flip", 2), objective.flip)
    inputs = operator_learning.add_queries(objective, batch, draws, terms)
    if "residual" in terms:
        batch_size = config.global_batch_size
        inputs |= refinement.draw_noise(batch, config.seed, step, batch_size, objective.residual_steps)
    if objective.drop_path:
        blocks = sum(config.model.stages)
        inputs["keep"] = token_blocks.drop_path(draws("drop_path", blocks), objective.drop_path)
    return inputs, batch["weight"]


def loss_sums(model: nn.Module, inputs: Batch, learned: operator_learning.StepObjective) -> dict[str, Tensor]:
    """Return the losses (B,) of each term, in fp32. Terms that this step does not train are 0."""
    forward = losses.forward_of(model, inputs, learned.number, learned.task, learned.terms, learned.parts)
    weight = inputs["weight"]
    sums = {name: torch.zeros_like(weight) for name in losses.TERMS}
    for name in losses.TERMS:
        if name in learned.terms:
            sums[name] = losses.TERMS[name].losses(forward) * weight
    return sums


def work(
    config: Config, shape: PdeTransformerConfig, learned: operator_learning.StepObjective, batches: StepBatches
) -> dict[str, Tensor | int]:
    """Count this process's part of a step, for the throughput."""
    points = math.prod(shape.grid(shape.tasks[learned.number]).cells)
    weights = torch.stack([batch["weight"].sum() for batch in batches.micro_batches])
    samples = sum(len(batch["weight"]) for batch in batches.micro_batches)
    per_sample = flops.training_flops_per_sample(shape, learned.number, config.objective.queries, learned.parts)
    return {
        "tokens": weights.sum() * points,
        "padded_tokens": samples * points,
        "flops": samples * per_sample,
    }


# ------------------------------------------------------------------------------------------------------ evaluation
def evaluate(config: Config, prepared: TrainState, data: rows.FieldData) -> dict[str, float]:
    """Compute held-out metrics and draw fields.png, with the EMA weights. Every process calls it."""
    metrics: dict[str, float] = {}
    panels: list[tuple[str, scores.Panels]] = []
    accelerator = prepared.accelerator
    options = config.evaluation
    batch_size = options.batch_size or config.micro_batch_size
    forward = evaluation.interruptible(prepared.model)
    with evaluation.evaluating(prepared.model, prepared.ema):
        for number, task in enumerate(data.tasks):
            found, drawn = scores.evaluate_task(
                accelerator, forward, data, number, options, batch_size, config.objective.residual_steps, config.seed
            )
            metrics |= found
            panels.append((task.name, drawn))
    metrics[scores.MEAN] = scores.mean_nrmse(data, metrics)
    # Files and baselines need one process. Only the main process records metrics.
    if accelerator.is_main_process:
        metrics |= scores.baseline_metrics(data, options.samples)
        pictures.write_fields(prepared.report_directory / "fields.png", panels)
    logs.info(logger, *scores.table(data, metrics))
    return metrics


# ------------------------------------------------------------------------------------------------------------ main
def save_extras(config: Config, shape: PdeTransformerConfig, data: rows.FieldData, directory: Path) -> None:
    """Write the files for prediction from the checkpoint, beside its weights."""
    description = pipeline.describe_model(shape, config.objective, data.assets, config.data.path)
    records.write_json(directory / "config.json", description)
    data.assets.save(directory / "assets")


@one_run
def main(argv: Sequence[str]) -> int:
    """Train, resume or evaluate. Every process runs it. Usage errors are reported before a model is built."""
    config = load_config(Config, argv, presets=PRESETS, default_preset=DEFAULT_PRESET).config
    accelerator = startup.start(config)
    weights = assets_of_weights(config.run_options())
    preparing = partial(prepare_pde, config.data, weights=weights, init_tasks=config.init_tasks)
    data = startup.prepare_data(accelerator, preparing)
    order = task_sampler.TaskSampler(data.train.sizes, config.global_batch_size, config.seed, config.task_weights)
    checks.check_tasks(config, data.tasks, data.strides, operator_learning.trained_terms(config.objective, data.tasks))
    length = experiment.resolve_length(config, accelerator, len(data.train))
    stages = checks.check_stages(config.objective, length.schedule, length.max_steps, length.decay_steps)
    opened = experiment.open_on_data(
        config,
        accelerator,
        data,
        notices=[*data.notices, *stages, *chosen.notices(data, config.evaluation)],
        metrics=scores.metric_names(data, refined=config.model.residual_depth > 0),
        patience_after=config.objective.last_stage,
    )
    if opened.finished:
        return experiment.nothing_to_do(opened)

    shape = operator_learning.model_shape(config.model, data.tasks)
    model = preparation.build_model(opened, transformer.PdeTransformer, shape)
    needs = shape.attention_needs(accelerator.device, config.precision, config.micro_batch_size)
    freezable = operator_learning.freezable(config.objective, model)
    names = transfer.names_in_weights(model, opened.run.initial_weights, data.origins)
    prepared = preparation.prepare(opened, model, needs, freezable, names_in_weights=names)
    optimizer = prepared.optimizer
    run_evaluation = partial(evaluate, config, prepared, data)
    if opened.only_evaluates:
        return loop.evaluate_only(opened, run_evaluation)

    write_extras = partial(save_extras, config, shape, data)
    with loop.training(opened, prepared, data.train, order, write_extras) as training:
        for batches in training:
            step = batches.step
            number = order.task_of_step(step)
            learned = operator_learning.objective_of_step(config.objective, step, number, data.tasks[number])
            schedule_step, decay_steps = operator_learning.place_in_schedule(config.objective, step, opened.decay_steps)
            optimizers.set_frozen(optimizer, learned.frozen)
            optimizers.set_learning_rate(optimizer, opened.learning_rate_factor(schedule_step, decay_steps))

            corrupted = [corrupt(config, batch, step, learned) for batch in batches.micro_batches]
            window = prepared.window(corrupted, learned.coefficients, step)
            # Gradients stay local until the last micro-batch.
            for inputs in window:
                window.backward(loss_sums(prepared.model, inputs, learned))
            result = window.finish(config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            prepared.ema.update(step)

            training.report(batches, result, task=learned.task.name, **work(config, shape, learned, batches))
            # Save before the evaluation, so that a failing one loses nothing.
            training.save_if_due(result)
            if config.evaluation.due(batches.done, opened.max_steps):
                training.evaluate(run_evaluation)
    return loop.finish(training)


if __name__ == "__main__":
    run_main(main)
