"""How much memory a save takes on each rank of a real strategy; prints one JSON line. Started like a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.checkpoints.saver import Saver
from accel_train.hub.options import HubConfig
from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.exiting import run_main
from accel_train.store import atomic_files
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.shards import Shards

WIDTH, DEPTH = 1024, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Toy(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def resident_bytes(peak: bool) -> int:
    """Memory of this process, shared memory that it has touched included."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"Vm{'HWM' if peak else 'RSS'}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def main(argv: Sequence[str]) -> None:
    accelerator = build_accelerator(precision="fp32", global_batch_size=2, micro_batch_size=1, max_grad_norm=1.0)
    model = Toy()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    accelerator.backward(model(torch.randn(1, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    average = Ema(EmaConfig(0.9), Shards(model, optimizer))
    run = Run(Path(argv[0]), "memory", None, "", {"experiment": {"global_batch_size": 2}, "resolved": {}})
    if accelerator.is_main_process:
        run.checkpoints.mkdir(parents=True)
        atomic_files.write_json_in_place(run.directory / "run.json", {})
    accelerator.wait_for_everyone()
    saver = Saver(accelerator, run, average, CheckpointConfig(), HubConfig(), lambda _: None, epoch=float)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident_bytes(peak=False)
    with saver:
        saver.save(1)
        first = resident_bytes(peak=True) - before
        assert saver._snapshot is not None
        share = saver._snapshot[1].sizes[accelerator.process_index]
        total = sum(saver._snapshot[1].sizes)
        saver.finish()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes(peak=False)
        saver.save(2)
        second = resident_bytes(peak=True) - before
    mine = {"share": share, "total": total, "first": first, "second": second}
    everyone: list[dict[str, int]] = [{} for _ in range(accelerator.num_processes)]
    dist.all_gather_object(everyone, mine)
    if accelerator.is_main_process:
        print(f"RESULT {json.dumps(everyone)}", flush=True)


if __name__ == "__main__":
    run_main(main)
