"""Casting the inputs of a denoiser to the dtype of its weights, for strategies without autocast."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are multiplied as stored. Quantised weights are decoded to the dtype of their input."""
KEPT = frozenset(("timestep", "guidance", "time_ids", "txt_ids", "img_ids"))
"""Inputs embedded in fp32: bf16 could not tell apart neighbouring times, sizes and positions."""


def cast_inputs(model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Cast latents and embeddings to the dtype of the weights: a forward pre-hook for a denoiser of diffusers.

    There is no autocast under FSDP2 and DeepSpeed, nor with fp32, whose embeddings may be of text encoders in bf16, and
    diffusers does not cast its inputs. Latents are the first input. A second positional input is the time, which stays
    fp32.
    """
    weights = [parameter for parameter in model.parameters() if parameter.dtype in COMPUTED_IN]
    dtype = weights[0].dtype
    if torch.is_autocast_enabled(weights[0].device.type):
        return None
    positional = [value if place == 1 else cast_floats(value, dtype) for place, value in enumerate(given)]
    return tuple(positional), cast_floats(named, dtype)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors, also within lists and dicts, except those of names in ``KEPT``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list):
        return [cast_floats(one, dtype) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        inputs = cast("dict[str, Any]", value)
        return {name: one if name in KEPT else cast_floats(one, dtype) for name, one in inputs.items()}
    return value
