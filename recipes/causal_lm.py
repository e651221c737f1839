"""Train a causal language model from transformers: from scratch, or from pretrained weights.

    accelerate launch recipes/causal_lm.py                                    # a small Llama on Shakespeare, offline
    accelerate launch recipes/causal_lm.py causal_lm_tune --model.source Qwen/Qwen3-0.6B --data.path chats.jsonl

Texts are packed into rows, and attention stays within each text. Every token in the loss has the same weight, on any
number of processes and with any micro-batch.
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

from accel_train import experiment, loop, preparation, startup
from accel_train.checkpoints.run import earlier_assets
from accel_train.data.loader import StepBatches
from accel_train.data.sampler import StepSampler
from accel_train.domains.language import (
    adapted,
    flops,
    language_model,
    perplexity,
    pipeline,
    prepare,
    pretrained,
    row_checks,
    samples,
    showing,
    sources,
)
from accel_train.domains.models.lora import LoraConfig, describe_lora
from accel_train.frozen_weights import pinned
from accel_train.metrics import evaluation, logs
from accel_train.metrics.progress import Labels
from accel_train.options.loading import load_config
from accel_train.train_state import TrainState
from accel_train.training.accumulation import Batch
from accel_train.training.optimizers import set_learning_rate
from accel_train.training.shards import plain_module

logger = logging.getLogger("recipes.causal_lm")
PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "causal_lm_demo"
OWN_ROWS = (
    "train it on your own rows: accelerate launch recipes/causal_lm.py --data.path FILE.txt --output_dir runs/mine",
    "tune a pretrained model: accelerate launch recipes/causal_lm.py causal_lm_tune --model.source NAME --lora.rank 16 "
    "--optimizer.lr 2e-4 --data.path FILE.jsonl --output_dir runs/tuned",
)


# ---------------------------------------------------------------------------------------------------------- config
@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """Causal language model from transformers, on plain text, completions or chats."""

    recipe: ClassVar = experiment.Recipe(
        free_to_change=("evaluation", "data.cache_dir", "data.changed", "model.loss_chunk"),
        labels=Labels(
            units={"nll": "nats per token", "accuracy": "fraction"},
            titles={"nll": "NLL"},
            baselines=perplexity.BASELINES,
            own_summary=True,
        ),
        decides_shapes=("lora.rank", "lora.targets"),
        one_loss_term=True,
        decided_by={"nll": "min"},
        first_options=("model.source", "lora.rank", "data.path", "data.max_length", "data.packing", "evaluation.every"),
        base_option="model.source",
        pipeline=pipeline.LanguagePipeline,
        text_rows=showing.text_rows,
        smoke={"evaluation.samples": 2, "evaluation.shown": 1, "evaluation.max_new_tokens": 4},
    )

    output_dir: str = "runs/causal-lm-demo"
    model: pretrained.ModelConfig = field(default_factory=pretrained.ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: prepare.DataConfig = field(default_factory=prepare.DataConfig)
    evaluation: samples.EvaluationConfig = field(default_factory=samples.EvaluationConfig)

    def __post_init__(self) -> None:
        pretrained.refuse_adapters_without_source(self.model, self.lora)
        self.data.refuse_beside(self.model.source)


# ------------------------------------------------------------------------------------------------------------ loss
# A batch holds input_ids, labels and position_ids (B, S), and what the loader adds: weight, sample ... (B,).
def weigh(batch: Batch) -> tuple[Batch, Tensor]:
    """Return the model's inputs, and the weight of each row in the loss: the number of tokens that count."""
    return batch, perplexity.trained_tokens(batch)


def loss_sums(model: language_model.LanguageModel, batch: Batch) -> Tensor:
    """Sum the loss over the tokens of each row, (B,) fp32. The window divides by the tokens of the global batch."""
    return model.of_tokens(batch, perplexity.targets(batch), perplexity.losses).sum(-1)


def work(batches: StepBatches, flops_per_token: int) -> dict[str, Tensor | int]:
    """Count this process's part of a step, for the throughput."""
    shapes = [batch["input_ids"].shape for batch in batches.micro_batches]
    computed = sum(rows * length for rows, length in shapes)
    tokens = sum(perplexity.real_tokens(batch) for batch in batches.micro_batches)
    return {"tokens": tokens, "padded_tokens": computed, "flops": flops_per_token * computed}


