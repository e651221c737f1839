"""A prepared model whose every process group has been used: over which interface, and how long each group waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.exiting import run_main


class Block(nn.Linear):
    pass


class Model(nn.Module):
    _no_split_modules: ClassVar = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def main(argv: Sequence[str]) -> int:
    accelerator = build_accelerator(
        precision="fp32",
        global_batch_size=16,
        micro_batch_size=4,
        max_grad_norm=1.0,
        collective_timeout_seconds=int(argv[0]),
    )
    model = Model()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 8)).sum().backward()
    if accelerator.is_main_process:
        print(f"GLOO_SOCKET_IFNAME: {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
        groups: Any = distributed.distributed_c10d
        for group in groups._world.pg_map:
            waits = group._get_backend(torch.device("cpu")).options._timeout
            print(f"{group.group_desc}: {waits.total_seconds():g} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    run_main(main)
