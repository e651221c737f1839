"""Table of the loss terms of a latent operator, and the forward that the terms of a step share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from accel_train.data.datasets import Batch
from accel_train.domains.pde import fields
from accel_train.domains.pde.data.assets import FieldTask
from accel_train.domains.pde.residual import refinement
from accel_train.domains.pde.residual.network import ResidualGuess
from accel_train.domains.pde.transformer import PREDICTION, Parts

Need = Literal["target", "operator", "prediction", "reconstruction", "reencoding", "correction"]


@dataclass(frozen=True)
class Forward:
    """A micro-batch with the model's output."""

    inputs: Batch
    task: FieldTask
    output: Any
    """A `PdeOutput`, or a `Prediction` if a term needs the correction."""

    @cached_property
    def predicted(self) -> Tensor:
        """Prediction (B, C', Q) at the points of ``inputs["query_target"]``."""
        # Sliced once for all terms, so their gradients are always added in the same order.
        return self.output.prediction[..., : self.queries]

    @property
    def queries(self) -> int:
        """Number of query points Q, without the boundary term's points that follow them."""
        return self.inputs["query_target"].shape[-1]


@dataclass(frozen=True)
class Term:
    """One term of the loss."""

    losses: Callable[[Forward], Tensor]
    """Loss of each sample, (B,) fp32."""
    needs: tuple[Need, ...]
    """Outputs required from the forward, as in `Parts`. target: the encoding of the target. correction: the prediction
    without gradient and the network for its residual."""


def _prediction(forward: Forward) -> Tensor:
    return fields.squared_error(forward.predicted, forward.inputs["query_target"])


def _spectral(forward: Forward) -> Tensor:
    # The whole grid is decoded: the options refuse `queries` with this term and with `_conservation`.
    predicted = forward.predicted.unflatten(-1, forward.task.grid)
    return fields.spectral_loss(predicted, forward.inputs["target"])


def _conservation(forward: Forward) -> Tensor:
    input_scale, target_scale = forward.task.common_scales()
    # In fp32: bf16 would round the mean of the predicted fields, but not that of the input.
    predicted = target_scale.denormalise(forward.predicted.float(), 1)
    input = input_scale.denormalise(forward.inputs["query_input"], 1)
    return fields.conservation_gap(predicted, input, input_scale)


def _boundary(forward: Forward) -> Tensor:
    edge = forward.output.prediction[..., forward.queries :]
    # The boundary is 0 in physical units, which is another number once normalised.
    zero = forward.task.target.normalise(torch.zeros_like(edge), 1)
    return fields.squared_error(edge, zero)


def _latent(forward: Forward) -> Tensor:
    # The target is detached: the encoder could lower this loss by making all latents alike.
    return fields.squared_error(forward.output.predicted_latent, forward.output.target_latent.detach())


def _reconstruction(forward: Forward) -> Tensor:
    """Add the errors of the decoded input and of the decoded target."""
    decoded_input = forward.output.input_reconstruction[..., : forward.queries]
    decoded_target = forward.output.target_reconstruction[..., : forward.queries]
    input_error = fields.squared_error(decoded_input, forward.inputs["query_input"])
    target_error = fields.squared_error(decoded_target, forward.inputs["query_target"])
    return torch.stack([input_error, target_error]).sum(0)


def _reencoding(forward: Forward) -> Tensor:
    # Detached for the same reason as in `_latent`.
    return fields.squared_error(forward.output.reencoded, forward.output.target_latent.detach())


def _residual(forward: Forward) -> Tensor:
    inputs = forward.inputs
    predicted, log_size, correct = forward.output
    assert log_size is not None, "checks.check_residual requires the network"
    residual = inputs["target"] - predicted
    return refinement.losses(correct, residual, log_size, inputs["time"], inputs["noise"])


TERMS: Mapping[str, Term] = {
    "prediction": Term(_prediction, ("prediction",)),
    "spectral": Term(_spectral, ("prediction",)),
    "conservation": Term(_conservation, ("prediction",)),
    "boundary": Term(_boundary, ("prediction",)),
    "latent": Term(_latent, ("operator", "target")),
    "reconstruction": Term(_reconstruction, ("reconstruction", "target")),
    "reencoding": Term(_reencoding, ("reencoding", "target")),
    "residual": Term(_residual, ("correction",)),
}
"""All terms by name. docs/recipes.md, "Adding a loss term or an option", lists the other places to extend."""


