"""Train a multimodal diffusion transformer on text and on latents of that text.

    accelerate launch recipes/mmdit.py                                              # the demo, on anything
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/mmdit.py base --data.path my.jsonl

Text is learned by masked diffusion, latents by rectified flow or DDPM: text from its latent (l2t), the latent from
its text (t2l), and both from nothing. The curve is the same on any number of processes, any micro-batch and strategy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import experiment, loop, rng
from accel_train.config import expand_path, load_config, to_tree
from accel_train.data import heldout, sampler
from accel_train.domains.diffusion import latents, masked_text, timesteps
from accel_train.domains.models import flops, mmdit
from accel_train.domains.text import baseline_scores, both_ways, modes, prepare, samples
from accel_train.metrics import evaluation, logs, recorder, records
from accel_train.runtime.exiting import one_run, run_main
from accel_train.training import accumulation, ema, optimizers

logger = logging.getLogger("recipes.mmdit")


# ---------------------------------------------------------------------------------------------------------- config
@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """Multimodal diffusion transformer: text and latents, learned in both directions."""

    output_dir: str = "runs/mmdit-demo"
    model: mmdit.ModelConfig = field(default_factory=mmdit.ModelConfig)
    data: prepare.DataConfig = field(default_factory=prepare.DataConfig)
    modes: modes.ModeConfig = field(default_factory=modes.ModeConfig)
    text: masked_text.TextDiffusionConfig = field(default_factory=masked_text.TextDiffusionConfig)
    latent: latents.LatentDiffusionConfig = field(default_factory=latents.LatentDiffusionConfig)
    evaluation: both_ways.EvaluationConfig = field(default_factory=both_ways.EvaluationConfig)


# ------------------------------------------------------------------------------------------------------------ loss
def corrupt(
    config: Config, batch: accumulation.Batch, step: int, mask_id: int
) -> tuple[accumulation.Batch, dict[str, Tensor]]:
    """Inputs of the model and the weight of each loss term. Noise is keyed by sample, never by process."""
    mode = modes.mode_of_step(config.modes, config.seed, step)

    def keys(stream: str) -> Tensor:
        return rng.sample_keys(config.seed, stream, step, batch["occurrence"])

    text_time = timesteps.training_times(batch, config.seed, "time", step, config.global_batch_size)
    latent_time = timesteps.training_times(batch, config.seed, "latent_time", step, config.global_batch_size, axis=1)
    condition_time = (rng.uniform(keys("condition")) < config.modes.conditioning_dropout).float()  # 0 clean, 1 absent
    if mode == "l2t":
        latent_time = condition_time
    if mode == "t2l":
        text_time = condition_time
    draws = rng.uniform(keys("mask"), batch["tokens"].shape[1:])
    noisy_tokens, masked = masked_text.corrupt(batch["tokens"], batch["maskable"], text_time, draws, mask_id)
    noise = rng.normal(keys("noise"), batch["latent"].shape[1:])
    inputs = batch | {
        "noisy_tokens": noisy_tokens,
        "masked": masked,
        "text_time": text_time,
        "noisy_latent": latents.add_noise(batch["latent"], noise, latent_time, config.latent),
        "latent_target": latents.target(batch["latent"], noise, latent_time, config.latent),
        "latent_time": latent_time,
    }
    text_weight = masked_text.term_weight(masked, batch["maskable"], batch["weight"], config.text.weighting)
    tokens = (batch["text_mask"].sum(-1) * batch["weight"]).sum()  # a count, for the throughput
    return inputs, {"text": text_weight, "latent": batch["weight"].sum(), "tokens": tokens}


def loss_sums(config: Config, model: nn.Module, inputs: accumulation.Batch, mask_id: int) -> dict[str, Tensor]:
    """Sum of each loss term over a micro-batch, in fp32; divided by the global weights elsewhere."""
    output = model(
        inputs["noisy_tokens"], inputs["noisy_latent"], inputs["text_time"], inputs["latent_time"], inputs["text_mask"]
    )
    text = masked_text.loss_sums(
        output.text_logits, inputs["tokens"], inputs["masked"], inputs["text_time"], mask_id, config.text.weighting
    )
    latent = latents.losses(output.latents, inputs["latent_target"], config.latent)
    return {"text": (text * inputs["weight"]).sum(), "latent": (latent * inputs["weight"]).sum()}


# ------------------------------------------------------------------------------------------------------ evaluation
def evaluate(
    config: Config, accelerator: Accelerator, model: nn.Module, average: ema.Ema, data: prepare.PreparedData
) -> dict[str, float]:
    """Held-out figures and samples.md, with the averaged weights; the same on any layout. All ranks."""
    options, device = config.evaluation, accelerator.device
    place = accelerator.process_index, accelerator.num_processes, device
    forward = evaluation.interruptible(model)  # a stop ends it between two forwards
    both = both_ways.BothWays(forward, data.tokenizer.mask_id, config.seed, config.latent, options.text, options.latent)
    with evaluation.evaluating(model, average):
        pairs = heldout.heldout_pairs(data.heldout, options.samples, options.batch_size, *place)
        sums = evaluation.weighted_sums(accelerator, pairs, lambda pair: both.figures(*pair, options.timesteps))
        shown = next(heldout.heldout_batches(data.heldout, options.shown, options.shown, 0, 1, device))
        tokens, sampled = both.sample_text(shown), both.sample_latents(shown)
    if accelerator.is_main_process:
        texts = [data.tokenizer.decode(row) for row in tokens.cpu()]
        samples.write_samples(expand_path(config.output_dir), data.heldout.texts, texts, data.nearest_texts(sampled))
    figures = both_ways.figures_from_sums({k: float(v) for k, v in sums.items()}, options.timesteps)
    if accelerator.is_main_process:
        figures |= baseline_scores.baseline_figures(data, options.samples, options.timesteps, config.seed)
    logs.info(logger, *both_ways.summary(figures))
    return figures


# ------------------------------------------------------------------------------------------------------------ main
@one_run
def main(argv: Sequence[str]) -> int:
    """Every process runs it. Raises ``UsageError`` (exit code 2) before anything is built."""
    config = load_config(Config, argv, presets=Path(__file__).parent / "presets").config
    accelerator = experiment.start(config)
    world_size, device = accelerator.num_processes, accelerator.device
    data = experiment.prepare_data(accelerator, partial(prepare.prepare_data, config.data, device=str(device)))
    order = sampler.StepSampler(len(data.train), config.global_batch_size, config.seed)
    metrics = baseline_scores.metric_names(data)
    found = len(data.train), data.fingerprint, data.notices
    opened = experiment.open_experiment(config, accelerator, *found, metrics=metrics)
    if opened.finished:
        return experiment.nothing_to_do(config, accelerator, opened)

    shape = config.model.multimodal(data.tokenizer.vocab_size, config.data.max_length, data.latent_shape)
    model = experiment.build_model(config, accelerator, mmdit.MultimodalMMDiT, shape)
    needs = shape.attention_needs(device, config.precision, config.micro_batch_size)
    prepared = experiment.prepare(config, accelerator, opened, model, needs, modes.freezable(config.modes))
    model, optimizer, average, guard, _ = prepared
    held_out = partial(evaluate, config, accelerator, model, average, data)
    if config.evaluate_only:
        recorder.write_report(accelerator, opened.run.directory, opened.start_step, held_out())
        return 0

    def write_extras(directory: Path) -> None:
        """What sampling from the checkpoint needs beside the weights."""
        records.write_json(directory / "config.json", to_tree(shape))
        data.assets.save(directory / "assets")

    per_sample = partial(flops.flops_per_sample, shape, latent_length=shape.max_latent_length)
    with loop.Training(config, accelerator, opened, prepared, data.train, order, write_extras) as training:
        for batches in training:
            step = batches.step
            mode = modes.mode_of_step(config.modes, config.seed, step)
            optimizers.set_frozen(optimizer, modes.frozen_parts(config.modes, step))
            optimizers.set_learning_rate(optimizer, opened.learning_rate_factor(step))

            corrupted = [corrupt(config, batch, step, data.tokenizer.mask_id) for batch in batches.micro_batches]
            coefficients = modes.coefficients(config.modes, mode)
            window = accumulation.GradientWindow(accelerator, model, corrupted, coefficients, step, config.sync, guard)
            for inputs in window:  # gradients stay local until the last micro-batch
                window.backward(loss_sums(config, model, inputs, data.tokenizer.mask_id))
            result = window.finish(config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            average.update(step)

            sizes = [inputs["tokens"].shape for inputs in batches.micro_batches]  # (B, S), alike on every process
            training.report(
                batches,
                result,
                mode=mode,
                tokens=result.weights["tokens"],
                padded_tokens=world_size * sum(b * s for b, s in sizes),
                flops=3 * world_size * sum(b * per_sample(s) for b, s in sizes),
            )
            training.save_if_due(result)  # before the evaluation: one that fails loses nothing
            if config.evaluation.due(batches.done, opened.max_steps):
                training.evaluate(held_out)
    return loop.finish(training)


if __name__ == "__main__":
    run_main(main)
