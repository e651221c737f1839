"""The loss terms of a latent operator, one entry of a table each, and the forward that they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from accel_train.domains.pde import fields, residual_diffusion
from accel_train.domains.pde.prediction import predict
from accel_train.domains.pde.rows import FieldTask
from accel_train.domains.pde.transformer import Parts

Need = Literal["target", "operator", "prediction", "reconstruction", "reencoding", "correction"]


@dataclass(frozen=True)
class Forward:
    """A micro-batch and what the model made of it."""

    inputs: Mapping[str, Tensor]
    task: FieldTask
    output: Any
    """A `PdeOutput`, or a `Prediction` where a term needs the correction."""

    @cached_property
    def predicted(self) -> Tensor:
        """(B, C', Q) at the points of ``inputs["sought"]``. Cut once, so that its gradients add up in one order."""
        return self.output.prediction[..., : self.inputs["sought"].shape[-1]]


@dataclass(frozen=True)
class Term:
    """One term of the loss."""

    losses: Callable[[Forward], Tensor]
    """Loss of each sample, (B,) fp32."""
    needs: tuple[Need, ...]
    """What the forward must compute, as in `Parts`; target: the encoding of the target; correction: the prediction
    without gradient, and the network that corrects it."""


def _prediction(forward: Forward) -> Tensor:
    return fields.squared_error(forward.predicted, forward.inputs["sought"])


def _spectral(forward: Forward) -> Tensor:
    return fields.spectral_loss(forward.predicted.unflatten(-1, forward.task.grid), forward.inputs["target"])


def _conservation(forward: Forward) -> Tensor:
    predicted = forward.task.target.denormalise(forward.predicted, 1)
    return fields.conservation_gap(predicted, forward.task.input.denormalise(forward.inputs["given"], 1))


def _boundary(forward: Forward) -> Tensor:
    edge = forward.output.prediction[..., forward.inputs["sought"].shape[-1] :]
    return fields.squared_error(edge, forward.task.target.normalise(torch.zeros_like(edge), 1))


def _latent(forward: Forward) -> Tensor:
    return fields.squared_error(forward.output.predicted_latent, forward.output.target_latent.detach())


def _reconstruction(forward: Forward) -> Tensor:
    """Of the encoded input and of the encoded target."""
    inputs, output, count = forward.inputs, forward.output, forward.inputs["sought"].shape[-1]
    decoded_input = fields.squared_error(output.input_reconstruction[..., :count], inputs["given"])
    decoded_target = fields.squared_error(output.target_reconstruction[..., :count], inputs["sought"])
    return torch.stack([decoded_input, decoded_target]).sum(0)


def _reencoding(forward: Forward) -> Tensor:
    return fields.squared_error(forward.output.reencoded, forward.output.target_latent.detach())


def _residual(forward: Forward) -> Tensor:
    inputs, (found, size, correct) = forward.inputs, forward.output
    assert size is not None, "Config has seen to it"
    return residual_diffusion.losses(correct, inputs["target"] - found, size, inputs["time"], inputs["noise"])


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
"""Every term. A new one is an entry here and a coefficient in ``operator_learning.coefficients``."""


def needs_of(terms: Collection[str]) -> set[Need]:
    """What the forward must compute for these terms together."""
    return {need for term in terms for need in TERMS[term].needs}


def parts_of(terms: Collection[str], *, train_encoder: bool) -> Parts | None:
    """What the model must compute for these terms. None: a prediction without gradient, and what it misses."""
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
    inputs: Mapping[str, Tensor],
    number: int,
    task: FieldTask,
    terms: Collection[str],
    parts: Parts | None,
) -> Forward:
    """Run the model on a micro-batch of task ``number``, for what ``terms`` need."""
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
