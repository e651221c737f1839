"""Train LoRA adapters on a pretrained text-to-image model, from pictures with captions.

    accelerate launch recipes/mmdit.py image_demo   # the base of the demo, offline
    accelerate launch recipes/lora.py               # the demo: flags, which that model has never seen
    accelerate launch recipes/lora.py --base.source stabilityai/stable-diffusion-xl-base-1.0 --data.path photos

What is predicted (noise, v, flow or the picture) is taken from the base. Noise, times and dropped captions are
functions of (seed, step, picture), the same on any number of processes.
"""

from __future__ import annotations

from accel_train.runtime.exiting import before_imports, one_run, run_main

if __name__ == "__main__":
    before_imports()  # answers --help without the imports below, which take seconds

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from accel_train import experiment, loop, preparation, startup
from accel_train.checkpoints.run import earlier_assets
from accel_train.config import UsageError
from accel_train.data.sampler import StepSampler
from accel_train.domains.diffusion.noise_levels import NoiseLevels
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images import pipeline as pictures
from accel_train.domains.images.options import FREE_TO_CHANGE, PictureDataConfig
from accel_train.domains.images.pipelines import before_after, loading, objective, validation
from accel_train.domains.images.pipelines.inputs import Inputs, prepare_inputs, refuse_beside_cache_only
from accel_train.domains.images.pipelines.objective import Denoising
from accel_train.domains.images.recorded_base import at_commit
from accel_train.domains.images.trained_text import adapters
from accel_train.domains.models.lora import LoraConfig
from accel_train.frozen_weights import pinned
from accel_train.metrics import evaluation, logs
from accel_train.options.flags import words_of
from accel_train.options.loading import load_config
from accel_train.runtime.strategy import strategy_of
from accel_train.train_state import TrainState
from accel_train.training.accumulation import Batch
from accel_train.training.optimizers import set_learning_rate
from accel_train.training.shards import plain_module

logger = logging.getLogger("recipes.lora")
PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "lora_demo"
TUNE_PRESET = "lora_tune"
"""The preset if none is named but --base.source is given."""


