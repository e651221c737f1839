"""Train a multimodal diffusion transformer on text and on latents of that text, or on captions and pictures.

    accelerate launch recipes/mmdit.py                                              # the demo, on anything
    accelerate launch recipes/mmdit.py image_demo                                   # pictures from captions, and back
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/mmdit.py base --data.path my.jsonl

Text is learned by masked diffusion, latents by rectified flow or DDPM: text from its latent (l2t), the latent from
its text (t2l), and both unconditionally. Processes, micro-batch and strategy do not change the trajectory.
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
from typing import Any, ClassVar

from torch import Tensor, nn

from accel_train import experiment, loop, preparation, rng, startup
from accel_train.checkpoints import run
from accel_train.data import sampler
from accel_train.domains.diffusion import latents, masked_text, timesteps
from accel_train.domains.images import captioned, picture_scores
from accel_train.domains.images.picture_scores import Scores
from accel_train.domains.models import flops, mmdit, sd3_blocks
from accel_train.domains.text import baseline_scores, both_ways, dataset, modes, pipeline, prepare, samples
from accel_train.metrics import evaluation, logs, records
from accel_train.options.loading import load_config
from accel_train.train_state import TrainState
from accel_train.training import optimizers
from accel_train.training.accumulation import Batch

logger = logging.getLogger("recipes.mmdit")
PRESETS = Path(__file__).parent / "presets"


# ---------------------------------------------------------------------------------------------------------- config
@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """Multimodal diffusion transformer: text and latents, learned in both directions."""

    recipe: ClassVar = experiment.Recipe(
        free_to_change=("evaluation", *prepare.FREE_TO_CHANGE, *captioned.FREE_TO_CHANGE),
        decides_shapes=("model", *prepare.DECIDE_SHAPES, *captioned.DECIDE_SHAPES),
        labels=both_ways.LABELS,
        decided_by={"l2t_nll": "min", "t2l_cosine": "max"},
        loads_with=mmdit.MultimodalMMDiT,
        first_options=("model.size", "data.path", "data.encoder", "modes.weights", "latent.kind", "evaluation.every"),
        pipeline=pipeline.TextLatentPipeline,
        text_rows=dataset.text_rows,
        timesteps={"text": "text_time", "latent": "latent_time"},
        smoke={"evaluation.samples": 8, "evaluation.timesteps": 1, "evaluation.shown": 1, "evaluation.text.steps": 2},
    )

    output_dir: str = "runs/mmdit-demo"
    model: mmdit.ModelConfig = field(default_factory=mmdit.ModelConfig)
    data: prepare.DataConfig = field(default_factory=prepare.DataConfig)
    pictures: captioned.PictureConfig = field(default_factory=captioned.PictureConfig)
    modes: modes.ModeConfig = field(default_factory=modes.ModeConfig)
    text: masked_text.TextDiffusionConfig = field(default_factory=masked_text.TextDiffusionConfig)
    latent: latents.LatentDiffusionConfig = field(default_factory=latents.LatentDiffusionConfig)
    times: timesteps.TimeConfig = field(default_factory=timesteps.TimeConfig)
    evaluation: both_ways.EvaluationConfig = field(default_factory=both_ways.EvaluationConfig)

    def __post_init__(self) -> None:
        modes.refuse_unlearned(self.modes, self.text, self.times, self.latent)
        modes.refuse_unlearned_guidance(self.modes, self.evaluation.guidance())
        captioned.refuse_unread(self.pictures, self.data)


# ------------------------------------------------------------------------------------------------------------ loss
# A batch holds tokens, text_mask, maskable (B, S) and latent (B, L, D). The loader adds weight, sample, occurrence and
# position (B,). Padding samples, which give every process the same number of micro-batches, have weight 0.
def corrupt(config: Config, batch: Batch, step: int, batch_size: int, mask_id: int) -> tuple[Batch, dict[str, Tensor]]:
    """Return the model's inputs and the weights (B,) of each loss term. Draws are keyed by sample, never by process."""
    text_time, latent_time = draw_times(config, batch, step, batch_size)

    def keys(stream: str) -> Tensor:
        return rng.sample_keys(config.seed, stream, step, batch["occurrence"])

    tokens = batch["tokens"]
    maskable = batch["maskable"]
    draws = rng.uniform(keys("mask"), tokens.shape[1:])
    noisy_tokens, masked = masked_text.corrupt(tokens, maskable, text_time, draws, mask_id)
    latent = batch["latent"]
    noise = rng.normal(keys("noise"), latent.shape[1:])
    inputs = batch | {
        "noisy_tokens": noisy_tokens,
        "masked": masked,
        "text_time": text_time,
        "noisy_latent": latents.add_noise(latent, noise, latent_time, config.latent),
        "latent_target": latents.target(latent, noise, latent_time, config.latent),
        "latent_time": latent_time,
    }
    weight = batch["weight"]
    text_weight = masked_text.term_weight(masked, maskable, weight, config.text.weighting)
    return inputs, {"text": text_weight, "latent": weight}


