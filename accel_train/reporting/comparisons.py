"""Builds the comparisons between the processes of a training that its options ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_train.metrics.throughput import Throughput
from accel_train.precision import dtype_of
from accel_train.runtime.strategy import strategy_of
from accel_train.training.health.comparing import Clocks, Comparisons, forward_is_local
from accel_train.training.health.options import has_replicas
from accel_train.training.health.replicas import Replicas

if TYPE_CHECKING:
    from accel_train.metrics.recorder import Recorder
    from accel_train.train_state import Experiment, TrainState


def build_comparisons(opened: Experiment, prepared: TrainState, throughput: Throughput, log: Recorder) -> Comparisons:
    """Build the periodic comparisons between processes (``HealthConfig``). Every process has one. No collective."""
    config = opened.config
    accelerator = opened.accelerator
    strategy = strategy_of(accelerator)
    times = None
    if forward_is_local(prepared.model, strategy):
        times = prepared.times
    replicas = None
    if config.health.check_replicas_every != 0 and has_replicas(accelerator, strategy):
        replicas = Replicas(accelerator, prepared.ema, strategy)
    return Comparisons(
        accelerator,
        config.health,
        replicas,
        Clocks(throughput, times),
        log.record,
        dtype_of(config.precision),
    )