# ---------------------------------------------------------------------------------------------------------- config
@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """LoRA adapters on a diffusers text-to-image pipeline, or on our own MMDiT."""

    recipe: ClassVar = experiment.Recipe(
        free_to_change=("evaluation", *FREE_TO_CHANGE, "base.encoder_batch_size", "base.offload_encoders"),
        decides_shapes=adapters.DECIDE_SHAPES,
        labels=objective.LABELS,
        one_loss_term=True,
        decided_by={"loss": "min"},
        first_options=(
            "base.source",
            "data.path",
            "data.resolutions",
            "lora.rank",
            "evaluation.prompts",
            "evaluation.every",
        ),
        pipeline=pictures.PicturePipeline,
        timesteps={"loss": "time"},
        smoke={"evaluation.samples": 2, "evaluation.steps": 2, "data.group_size": 1},
    )

    output_dir: str = "runs/lora"
    cache_only: bool = False
    """Encode the pictures, captions and prompts into the cache, and stop before the denoiser is loaded."""
    base: loading.BaseConfig = field(default_factory=loading.BaseConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    text_encoders: adapters.TextEncoderConfig = field(default_factory=adapters.TextEncoderConfig)
    data: PictureDataConfig = field(default_factory=PictureDataConfig)
    objective: objective.ObjectiveConfig = field(default_factory=objective.ObjectiveConfig)
    times: TimeConfig = field(default_factory=TimeConfig)
    evaluation: validation.EvaluationConfig = field(default_factory=validation.EvaluationConfig)

    def __post_init__(self) -> None:
        if self.lora.rank == 0:
            raise UsageError("lora.rank: 0, and this recipe trains adapters alone; give --lora.rank 16")
        self.evaluation.refuse_without_heldout(self.data)
        refuse_beside_cache_only(self)


def preset_without_one(argv: Sequence[object]) -> str:
    """Return the preset for a command line that names none: with --base.source the one for tuning, else the demo."""
    has_base = any(word.partition("=")[0] == "--base.source" for word in words_of(argv))
    return TUNE_PRESET if has_base else DEFAULT_PRESET


# ------------------------------------------------------------------------------------------------------------ loss
# A batch holds mean and logvar of the VAE (B, C, H, W), sizes (B, 2), embeddings or tokens of captions, and what the
# loader adds.
def corrupt(
    config: Config, inputs: Inputs, denoising: Denoising, batch: Batch, step: int, batch_size: int
) -> tuple[Batch, Tensor]:
    """Return the denoiser's inputs with their target, and the weight of each picture, (rows * B,)."""
    encoded = inputs.encoded(batch)
    return denoising.noised(encoded, config.seed, step, inputs.rows * batch_size), inputs.weights(batch)


def loss_sums(denoising: Denoising, model: nn.Module, batch: Batch) -> Tensor:
    """Return the weighted squared error of each picture, (rows * B,). The window divides by the global weight."""
    return denoising.errors(model, batch) * batch["level_weight"] * batch["weight"]


# ------------------------------------------------------------------------------------------------------ evaluation
def heldout_sums(inputs: Inputs, denoising: Denoising, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Sum the errors within each band of times, without the loss weights of training."""
    encoded = inputs.encoded(batch)
    sums = {"samples": batch["weight"].sum()}
    for band in range(objective.BANDS):
        errors = denoising.errors(model, denoising.noised_in_band(encoded, band))
        sums[f"loss_band_{band + 1}"] = (errors * batch["weight"]).sum()
    return sums


def heldout_losses(config: Config, prepared: TrainState, inputs: Inputs, denoising: Denoising) -> dict[str, float]:
    """Return the loss of each band of times on held-out pictures, or nothing without any. Every process calls it."""
    if not len(inputs.heldout):
        return {}
    accelerator = prepared.accelerator
    batch_size = config.evaluation.batch_size or config.micro_batch_size
    batches = evaluation.heldout_batches(accelerator, inputs.heldout, config.evaluation.samples, batch_size)
    sums_of = partial(heldout_sums, inputs, denoising, prepared.model)
    sums = evaluation.weighted_sums(accelerator, batches, sums_of)
    return objective.metrics_of(sums)


def evaluate(config: Config, prepared: TrainState, inputs: Inputs, denoising: Denoising, step: int) -> dict[str, float]:
    """Compute held-out losses and sample pictures for prompts, with the EMA weights. Every process calls it."""
    options = config.evaluation
    side = options.pixels(config.data)
    with evaluation.evaluating(prepared.model, prepared.ema):
        metrics = heldout_losses(config, prepared, inputs, denoising)
        model = plain_module(prepared.model)
        setattr(inputs.pipeline, denoising.family.denoiser, model)
        drawn = validation.draw(inputs.pipeline, denoising.family, inputs.embeddings, options, side, config.seed)
        compared = before_after.draw(inputs, model, options, side, config.seed)
    if prepared.accelerator.is_main_process:
        validation.report(prepared.report_directory, step, drawn, options.prompts)
        before_after.report(prepared.report_directory, compared)
        metrics |= before_after.judge(compared, options)
    logs.info(logger, objective.summary(metrics), *before_after.summary(metrics, options))
    return metrics


# ------------------------------------------------------------------------------------------------------------ main
def save_extras(
    config: Config, prepared: TrainState, plain: nn.Module, base: loading.Base, levels: NoiseLevels, directory: Path
) -> None:
    """Write the files for sampling from the checkpoint, beside its weights."""
    pictures.write_files(plain, base, prepared.base_files, levels.prediction, config.evaluation, config.data, directory)


@one_run
def main(argv: Sequence[str]) -> int:
    """Train, resume or evaluate. Every process runs it. Usage errors are reported before a model is built."""
    config = load_config(Config, argv, presets=PRESETS, default_preset=preset_without_one(argv)).config
    accelerator = startup.start(config)
    found = loading.find_base(pinned(accelerator, config.base, "base.revision", config.run_options(), at_commit))
    base = adapters.with_trained_text(found, config.text_encoders, strategy_of(accelerator))
    adapters.refuse_unknown_targets(base, config.lora)
    levels = base.levels()
    objective.refuse_foreign_weights(config.objective, config.times, levels, base.source)
    earlier = earlier_assets(config.run_options())
    preparing = partial(prepare_inputs, config.data, base, config.evaluation, accelerator.device, earlier=earlier)
    inputs = startup.prepare_data(accelerator, preparing)
    if config.cache_only:
        logs.info(logger, *inputs.notices)
        return 0
    order = StepSampler(len(inputs.train), config.global_batch_size, config.seed, blocks=inputs.train.order)
    opened = experiment.open_on_data(
        config,
        accelerator,
        inputs,
        notices=(*inputs.notices, *before_after.notices(config.evaluation, inputs)),
        metrics=before_after.metric_names(config.evaluation, inputs),
    )
    if opened.finished:
        return experiment.nothing_to_do(opened)

    build = partial(adapters.build, base, config.lora, config.text_encoders, initial_weights=opened.run.initial_weights)
    plain = preparation.build_model(opened, build, config.precision, accelerator.device)
    described = adapters.describe_adapters(plain, config.lora, config.text_encoders)
    logs.info(logger, objective.describe_objective(levels, base.family), *described)
    denoising = inputs.denoising(levels, plain.config, config.objective, config.times)
    example = partial(inputs.call_once, denoising)
    prepared = preparation.prepare(opened, plain, freezable=adapters.groups(base), base=base.files(), example=example)
    adapters.scale_learning_rate(prepared.optimizer, config.text_encoders)
    run_evaluation = partial(evaluate, config, prepared, inputs, denoising)
    if opened.only_evaluates:
        return loop.evaluate_only(opened, partial(run_evaluation, opened.start_step))

    write_extras = partial(save_extras, config, prepared, plain, base, levels)
    with loop.training(opened, prepared, inputs.train, order, write_extras) as training:
        for batches in training:
            step, batch_size = batches.step, opened.batch_size(batches.step)
            set_learning_rate(prepared.optimizer, opened.learning_rate_factor(step))

            corrupted = [corrupt(config, inputs, denoising, batch, step, batch_size) for batch in batches.micro_batches]
            window = prepared.window(corrupted, {"loss": 1.0}, step)
            # Gradients stay local until the last micro-batch.
            for batch in window:
                window.backward(loss_sums(denoising, prepared.model, batch))
            result = window.finish(config.optimizer.max_grad_norm)
            prepared.optimizer.step()
            prepared.optimizer.zero_grad()
            prepared.ema.update(step)

            training.report(batches, result)
            # Save before the evaluation, so that a failing one loses nothing.
            training.save_if_due(result)
            if config.evaluation.due(batches.done, opened.max_steps):
                training.evaluate(partial(run_evaluation, batches.done))
    return loop.finish(training)


if __name__ == "__main__":
    run_main(main)
