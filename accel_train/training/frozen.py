"""A frozen part has no gradient: neither the norm that is clipped nor the optimizer's running means see one.

Its parameters keep `requires_grad`: switched off after wrapping, DDP raises, FSDP2 leaves the gradient None and ZeRO
fills zeros, three different trainings. Zeros are what all strategies can have.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PART = "_accel_train_part"


def mark(parameters: Iterable[nn.Parameter], part: str) -> None:
    """Note the part on the parameters themselves: ZeRO puts flat tensors of its own into the optimizer's groups."""
    for parameter in parameters:
        setattr(parameter, _PART, part)


def clear_gradients(optimizers: Iterable[Any]) -> None:
    """Set the gradients of frozen groups to zero, whole ones and shards. Not for ZeRO, which keeps them to itself."""
    for group in _frozen_groups(optimizers):
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


@contextmanager
def without_gradients(model: nn.Module, optimizers: Iterable[Any]) -> Generator[None]:
    """For ZeRO, whose engine reduces, measures and clips within the backward: a backward in the body gives the engine
    zeros for frozen parts."""
    frozen = {group["part"] for group in _frozen_groups(optimizers)}
    parameters = [p for p in model.parameters() if getattr(p, _PART, None) in frozen] if frozen else []
    handles = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _frozen_groups(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups if group.get("frozen")]