def needs_of(terms: Collection[str]) -> set[Need]:
    """Collect the outputs required by these terms together."""
    return {need for term in terms for need in TERMS[term].needs}


def parts_of(terms: Collection[str], *, train_encoder: bool) -> Parts | None:
    """Return the parts of the forward for these terms. None: the residual stage, with a prediction without gradient."""
    needs = needs_of(terms)
    if "correction" in needs:
        return None
    return Parts(
        reconstruction="reconstruction" in needs,
        reencoding="reencoding" in needs,
        operator=bool(needs & {"operator", "prediction"}),
        prediction="prediction" in needs,
        train_encoder=train_encoder,
    )


def forward_of(
    model: Callable[..., Any],
    inputs: Batch,
    number: int,
    task: FieldTask,
    terms: Collection[str],
    parts: Parts | None,
) -> Forward:
    """Run the model on a micro-batch of task ``number``, computing the outputs that ``terms`` require."""
    if parts is None:
        return Forward(inputs, task, predict(model, inputs, number, task.grid))
    target = inputs["target"] if "target" in needs_of(terms) else None
    output = model(
        inputs["input"],
        target,
        inputs["parameters"],
        inputs["dt"],
        number,
        queries=inputs.get("queries"),
        parts=parts,
        keep=inputs.get("keep"),
    )
    return Forward(inputs, task, output)


class Prediction(NamedTuple):
    """The next fields and a handle on their residual, the difference from the true ones."""

    fields: Tensor
    """(B, C', H, W) fp32."""
    log_size: Tensor | None
    """Logarithm of the residual's size, (C',). None: the model has no residual network."""
    correct: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Correct guesses (B, C', H, W) of the residual at times (B,), with gradients.

    Returns the corrections and the logarithm of the size.
    """


@torch.no_grad()
def predict(model: Callable[..., Any], batch: Batch, task: int, grid: tuple[int, int]) -> Prediction:
    """Predict from ``input`` (B, C, H, W), ``parameters`` (B, P) and ``dt`` (B,) of task number ``task``."""
    parameters = batch["parameters"]
    dt = batch["dt"]
    output = model(batch["input"], None, parameters, dt, task, None, PREDICTION)
    fields = output.prediction.unflatten(-1, grid).float()  # (B, C', H, W)

    def correct(guess: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        # It runs after `predict` has returned, outside its no_grad, so that the correction has gradients.
        given = ResidualGuess(guess, time, fields, batch["input"])
        corrected = model(given, None, parameters, dt, task)
        return corrected.residual, corrected.residual_size

    return Prediction(fields, output.residual_size, correct)


def stepper(
    model: Callable[..., Any], parameters: Tensor, dt: float, task: int, grid: tuple[int, int]
) -> Callable[[Tensor], Tensor]:
    """Return a step from fields (B, C, H, W) to those `dt` later, without refinement. `parameters` are (B, P)."""

    def step(state: Tensor) -> Tensor:
        batch = {
            "input": state,
            "parameters": parameters,
            "dt": torch.full((len(state),), dt, device=state.device),
        }
        return predict(model, batch, task, grid).fields

    return step


def predict_refined(
    model: Callable[..., Any],
    described: Mapping[str, Any],
    input: Tensor,
    parameters: Tensor,
    dt: Tensor,
    task: int,
    sample: Tensor,
) -> Tensor:
    """Predict normalised fields (B, C', H, W) from normalised ones, with the residual if the model has learned one.

    ``parameters`` (B, P) are normalised. ``sample`` (B,) int64 keys the noise of the residual. ``described`` is
    config.json.
    """
    batch = {"input": input, "parameters": parameters, "dt": dt}
    grid = described["tasks"][task]["grid"]
    fields, log_size, correct = predict(model, batch, task, tuple(grid))
    if log_size is None:
        return fields
    steps = described["sampler"]["residual_steps"]
    return refinement.refine(correct, fields, log_size, steps, described["sampler"]["seed"], sample)
