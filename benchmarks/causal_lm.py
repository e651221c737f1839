"""recipes/causal_lm.py against HuggingFace's Trainer: equal losses, and the ratio of their throughput.

    python -m benchmarks.causal_lm --output benchmarks/results/causal_lm_cpu.json

Both train the model of `causal_lm_demo` from the same initial weights on packed rows in the same order: fp32, AdamW
without weight decay at a constant learning rate, gradients clipped to norm 1, four micro-batches per step. The Trainer
computes the loss of transformers and divides it by the tokens of the step. The two alternate, the recipe in a process
of its own, with one thread each unless OMP_NUM_THREADS is set. Throughput covers the steps after the first ten. Ours
logs every ten steps, the Trainer never; the losses are from another run of ours that logs every step. Processor time is
meaningful on a busy machine too. Ours is the difference between a whole run and one of a third of its steps, since both
start, save and evaluate alike.

The loss alone, forward and backward in bf16 with the vocabulary of Qwen3, is compared with torch's cross entropy of an
fp32 copy of the logits. `model.loss_chunk` is compared with computing all logits at once, in a model with the
proportions of Qwen3-0.6B at a quarter of its width: forward and backward of one row under bf16 autocast, with full
activation checkpointing, as where memory is short.
"""

from __future__ import annotations

import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel_train.data.sampler import StepSampler
from accel_train.domains.language import perplexity, prepare, pretrained
from accel_train.domains.language.language_model import LanguageModel
from accel_train.domains.language.packing import IGNORED
from accel_train.domains.language.prepare import DataConfig, LanguageData
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.metrics.records import read_metrics
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.options import ActivationCheckpointingConfig
from benchmarks.activation_checkpointing import Memory
from benchmarks.method import Row, in_turns, largest, largest_difference, on_cpu, parser_of, row, write_results

