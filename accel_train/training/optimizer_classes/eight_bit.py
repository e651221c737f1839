"""The 8-bit AdamW state of bitsandbytes as fp32 values, for checkpoints, and back again to the same bits.

Each block of 256 elements keeps its largest absolute value in fp32, and each element as one of 256 fractions of it
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
"""AdamW's name for a moment -> its number in bitsandbytes (``state1``, ``absmax1``, ``qmap1``)."""


def holds_moments(state: Mapping[str, Any]) -> bool:
    """Return True for one parameter's state of bitsandbytes' AdamW, in 8 or 32 bits."""
    return "state1" in state and "state2" in state


def read_moment(state: Mapping[str, Any], key: str) -> Tensor:
    """Return a moment in fp32, shaped like the parameter.

    The fractions go from about -0.993 to 1, so a block with a negative extreme would shrink at every round trip.
    Its lowest code is therefore read as -1 and rounds back to the same code.
    """
    number = MOMENTS[key]
    codes: Tensor = state[f"state{number}"]
    if codes.dtype != torch.uint8:  # bitsandbytes keeps small tensors in fp32
        return codes
    fractions: Tensor = state[f"qmap{number}"].clone()
    if float(fractions[0]) < 0:  # the map of exp_avg_sq has no negative fractions
        fractions[0] = -1.0
    block_scales: Tensor = state[f"absmax{number}"]
    scales = block_scales.repeat_interleave(BLOCK)[: codes.numel()]
    values = fractions[codes.flatten().long()] * scales
    return values.view(codes.shape)


def write_moment(state: Mapping[str, Any], key: str, values: Tensor) -> None:
    """Write a moment from fp32 values. Values of ``read_moment`` give back the same codes and scales."""
    number = MOMENTS[key]
    codes: Tensor = state[f"state{number}"]
    if codes.dtype != torch.uint8:
        codes.copy_(values)
        return
    flat = values.to(codes.device, torch.float32).flatten()
    # The zeros at the end do not change the largest value of the last block.
    padding = -len(flat) % BLOCK
    blocks = F.pad(flat, (0, padding)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    fractions: Tensor = state[f"qmap{number}"]
    middles = (fractions[1:] + fractions[:-1]) / 2
    # A block of zeros has scale 0, and 0 / 0 would be NaN.
    divisor = scale.clamp(min=torch.finfo().tiny)
    # With the middles between neighbours as bounds, the index found is that of the nearest fraction.
    nearest = torch.bucketize(blocks / divisor[:, None], middles)
    codes.copy_(nearest.flatten()[: len(flat)].view(codes.shape))
    state[f"absmax{number}"].copy_(scale)
