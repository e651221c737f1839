"""Wrappers of the steps of a loop: a watch for hanging steps, and a profiler if asked for."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from accel_train.data.options import resolve_loader
from accel_train.metrics.throughput import Throughput
from accel_train.options.tree import flatten, to_tree
from accel_train.training.health.hangs import HangWatch

if TYPE_CHECKING:
    from accel_train.data.loader import StepBatches
    from accel_train.train_state import Experiment


def watched_steps(opened: Experiment, steps: Generator[StepBatches], throughput: Throughput) -> Generator[StepBatches]:
    """Wrap the steps of the loop with a watch for hanging ones and, if asked for, a profiler. No collective."""
    config = opened.config
    seconds = config.health.hang_seconds
    if seconds is None:
        seconds = config.collective_timeout_seconds / 2
    steps = _profiled_steps(opened, steps, throughput)
    if not seconds:
        return steps
    accelerator = opened.accelerator
    watch = HangWatch(
        opened.run.directory / "logs",
        accelerator.process_index,
        accelerator.num_processes,
        seconds,
        lambda: throughput.is_paused,
    )
    return watch.steps(steps)


def _profiled_steps(
    opened: Experiment, steps: Generator[StepBatches], throughput: Throughput
) -> Generator[StepBatches]:
    """Return the steps of the loop. The main process profiles the range in ``--profile.steps``.

    Returns ``steps`` itself on other processes, and without a range. No collective.
    """
    config = opened.config
    wanted = config.profile.range()
    if wanted is None or not opened.accelerator.is_main_process:
        return steps
    # Imported here, because a run without a profile does not need it.
    from accel_train.metrics.profiling.advice import Setting
    from accel_train.metrics.profiling.profiler import profiled

    device = opened.accelerator.device
    setting = Setting(
        recipe=sys.argv[0],
        directory=opened.run.directory,
        options=flatten(to_tree(config)),
        micro_batch_size=opened.micro_batch_size,
        accumulation_steps=opened.accumulation_steps,
        num_workers=resolve_loader(config.loader, device).num_workers,
        world_size=opened.accelerator.num_processes,
        records_memory=config.profile.memory,
    )
    return profiled(steps, wanted, setting, opened.start_step, device, throughput.pause)
