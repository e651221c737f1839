"""Micro-batches of each step on the device, in the order of the sampler, read by torch's DataLoader.

The DataLoader follows a fixed plan. It is never prepared by Accelerate, which would shard and reorder it. Its batches
depend on (seed, step, shard), not on the number of workers.
"""

import contextlib
import logging
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import default_collate

from accel_train.config import NonNegativeInt, PositiveFloat, PositiveInt, UsageError
from accel_train.data.bucketing import resolve_buckets
from accel_train.data.reading import Batch, Collate, LoaderSettings, MapDataset, Plan, Reader
from accel_train.data.sampler import BatchShard, Sampler, accumulation_steps
from accel_train.data.workers import Workers

MAX_AUTO_WORKERS = 8
MAX_WORKERS_PER_CORE = 8
"""With more, reading processes only wait for each other. One takes about 300 MiB of memory."""
DEFAULT_PREFETCH_FACTOR = 2
DEFAULT_TIMEOUT_SECONDS = 300.0
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderConfig:
    """Reading of samples. No option here changes the samples of a step or their noise. Workers live as long as the
    run, across epochs."""

    num_workers: NonNegativeInt | Literal["auto"] = "auto"
    """Reading processes per training process. 0 = read in the training process. auto = 0 on a CPU, whose cores are
    busy with training, else the cores of this host per training process minus one, at most 8."""

    prefetch_factor: PositiveInt | None = None
    """Micro-batches read ahead by each worker, kept in shared memory. None = 2. Needs workers."""

    pin_memory: bool | Literal["auto"] = "auto"
    """Read into page-locked host memory, so that copies to the GPU overlap with training. auto = on CUDA."""

    timeout_seconds: PositiveFloat | None = None
    """Longest wait for one micro-batch before the run stops with an error. None = 300. Keep it below the
    timeout of collectives, which would otherwise fail first without naming the cause. Needs workers."""

    bucket_by_length: bool = False
    """Sort each global batch by length before splitting it, and pad each micro-batch to its own longest sample: less
    padding, the same samples, noise and gradient. Helps with several micro-batches per step or texts far shorter
    than the longest allowed."""

    bucket_shapes: PositiveInt | None = None
    """Maximum number of padded lengths, chosen once from the data. Compilation, cuDNN and the caching allocator pay
    for each. None = 4. Needs bucket_by_length."""

    def __post_init__(self) -> None:
        if self.num_workers == 0:
            _refuse_worker_options(self, "num_workers=0")
        if self.bucket_shapes is not None and not self.bucket_by_length:
            raise UsageError(
                f"bucket_shapes={self.bucket_shapes}: has no effect without buckets. Set bucket_by_length to True, or "
                "leave bucket_shapes out."
            )


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


def resolve_loader(config: LoaderConfig, device: torch.device) -> LoaderSettings:
    """Resolve `auto` to numbers, with the reason. Refuses settings this device cannot obey. Call it early."""
    if config.pin_memory is True and device.type != "cuda":
        raise UsageError(
            f"pin_memory=True: page-locked memory serves copies to a CUDA device, this run is on {device.type}. "
            "Set pin_memory to auto or False."
        )
    if config.num_workers == "auto":
        workers, reason = _auto_workers(device)
        if workers == 0:
            _refuse_worker_options(config, f"num_workers=auto chose 0 ({reason})")
    else:
        workers = config.num_workers
        reason = "num_workers as asked"
        _refuse_too_many(workers)
    return LoaderSettings(
        num_workers=workers,
        prefetch_factor=config.prefetch_factor or DEFAULT_PREFETCH_FACTOR,
        pin_memory=device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory,
        timeout_seconds=config.timeout_seconds or DEFAULT_TIMEOUT_SECONDS,
        reason=reason,
    )


