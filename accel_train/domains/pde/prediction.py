"""Fields predicted by a `PdeTransformer`, which may be wrapped for several processes. Without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.domains.pde.residual_network import ResidualGuess
from accel_train.domains.pde.transformer import PREDICTION


class Prediction(NamedTuple):
    """The next fields, and what can be known of what they miss."""

    fields: Tensor
    """(B, C', H, W) fp32."""
    log_size: Tensor | None
    """(C',): logarithm of the size of what is missed. None: the model has no residual."""
    correct: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Guesses (B, C', H, W) of it and times (B,) -> what they lack, and the logarithm of its size. With gradients."""


@torch.no_grad()
def predict(model: Callable[..., Any], batch: Mapping[str, Tensor], task: int, grid: tuple[int, int]) -> Prediction:
    """From ``input`` (B, C, H, W), ``parameters`` (B, P) and ``dt`` (B,) of one task, by its number."""
    given = batch["parameters"], batch["dt"], task
    output = model(batch["input"], None, *given, None, PREDICTION)
    fields = output.prediction.unflatten(-1, grid).float()

    def correct(guess: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        found = model(ResidualGuess(guess, time, fields, batch["input"]), None, *given)
        return found.residual, found.residual_size

    return Prediction(fields, output.residual_size, correct)


def stepper(
    model: Callable[..., Any], parameters: Tensor, dt: float, task: int, grid: tuple[int, int]
) -> Callable[[Tensor], Tensor]:
    """Fields (B, C, H, W) -> those `dt` later, not refined, for samples with these parameters (B, P)."""

    def step(state: Tensor) -> Tensor:
        times = torch.full((len(state),), dt, device=state.device)
        return predict(model, {"input": state, "parameters": parameters, "dt": times}, task, grid).fields

    return step
