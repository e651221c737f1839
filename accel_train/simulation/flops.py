"""Floating-point operations of a step: those of torch's counter, and attention on the CPU, which it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class Flops:
    """Operations counted so far: matrix products, convolutions and attention."""

    total: int = 0

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Add the operations of one operator."""
        # The registry has one entry for all overloads of an operator.
        packet = func._overloadpacket
        if packet is _FORWARD:
            query, key, value = args[:3]
            self.total += sdpa_flop_count(query.shape, key.shape, value.shape)
        elif packet is _BACKWARD:
            gradient, query, key, value = args[:4]
            self.total += sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, **kwargs, out_val=result)