def draw_times(config: Config, batch: Batch, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Draw the diffusion times of text and latent, (B,) each. The mode fixes the time of its condition."""
    times = partial(timesteps.training_times, batch, config.seed, step=step, global_batch_size=batch_size)
    text_time = times("time")
    latent_time = times("latent_time", axis=1, config=config.times)
    return modes.fix_condition(config.modes, config.seed, step, batch["occurrence"], text_time, latent_time)


def loss_sums(config: Config, model: nn.Module, inputs: Batch, mask_id: int) -> dict[str, Tensor]:
    """Sum each loss term over each sample, (B,) fp32. The window divides by the weights of the global batch."""
    text_time = inputs["text_time"]
    output = model(
        inputs["noisy_tokens"], inputs["noisy_latent"], text_time, inputs["latent_time"], inputs["text_mask"]
    )
    text = masked_text.loss_sums(
        output.text_logits, inputs["tokens"], inputs["masked"], text_time, mask_id, config.text.weighting
    )
    latent = latents.losses(output.latents, inputs["latent_target"], config.latent)
    latent = latent * timesteps.loss_weight(inputs["latent_time"], config.times.weighting)
    return {"text": text * inputs["weight"], "latent": latent * inputs["weight"]}


# ------------------------------------------------------------------------------------------------------ evaluation
def evaluate(
    config: Config, prepared: TrainState, data: dataset.PreparedData, scores: Scores, step: int
) -> dict[str, float]:
    """Compute held-out metrics, the same on any layout, and write the report, with the EMA weights. Collective."""
    options = config.evaluation
    batch_size = options.batch_size or config.micro_batch_size
    both = build_samplers(config, prepared.model, data.tokenizer.mask_id)
    with evaluation.evaluating(prepared.model, prepared.ema):
        sums_of = partial(both.metric_sums, timesteps=options.timesteps, scores=scores)
        sums = evaluation.paired_sums(prepared.accelerator, data.heldout, options.samples, batch_size, sums_of)
        shown = evaluation.first_samples(prepared.accelerator, data.heldout, options.shown)
        drawn = both.sample_all(shown, unconditional=scores is not None)
    metrics = both_ways.metrics_from_sums(sums, options.timesteps) | picture_scores.metrics(scores, sums)
    # Files and simple predictors need one process. Only the main process records metrics.
    if prepared.accelerator.is_main_process:
        samples.report_samples(prepared.report_directory, data, drawn.tokens, drawn.latents, step)
        picture_scores.report(scores, prepared.report_directory, step, shown, drawn)
        metrics |= baseline_scores.baseline_metrics(data, options.samples, options.timesteps, config.seed)
    logs.info(logger, *samples.summary(metrics), *picture_scores.summary(metrics))
    return metrics


def build_samplers(config: Config, model: nn.Module, mask_id: int) -> both_ways.BothWays:
    """Build the samplers in both directions. A stop request ends them between two forwards."""
    forward = evaluation.interruptible(model)
    options = config.evaluation
    return both_ways.BothWays(forward, mask_id, config.seed, config.latent, options.text, options.latent)


# ------------------------------------------------------------------------------------------------------------ main
def save_extras(
    config: Config, shape: mmdit.MultimodalMMDiTConfig, data: dataset.PreparedData, directory: Path
) -> None:
    """Write the files for sampling from the checkpoint, beside its weights."""
    description = pipeline.describe_model(
        shape, config.modes, config.text, config.latent, config.evaluation, config.seed, data.assets, config.data.path
    )
    records.write_json(directory / "config.json", description)
    data.assets.save(directory / "assets")


def prepare_data(config: Config, **start: Any) -> tuple[dataset.PreparedData, Scores]:
    """Prepare texts or captions, and their latents. Every process calls it, with its device and rank in ``start``."""
    pictures = captioned.prepare_pictures(config.pictures, config.data, **start)
    options = pictures.rows(config.data) if pictures else config.data
    data = prepare.prepare_data(options, pictures=pictures, **start)
    scores = picture_scores.build_scores(pictures, data.assets.denormalise, data.tokenizer.decode, data.nearest_latents)
    return data, scores


@one_run
def main(argv: Sequence[str]) -> int:
    """Train, resume or evaluate. Every process runs it. Usage errors are reported before a model is built."""
    config = load_config(Config, argv, presets=PRESETS).config
    accelerator = startup.start(config)
    weights = run.assets_of_weights(config.run_options())
    preparing = partial(prepare_data, config, device=str(accelerator.device), weights=weights)
    data, scores = startup.prepare_data(accelerator, preparing)
    order = sampler.StepSampler(len(data.train), config.global_batch_size, config.seed, blocks=data.train.order)
    opened = experiment.open_on_data(
        config,
        accelerator,
        data,
        notices=[*data.notices, *picture_scores.notices(scores), *samples.notices(config.evaluation, data)],
        metrics=[*baseline_scores.metric_names(data), *picture_scores.metric_names(scores)],
    )
    if opened.finished:
        return experiment.nothing_to_do(opened)

    mask_id = data.tokenizer.mask_id
    grid = scores.pictures.grid if scores else None
    shape = config.model.multimodal(data.tokenizer.vocab_size, config.data.max_length, data.latent_shape, grid)
    model = preparation.build_model(opened, sd3_blocks.build, shape, config.model, opened.start_step, config.init_from)
    needs = shape.attention_needs(accelerator.device, config.precision, config.micro_batch_size)
    prepared = preparation.prepare(opened, model, needs, modes.freezable(config.modes))
    optimizer = prepared.optimizer
    run_evaluation = partial(evaluate, config, prepared, data, scores)
    if opened.only_evaluates:
        return loop.evaluate_only(opened, partial(run_evaluation, opened.start_step))

    write_extras = partial(save_extras, config, shape, data)
    with loop.training(opened, prepared, data.train, order, write_extras) as training:
        for batches in training:
            step = batches.step
            batch_size = opened.batch_size(step)
            mode = modes.mode_of_step(config.modes, config.seed, step)
            optimizers.set_frozen(optimizer, modes.frozen_parts(config.modes, step))
            optimizers.set_learning_rate(optimizer, opened.learning_rate_factor(step))

            corrupted = [corrupt(config, batch, step, batch_size, mask_id) for batch in batches.micro_batches]
            window = prepared.window(corrupted, modes.coefficients(config.modes, mode), step)
            # Gradients stay local until the last micro-batch.
            for inputs in window:
                window.backward(loss_sums(config, prepared.model, inputs, mask_id))
            result = window.finish(config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            prepared.ema.update(step)

            training.report(batches, result, mode=mode, **flops.work(shape, batches.micro_batches))
            # Save before the evaluation, so that a failing one loses nothing.
            training.save_if_due(result)
            if config.evaluation.due(batches.done, opened.max_steps):
                training.evaluate(partial(run_evaluation, batches.done))
    return loop.finish(training)


if __name__ == "__main__":
    run_main(main)
