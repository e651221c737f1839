"""Options for the samples of a step and for reading them, and the meaning of `auto` on this machine."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import torch

from accel_train.config import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UsageError,
    refuse_without_effect,
)
from accel_train.cores import usable_cores

MAX_AUTO_WORKERS = 8
MAX_WORKERS_PER_CORE = 8
"""With more, reading processes only wait for each other. One takes about 300 MiB of memory."""
DEFAULT_PREFETCH_FACTOR = 2
DEFAULT_TIMEOUT_SECONDS = 300.0
MEASURABLE = ("adamw", "adamw_offload")
"""Optimizers whose ``exp_avg`` is the running mean of the clipped gradient, in fp32."""


@dataclass(frozen=True)
class BatchScheduleConfig:
    """Samples per optimizer step that change in the course of a run: after given steps, or by the measured noise."""

    steps: tuple[PositiveInt, ...] = ()
    """Optimizer steps after which the number of samples changes, ascending. Empty: global_batch_size throughout."""
    sizes: tuple[PositiveInt, ...] = ()
    """Samples per optimizer step over all processes, after each of `steps`. Before the first: global_batch_size."""
    learning_rate: Literal["constant", "linear", "sqrt"] = "constant"
    """Factor of the learning rate where a step has n times global_batch_size samples. constant: 1. linear: n. sqrt: the
    square root of n."""
    noise_factor: NonNegativeFloat = 0.0
    """Double the batch when the measured gradient noise scale (arXiv:1812.06162) exceeds this many times the batch
    size. Replaces `steps` and `sizes`; adamw or adamw_offload only. At high learning rates the estimate is too large,
    or missing, and then the batch does not grow. 0: off."""
    noise_steps: PositiveInt = 500
    """Optimizer steps of a window. At its end the batch doubles or stays, as the mean of its observations decides."""
    noise_every: PositiveInt = 10
    """Optimizer steps between two observations, each of which reads the running mean of the gradient once. Divides
    `noise_steps`."""
    max_size: PositiveInt | None = None
    """Upper limit of the batch that noise_factor may reach; required with it. Set it to global_batch_size to measure
    the noise without growing."""

    def __post_init__(self) -> None:
        self._check_noise()
        if len(self.steps) != len(self.sizes):
            raise UsageError(
                f"batch_schedule.steps {list(self.steps)}, batch_schedule.sizes {list(self.sizes)}: {len(self.steps)} "
                f"and {len(self.sizes)} values; a size for each step is required, as in --batch_schedule.steps 1000 "
                "3000 --batch_schedule.sizes 128 256"
            )
        if any(first >= second for first, second in itertools.pairwise(self.steps)):
            raise UsageError(f"batch_schedule.steps {list(self.steps)}: each must be above the one before; sort them")
        if not self.steps and not self.measures:
            because = "without batch_schedule.steps or batch_schedule.noise_factor"
            refuse_without_effect(self, "batch_schedule", ["learning_rate"], because, "give steps and sizes")

    def _check_noise(self) -> None:
        if not self.measures:
            names = ("noise_steps", "noise_every", "max_size")
            instead = "give --batch_schedule.noise_factor 1"
            refuse_without_effect(self, "batch_schedule", names, "without batch_schedule.noise_factor", instead)
            return
        if self.steps or self.sizes:
            raise UsageError(
                f"batch_schedule.noise_factor: {self.noise_factor}, batch_schedule.steps {list(self.steps)}: either "
                "the noise or the steps decide when a batch grows; leave one of them out"
            )
        if self.max_size is None:
            raise UsageError(
                f"batch_schedule.noise_factor: {self.noise_factor}: a largest number of samples per step is required; "
                "give --batch_schedule.max_size, such as 8 times global_batch_size"
            )
        if self.noise_steps % self.noise_every:
            raise UsageError(
                f"batch_schedule.noise_steps: {self.noise_steps}: a multiple of batch_schedule.noise_every "
                f"{self.noise_every} is required, so that every window has the same number of observations; give "
                f"{self.noise_every * math.ceil(self.noise_steps / self.noise_every)}"
            )

    @property
    def measures(self) -> bool:
        """True if the measured noise decides when a batch grows."""
        return self.noise_factor > 0

    def refuse_unmeasurable(self, first: int, optimizer: str, beta: float, max_epochs: float | None) -> None:
        """Raise ``UsageError`` where the noise cannot be measured, or no batch could follow it.

        ``first`` is ``global_batch_size``, and ``beta`` the decay of the running mean of the gradient.
        """
        if not self.measures:
            return
        given = f"batch_schedule.noise_factor: {self.noise_factor}"
        if optimizer not in MEASURABLE:
            raise UsageError(
                f"{given}: optimizer.name {optimizer} keeps no fp32 mean of the gradient that decays by betas[0] for "
                f"all parameters; {' or '.join(MEASURABLE)} is required, or give batch_schedule.steps and sizes"
            )
        if beta == 0:
            raise UsageError(
                f"{given}: optimizer.betas 0.0: with no mean over several steps nothing separates the gradient from "
                "its noise; give --optimizer.betas 0.9 0.95"
            )
        if max_epochs is not None:
            raise UsageError(
                f"{given}, max_epochs: {max_epochs}: the number of steps would follow from measurements yet to be "
                "made, and the schedule of the learning rate with it; give max_steps"
            )
        assert self.max_size is not None, "_check_noise requires it"
        if self.max_size < first:
            raise UsageError(
                f"batch_schedule.max_size: {self.max_size}: at least global_batch_size {first} is required, at which "
                f"the noise is only measured; give {8 * first}"
            )

    def grown(self, stages: Sequence[tuple[int, int]]) -> BatchScheduleConfig:
        """Return the schedule with these changes, as (step, size after it), in place of measurements."""
        if not stages:
            return self
        steps, sizes = zip(*stages, strict=True)
        return BatchScheduleConfig(steps, sizes, self.learning_rate)

    def next_size(self, size: int) -> int:
        """Return the samples of a step after ``size``, if the noise asks for more. Never fewer than ``size``."""
        assert self.max_size is not None, "_check_noise requires it"
        # A resume may have set a maximum below the size that was reached.
        return max(size, min(2 * size, self.max_size))

    def size(self, first: int, step: int) -> int:
        """Return the samples of step ``step``, counted from 0. ``first`` is ``global_batch_size``."""
        return next(size for _, end, size in self._parts(first) if step < end)

    def largest(self, first: int) -> int:
        """Return the largest number of samples that a step of the run may have."""
        return max(first, *self.sizes, self.max_size or 0)

    def samples_before(self, first: int, step: int) -> int:
        """Return the samples of all steps before ``step``."""
        total = 0
        for start, end, size in self._parts(first):
            until = int(min(end, step))
            total += max(0, until - start) * size
        return total

    def steps_for_epochs(self, first: int, epochs: float, dataset_size: int) -> int:
        """Return the number of steps that take at least ``epochs`` passes over the data."""
        # From the decimal digits as written: in floats, 1.1 times 50,000 is more than 55,000.
        return self.steps_for(first, Fraction(str(epochs)) * dataset_size)

    def steps_for(self, first: int, samples: float | Fraction) -> int:
        """Return the number of steps that take at least ``samples`` samples."""
        left = samples
        for start, end, size in self._parts(first):
            if left <= (end - start) * size:
                return start + math.ceil(left / size)
            left -= (end - start) * size
        raise AssertionError("the last part has no end")

    def factor(self, first: int, step: int) -> float:
        """Return the factor of the learning rate in step ``step``."""
        if self.learning_rate == "constant":
            return 1.0
        growth = self.size(first, step) / first
        return growth if self.learning_rate == "linear" else math.sqrt(growth)

    def notices(self, max_steps: int) -> list[str]:
        """Return a line for the log about each change."""
        lines: list[str] = []
        for step, size in zip(self.steps, self.sizes, strict=True):
            late = "" if step < max_steps else f": not in this run, which ends at step {max_steps:,}"
            lines.append(f"batch_schedule: {size:,} samples per step after step {step:,}{late}")
        if self.measures and self.noise_steps >= max_steps:
            lines.append(
                f"batch_schedule.noise_factor: {self.noise_factor:g}: has no effect in this run of {max_steps:,} "
                f"steps, because the first window ends with step {self.noise_steps:,}"
            )
        return lines

    def _parts(self, first: int) -> Iterator[tuple[int, float, int]]:
        """Yield the first step of each part, the step after its last, and its samples per step."""
        starts = (0, *self.steps)
        ends = (*self.steps, math.inf)
        yield from zip(starts, ends, (first, *self.sizes), strict=True)


ONE_BATCH_SIZE = BatchScheduleConfig()


@dataclass(frozen=True)
class LoaderConfig:
    """Reading of samples. No option here changes the samples of a step or their noise. Workers live as long as the
    run, across epochs."""

    num_workers: NonNegativeInt | Literal["auto"] = "auto"
    """DataLoader workers per training process. 0: read in the training process. auto: 0 on a CPU, whose cores are
    busy with training, else the cores of this host per training process minus one, at most 8."""

    prefetch_factor: PositiveInt | None = None
    """Micro-batches read ahead by each worker, kept in shared memory. None: 2. Needs workers."""

    pin_memory: bool | Literal["auto"] = "auto"
    """Read into page-locked host memory, so that copies to the GPU overlap with training. auto: on CUDA."""

    timeout_seconds: PositiveFloat | None = None
    """Longest wait for one micro-batch before the run stops with an error. None: 300. Keep it below the
    timeout of collectives, which would otherwise fail first without naming the cause. Needs workers."""

    bucket_by_length: bool = False
    """Sort each global batch by length before splitting it, and pad each micro-batch to its own longest sample: less
    padding, the same samples, noise and gradient. Helps with several micro-batches per step or texts far shorter
    than the longest allowed."""

    bucket_shapes: PositiveInt | None = None
    """Maximum number of padded lengths, chosen once from the data. Each one has a cost in compilation, cuDNN and the
    caching allocator. None: 4. Needs bucket_by_length."""

    def __post_init__(self) -> None:
        if self.num_workers == 0:
            self.refuse_worker_options("with loader.num_workers: 0")
        if not self.bucket_by_length:
            because = "without loader.bucket_by_length"
            refuse_without_effect(self, "loader", ["bucket_shapes"], because, "give --loader.bucket_by_length")

    def refuse_worker_options(self, because: str) -> None:
        """Raise ``WithoutEffectError`` for options of workers if there are no workers."""
        names = ("prefetch_factor", "timeout_seconds")
        refuse_without_effect(self, "loader", names, because, "give --loader.num_workers 1 or more")


class LoaderSettings(NamedTuple):
    """`LoaderConfig` with `auto` resolved for this machine."""

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    timeout_seconds: float
    reason: str


def resolve_loader(config: LoaderConfig, device: torch.device) -> LoaderSettings:
    """Resolve `auto` to numbers, with the reason. Refuses settings that this device does not support. Call it early."""
    if config.pin_memory is True and device.type != "cuda":
        raise UsageError(
            f"loader.pin_memory: True: page-locked memory serves copies to a CUDA device, but this run is on "
            f"{device.type}; give --loader.pin_memory auto or False"
        )
    if config.num_workers == "auto":
        workers, reason = _auto_workers(device)
        if workers == 0:
            config.refuse_worker_options(f"with loader.num_workers: auto, which chose 0 ({reason})")
    else:
        workers = config.num_workers
        reason = "num_workers as asked"
        # Set by the launcher. The other processes of this host start as many workers each.
        refuse_too_many("loader.num_workers", workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return LoaderSettings(
        num_workers=workers,
        prefetch_factor=config.prefetch_factor or DEFAULT_PREFETCH_FACTOR,
        pin_memory=device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory,
        timeout_seconds=config.timeout_seconds or DEFAULT_TIMEOUT_SECONDS,
        reason=reason,
    )


def _auto_workers(device: torch.device) -> tuple[int, str]:
    if device.type == "cpu":
        return 0, "auto: training on the CPU keeps the cores busy"
    cores, _ = usable_cores()
    # Set by the launcher. The other processes of this host start as many workers each.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # One core is left to the training process itself.
    workers = min(MAX_AUTO_WORKERS, max(0, cores // processes - 1))
    return workers, f"auto: {cores} cores for {processes} training processes on this host"


def refuse_too_many(option: str, workers: int, processes: int = 1) -> None:
    """Raise ``UsageError`` for more workers than this host can use. Each of its ``processes`` starts ``workers``."""
    cores, _ = usable_cores()
    total = workers * processes
    limit = max(16, MAX_WORKERS_PER_CORE * cores)
    if total <= limit:
        return
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    raise UsageError(
        f"{option}: {workers}: with {processes} training process(es) on this host that is "
        f"{total} worker processes, about {total * 0.3:.0f} GiB, on {cores} core(s) "
        f"and {memory_gib:.0f} GiB of memory, and at most {limit} are started; give {limit // processes} or less, or "
        "auto"
    )
