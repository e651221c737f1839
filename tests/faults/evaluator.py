"""A small recipe whose evaluation raises or does not end. Run by ``trainers`` in place of the trainer: ``FAULT_PATCH``
is ``INSTEAD``. The environment says what goes wrong: RAISE_AT, LAST_AT and END_AT name a step, RAISE_RANK a rank,
FORGOTTEN a call of the loop, DATA other data. With BASELINE an evaluation precedes the first step. With LACKS_AT the
recipe declares its metrics, and the evaluation after that step lacks one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train import experiment, loop, preparation, startup
from accel_train.config import NonNegativeInt
from accel_train.data import sampler
from accel_train.metrics import evaluation
from accel_train.options.loading import load_config
from accel_train.train_state import TrainState
from accel_train.training import optimizers
from tests.faults.trainer import append

PRESETS = Path(__file__).parent
INSTEAD = "from tests.faults import evaluator, trainer; trainer.main = evaluator.main"


@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """Evaluated trainer."""

    evaluate_every: NonNegativeInt = 5


class Numbers:
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.arange(8).add(index).sin()}


def asked(name: str, default: int = -1) -> int:
    """A number from the environment: no option, which would be part of the experiment."""
    return int(os.environ.get(name, default))


def evaluate(config: Config, prepared: TrainState, step: int) -> dict[str, float]:
    """The distance of the weights from 0, and a line in the file ``evaluations.txt``."""
    out = Path(config.output_dir)
    accelerator = prepared.accelerator
    forward = evaluation.interruptible(prepared.model)
    if accelerator.is_main_process:
        append(out / "evaluations.txt", str(step))
    with evaluation.evaluating(prepared.model, prepared.ema):
        while True:
            value = forward(torch.ones(1, 8))
            if step != asked("LAST_AT"):
                break
            time.sleep(0.01)
    if (step, accelerator.process_index) == (asked("RAISE_AT"), asked("RAISE_RANK", 0)):
        raise RuntimeError("the evaluation's own mistake")
    metrics = {"distance": float(value.abs().sum()), "worst_at_ten": -abs(step - 10.0)}
    if step == asked("LACKS_AT"):
        del metrics["worst_at_ten"]
    return metrics


def main(argv: Sequence[str]) -> int:
    config = load_config(Config, argv, presets=PRESETS, default_preset="evaluator").config
    accelerator = startup.start(config)
    data = Numbers()
    order = sampler.StepSampler(len(data), config.global_batch_size, config.seed)
    version = os.environ.get("DATA", data.fingerprint)
    declared = ["distance", "worst_at_ten"] if "LACKS_AT" in os.environ else None
    opened = experiment.open_experiment(
        config, accelerator, dataset_size=len(data), fingerprint=version, metrics=declared
    )
    if opened.finished:
        return experiment.nothing_to_do(opened)
    torch.manual_seed(config.seed)
    prepared = preparation.prepare(opened, nn.Linear(8, 1))
    model, optimizer = prepared.model, prepared.optimizer
    if opened.only_evaluates:
        return loop.evaluate_only(opened, partial(evaluate, config, prepared, opened.start_step))
    forgotten = os.environ.get("FORGOTTEN")
    result: Any = None
    with loop.training(opened, prepared, data, order) as training:
        if "BASELINE" in os.environ:
            training.evaluate(partial(evaluate, config, prepared, training.done))
        for batches in training:
            if forgotten != "set_learning_rate":
                optimizers.set_learning_rate(optimizer, opened.learning_rate_factor(batches.step))
            weighed = [(batch, batch["weight"].sum()) for batch in batches.micro_batches]
            window = prepared.window(weighed, {"main": 1.0}, batches.step)
            for batch in window:
                window.backward((model(batch["x"]).square()[:, 0] * batch["weight"]).sum())
            if forgotten != "window.finish" and (forgotten != "second window.finish" or batches.done == 1):
                result = window.finish(1.0)
            if forgotten != "optimizer.step":
                optimizer.step()
            if forgotten == "second optimizer.step":
                optimizer.step()
            optimizer.zero_grad()
            if forgotten != "prepared.ema.update":
                prepared.ema.update(batches.step)
            if forgotten != "training.report":
                training.report(batches, result)
            if forgotten != "training.save_if_due":
                training.save_if_due(result)
            if batches.done % config.evaluate_every == 0 or batches.done == opened.max_steps:
                training.evaluate(partial(evaluate, config, prepared, batches.done))
            if batches.done == asked("END_AT"):
                training.end()
    return loop.finish(training)
