"""What every recipe has, whatever it trains: its options, its start and its end."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.checkpoints import refused
from accel_train.checkpoints.opening import kept, open_run
from accel_train.checkpoints.policy import refuse_unknown_metric
from accel_train.config import UsageError, expand_path, origin_of
from accel_train.data import sampler
from accel_train.data.options import resolve_loader
from accel_train.experiment_options import ExperimentConfig as ExperimentConfig
from accel_train.experiment_options import Recipe as Recipe
from accel_train.hub.pusher import push_the_rest
from accel_train.metrics import gates
from accel_train.metrics.logs import info, setup_logging
from accel_train.metrics.trackers import resolve_trackers
from accel_train.opened import Opened
from accel_train.runtime import early_stop, step_overhead, threads
from accel_train.runtime.accelerator import build_accelerator, log_notices
from accel_train.runtime.exiting import current_run
from accel_train.runtime.main_alone import failing_together, on_main
from accel_train.runtime.strategy import strategy_of
from accel_train.speed.attention import check_name
from accel_train.speed.float8 import refuse_float8
from accel_train.store.names import EVALUATION_FILE
from accel_train.training import schedules
from accel_train.training.schedules import ScheduleConfig

T = TypeVar("T")
logger = logging.getLogger(__name__)
WARMUP_KEPT = "schedule.warmup"
"""In ``resolved`` of a run whose warm-up was shortened: the number asked for, and the one it trains with."""


def start(config: ExperimentConfig) -> Accelerator:
    """The verified ``Accelerator``, with logging set up. All processes call it, before anything heavy.

    What an earlier run of this process left is given back first, and a run that ends in ``UsageError`` before its first
    step leaves nothing of its own in ``output_dir``. Raises ``UsageError`` for a machine that is not what was asked
    for, a tracker that is not installed, a kernel that nobody knows, loader options or float8 where the device cannot
    obey, and in a thread, where Python delivers no signals.
    """
    step_overhead.remember_lookups()
    resolve_trackers(config.log.trackers)
    check_name(config.attention)
    directory = expand_path(config.output_dir)
    before = refused.present(directory)  # ahead of the processes' first meeting: none of them has made anything
    accelerator = build_accelerator(
        precision=config.precision,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        max_grad_norm=config.optimizer.max_grad_norm,
        collective_timeout_seconds=config.collective_timeout_seconds,
        distributed=config.distributed,
    )
    refuse_float8(config.float8, accelerator.device, config.precision, strategy_of(accelerator))
    rank = accelerator.process_index
    current_run.push(lambda kind, *_: refused.remove_new(directory, before, rank) if kind is UsageError else None)
    logs = setup_logging(directory, rank, accelerator.num_processes)
    current_run.push(lambda *left: logs.__exit__(*((None,) * 3 if left[0] is UsageError else left)))
    if accelerator.is_main_process:
        early_stop.look_for_stop_file(directory)
    log_notices()
    info(logger, threads.resolve_threads(accelerator.device.type))
    resolve_loader(config.loader, accelerator.device)
    return accelerator


def prepare_data(accelerator: Accelerator, prepare: Callable[..., T]) -> T:
    """Call ``prepare(rank=, world_size=, barrier=)`` on every process; an error of one is raised on all. Collective."""
    with failing_together(accelerator) as barrier:
        return prepare(rank=accelerator.process_index, world_size=accelerator.num_processes, barrier=barrier)


def lengths(config: ExperimentConfig, accelerator: Accelerator, dataset_size: int) -> tuple[int, int]:
    """Optimizer steps in all, and those of the schedule: of the first start that trained. Collective. Raises
    ``UsageError``."""
    return _lengths(config, on_main(accelerator, lambda: kept(config.run_options())), dataset_size)


def _lengths(config: ExperimentConfig, resolved: Mapping[str, Any], dataset_size: int) -> tuple[int, int]:
    max_steps = config.max_steps or math.ceil((config.max_epochs or 0) * dataset_size / config.global_batch_size)
    steps = resolved.get("schedule.decay_steps") or max_steps
    return max_steps, schedules.resolve_decay_steps(_schedule_of(config, resolved, steps), steps)


def _schedule_of(config: ExperimentConfig, resolved: Mapping[str, Any], steps: int) -> ScheduleConfig:
    """The schedule as it fits a run of ``steps``, or as the first start made it fit and ``resolved`` keeps it.

    Only a warm-up that a preset or file names is shortened, and only for a length that came later, on the command line:
    two numbers that were given together and contradict each other are left to be refused.
    """
    schedule, sources = config.schedule, ("default", "command line")
    warmup, length = (origin_of(config, name) for name in ("schedule.warmup_steps", _length_option(config)))
    if warmup == "command line" or schedule.decay_steps is not None:
        return schedule
    asked, used = resolved.get(WARMUP_KEPT) or (None, 0)
    if schedule.warmup_steps == asked:
        return replace(schedule, warmup_steps=used)
    return (
        schedules.shortened_warmup(schedule, steps) if warmup not in sources and length == "command line" else schedule
    )


def _length_option(config: ExperimentConfig) -> str:
    return "max_epochs" if config.max_steps is None else "max_steps"


def open_experiment(
    config: ExperimentConfig,
    accelerator: Accelerator,
    *,
    dataset_size: int,
    fingerprint: str,
    notices: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
) -> Opened:
    """Open the run directory: a start or a resume. All processes call it; collective.

    ``dataset_size`` samples make an epoch; ``fingerprint`` is the data's; ``notices`` are logged first; ``metrics`` are
    the names of all that an evaluation reports. Raises what ``open_run`` raises, and ``UsageError`` for a
    ``checkpoints.best_metric`` or a gate of ``accel-train compare`` that is not among ``metrics``; None: a wrong one is
    found when there is an evaluation.
    """
    given = config
    _refuse_different_data(accelerator, dataset_size, fingerprint)
    if metrics is not None:
        refuse_unknown_metric(config.checkpoints.best_metric, metrics)
        gates.refuse_unknown_gates(metrics)
    batch, world_size = config.global_batch_size, accelerator.num_processes
    earlier = on_main(accelerator, lambda: kept(config.run_options()))
    max_steps, decay_steps = _lengths(config, earlier, dataset_size)
    schedule = _schedule_of(config, earlier, decay_steps)
    resolved: dict[str, Any] = {"schedule.decay_steps": decay_steps}
    if schedule != config.schedule:
        asked, used = config.schedule.warmup_steps, schedule.warmup_steps
        resolved[WARMUP_KEPT] = [asked, used]
        notices = [
            *notices,
            f"schedule.warmup_steps: {asked} is more than the {decay_steps} steps of this run's schedule: "
            f"shortened to {used}; to choose the number yourself, give --schedule.warmup_steps",
        ]
        config = replace(config, schedule=schedule)  # what is saved with the run is what it trains with
    run = open_run(config.run_options(), accelerator, fingerprint, resolved)
    current_run.callback(run.close)
    decay_steps = run.resolved("schedule.decay_steps")
    uneven = sampler.notices(batch, world_size, config.micro_batch_size)
    info(logger, *notices, *uneven, *schedules.notices(config.schedule, decay_steps, max_steps), run.decision)
    if run.checkpoint is not None:
        info(logger, *threads.keep_threads(run.checkpoint.manifest, accelerator.device.type))
    finished = run.start_step >= max_steps and not config.evaluate_only
    if finished:
        info(logger, f"the run is finished: step {run.start_step} of {max_steps}; raise --max_steps to go on")
        if not (config.report_directory / EVALUATION_FILE).exists():
            info(logger, f"{config.report_directory} has no {EVALUATION_FILE}: --evaluate_only writes it")
    pieces = sampler.accumulation_steps(batch, world_size, config.micro_batch_size)
    return Opened(given, accelerator, run, config.schedule, max_steps, decay_steps, pieces, finished)


def _refuse_different_data(accelerator: Accelerator, dataset_size: int, fingerprint: str) -> None:
    """Hosts with a stale copy of the files would train on something else, or leave the others waiting."""
    if accelerator.num_processes == 1:
        return
    mine = fingerprint, dataset_size, socket.gethostname(), accelerator.process_index
    all_data: list[tuple[str, int, str, int]] = gather_object([mine])
    for other in all_data:
        if other[:2] != all_data[0][:2]:
            one, two = (f"{n} samples, fingerprint {f}, on {h} (process {p})" for f, n, h, p in (all_data[0], other))
            raise UsageError(
                f"the processes see different data: {one}; {two}. All hosts must read the same files and the same "
                "revisions: share the folder, or bring the copies up to date"
            )


def nothing_to_do(opened: Opened) -> int:
    """Instead of training, where no step is left: push what an earlier start left to be pushed. Returns exit code 0."""
    run, config = opened.run, opened.config
    if opened.accelerator.is_main_process and run.checkpoint is not None:
        policy = config.checkpoints
        push_the_rest(run.directory, run.checkpoint, config.hub, policy.best_metric, policy.best_mode)
    return 0
