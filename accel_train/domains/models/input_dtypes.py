"""Inputs of a denoiser in the dtype of its weights, where no autocast takes care of it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights multiplied as they are. Quantised weights are decoded to the dtype of their input."""
KEPT = frozenset(("timestep", "guidance", "time_ids", "txt_ids", "img_ids"))
"""Inputs embedded in fp32: bf16 could not tell apart neighbouring times, sizes and places."""


def cast_inputs(model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Cast latents and embeddings to the dtype of the weights, as a forward pre-hook of a denoiser of diffusers.

    Under FSDP2 and DeepSpeed there is no autocast, and diffusers multiplies its inputs as they come. Latents are the
    first input, and a second one without a name is the time, which stays fp32.
    """
    weights = [parameter for parameter in model.parameters() if parameter.dtype in COMPUTED_IN]
    dtype = weights[0].dtype
    if dtype == torch.float32 or torch.is_autocast_enabled(weights[0].device.type):
        return None
    positional = [value if place == 1 else _cast(value, dtype) for place, value in enumerate(given)]
    return tuple(positional), _cast(named, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list):
        return [_cast(one, dtype) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        inputs = cast("dict[str, Any]", value)
        return {name: one if name in KEPT else _cast(one, dtype) for name, one in inputs.items()}
    return value
