"""The 8-bit AdamW state of bitsandbytes as fp32 values, for checkpoints, and back again to the same bits.

Of each 256 elements the largest absolute value is kept in fp32, and each element as one of 256 fractions of it
(Dettmers et al., 2021, arXiv 2110.02861). Tensors of fewer than 4096 elements stay in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""AdamW's name of a moment -> the number that bitsandbytes gives it (``state1``, ``absmax1``, ``qmap1``)."""


def holds_moments(state: Mapping[str, Any]) -> bool:
    """Whether this is one parameter's state of bitsandbytes' AdamW, in 8 or 32 bits."""
    return "state1" in state and "state2" in state


def read_moment(state: Mapping[str, Any], key: str) -> Tensor:
    """A moment in fp32, shaped like the parameter.

    The fractions reach 1 upwards and about -0.993 downwards, so a block whose largest value is negative would shrink
    each time it is written back. Its lowest code is therefore read as -1, which rounds to the same code.
    """
    number = MOMENTS[key]
    codes: Tensor = state[f"state{number}"]
    if codes.dtype != torch.uint8:
        return codes
    fractions: Tensor = state[f"qmap{number}"].clone()
    if float(fractions[0]) < 0:
        fractions[0] = -1.0
    scale: Tensor = state[f"absmax{number}"].repeat_interleave(BLOCK)[: codes.numel()]
    return (fractions[codes.flatten().long()] * scale).view(codes.shape)


def write_moment(state: Mapping[str, Any], key: str, values: Tensor) -> None:
    """Set a moment from fp32. What ``read_moment`` gave becomes the codes and scales that it was."""
    number = MOMENTS[key]
    codes: Tensor = state[f"state{number}"]
    if codes.dtype != torch.uint8:
        codes.copy_(values)
        return
    flat = values.to(codes.device, torch.float32).flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    fractions: Tensor = state[f"qmap{number}"]
    middles = (fractions[1:] + fractions[:-1]) / 2
    nearest = torch.bucketize(blocks / scale.clamp(min=torch.finfo().tiny)[:, None], middles)
    codes.copy_(nearest.flatten()[: len(flat)].view(codes.shape))
    state[f"absmax{number}"].copy_(scale)