# ------------------------------------------------------------------------------------------------------ evaluation
def evaluate(
    config: Config,
    prepared: TrainState,
    model: language_model.LanguageModel,
    data: prepare.LanguageData,
    step: int,
) -> dict[str, float]:
    """Compute held-out perplexity and write samples.md, with the EMA weights. Every process calls it."""
    options = config.evaluation
    batch_size = options.batch_size or config.micro_batch_size
    accelerator = prepared.accelerator
    unigram = data.unigram.to(accelerator.device)
    with evaluation.evaluating(prepared.model, prepared.ema):
        batches = evaluation.heldout_batches(accelerator, data.heldout, options.samples, batch_size)

        def sums_of(batch: Batch) -> dict[str, Tensor]:
            expected = perplexity.targets(batch)
            found = model.of_tokens(batch, expected, perplexity.losses_and_hits)
            return perplexity.metric_sums(found, expected, unigram)

        sums = evaluation.weighted_sums(accelerator, batches, sums_of)
        module = plain_module(prepared.model)
        written = samples.write(
            module,
            data,
            options,
            config.seed,
            processes=accelerator.num_processes,
        )
    metrics = perplexity.metrics_from_sums(sums)
    if accelerator.is_main_process:
        samples.report(prepared.report_directory, written, step)
    logs.info(logger, perplexity.summary(metrics))
    return metrics


# ------------------------------------------------------------------------------------------------------------ main
def save_extras(
    config: Config, model_config: pretrained.ModelConfig, plain: nn.Module, tokenizer: Any, directory: Path
) -> None:
    """Write the files for generation from the checkpoint, beside its weights."""
    precision = config.lora.base_precision
    pipeline.write_files(plain, tokenizer, model_config, config.evaluation, config.data.paths, precision, directory)


def next_steps(config: Config) -> Sequence[str]:
    """Return what to try after the demo."""
    return OWN_ROWS if config.data.path == "demo" else ()


@one_run
def main(argv: Sequence[str]) -> int:
    """Train, resume or evaluate. Every process runs it. Usage errors are reported before a model is built."""
    config = load_config(Config, argv, presets=PRESETS, default_preset=DEFAULT_PRESET).config
    accelerator = startup.start(config)
    model_config = pinned(accelerator, config.model, "model.revision", config.run_options(), sources.at_commit)
    preparing = partial(prepare.prepare_data, config.data, model_config, earlier=earlier_assets(config.run_options()))
    data = startup.prepare_data(accelerator, preparing)
    order = StepSampler(len(data.train), config.global_batch_size, config.seed, more=data.more_samples)
    hf_config = pretrained.resolve_config(model_config, data.tokenizer, config.data.max_length)
    opened = experiment.open_on_data(config, accelerator, data, notices=data.notices, metrics=perplexity.METRICS)
    if opened.finished:
        return experiment.nothing_to_do(opened)

    adapted.refuse_other_meaning(opened.run.initial_weights, data.tokenizer, config.lora)
    pretrained.refuse_other_config(model_config, hf_config, opened.run.checkpoint)
    # Weights other than the source's are loaded later, from a checkpoint or from init_from.
    fresh = opened.run.has_no_weights
    build = partial(pretrained.build, model_config, hf_config, load_source=fresh, adapters=config.lora)
    plain = preparation.build_model(opened, build, precision=config.precision, device=accelerator.device)
    # Tokens of a micro-batch. Their logits may take more memory than everything else.
    tokens = opened.micro_batch_size * config.data.max_length
    logs.info(
        logger,
        *describe_lora(plain, config.lora),
        *row_checks.check_rows(plain, packing=config.data.packing, loss_chunk=config.model.loss_chunk),
        *language_model.notices(plain, config.model.loss_chunk, tokens, config.precision),
        *data.end_answers(plain),
    )
    flops_per_token = flops.training_flops_per_token(plain, config.data.max_length)
    example = partial(row_checks.attention_example, packing=config.data.packing)
    prepared = preparation.prepare(opened, plain, base=sources.base_of(model_config, config.lora), example=example)
    attention = pretrained.attention_of(plain)
    model = language_model.LanguageModel(prepared.model, config.data.packing, attention, config.model.loss_chunk)
    run_evaluation = partial(evaluate, config, prepared, model, data)
    if opened.only_evaluates:
        return loop.evaluate_only(opened, partial(run_evaluation, opened.start_step))

    write_extras = partial(save_extras, config, model_config, plain, data.tokenizer)
    with loop.training(opened, prepared, data.train, order, write_extras) as training:
        for batches in training:
            set_learning_rate(prepared.optimizer, opened.learning_rate_factor(batches.step))

            weighted = [weigh(batch) for batch in batches.micro_batches]
            window = prepared.window(weighted, {"nll": 1.0}, batches.step)
            # Gradients stay local until the last micro-batch.
            for batch in window:
                window.backward(loss_sums(model, batch))
            result = window.finish(config.optimizer.max_grad_norm)
            prepared.optimizer.step()
            prepared.optimizer.zero_grad()
            prepared.ema.update(batches.step)

            training.report(batches, result, **work(batches, flops_per_token))
            # Save before the evaluation, so that a failing one loses nothing.
            training.save_if_due(result)
            if config.evaluation.due(batches.done, opened.max_steps):
                training.evaluate(partial(run_evaluation, batches.done))
    code = loop.finish(training)
    logs.info(logger, *next_steps(config))
    return code


if __name__ == "__main__":
    run_main(main)
