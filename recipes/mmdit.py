"""Train a multimodal diffusion transformer on text and on latents of that text.

    accelerate launch recipes/mmdit.py                                              # the demo, on anything
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/mmdit.py base --data.path my.jsonl

Text is learned by masked diffusion, latents by rectified flow or DDPM: text from its latent (l2t), the latent from
its text (t2l), and both from nothing. The curve is the same on any number of processes, any micro-batch and strategy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import rng
from accel_train.checkpoints import hub_options, policy, restore, state
from accel_train.checkpoints import run as runs
from accel_train.config import PositiveFloat, PositiveInt, Seed, UsageError, expand_path, load_config, run_main, to_tree
from accel_train.data import heldout, loader, prepare, sampler
from accel_train.diffusion import latents, masked_text, modes, text_latent, timesteps
from accel_train.metrics import logs, recorder, records, report, samples, throughput, trackers
from accel_train.models import flops, mmdit
from accel_train.runtime import accelerator as machine
from accel_train.runtime import signals
from accel_train.training import accumulation, ema, optimizers, schedules, shards

logger = logging.getLogger("recipes.mmdit")


# ---------------------------------------------------------------------------------------------------------- config
@dataclass(frozen=True)
class Config:
    """Multimodal diffusion transformer: text and latents, learned in both directions."""

    output_dir: str = "runs/mmdit-demo"
    """Directory of the run: checkpoints, metrics, pictures. Shared by all hosts."""
    seed: Seed = 0
    """Everything random is a function of it: weights, order, noise."""
    global_batch_size: PositiveInt = 64
    """Samples per optimizer step over all processes: part of the experiment."""
    micro_batch_size: PositiveInt = 64
    """Samples per process per forward: part of the machine. Accumulation is derived from the two."""
    max_steps: PositiveInt | None = None
    """Optimizer steps in all. Give this or max_epochs."""
    max_epochs: PositiveFloat | None = None
    """Passes over the training split, instead of max_steps."""
    precision: machine.Precision = "fp32"
    """Of the computation; weights, optimizer and average stay fp32."""
    sync: accumulation.SyncPolicy = "auto"
    """When gradients are reduced: on the last micro-batch, on every one, or as the strategy does best."""
    resume: str = "auto"
    """auto resumes what is in output_dir, else starts; must requires it; never refuses a used directory; the path of
    a checkpoint or hub:org/name@step starts a new directory from there."""
    allow: tuple[str, ...] = ()
    """Options that may differ from the saved experiment when resuming, on purpose."""
    overwrite: bool = False
    """Delete what is in output_dir and start anew."""
    init_from: str | None = None
    """Checkpoint directory (or any with model.safetensors) to take the weights from, and nothing else."""
    evaluate_only: bool = False
    """Evaluate and sample from the newest checkpoint in output_dir; train nothing."""
    collective_timeout_seconds: PositiveInt = 1800
    """How long a process waits for the others before the run stops with an error."""
    model: mmdit.ModelConfig = field(default_factory=mmdit.ModelConfig)
    data: prepare.DataConfig = field(default_factory=prepare.DataConfig)
    modes: modes.ModeConfig = field(default_factory=modes.ModeConfig)
    text: masked_text.TextDiffusionConfig = field(default_factory=masked_text.TextDiffusionConfig)
    latent: latents.LatentDiffusionConfig = field(default_factory=latents.LatentDiffusionConfig)
    optimizer: optimizers.OptimizerConfig = field(default_factory=optimizers.OptimizerConfig)
    schedule: schedules.ScheduleConfig = field(default_factory=schedules.ScheduleConfig)
    ema: ema.EmaConfig = field(default_factory=ema.EmaConfig)
    loader: loader.LoaderConfig = field(default_factory=loader.LoaderConfig)
    checkpoints: policy.CheckpointConfig = field(default_factory=policy.CheckpointConfig)
    hub: hub_options.HubConfig = field(default_factory=hub_options.HubConfig)
    log: recorder.LogConfig = field(default_factory=recorder.LogConfig)
    evaluation: text_latent.EvaluationConfig = field(default_factory=text_latent.EvaluationConfig)

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UsageError(
                f"max_steps: {self.max_steps}, max_epochs: {self.max_epochs}: exactly one of the two is required; "
                "set the other to None"
            )


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
    config: Config, accelerator: Accelerator, model: nn.Module, average: ema.Ema, data: prepare.PreparedData, step: int
) -> dict[str, float]:
    """Held-out figures, samples.md and the report, with the averaged weights; the same on any layout. All ranks."""
    options, device = config.evaluation, accelerator.device
    rank, world_size = accelerator.process_index, accelerator.num_processes
    both = text_latent.BothWays(model, data.tokenizer.mask_id, config.seed, config.latent, options.text, options.latent)
    with average.applied():
        pairs = heldout.heldout_batches(data.heldout, options.samples, options.batch_size, rank, world_size, device)
        parts = [both.figures(batch, shuffled, options.timesteps) for batch, shuffled in pairs]
        shown, _ = next(heldout.heldout_batches(data.heldout, options.shown, options.shown, 0, 1, device))
        tokens, sampled = both.sample_text(shown), both.sample_latents(shown)
    totals: Any = accelerator.reduce(
        torch.stack([accumulation.widest(torch.stack([p[k] for p in parts])).sum() for k in parts[0]])
    )
    sums: dict[str, float] = dict(zip(parts[0], totals.tolist(), strict=True))
    if accelerator.is_main_process:
        texts = [data.tokenizer.decode(row) for row in tokens.cpu()]
        samples.write_samples(expand_path(config.output_dir), data.heldout.texts, texts, data.nearest_texts(sampled))
    figures = text_latent.figures_from_sums(sums, options.timesteps)
    logs.info(logger, *text_latent.summary(figures))
    report.write_report(accelerator, expand_path(config.output_dir), step, figures)
    return figures


# ------------------------------------------------------------------------------------------------------------ main
def main(argv: Sequence[str]) -> int:
    """Every process runs it. Raises ``UsageError`` (exit code 2) before anything is built."""
    config = load_config(Config, argv, presets=Path(__file__).parent / "presets").config
    trackers.resolve_trackers(config.log.trackers)
    accelerator = machine.build_accelerator(
        precision=config.precision,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        max_grad_norm=config.optimizer.max_grad_norm,
        collective_timeout_seconds=config.collective_timeout_seconds,
    )
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    logs.setup_logging(expand_path(config.output_dir), rank, world_size)
    loader.resolve_loader(config.loader, device)
    barrier = accelerator.wait_for_everyone
    data = prepare.prepare_data(config.data, rank=rank, world_size=world_size, barrier=barrier, device=str(device))
    order = sampler.StepSampler(len(data.train), config.global_batch_size, config.seed)
    max_steps = config.max_steps or math.ceil((config.max_epochs or 0) * len(data.train) / config.global_batch_size)
    decay_steps = schedules.resolve_decay_steps(config.schedule, max_steps)
    run = runs.open_run(config, accelerator, data.fingerprint, {"schedule.decay_steps": decay_steps})
    decay_steps = run.resolved("schedule.decay_steps")  # that of the first start: a raised max_steps holds the floor
    uneven = sampler.notices(config.global_batch_size, world_size, config.micro_batch_size)
    floor = schedules.notices(config.schedule, decay_steps, max_steps)
    logs.info(logger, *data.notices, *uneven, *floor, run.decision)
    if run.start_step >= max_steps and not config.evaluate_only:
        logs.info(logger, f"the run is finished: step {run.start_step} of {max_steps}; raise --max_steps to go on")
        logs.info(logger, "no evaluation.json there? --evaluate_only writes it")
        return 0

    torch.manual_seed(config.seed)  # the same initial weights on every process
    shape = config.model.multimodal(data.tokenizer.vocab_size, config.data.max_length, data.latent_shape)
    model: nn.Module = mmdit.MultimodalMMDiT(shape)
    restore.load_initial_weights(model, run)
    strategy, parts = machine.strategy_of(accelerator), modes.freezable(config.modes)
    optimizer, reason = optimizers.build_optimizer(
        model, config.optimizer, device, parts, strategy=strategy, precision=config.precision
    )
    masters = shards.exact_masters(model, config.precision)
    model, optimizer = accelerator.prepare(model, optimizer)
    weights = shards.Shards(model, optimizer, masters)
    average = ema.Ema(config.ema, weights)
    restore.restore(run, accelerator, weights, average)
    wrapped = machine.verify_prepared(accelerator, model, config.optimizer.max_grad_norm)
    logs.info(logger, wrapped, reason, accumulation.resolve_sync(config.sync, accelerator)[1])
    if config.evaluate_only:
        evaluate(config, accelerator, model, average, data, run.start_step)
        return 0

    def write_extras(directory: Path) -> None:
        """What sampling from the checkpoint needs beside the weights."""
        records.write_json(directory / "config.json", to_tree(shape))
        data.assets.save(directory / "assets")

    first, tree = run.start_step, to_tree(config)
    facts = {"run_id": run.run_id, "strategy": strategy}
    log = recorder.Recorder(
        accelerator, run.directory, config.log, max_steps=max_steps, start_step=first, config=tree, facts=facts
    )
    saver = state.Saver(
        accelerator, run, average, config.checkpoints, config.hub, write_extras, epoch=order.epoch, on_commit=log.saved
    )
    cut = sampler.Cut(rank, world_size, config.micro_batch_size)
    steps = loader.iterate_steps(
        data.train, order, cut, start_step=first, max_steps=max_steps, device=device, config=config.loader
    )
    rates = throughput.Throughput(device, world_size=world_size, precision=config.precision)
    batch_size = config.global_batch_size
    step_flops = 3 * batch_size * flops.flops_per_sample(shape, config.data.max_length, shape.max_latent_length)
    stop, done = False, first
    with log, closing(steps), saver:
        for batches in steps:
            step, done = batches.step, batches.step + 1
            mode = modes.mode_of_step(config.modes, config.seed, step)
            optimizers.set_frozen(optimizer, modes.frozen_parts(config.modes, step))
            optimizers.set_learning_rate(optimizer, schedules.learning_rate_factor(config.schedule, step, decay_steps))

            corrupted = [corrupt(config, batch, step, data.tokenizer.mask_id) for batch in batches.micro_batches]
            coefficients = modes.coefficients(config.modes, mode)
            window = accumulation.GradientWindow(accelerator, model, corrupted, coefficients, step, config.sync)
            for inputs in window:  # gradients stay local until the last micro-batch
                window.backward(loss_sums(config, model, inputs, data.tokenizer.mask_id))
            result = window.finish(config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            average.update(step)

            rates.update(
                samples=batch_size,
                tokens=result.weights["tokens"],
                padded_tokens=batch_size * config.data.max_length,
                data_wait_seconds=batches.data_wait_seconds,
                flops=step_flops,
            )
            log.advance(done)
            if log.due(done):
                lr, epoch = optimizer.param_groups[0]["lr"], order.epoch(done)
                log.train(
                    done, result.fields() | rates.read() | {"lr": lr, "epoch": epoch, "global_batch_size": batch_size}
                )
            stop, figures = saver.boundary(done), dict[str, float]()  # asked to stop: all processes, at one step
            if config.evaluation.due(done, max_steps) and not stop:
                with rates.pause():
                    figures = evaluate(config, accelerator, model, average, data, done)
                    log.evaluation(done, figures)
            if stop or saver.due(done, max_steps):
                with rates.pause():
                    stop = saver.save(done, figures)
            if stop:
                break
    accelerator.end_training()
    if stop:
        logs.info(logger, f"stopped at step {done} of {max_steps} and saved; start again to go on (exit code 75)")
        return signals.EXIT_PREEMPTED
    logs.info(logger, f"finished: {run.directory} holds the checkpoint, evaluation.json, curves.png and samples.md")
    return 0


if __name__ == "__main__":
    run_main(main)
