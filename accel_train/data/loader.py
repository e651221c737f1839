"""Micro-batches of each step on the device, in the order of the sampler, read by torch's DataLoader.

The DataLoader follows a fixed plan. It is never prepared by Accelerate, which would shard and reorder it. Its batches
depend on (seed, step, shard), not on the number of workers.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from accel_train.data.datasets import Batch, MapDataset, refuse_other_than_map_style
from accel_train.data.grouping.bucketing import Buckets, resolve_buckets
from accel_train.data.grouping.shape_groups import ShapeGroups, describe, shape_groups
from accel_train.data.options import LoaderConfig, LoaderSettings, resolve_loader
from accel_train.data.reading import Reader
from accel_train.data.sampler import (
    BatchShard,
    Draw,
    Request,
    Sampler,
    accumulation_steps,
    refuse_other_data,
    refuse_small_batches,
)
from accel_train.data.workers import Workers
from accel_train.wording import FILE_ONLY

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepBatches:
    """Micro-batches of one process for one optimizer step."""

    step: int
    micro_batches: list[Batch]
    data_wait_seconds: float
    """Host time spent waiting for samples since the previous step was yielded."""

    @property
    def done(self) -> int:
        """Number of optimizer steps completed after this one."""
        return self.step + 1


class Plan(NamedTuple):
    """All requests of this process, computed as needed: the DataLoader's batch sampler."""

    sampler: Sampler
    shard: BatchShard
    start_step: int
    max_steps: int
    buckets: Buckets | ShapeGroups | None = None

    def requests(self) -> Iterator[Request]:
        for step in range(self.start_step, self.max_steps):
            for index, (draws, length) in enumerate(self._micro_batches(step)):
                yield Request(step, index, draws, length)

    def accumulation(self, step: int) -> int:
        """Return the number of micro-batches of a step. It differs with the shapes of samples and the batch size."""
        if isinstance(self.buckets, ShapeGroups):
            return len(self.buckets.micro_batches(self.sampler.draws(step), self.shard))
        return accumulation_steps(self.sampler.batch_size(step), self.shard.world_size, self.shard.micro_batch_size)

    def _micro_batches(self, step: int) -> Sequence[tuple[list[Draw], int | None]]:
        if self.buckets is not None:
            return self.buckets.micro_batches(self.sampler.draws(step), self.shard)
        rank, world_size, micro_batch_size = self.shard
        micro_batches = self.sampler.micro_batches(step, rank, world_size, micro_batch_size)
        return [(draws, None) for draws in micro_batches]


def iterate_steps(
    dataset: MapDataset,
    sampler: Sampler,
    shard: BatchShard,
    *,
    start_step: int,
    max_steps: int,
    device: torch.device,
    config: LoaderConfig | None = None,
) -> Generator[StepBatches, None, None]:
    """Yield the micro-batches of steps start_step to max_steps - 1. Earlier samples are not read.

    A batch has the fields of `collate_of(dataset)`, each with leading dimension B, plus `sample`, `occurrence`,
    `position` (B,) int64 and `weight` (B,) float32. On CUDA the next step is copied on its own stream while this one
    trains. Closing the generator ends the workers, and so does an error.

    Global generators are seeded by (seed, occurrence) around `dataset[i]`. A `BatchDataset` reads whole micro-batches
    instead. Every rank calls it with its own `shard`. No collectives.
    """
    # Everything is checked here, before the first step is requested: the generators below start late.
    refuse_other_than_map_style(dataset)
    refuse_other_data(sampler, len(dataset))
    refuse_small_batches(sampler, shard.world_size, shard.micro_batch_size)
    config = config or LoaderConfig()
    settings = resolve_loader(config, device)
    is_default = config == LoaderConfig()
    logger.info("loader: %s", _describe(settings, device), extra={FILE_ONLY: is_default})
    buckets = _resolve_micro_batches(dataset, sampler, shard, config)
    reader = Reader(dataset, sampler.seed, settings.num_workers)
    plan = Plan(sampler, shard, start_step, max_steps, buckets)
    steps = _read_steps(reader, plan, settings)
    if device.type == "cuda":
        return _copy_ahead(steps, device)
    return _copy(steps, device)


