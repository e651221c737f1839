"""Comparisons of the speed and the weights of a run's processes, at steps that depend on the step number alone."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.training.health.options import HealthConfig
from accel_train.training.health.replicas import Replicas, ReplicasDifferError
from accel_train.training.health.stragglers import Probe, Stragglers, Times
from accel_train.training.parameters import widest

logger = logging.getLogger(__name__)
CHECK_REPLICAS_EVERY = 1000


class Record(Protocol):
    """Writes an event to ``metrics.jsonl``, on the main process."""

    def __call__(self, event: str, fields: Mapping[str, object], *, step: int) -> None: ...


class Pauses(Protocol):
    """Seconds that this process has spent in evaluations and saves."""

    @property
    def paused_seconds(self) -> float: ...


class PartTimes(Protocol):
    """Seconds that this process has spent in each part of its steps. NaN where not measured."""

    def total(self, part: Literal["forward"]) -> float: ...


class Clocks(NamedTuple):
    """Clocks of this process."""

    pauses: Pauses
    parts: PartTimes | None
    """None where a forward waits for other processes."""


def forward_is_local(model: nn.Module, strategy: str) -> bool:
    """Return True if no process waits for another within a forward."""
    if strategy != "ddp":
        return False
    # Before a forward, DDP broadcasts the buffers of process 0 to the others, which wait for them.
    assert isinstance(model, nn.parallel.DistributedDataParallel), type(model)
    return not (model.broadcast_buffers and any(True for _ in model.module.buffers()))


class Comparisons:
    """Periodic comparisons of the processes. Built and called on every process, at the same steps.

    Each comparison is a small gather and waits for the device. Without anything to compare, nothing happens:
    ``replicas`` is None where no weight is on several processes, or their comparison is off.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: HealthConfig,
        replicas: Replicas | None,
        clocks: Clocks,
        record: Record,
        dtype: torch.dtype,
    ) -> None:
        self._accelerator = accelerator
        self._record = record
        self._clocks = clocks
        self._stragglers = Stragglers(config.slow_factor)
        self._compare_every = config.steps_between_comparisons
        self._probe: Probe | None = None
        if accelerator.num_processes > 1 and self._compare_every:
            # Allocated here, because memory may be short at a check.
            self._probe = Probe(accelerator.device, dtype)
        self._hosts: list[str] = [""] * accelerator.num_processes
        self._replicas = replicas
        self._check_every = config.check_replicas_every or CHECK_REPLICAS_EVERY
        self._checked_step = -1
        self._has_begun = False
        self._restart()

    def _restart(self) -> None:
        self._steps = 0
        self._data_seconds = 0.0
        self._forward_before = self._forward_seconds()
        self._paused_before = self._clocks.pauses.paused_seconds
        self._since = time.perf_counter()

    def _forward_seconds(self) -> float:
        parts = self._clocks.parts
        if parts is None:
            return math.nan
        return parts.total("forward")

    def after(self, step: int, data_wait_seconds: float) -> None:
        """Run the comparisons due after ``step`` steps. Call it before a save. Raises ``ReplicasDifferError``."""
        if not self._has_begun:
            # The first step after a start compiles and opens files, so its time is not comparable.
            self._has_begun = True
            self._restart()
        else:
            self._steps += 1
            self._data_seconds += data_wait_seconds
        if self._probe is not None and self._steps and step % self._compare_every == 0:
            self._compare(step, self._probe)
        if step % self._check_every == 0:
            self.check_replicas(step)

    def check_replicas(self, step: int) -> None:
        """Raise ``ReplicasDifferError`` if the processes hold different weights. Checks at most once per step."""
        if self._replicas is None or self._checked_step == step:
            return
        self._checked_step = step
        difference = self._replicas.difference()
        if difference is None:
            return
        fields = {"parameters": difference.parameters, "processes": difference.processes}
        self._record("replicas_differ", fields, step=step)
        # The first process to exit takes the others down, and the event must be written by then.
        self._accelerator.wait_for_everyone()
        raise ReplicasDifferError(f"after step {step} {difference.explanation}")

    def _compare(self, step: int, probe: Probe) -> None:
        rows = self._gather(self._own_times(probe))
        slow, recovered = self._stragglers.judge(rows)
        # All processes have judged alike, so all take part.
        if (slow or recovered) and not all(self._hosts):
            torch.distributed.all_gather_object(self._hosts, socket.gethostname())
        for each in slow:
            host = self._hosts[each.process]
            if self._accelerator.is_main_process:
                logger.warning("step %d: %s", step, each.describe(host, len(rows)))
            self._record("straggler", {**each._asdict(), "host": host, "recovered": False}, step=step)
        for process, measure in recovered:
            logger.info("step %d: process %d is no longer slower than the others (%s)", step, process, measure)
            fields = {"process": process, "measure": measure, "host": self._hosts[process], "recovered": True}
            self._record("straggler", fields, step=step)
        self._restart()

    def _own_times(self, probe: Probe) -> Times:
        seconds = time.perf_counter() - self._since - (self._clocks.pauses.paused_seconds - self._paused_before)
        forward = self._forward_seconds() - self._forward_before
        return Times(seconds / self._steps, self._data_seconds / self._steps, forward / self._steps, *probe.measure())

    def _gather(self, times: Times) -> list[Times]:
        row = widest(torch.tensor([times], device=self._accelerator.device))
        gathered: Tensor = self._accelerator.gather(row)  # pyright: ignore[reportAssignmentType]
        return [Times(*one) for one in gathered.tolist()]
