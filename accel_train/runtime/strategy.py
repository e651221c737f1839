"""Name the strategy by which the processes share a model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


def strategy_of(accelerator: Accelerator) -> Strategy:
    """Return the strategy of the running Accelerator."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        plugin: Any = accelerator.state.deepspeed_plugin
        stage = int(plugin.zero_stage)
        names: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        return names[stage]
    if kind == DistributedType.FSDP:
        return "fsdp2"
    if kind == DistributedType.NO:
        return "single"
    return "ddp"


def layout_of(accelerator: Accelerator) -> dict[str, Any]:
    """Describe the machine and the sharding. A bit-exact continuation requires the same."""
    device = accelerator.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "strategy": strategy_of(accelerator),
        "world_size": accelerator.num_processes,
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }
