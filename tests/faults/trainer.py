"""A small run for the fault tests: the real accelerator, run directory, saver, restore and records, a toy model.

    python tests/faults/trainer.py --output_dir OUT --max_steps 20 --checkpoints.save_every 5

Every step's loss goes to OUT/losses.txt as a hexadecimal float, every committed save to OUT/acknowledged.txt: what a
user has been told is safe. ``--raise_at`` and ``--poison`` make it fail the way users' code does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from accel_train import rng
from accel_train.checkpoints import opening, policy, restore
from accel_train.checkpoints import saver as state
from accel_train.checkpoints.policy import RunOptions
from accel_train.config import expand_path
from accel_train.experiment_options import FREE_TO_CHANGE
from accel_train.hub import options
from accel_train.metrics import logs
from accel_train.options.loading import load_config
from accel_train.options.tree import config_text, experiment_tree, flatten
from accel_train.runtime import accelerator as machine
from accel_train.runtime.exiting import EXIT_PREEMPTED, run_main
from accel_train.store import failpoints
from accel_train.training import accumulation, ema, shards

SAMPLES, WIDTH = 96, 24
PAUSES = ("step_seconds", "pause_at", "pause_rank")


@dataclass(frozen=True)
class Config:
    """Fault trainer."""

    output_dir: str = "runs/faults"
    seed: int = 0
    global_batch_size: int = 8
    micro_batch_size: int = 4
    max_steps: int = 20
    resume: str = "auto"
    allow: tuple[str, ...] = ()
    overwrite: bool = False
    init_from: str | None = None
    collective_timeout_seconds: int = 1800
    """Longer than a test waits: what ends by it alone has failed."""
    hidden: int = 32
    """Width of the inner layer: how large a checkpoint is."""
    step_seconds: float = 0.0
    """Pause in every step, so that signals and kills find one."""
    pause_at: int = -1
    """After so many steps finish the save that is under way, and wait until told to go on or to stop."""
    pause_rank: int = 0
    save_first: bool = False
    """Save before the first step."""
    raise_at: int = -1
    """Step in which the user's own code raises."""
    raise_rank: int = 0
    hang_at: int = -1
    """Step in which ``raise_rank`` stops answering."""
    hub: options.HubConfig = field(default_factory=options.HubConfig)
    checkpoints: policy.CheckpointConfig = field(default_factory=policy.CheckpointConfig)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Toy(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def micro_batches(
    config: Config, step: int, rank: int, world_size: int
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """This rank's part of the batch of ``step``, with noise keyed by sample."""
    order = torch.arange(step * config.global_batch_size, (step + 1) * config.global_batch_size)
    mine = order.tensor_split(world_size)[rank]
    cut: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for samples in mine.split(config.micro_batch_size):
        keys = rng.sample_keys(config.seed, "data", step, samples)
        x = rng.normal(keys, (WIDTH,))
        cut.append(({"x": x, "y": x.sum(-1, keepdim=True).sin()}, {"main": torch.tensor(float(len(samples)))}))
    return cut


def run_options(config: Config) -> RunOptions:
    return RunOptions(
        config.output_dir,
        flatten(experiment_tree(config)),
        config_text(config),
        free_to_change=(*FREE_TO_CHANGE, *PAUSES, "save_first", "raise_at", "raise_rank", "hang_at"),
        resume=config.resume,
        allow=config.allow,
        overwrite=config.overwrite,
        init_from=config.init_from,
        hub=config.hub,
        collective_timeout_seconds=config.collective_timeout_seconds,
    )


def append(path: Path, line: str) -> None:
    """One write, so that a kill leaves whole lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def pause(saver: state.Saver, mine: bool) -> None:
    """Until the test says go, or this process has been asked to stop. Where it is not ``mine``: go on, to the next
    collective."""
    go = Path(os.environ[failpoints.GO_VARIABLE])
    while mine and not go.exists() and not saver._requests.requested:
        time.sleep(0.01)


def main(argv: Sequence[str]) -> int:
    config = load_config(Config, argv, presets=Path(__file__).parent).config
    accelerator = machine.build_accelerator(
        precision="fp32",
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        max_grad_norm=1.0,
        collective_timeout_seconds=config.collective_timeout_seconds,
    )
    rank, world_size = accelerator.process_index, accelerator.num_processes
    out = expand_path(config.output_dir)
    logs.setup_logging(out, rank, world_size)
    run = opening.open_run(run_options(config), accelerator, "toy")
    if accelerator.is_main_process:
        print(run.decision, flush=True)
    torch.manual_seed(config.seed)
    model: nn.Module = Toy(config.hidden)
    restore.load_initial_weights(model, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    weights = shards.Shards(model, optimizer)
    average = ema.Ema(ema.EmaConfig(0.9), weights)
    restore.restore(run, accelerator, weights, average)
    saver = state.Saver(
        accelerator,
        run,
        average,
        config.checkpoints,
        config.hub,
        lambda folder: commit_config(folder, config),
        epoch=lambda step: step * config.global_batch_size / SAMPLES,
        on_commit=lambda saved: append(out / "acknowledged.txt", str(saved.step)),
    )
    stop, done = False, run.start_step
    with saver:
        if config.save_first:
            saver.save(run.start_step)
        for step in range(run.start_step, config.max_steps):
            done = step + 1
            if step == config.raise_at and rank == config.raise_rank:
                raise RuntimeError("the user's own mistake")
            if step == config.hang_at and rank == config.raise_rank:
                time.sleep(3600)
            window = accumulation.GradientWindow(
                accelerator, model, micro_batches(config, step, rank, world_size), {"main": 1.0}, step
            )
            for inputs in window:
                window.backward({"main": (model(inputs["x"]) - inputs["y"]).square().sum()})
            result = window.finish(1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update(step)
            if rank == 0:
                append(out / "losses.txt", f"{done} {float(result.loss).hex()}")
            time.sleep(config.step_seconds)
            if done == config.pause_at:
                saver.finish()
                pause(saver, rank == config.pause_rank)
            stop = saver.boundary(done)
            if stop or saver.due(done, config.max_steps):
                stop = saver.save(done, {"loss": float(result.loss)})
            if stop:
                break
    accelerator.end_training()
    run.close()
    if stop and accelerator.is_main_process:  # as the recipes say it
        print(f"stopped at step {done} and saved; start the same command again to resume (exit code 75)", flush=True)
    return EXIT_PREEMPTED if stop else 0


def commit_config(folder: Path, config: Config) -> None:
    (folder / "config.json").write_text(f'{{"hidden": {config.hidden}}}\n')


if __name__ == "__main__":
    run_main(main)
