"""Steps of micro-batches on the device, in the order of the sampler, read by torch's DataLoader.

The DataLoader is given the plan of what to read and nothing to decide, and is never prepared by Accelerate:
that would shard and reorder it. What it yields depends on (seed, step, cut), not on the number of workers.
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
from accel_train.data.reading import Batch, Collate, LoaderSettings, MapDataset, Plan, Reader, Workers
from accel_train.data.sampler import Cut, Sampler, accumulation_steps

MAX_AUTO_WORKERS = 8
MAX_WORKERS_PER_CORE = 8
"""Above it reading processes only wait for each other; one takes some 300 MiB of memory."""
DEFAULT_PREFETCH_FACTOR = 2
DEFAULT_TIMEOUT_SECONDS = 300.0
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderConfig:
    """How samples are read. Nothing here changes what is read, in which step, or the noise added to it. Workers live
    as long as the run: epochs do not end them."""

    num_workers: NonNegativeInt | Literal["auto"] = "auto"
    """Reading processes per training process; 0 = read in the training process. auto = 0 on a CPU, which the
    training itself keeps busy, else the cores of this host per training process less one, at most 8."""

    prefetch_factor: PositiveInt | None = None
    """Micro-batches that each worker reads ahead; they wait in shared memory. None = 2. Needs workers."""

    pin_memory: bool | Literal["auto"] = "auto"
    """Read into page-locked host memory, from which copies to the GPU overlap with training. auto = on CUDA."""

    timeout_seconds: PositiveFloat | None = None
    """Longest wait for one micro-batch before the run stops with an error. None = 300; keep it below the
    timeout of collectives, or these fail first and name no cause. Needs workers."""

    bucket_by_length: bool = False
    """Sort each global batch by length before it is cut, and pad each micro-batch to its own longest sample: less
    padding, the same samples, noise and gradient. It helps with several micro-batches per step or texts far shorter
    than the longest allowed."""

    bucket_shapes: PositiveInt | None = None
    """Most padded lengths that occur, chosen once from the data: compilation, cuDNN and the caching allocator pay
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
    """All that one process computes in one optimizer step."""

    step: int
    micro_batches: list[Batch]
    data_wait_seconds: float
    """Host time spent waiting for samples since the previous step was handed out."""

    @property
    def done(self) -> int:
        """Optimizer steps that are done after this one."""
        return self.step + 1


def resolve_loader(config: LoaderConfig, device: torch.device) -> LoaderSettings:
    """Turn `auto` into numbers, with the reason. Refuses what this device cannot obey; call it early."""
    cuda = device.type == "cuda"
    if config.pin_memory is True and not cuda:
        raise UsageError(
            f"pin_memory=True: page-locked memory serves copies to a CUDA device, this run is on {device.type}. "
            "Set pin_memory to auto or False."
        )
    workers, reason = config.num_workers, "num_workers as asked"
    if workers != "auto":
        _refuse_too_many(workers)
    else:
        workers, reason = _auto_workers(device)
        if workers == 0:
            _refuse_worker_options(config, f"num_workers=auto chose 0 ({reason})")
    return LoaderSettings(
        num_workers=workers,
        prefetch_factor=config.prefetch_factor or DEFAULT_PREFETCH_FACTOR,
        pin_memory=cuda if config.pin_memory == "auto" else config.pin_memory,
        timeout_seconds=config.timeout_seconds or DEFAULT_TIMEOUT_SECONDS,
        reason=reason,
    )


def iterate_steps(
    dataset: MapDataset,
    sampler: Sampler,
    cut: Cut,
    *,
    start_step: int,
    max_steps: int,
    device: torch.device,
    config: LoaderConfig | None = None,
    collate: Collate = default_collate,
) -> Generator[StepBatches, None, None]:
    """Micro-batches of steps start_step to max_steps - 1; nothing of an earlier step is read.

    A batch holds what `collate` makes of the samples, each field with leading dimension B, and `sample`,
    `occurrence`, `position` (B,) int64 and `weight` (B,) float32. On CUDA the next step is copied on a stream
    of its own while this one trains. Closing the generator ends the workers; an error does so as well.

    Global generators are seeded by (seed, occurrence) around `dataset[i]`; `collate` gets whatever state the
    last sample left. A dataset that is a `WholeReader` is asked for whole micro-batches instead, unless you give a
    `collate` of your own. Every rank calls it with its own `cut`; no collectives.
    """
    if len(dataset) != sampler.dataset_size:
        raise ValueError(f"the sampler is for {sampler.dataset_size} samples, the dataset has {len(dataset)}")
    accumulation = accumulation_steps(sampler.global_batch_size, cut.world_size, cut.micro_batch_size)
    config = config or LoaderConfig()
    settings = resolve_loader(config, device)
    logger.info("loader: %s", _describe(settings, device))
    buckets = None
    if config.bucket_by_length:
        buckets, choice = resolve_buckets(dataset, sampler, cut, config.bucket_shapes)
        logger.info("loader: bucket_by_length, %s", choice)
    reader = Reader(dataset, sampler.seed, collate, settings.num_workers)
    steps = _host_steps(reader, Plan(sampler, cut, start_step, max_steps, buckets), accumulation, settings)
    return _copied_ahead(steps, device) if device.type == "cuda" else _copied(steps, device)