def iterate_steps(
    dataset: MapDataset,
    sampler: Sampler,
    shard: BatchShard,
    *,
    start_step: int,
    max_steps: int,
    device: torch.device,
    config: LoaderConfig | None = None,
    collate: Collate = default_collate,
) -> Generator[StepBatches, None, None]:
    """Yield the micro-batches of steps start_step to max_steps - 1. Earlier samples are not read.

    A batch has the fields of `collate`, each with leading dimension B, plus `sample`, `occurrence`, `position` (B,)
    int64 and `weight` (B,) float32. On CUDA the next step is copied on its own stream while this one trains. Closing
    the generator ends the workers, and so does an error.

    Global generators are seeded by (seed, occurrence) around `dataset[i]`. `collate` runs with the state after the
    last sample. A `BatchDataset` reads whole micro-batches instead, unless `collate` is given. Every rank calls it
    with its own `shard`. No collectives.
    """
    # Everything is checked here, before the first step is asked for: the generators below start late.
    if len(dataset) != sampler.dataset_size:
        raise ValueError(f"the sampler is for {sampler.dataset_size} samples, the dataset has {len(dataset)}")
    accumulation = accumulation_steps(sampler.global_batch_size, shard.world_size, shard.micro_batch_size)
    config = config or LoaderConfig()
    settings = resolve_loader(config, device)
    logger.info("loader: %s", _describe(settings, device))
    buckets = None
    if config.bucket_by_length:
        buckets, choice = resolve_buckets(dataset, sampler, shard, config.bucket_shapes)
        logger.info("loader: bucket_by_length, %s", choice)
    reader = Reader(dataset, sampler.seed, collate, settings.num_workers)
    plan = Plan(sampler, shard, start_step, max_steps, buckets)
    steps = _read_steps(reader, plan, accumulation, settings)
    if device.type == "cuda":
        return _copy_ahead(steps, device)
    return _copy(steps, device)


def _read_steps(
    reader: Reader,
    plan: Plan,
    accumulation: int,
    settings: LoaderSettings,
) -> Generator[StepBatches, None, None]:
    """Yield steps in host memory."""
    with contextlib.closing(Workers(reader, plan, settings)) as workers:
        for step in range(plan.start_step, plan.max_steps):
            started = time.perf_counter()
            batches = [workers.read() for _ in range(accumulation)]
            yield StepBatches(step, batches, time.perf_counter() - started)


def _copy(steps: Generator[StepBatches, None, None], device: torch.device) -> Generator[StepBatches, None, None]:
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
            wait_seconds += host.data_wait_seconds
            following = _start_copy(host, stream, device)
            if ahead is not None:
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


def usable_cores() -> int:
    """Count the cores this process may use: by its affinity and, in a container, its cgroup's quota."""
    cores = os.cpu_count() or 1
    # macOS has no affinity.
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text("utf-8").split()
        if quota == "max":
            return cores
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        # No quota on this host, or cgroups of version 1.
        return cores


def _auto_workers(device: torch.device) -> tuple[int, str]:
    if device.type == "cpu":
        return 0, "auto: training on the CPU keeps the cores busy"
    cores = usable_cores()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # One core is left to the training process itself.
    workers = min(MAX_AUTO_WORKERS, max(0, cores // processes - 1))
    return workers, f"auto: {cores} cores for {processes} training processes on this host"


def _refuse_too_many(workers: int) -> None:
    cores = usable_cores()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    total = workers * processes
    limit = max(16, MAX_WORKERS_PER_CORE * cores)
    if total <= limit:
        return
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    raise UsageError(
        f"loader.num_workers={workers}: with {processes} training process(es) on this host that is "
        f"{total} reading processes, about {total * 0.3:.0f} GiB, on {cores} core(s) "
        f"and {memory_gib:.0f} GiB of memory. At most {limit} are started. Give {limit // processes} or less, or auto."
    )


def _refuse_worker_options(config: LoaderConfig, reason: str) -> None:
    given = {"prefetch_factor": config.prefetch_factor, "timeout_seconds": config.timeout_seconds}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name}={value}: needs at least 1 worker, but {reason}. Set num_workers to 1 or more, "
                f"or leave {name} out."
            )
