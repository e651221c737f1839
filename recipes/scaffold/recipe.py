"""Learn which ring of a target a point lies on: a complete recipe to start from. CHANGE marks what to replace."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from accel_train import experiment, loop, preparation, rng, startup
from accel_train.config import PositiveInt
from accel_train.data import datasets, sampler
from accel_train.options.loading import load_config
from accel_train.runtime.exiting import one_run, run_main
from accel_train.store.run_file import experiment_options
from accel_train.store.weights import best_stem, load_weights
from accel_train.training import optimizers


# CHANGE: the data. Anything with a length that returns a dict of tensors for an index.
def points(count: int, stream: str) -> list[dict[str, Tensor]]:
    places = rng.normal(rng.sample_keys(0, stream, 0, torch.arange(count)), (2,))
    return [{"place": place, "ring": (2 * place.norm()).long().clamp(max=4)} for place in places]


# CHANGE: the model. No dropout layers: draw masks with `rng`, which depend on the sample and not on the process.
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(x))


class RingModel(nn.Sequential):
    _no_split_modules: ClassVar = ["Block"]  # FSDP2 shards each of these as one unit


def build_model(width: int) -> nn.Module:
    return RingModel(nn.Linear(2, width), nn.GELU(), Block(width), Block(width), nn.Linear(width, 5))


# Use. CHANGE: the options and the answer of `accel-train sample --recipe recipe.py RUN` with a trained model.
@dataclass(frozen=True)
class Question:
    """On which ring of the target does a point lie?"""

    place: tuple[float, float] = (0.0, 0.0)
    """The two coordinates of the point."""
    device: str = "cpu"
    """Device of torch."""


class RingPipeline:
    options: ClassVar = Question

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()

    @classmethod
    def from_directory(cls, directory: Path, device: str = "cpu") -> "RingPipeline":
        model = build_model(experiment_options(directory)["width"])
        load_weights(directory, best_stem(directory), model)
        return cls(model.to(device))

    @torch.no_grad()
    def sample(self, options: Question) -> list[str]:
        logits = self.model(torch.tensor([options.place], device=options.device))
        return [f"ring {int(logits.argmax())}"]


# Config. CHANGE: your own options. Those of every recipe are inherited from ExperimentConfig.
@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """Learn which ring of a target a point lies on."""

    recipe: ClassVar = experiment.Recipe(pipeline=RingPipeline)
    width: PositiveInt = 64
    """Width of the hidden layers."""


# Loss and evaluation. CHANGE: loss and other metrics of each sample, (B,). Evaluations log them as heldout_NAME.
def metrics_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = model(batch["place"]).float()
    loss = nn.functional.cross_entropy(logits, batch["ring"], reduction="none")
    return {"loss": loss, "accuracy": (logits.argmax(-1) == batch["ring"]).float()}


@one_run
def main(argv: Sequence[str]) -> int:
    config = load_config(Config, argv, presets=Path(__file__).parent / "presets").config
    accelerator = startup.start(config)
    data, heldout = points(4000, "train"), points(1000, "heldout")
    order = sampler.StepSampler(len(data), config.global_batch_size, config.seed)
    version = datasets.fingerprint_of(data)  # reads all samples. CHANGE for large data: a text that changes with it
    opened = experiment.open_experiment(
        config, accelerator, dataset_size=len(data), fingerprint=version, metrics=["heldout_loss", "heldout_accuracy"]
    )
    if opened.finished:
        return experiment.nothing_to_do(opened)

    prepared = preparation.prepare(opened, preparation.build_model(opened, build_model, config.width))
    optimizer = prepared.optimizer
    evaluate = partial(loop.heldout_means, prepared, heldout, config.micro_batch_size, metrics_of)
    if opened.only_evaluates:
        return loop.evaluate_only(opened, evaluate)
    with loop.training(opened, prepared, data, order) as training:
        for batches in training:
            optimizers.set_learning_rate(optimizer, opened.learning_rate_factor(batches.step))
            weighted = [(batch, batch["weight"]) for batch in batches.micro_batches]
            # With several loss terms, weights and losses are dicts with a value for each.
            window = prepared.window(weighted, {"ring": 1.0}, batches.step)
            for batch in window:  # the window sums the losses and divides by the weights of all processes
                window.backward(metrics_of(prepared.model, batch)["loss"] * batch["weight"])
            result = window.finish(config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            prepared.ema.update(batches.step)
            training.report(batches, result)
            training.save_if_due(result)
            if batches.done % 100 == 0 or batches.done == opened.max_steps:
                training.evaluate(evaluate)
    return loop.finish(training)


if __name__ == "__main__":
    run_main(main)
