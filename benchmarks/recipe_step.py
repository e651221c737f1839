"""The work of the recipes' loop after each optimizer step between two log points, for C1 and G2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator

from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.checkpoints.saver import Saver
from accel_train.hub.options import HubConfig
from accel_train.metrics.details.by_sample import SampleLosses
from accel_train.metrics.progress import LogConfig
from accel_train.metrics.recorder import Recorder
from accel_train.metrics.throughput import LocalCounts, Throughput
from accel_train.store import atomic_files
from accel_train.training.ema import Ema
from accel_train.training.health.comparing import Clocks, Comparisons
from accel_train.training.health.options import HealthConfig
from accel_train.training.step_guard import StepResult

NEVER = 1 << 40
START = 2
"""First step of the loop. Earlier ones differ."""


@contextmanager
def after_steps(
    accelerator: Accelerator, average: Ema, folder: Path, rows: int
) -> Iterator[Callable[[StepResult], None]]:
    """Yield a function to call after each step. Raises AssertionError if a step logs or saves.

    It updates throughput and losses by sample, compares processes, and advances recorder and saver. ``rows`` is the
    number of samples of a step.
    """
    run = Run(folder, "benchmark", None, "", {"experiment": {"global_batch_size": rows}, "resolved": {}})
    run.checkpoints.mkdir(parents=True)
    atomic_files.write_json_in_place(folder / "run.json", {})
    logging = LogConfig(log_every=NEVER, progress_bar="off")
    log = Recorder(accelerator, folder, logging, max_steps=NEVER, start_step=START)
    saver = Saver(
        accelerator, run, average, CheckpointConfig(), HubConfig(), lambda _: None, epoch=float, on_commit=log.saved
    )
    counts, rates = LocalCounts(), Throughput(accelerator.device)
    tokens = torch.tensor(float(rows), device=accelerator.device)
    losses = SampleLosses(accelerator, {"main": "time"}, None, START)
    comparisons = Comparisons(accelerator, HealthConfig(), None, Clocks(rates, None), log.record, torch.float32)
    done = START

    def after(result: StepResult) -> None:
        nonlocal done
        done += 1
        counts.add(tokens=tokens, padded_tokens=rows, flops=1)
        rates.end_of_step()
        losses.add(result)
        rates.update(samples=rows, data_wait_seconds=0.0)
        log.advance(done)
        comparisons.after(done, 0.0)
        if log.due(done) or saver.boundary(done) or saver.due(done, NEVER):
            raise AssertionError("a step of this benchmark neither logs nor saves")

    with log:
        try:
            yield after
        finally:
            saver.__exit__(RuntimeError, None, None)  # an error type prevents a final save