def _resolve_micro_batches(
    dataset: MapDataset, sampler: Sampler, shard: BatchShard, config: LoaderConfig
) -> Buckets | ShapeGroups | None:
    """Return the grouping of a global batch by length or shape. None to divide it by position."""
    groups = shape_groups(dataset, sampler.dataset_size)
    if config.bucket_by_length:
        buckets, choice = resolve_buckets(dataset, sampler, shard, config.bucket_shapes)
        logger.info("loader: bucket_by_length, %s", choice)
        return buckets
    if groups is not None:
        logger.info("loader: %s", describe(groups, sampler, shard))
    return groups


def _read_steps(
    reader: Reader,
    plan: Plan,
    settings: LoaderSettings,
) -> Generator[StepBatches, None, None]:
    """Yield steps in host memory."""
    with contextlib.closing(Workers(reader, plan.requests(), settings)) as workers:
        for step in range(plan.start_step, plan.max_steps):
            # Next to nothing with workers that keep up, and the whole reading time without workers.
            started = time.perf_counter()
            batches = [workers.read() for _ in range(plan.accumulation(step))]
            yield StepBatches(step, batches, time.perf_counter() - started)


def _copy(steps: Generator[StepBatches, None, None], device: torch.device) -> Generator[StepBatches, None, None]:
    # A loop that ends early must also end the workers, at once and not when Python collects the generator.
    with contextlib.closing(steps):
        for host in steps:
            batches = [_to_device(batch, device) for batch in host.micro_batches]
            yield StepBatches(host.step, batches, host.data_wait_seconds)


def _to_device(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    return {name: value.to(device, non_blocking=non_blocking) for name, value in batch.items()}


def _copy_ahead(steps: Generator[StepBatches, None, None], device: torch.device) -> Generator[StepBatches, None, None]:
    """Start the copy of the next step before yielding this one."""
    stream = torch.cuda.Stream(device)
    ahead: tuple[StepBatches, torch.cuda.Event] | None = None
    wait_seconds = 0.0
    with contextlib.closing(steps):
        for host in steps:
            # Two steps are read before the first is yielded, so their waits add up.
            wait_seconds += host.data_wait_seconds
            following = _start_copy(host, stream, device)
            if ahead is not None:
                # The copy of the step after it has begun by now.
                yield _await_copy(*ahead, device, wait_seconds)
                wait_seconds = 0.0
            ahead = following
        if ahead is not None:
            yield _await_copy(*ahead, device, wait_seconds)


def _start_copy(
    host: StepBatches, stream: torch.cuda.Stream, device: torch.device
) -> tuple[StepBatches, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        batches = [_to_device(batch, device, non_blocking=True) for batch in host.micro_batches]
        copied = torch.cuda.Event()
        # Recorded after the copies: whoever waits for it waits for all of them.
        copied.record(stream)
    return StepBatches(host.step, batches, 0.0), copied


def _await_copy(
    step: StepBatches,
    copied: torch.cuda.Event,
    device: torch.device,
    wait_seconds: float,
) -> StepBatches:
    """Order the training stream after the copy. The host does not wait."""
    training = torch.cuda.current_stream(device)
    training.wait_event(copied)
    for batch in step.micro_batches:
        for tensor in batch.values():
            # Memory of the copy stream must not be reused before training is done with it.
            tensor.record_stream(training)
    return StepBatches(step.step, step.micro_batches, wait_seconds)


def _describe(settings: LoaderSettings, device: torch.device) -> str:
    parts = [f"{settings.num_workers} workers ({settings.reason})"]
    if settings.num_workers:
        parts.append(f"each {settings.prefetch_factor} micro-batches ahead")
    parts.append(f"pin_memory={settings.pin_memory}")
    if device.type == "cuda":
        parts.append("the next step is copied to the device during this one")
    return ", ".join(parts)
