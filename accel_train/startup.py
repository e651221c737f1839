"""Start of a recipe: the verified ``Accelerator`` with logging set up, and data prepared by all processes together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from accelerate import Accelerator

from accel_train import rng
from accel_train.checkpoints import refused
from accel_train.config import MendedError, UsageError, expand_path
from accel_train.data.options import resolve_loader
from accel_train.experiment_options import ExperimentConfig
from accel_train.linting.reporting import log_findings
from accel_train.metrics.logs import details, info, setup_logging
from accel_train.runtime import early_stop, threads
from accel_train.runtime.accelerator import build_accelerator, log_notices
from accel_train.runtime.exiting import current_run
from accel_train.runtime.main_alone import connect_hosts, failing_together, on_main, place_among_workers
from accel_train.runtime.strategy import strategy_of
from accel_train.speed.apply import refuse_strategy_of_speed, set_deterministic, set_up_device
from accel_train.speed.attention.selection import check_name
from accel_train.train_state import smaller_micro_batch

T = TypeVar("T")
logger = logging.getLogger(__name__)


def refuse_options(config: ExperimentConfig) -> None:
    """Raise ``UsageError`` for options that every start refuses, whatever its device, data and directory.

    ``accel-train check`` calls it as well.
    """
    config.log.refuse_missing_trackers()
    check_name(config.attention)
    config.run_options()
    # max_epochs becomes a number of steps only once the data are known, and is compared then.
    if config.max_steps is not None:
        config.profile.refuse_beyond(config.max_steps)


def refuse_strategy(config: ExperimentConfig, strategy: str) -> None:
    """Raise ``UsageError`` for options that ``prepare`` refuses under ``strategy``, whatever the model and the device.

    ``accel-train check`` calls it, because a start gets there only after it has prepared its data.
    """
    config.optimizer.refuse_strategy(strategy, config.precision)
    config.health.refuse_strategy(strategy, config.precision, config.distributed.comm_hook)
    refuse_strategy_of_speed(config.float8, config.compile, config.precision, strategy, offloads=config.offload_frozen)


def start(config: ExperimentConfig) -> Accelerator:
    """Return the verified ``Accelerator``, with logging set up. All processes call it, before anything heavy.

    Releases whatever an earlier run in this process still holds. A run that ends in ``UsageError`` before its first
    step removes what it created in ``output_dir``.

    Raises ``UsageError`` if the machine is not the requested one, another process was started differently, a tracker is
    not installed, the attention kernel is unknown, the device cannot obey the options of the loader, of its memory or
    of float8, or the caller is not the main thread, because Python delivers signals to no other.
    """
    # Usage errors that need no other process are reported before the processes wait for each other.
    refuse_options(config)
    refused.refuse_missing_base(config.recipe.base_option, config.base_source(), config.run_options())
    directory = expand_path(config.output_dir)
    # Listed before the processes first meet: none of them has created anything yet.
    before = refused.present(directory)
    smaller = smaller_micro_batch(config)
    accelerator = build_accelerator(
        precision=config.precision,
        # The largest, because options of DDP that forbid accumulation must hold to the end.
        global_batch_size=config.batch_schedule.largest(config.global_batch_size),
        micro_batch_size=smaller.used if smaller else config.micro_batch_size,
        max_grad_norm=config.optimizer.max_grad_norm,
        collective_timeout_seconds=config.collective_timeout_seconds,
        distributed=config.distributed,
        logs=directory / "logs",
        config=config,
    )
    # For code of recipes that draws from them, such as a split of its data: the same in every process and every start.
    rng.seed_generators(config.seed)
    config.profile.refuse_device(accelerator.device.type)
    connect_hosts(accelerator, config.collective_timeout_seconds)
    strategy = strategy_of(accelerator)
    notices = set_up_device(accelerator.device, config.memory, config.float8, config.precision, strategy)
    if config.deterministic:
        notice, switch_back = set_deterministic(accelerator.device)
        current_run.push(lambda *_: switch_back())
        notices.append(notice)
    # Before anything is written.
    if _state.reads_data:
        return accelerator
    _set_up_directory(directory, before, accelerator)
    if accelerator.is_main_process:
        early_stop.look_for_stop_file(directory)
    log_notices()
    info(logger, *notices)
    log_findings(config, accelerator, "start")
    on_host = threads.updates_on_host(accelerator, config.optimizer.name)
    details(logger, threads.resolve_threads(accelerator.device.type, updates_on_host=on_host))
    resolve_loader(config.loader, accelerator.device)
    _download_weights(config, accelerator)
    return accelerator


def _set_up_directory(directory: Path, before: frozenset[Path], accelerator: Accelerator) -> None:
    """Set up logging into the run directory. A later ``UsageError`` removes whatever was not there ``before``."""
    rank = accelerator.process_index
    # Before the log is opened: a refused start must not write into the log of a live run.
    on_main(accelerator, lambda: refused.refuse_held(directory))

    def remove_created(kind: type[BaseException] | None, *_: object) -> None:
        if _is_wrong_usage(kind):
            refused.remove_new(directory, before, rank)

    # Pushed first, so that it runs last: the log is closed by then.
    current_run.push(remove_created)
    logs = setup_logging(directory, rank, accelerator.num_processes)

    def end_logging(
        kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A usage error is reported as one line, so the log gets no traceback of it.
        if _is_wrong_usage(kind):
            logs.__exit__(None, None, None)
        else:
            logs.__exit__(kind, error, traceback)

    current_run.push(end_logging)


def _download_weights(config: ExperimentConfig, accelerator: Accelerator) -> None:
    """Download the weights of ``init_from`` from the Hub before the data are prepared, which may need files of them."""
    # Imported here, because other commands import this module and train nothing.
    from accel_train.checkpoints import fetch

    fetch.download_weights(accelerator, config.run_options())


def _is_wrong_usage(kind: type[BaseException] | None) -> bool:
    """Return True for errors that the user has to correct. The next start mends a ``MendedError`` itself."""
    return kind is not None and issubclass(kind, UsageError) and not issubclass(kind, MendedError)


def prepare_data(accelerator: Accelerator, prepare: Callable[..., T]) -> T:
    """Call ``prepare(rank=, world_size=, barrier=)`` on every process. Collective.

    An exception of one process is raised on all.
    """
    rank, world_size = place_among_workers(accelerator)
    with failing_together(accelerator) as barrier:
        prepared = prepare(rank=rank, world_size=world_size, barrier=barrier)
    if _state.reads_data:
        raise _DataPrepared(prepared)
    return prepared


class _State:
    """State of this process across the calls of a recipe."""

    reads_data = False
    """Leave the recipe's ``main`` once its data are prepared, without creating a run directory."""


_state = _State()


class _DataPrepared(BaseException):
    """Leaves a recipe's ``main``. A ``BaseException``, so that no recipe catches it."""

    def __init__(self, data: object) -> None:
        self.data = data


def data_of(main: Callable[[Sequence[str]], object], argv: Sequence[str]) -> Any:
    """Return the data that ``main(argv)`` prepares with ``prepare_data``, as a start does, in this process alone.

    Call it within ``config.in_one_process``. Writes the same cache, and nothing into ``output_dir``. Returns None if
    ``main`` ends earlier. Raises ``UsageError`` as the start would.
    """
    _state.reads_data = True
    try:
        main(argv)
    except _DataPrepared as found:
        return found.data
    finally:
        _state.reads_data = False
    return None