ROOT = Path(__file__).parents[1]
ROWS, MICRO_ROWS = 16, 4
LEARNING_RATE = 1e-3
SKIPPED = 10
SIZES = ModelConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4)
"""Sizes of the preset causal_lm_demo."""
QUARTER = ModelConfig(
    config="qwen3",
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
"""Sizes of Qwen3-0.6B at a quarter of its width."""


def data_of(folder: Path, path: str) -> DataConfig:
    """Return the data options of both contenders, with the tokenizer of ``folder / "model"`` if it exists."""
    made = (folder / "model" / "tokenizer.json").exists()
    tokenizer = str(folder / "model") if made else None
    return DataConfig(path=path, max_length=128, tokenizer=tokenizer, cache_dir=str(folder / "cache"))


def write_model(folder: Path, path: str, sizes: ModelConfig) -> None:
    """Write initial weights and tokenizer to ``folder / "model"``, in the format of transformers."""
    data = prepare.prepare_data(data_of(folder, path), sizes)
    config = pretrained.resolve_config(sizes, data.tokenizer, 128)
    torch.manual_seed(0)
    model: Any = pretrained.build(sizes, config, load_source=False)
    model.save_pretrained(folder / "model")
    data.tokenizer.save_pretrained(folder / "model")


def ours(folder: Path, path: str, steps: int, log_every: int = 1) -> dict[str, Any]:
    """Train with the recipe in a subprocess; return its losses, processor seconds and samples per second."""
    config = folder / "ours.yaml"
    config.write_text(
        f"output_dir: {folder / 'ours'}\nglobal_batch_size: {ROWS}\nmicro_batch_size: {MICRO_ROWS}\n"
        f"max_steps: {steps}\nmodel: {{source: {folder / 'model'}}}\n"
        f"data: {{path: {path}, max_length: 128, cache_dir: {folder / 'cache'}}}\n"
        f"optimizer: {{lr: {LEARNING_RATE}, weight_decay: 0.0, max_grad_norm: 1.0}}\n"
        "schedule: {kind: constant, warmup_steps: 0}\nema: {decay: 0.0}\n"
        f"log: {{log_every: {log_every}, progress_bar: 'off'}}\nevaluation: {{samples: 1, shown: 0}}\n"
    )
    command = [sys.executable, str(ROOT / "recipes" / "causal_lm.py"), str(config), "--overwrite"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [r for r in read_metrics(folder / "ours" / "metrics.jsonl") if r["event"] == "train"]
    # Wall time between log lines, logging included: the same clock as for the Trainer.
    timed = [line for line in lines if line["step"] > SKIPPED] or lines[-1:]
    return {
        "losses": [line["loss"] for line in lines],
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        # All samples over all time, as for the Trainer. A median would hide slow steps.
        "samples_per_second": statistics.harmonic_mean([line["samples_per_second"] for line in timed]),
    }


def trainer(folder: Path, path: str, steps: int) -> dict[str, Any]:
    """Train with the Trainer in this process, on rows in the order of our sampler; return the same metrics per step."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    logging.getLogger("transformers").setLevel(logging.ERROR)
    source = ModelConfig(source=str(folder / "model"))
    data = prepare.prepare_data(data_of(folder, path), source)
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(folder / "model", dtype=torch.float32)
    losses: list[float] = [0.0]
    times: list[float] = []
    cpu_times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(time.perf_counter())
            cpu_times.append(time.process_time())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            losses.append(0.0)

    class Loop(Trainer):
        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss: Any = super().compute_loss(*arguments, **named)
            losses[-1] += float(loss.detach())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return None  # in order

    given: Any = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, learning_rate=LEARNING_RATE, weight_decay=0.0,
        lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0,
        per_device_train_batch_size=MICRO_ROWS, gradient_accumulation_steps=ROWS // MICRO_ROWS, use_cpu=True,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    Loop(model, given, train_dataset=in_order(data, steps), callbacks=[Clock()]).train()
    times.append(time.perf_counter())
    cpu_times.append(time.process_time())
    first = min(SKIPPED, len(times) - 2)
    timed = times[first:]
    return {
        "losses": losses[:steps],
        "samples_per_second": ROWS * (len(timed) - 1) / (timed[-1] - timed[0]),
        "cpu_seconds_per_step": (cpu_times[-1] - cpu_times[first]) / (len(timed) - 1),
    }


def in_order(data: LanguageData, steps: int) -> list[dict[str, Any]]:
    """Return the rows of ``steps`` steps in the order of the recipe's sampler, with the inputs of the model only."""
    sampler = StepSampler(len(data.train), ROWS, 0)
    rows = [data.train[draw.sample] for step in range(steps) for draw in sampler.draws(step)]
    return [{name: row[name] for name in ("input_ids", "labels", "position_ids")} for row in rows]


def measure(folder: Path, path: str, steps: int, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Train with both, alternating for ``rounds`` rounds; return rows and details."""
    write_model(folder, path, SIZES)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    losses = ours(folder, path, steps)["losses"]
    # 10 is the default of log.log_every. With windows of equal length the harmonic mean of rates is the overall rate.
    log_every = min(10, steps // 3)
    for _ in range(rounds):
        short = ours(folder, path, steps // 3, log_every)
        whole = ours(folder, path, steps, log_every)
        seconds = whole["cpu_seconds"] - short["cpu_seconds"]
        whole["cpu_seconds_per_step"] = seconds / (steps - steps // 3)
        pairs.append((whole, trainer(folder, path, steps)))
    differences = [largest_difference(losses, b["losses"]) for _, b in pairs]
    speedups = [a["samples_per_second"] / b["samples_per_second"] for a, b in pairs]
    cpu_times = [b["cpu_seconds_per_step"] / a["cpu_seconds_per_step"] for a, b in pairs]
    loss = f"largest relative difference of the losses of {steps} steps"
    rows = [
        row("causal_lm", loss, largest(differences), "", target="<= 1e-4"),
        row("causal_lm", "samples per second of wall time, ours over the Trainer", speedups, target=">= 1"),
        row("causal_lm", "processor time of a step, the Trainer over ours", cpu_times),
    ]
    per_second = [{"ours": a["samples_per_second"], "trainer": b["samples_per_second"]} for a, b in pairs]
    return rows, {"steps": steps, "samples_per_second": per_second}


def plain_loss(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the cross entropy of each token from an fp32 copy of the logits, as most scripts compute it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), expected.flatten(), ignore_index=IGNORED, reduction="none")


def measure_loss(tokens: int, vocabulary: int, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Compare memory and time of our loss and its gradient with torch's; return rows and details."""
    torch.manual_seed(0)
    logits = torch.randn(1, tokens, vocabulary).bfloat16().requires_grad_()
    expected = torch.randint(vocabulary, (1, tokens))
    ways = {
        "ours": lambda: torch.autograd.grad(perplexity.losses(logits.flatten(0, 1), expected.flatten()).sum(), logits),
        "torch": lambda: torch.autograd.grad(plain_loss(logits, expected).sum(), logits),
    }
    peaks: dict[str, int] = {}
    for name, way in ways.items():
        with Memory() as memory:
            way()
        peaks[name] = memory.peak
    times = in_turns(ways, rounds, warm_up=1)
    name = f"loss of {tokens:,} tokens over a vocabulary of {vocabulary:,} in bf16"
    rows = [
        row(
            "causal_lm",
            f"{name}: most memory beside the logits, over torch's cross entropy",
            peaks["ours"] / peaks["torch"],
        ),
        row("causal_lm", f"{name}: processor time over torch's cross entropy", times.ratios("ours", "torch")),
    ]
    return rows, {"bytes": peaks, **times.summary()}


def measure_chunks(tokens: int, sizes: ModelConfig, vocabulary: int, chunk: int, rounds: int) -> list[Row]:
    """Compare forward and backward with the loss in chunks to all logits at once; return rows of memory and time."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(sizes.config, vocab_size=vocabulary, head_dim=32, **sizes.sizes)
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(vocabulary, (1, tokens))}
    expected = batch["input_ids"].roll(-1)

    def way(of: int) -> Callable[[], None]:
        module = pretrained.build(replace(sizes, loss_chunk=of), config, load_source=False)
        apply_activation_checkpointing(module, ActivationCheckpointingConfig(mode="full"))
        model = LanguageModel(module, packing=False, attention="sdpa", loss_chunk=of)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                found = model.of_tokens(batch, expected, perplexity.losses)
            found.sum().backward()

        return step

    ways = {"chunks": way(chunk), "whole": way(0)}
    times = in_turns(ways, rounds, warm_up=1)
    peaks: dict[str, int] = {}
    for name, each in ways.items():
        with Memory() as memory:
            each()
        peaks[name] = memory.peak
    name = f"model.loss_chunk {chunk} over all {tokens:,} tokens at once, vocabulary of {vocabulary:,}"
    return [
        row("causal_lm", f"{name}: most memory beside weights and gradients", peaks["chunks"] / peaks["whole"]),
        row("causal_lm", f"{name}: processor time of forward and backward", times.ratios("chunks", "whole")),
    ]


def main() -> int:
    """Measure, print and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--path", default="demo")
    options = parser.parse_args()
    on_cpu()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    steps = 6 if options.tiny else options.steps
    rounds = 1 if options.tiny else options.rounds
    with tempfile.TemporaryDirectory() as name:
        rows, details = measure(Path(name), options.path, steps, rounds)
    loss_rows, details["loss"] = measure_loss(*((16, 512) if options.tiny else (2048, 151_936)), 5 * rounds)
    rows += loss_rows
    chunk_sizes = (16, SIZES, 512, 4) if options.tiny else (2048, QUARTER, 37_984, 512)
    rows += measure_chunks(*chunk_sizes, rounds)
    return 0 if write_results(options.output, "Language models beside HuggingFace's Trainer", rows, details) else 1


if __name__ == "__main__":
    sys.exit(main())
