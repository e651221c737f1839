"""Prediction by a `PdeTransformer`, without gradients. The model may be wrapped for several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.domains.pde.residual_network import ResidualGuess
from accel_train.domains.pde.transformer import PREDICTION


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
def predict(model: Callable[..., Any], batch: Mapping[str, Tensor], task: int, grid: tuple[int, int]) -> Prediction:
    """Predict from ``input`` (B, C, H, W), ``parameters`` (B, P) and ``dt`` (B,) of task number ``task``."""
    parameters = batch["parameters"]
    dt = batch["dt"]
    output = model(batch["input"], None, parameters, dt, task, None, PREDICTION)
    fields = output.prediction.unflatten(-1, grid).float()

    def correct(guess: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        corrected = model(ResidualGuess(guess, time, fields, batch["input"]), None, parameters, dt, task)
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