def _host_steps(
    reader: Reader, plan: Plan, accumulation: int, settings: LoaderSettings
) -> Generator[StepBatches, None, None]:
    with contextlib.closing(Workers(reader, plan, settings)) as workers:
        for step in range(plan.start_step, plan.max_steps):
            started = time.perf_counter()
            batches = [workers.read() for _ in range(accumulation)]
            yield StepBatches(step, batches, time.perf_counter() - started)


def _copied(steps: Generator[StepBatches, None, None], device: torch.device) -> Generator[StepBatches, None, None]:
    with contextlib.closing(steps):
        for host in steps:
            batches = [{k: v.to(device) for k, v in batch.items()} for batch in host.micro_batches]
            yield StepBatches(host.step, batches, host.data_wait_seconds)


def _copied_ahead(
    steps: Generator[StepBatches, None, None], device: torch.device
) -> Generator[StepBatches, None, None]:
    """One step is on the device and the next on its way before the first is handed out."""
    stream = torch.cuda.Stream(device)
    ahead: tuple[StepBatches, torch.cuda.Event] | None = None
    waited = 0.0
    with contextlib.closing(steps):
        for host in steps:
            waited += host.data_wait_seconds
            following = _start_copy(host, stream, device)
            if ahead is not None:
                yield _hand_over(*ahead, device, waited)
                waited = 0.0
            ahead = following
        if ahead is not None:
            yield _hand_over(*ahead, device, waited)


def _start_copy(
    host: StepBatches, stream: torch.cuda.Stream, device: torch.device
) -> tuple[StepBatches, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        batches = [{k: v.to(device, non_blocking=True) for k, v in batch.items()} for batch in host.micro_batches]
        copied = torch.cuda.Event()
        copied.record(stream)
    return StepBatches(host.step, batches, 0.0), copied


def _hand_over(step: StepBatches, copied: torch.cuda.Event, device: torch.device, waited: float) -> StepBatches:
    """Order the training stream after the copy, and the reuse of the copy's memory after the training."""
    training = torch.cuda.current_stream(device)
    training.wait_event(copied)
    for batch in step.micro_batches:
        for tensor in batch.values():
            tensor.record_stream(training)
    return StepBatches(step.step, step.micro_batches, waited)


def _describe(settings: LoaderSettings, device: torch.device) -> str:
    parts = [f"{settings.num_workers} workers ({settings.reason})"]
    if settings.num_workers:
        parts.append(f"each {settings.prefetch_factor} micro-batches ahead")
    parts.append(f"pin_memory={settings.pin_memory}")
    if device.type == "cuda":
        parts.append("the next step is copied to the device during this one")
    return ", ".join(parts)


def usable_cores() -> int:
    """Cores that this process may use: by its affinity and, in a container, by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text("utf-8").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such limit here, or no control groups of version 2
        return cores


def _auto_workers(device: torch.device) -> tuple[int, str]:
    if device.type == "cpu":
        return 0, "auto: training on the CPU keeps the cores busy"
    cores = usable_cores()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = min(MAX_AUTO_WORKERS, max(0, cores // processes - 1))
    return workers, f"auto: {cores} cores for {processes} training processes on this host"


def _refuse_too_many(workers: int) -> None:
    cores, processes = usable_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    most = max(16, MAX_WORKERS_PER_CORE * cores)
    if workers * processes > most:
        gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        raise UsageError(
            f"loader.num_workers={workers}: with {processes} training process(es) on this host that is "
            f"{workers * processes} reading processes, about {workers * processes * 0.3:.0f} GiB, on {cores} core(s) "
            f"and {gib:.0f} GiB of memory; at most {most} are started. Give {most // processes} or less, or auto."
        )


def _refuse_worker_options(config: LoaderConfig, because: str) -> None:
    given = {"prefetch_factor": config.prefetch_factor, "timeout_seconds": config.timeout_seconds}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name}={value}: needs at least 1 worker, but {because}. Set num_workers to 1 or more, "
                f"or leave {name} out."
            )
