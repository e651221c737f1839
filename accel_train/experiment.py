"""Open an experiment: its length, its schedule and its run directory, for a fresh start or a resume."""

from __future__ import annotations

import logging
import shlex
import socket
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.checkpoints.opening import open_run, values_of_first_start
from accel_train.checkpoints.policy import refuse_unknown_metric
from accel_train.checkpoints.run import Run
from accel_train.config import UsageError, expand_path, origin_of
from accel_train.data import sampler
from accel_train.data.tables.ledger import DataHistory, Ledger, unchanged_ledger
from accel_train.experiment_options import ExperimentConfig as ExperimentConfig
from accel_train.experiment_options import Recipe as Recipe
from accel_train.hub.pusher import push_the_rest
from accel_train.linting.reporting import log_findings
from accel_train.metrics import gates
from accel_train.metrics.logs import info
from accel_train.runtime import threads
from accel_train.runtime.exiting import current_run
from accel_train.runtime.main_alone import on_main
from accel_train.train_state import Experiment, in_use, smaller_micro_batch
from accel_train.training import schedules
from accel_train.training.schedules import ScheduleConfig

logger = logging.getLogger(__name__)
COUNTABLE = 2**53
"""Most samples that a run may read: beyond it a float does not represent every integer."""
SHORTENED = {"schedule.warmup": "warmup_steps", "schedule.cycle": "cycle_steps"}
"""Keys in ``resolved`` of a run with a shortened warm-up or first cycle: the steps asked for, and the steps used."""


def _max_steps(config: ExperimentConfig, dataset_size: int) -> int:
    if config.max_steps is not None:
        return config.max_steps
    assert config.max_epochs is not None, "ExperimentConfig requires one of the two"
    if config.max_epochs * dataset_size > COUNTABLE:
        raise UsageError(
            f"max_epochs: {config.max_epochs:g}: over {dataset_size:,} samples, at most {COUNTABLE:,} in all can be "
            "counted exactly; give fewer epochs, or max_steps"
        )
    # Rounded up, so that the last pass leaves out no sample.
    return config.batch_schedule.steps_for_epochs(config.global_batch_size, config.max_epochs, dataset_size)


def _length_option(config: ExperimentConfig) -> str:
    return "max_epochs" if config.max_steps is None else "max_steps"


def _decay_steps(config: ExperimentConfig, earlier: Mapping[str, Any], max_steps: int) -> int:
    """Return the length of the schedule. ``earlier`` holds the values that the first start resolved."""
    steps = earlier.get("schedule.decay_steps") or max_steps
    length = None if config.max_epochs is None else f"max_epochs: {config.max_epochs:g} ({steps} steps)"
    return schedules.resolve_decay_steps(_schedule(config, earlier, steps), steps, length)


def _schedule(config: ExperimentConfig, earlier: Mapping[str, Any], steps: int) -> ScheduleConfig:
    """Return the schedule for a run of ``steps``, with a warm-up and a first cycle that fit.

    Both are shortened only if they come from a preset or file, and the command line or ``max_epochs`` makes the run too
    short for them. Contradicting numbers from a single source stay as they are and are refused later.
    """
    schedule = config.schedule
    origins = {name: origin_of(config, f"schedule.{name}") for name in SHORTENED.values()}
    # A resume warms up as the first start did, even if its own max_steps has room for the whole warm-up.
    for key, name in SHORTENED.items():
        asked, used = earlier.get(key) or (None, 0)
        if origins[name] != "command line" and asked is not None and getattr(schedule, name) == asked:
            schedule = replace(schedule, **{name: used})
    # A schedule with its own length does not follow that of the run.
    if schedule.decay_steps is not None:
        return schedule
    # The steps of an epoch are known only with the data, so a file with max_epochs does not contradict itself.
    if config.max_steps is not None and origin_of(config, "max_steps") != "command line":
        return schedule
    free = [name for name, origin in origins.items() if origin not in ("default", "command line")]
    return schedules.shortened(schedule, steps, free)


class RunLength(NamedTuple):
    """Length and schedule of a run, as resolved by this start."""

    max_steps: int
    schedule: ScheduleConfig
    resolved: dict[str, Any]
    """Values for ``run.json``, which later starts keep."""
    notices: list[str]

    @property
    def decay_steps(self) -> int:
        """Length of the schedule."""
        return self.resolved["schedule.decay_steps"]

    @property
    def kept_flags(self) -> str:
        """Flags of shortened options, for a command with another ``decay_steps``: the file's values may not fit it."""
        shortened = {name: self.resolved[key] for key, name in SHORTENED.items() if key in self.resolved}
        return "".join(f" --schedule.{name} {used}" for name, (_, used) in shortened.items())


def resolve_length(config: ExperimentConfig, accelerator: Accelerator, dataset_size: int) -> RunLength:
    """Return the length of the run and of its schedule. Later starts keep some values of the first one that trained.

    Collective. Raises ``UsageError``.
    """
    earlier = on_main(accelerator, lambda: values_of_first_start(config.run_options()))
    max_steps = _max_steps(config, dataset_size)
    decay_steps = _decay_steps(config, earlier, max_steps)
    schedule = _schedule(config, earlier, decay_steps)
    resolved: dict[str, Any] = {"schedule.decay_steps": decay_steps}
    notices = [*config.replaced_notices(), *config.hub.notices(), *config.checkpoints.notices()]
    notices += late_evaluation(config, max_steps)
    for key, name in SHORTENED.items():
        asked, used = getattr(config.schedule, name), getattr(schedule, name)
        if asked == used:
            continue
        resolved[key] = [asked, used]
        where = f"the {decay_steps} steps of this run's schedule"
        if key in earlier:
            where = "the schedule of the first start"
        notices.append(
            f"schedule.{name}: {asked} is more than fits into {where}: shortened to {used}; to choose the number "
            f"yourself, give --schedule.{name}"
        )
    return RunLength(max_steps, schedule, resolved, notices)


def late_evaluation(config: ExperimentConfig, max_steps: int) -> list[str]:
    """Return a notice if the run is too short for ``evaluation.every``, unless a flag merely shortened a preset."""
    every = getattr(getattr(config, "evaluation", None), "every", 0)
    origin = origin_of(config, "evaluation.every")
    if every < max_steps or origin not in ("command line", origin_of(config, _length_option(config))):
        return []
    return [f"evaluation.every: {every}: the run has {max_steps} steps, so its one evaluation is at the end"]


class PreparedData(Protocol):
    """Data of a run, as the recipes prepare them."""

    @property
    def train(self) -> Sized:
        """Training samples of one epoch."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of the data."""
        ...

    @property
    def ledger(self) -> Ledger:
        """Ledger of the checkpoint to resume. Empty unless ``data.changed`` is ``allow``."""
        ...


def open_on_data(
    config: ExperimentConfig,
    accelerator: Accelerator,
    data: PreparedData,
    *,
    notices: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    patience_after: int = 0,
) -> Experiment:
    """Call ``open_experiment`` with the size, the fingerprint and the ledger of prepared data. Collective."""
    return open_experiment(
        config,
        accelerator,
        dataset_size=len(data.train),
        fingerprint=data.fingerprint,
        ledger=data.ledger,
        notices=notices,
        metrics=metrics,
        patience_after=patience_after,
    )


def open_experiment(
    config: ExperimentConfig,
    accelerator: Accelerator,
    *,
    dataset_size: int,
    fingerprint: str,
    ledger: Ledger = (),
    notices: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    patience_after: int = 0,
) -> Experiment:
    """Open the run directory for a start or a resume. Collective: all processes call it.

    ``dataset_size`` counts an epoch's samples, and ``fingerprint`` identifies the data. A ``ledger``, read from the
    checkpoint to resume by ``earlier_ledger``, permits both to change. ``notices`` are logged first. ``metrics`` names
    everything that an evaluation reports. With None, the first evaluation without ``best_metric`` ends the run.
    ``checkpoints.patience`` does not count evaluations in the first ``patience_after`` steps.

    Raises the errors of ``open_run``, and ``UsageError`` if the processes have different data, if
    ``checkpoints.best_metric`` or a gate of ``accel-train compare`` is not in ``metrics``, if the steps to profile lie
    beyond the last, or if, without a ``ledger``, the run has since moved on from these data to others.
    """
    # First, because lengths and the experiment follow from the data.
    _refuse_different_data(accelerator, dataset_size, fingerprint)
    if metrics is not None:
        refuse_unknown_metric(config.checkpoints.best_metric, metrics)
        gates.refuse_unknown_gates(metrics)
    # The length of an epoch needs the data. Findings come after the refusals, which they would only repeat.
    length = resolve_length(config, accelerator, dataset_size)
    log_findings(config, accelerator, "data", dataset_size=dataset_size)
    max_steps = length.max_steps
    config.profile.refuse_beyond(max_steps)
    micro_batch_size, size_notices = _agree_on_micro_batch(config, accelerator)
    history = DataHistory(fingerprint, dataset_size, ledger)
    run = _open_run(config, accelerator, history.fingerprint, length, micro_batch_size)
    history = _with_kept_ledger(config, run, history)
    # A resume keeps the schedule of the first start.
    decay_steps = run.resolved("schedule.decay_steps")
    batch_sizes = (config.global_batch_size, accelerator.num_processes, micro_batch_size)
    info(logger, *notices, *history.notices, *length.notices, *size_notices, *sampler.notices(*batch_sizes))
    info(logger, *config.batch_schedule.notices(max_steps), *config.plateau.notices(max_steps))
    info(logger, *schedules.notices(length.schedule, decay_steps, max_steps, length.kept_flags), run.decision)
    info(logger, *run.rollback_notices(history.contents), *config.profile.notices(run.start_step))
    _keep_threads(config, run, accelerator)
    opened = Experiment(
        config=config,
        accelerator=accelerator,
        run=run,
        schedule=length.schedule,
        max_steps=max_steps,
        decay_steps=decay_steps,
        micro_batch_size=micro_batch_size,
        accumulation_steps=sampler.accumulation_steps(*batch_sizes),
        history=history,
        metrics=None if metrics is None else tuple(metrics),
        patience_after=patience_after,
    )
    if opened.finished:
        info(logger, *opened.finished_notices(_length_option(config), length.kept_flags))
    return opened


def _agree_on_micro_batch(config: ExperimentConfig, accelerator: Accelerator) -> tuple[int, list[str]]:
    """Return the micro-batch size of this start, the same on every process, and notices. Collective."""
    smaller = smaller_micro_batch(config)
    sizes: list[int] = [smaller.used if smaller else config.micro_batch_size]
    if accelerator.num_processes > 1:
        # A process that looked a moment earlier may have missed a record that is being written.
        sizes = gather_object(sizes)
    if smaller is not None:
        return min(sizes), [smaller.notice(expand_path(config.output_dir))]
    if config.micro_batch_is_auto:
        return min(sizes), [
            f"micro_batch_size: {min(sizes)} (auto: a process's whole share of {config.global_batch_size} samples; "
            "halved if a step runs out of memory)"
        ]
    return min(sizes), []


def _open_run(
    config: ExperimentConfig, accelerator: Accelerator, fingerprint: str, length: RunLength, micro_batch_size: int
) -> Run:
    # The run is saved with the schedule and the micro-batch that it trains with.
    options = in_use(config, micro_batch_size, length.schedule).run_options()
    run = open_run(options, accelerator, fingerprint, length.resolved)
    # The lock is released however this run ends, so that a notebook can open the directory again.
    current_run.push(run.close)
    _refuse_lost_growth(config, run)
    return run


def _with_kept_ledger(config: ExperimentConfig, run: Run, history: DataHistory) -> DataHistory:
    """Add the checkpoint's ledger if the data must not change. The fingerprint stays as it is."""
    if history.ledger or run.checkpoint is None or config.evaluate_only:
        return history
    return replace(history, ledger=unchanged_ledger(history.contents, run.checkpoint.path / "assets"))


def _refuse_lost_growth(config: ExperimentConfig, run: Run) -> None:
    """Raise ``UsageError`` if the batch of the checkpoint had changed and would fall back unnoticed."""
    if run.checkpoint is None or config.evaluate_only:
        return
    if config.batch_schedule.measures:
        _refuse_measuring_after(config, run)
    else:
        _refuse_without_measured(config, run)


def _refuse_measuring_after(config: ExperimentConfig, run: Run) -> None:
    """Raise ``UsageError`` for measuring noise after a batch schedule: it would restart at ``global_batch_size``."""
    checkpoint = run.checkpoint
    assert checkpoint is not None, "a resume"
    before: Mapping[str, Any] = checkpoint.manifest.get("experiment", {})
    steps, sizes = (before.get(f"batch_schedule.{name}") or () for name in ("steps", "sizes"))
    reached = [size for step, size in zip(steps, sizes, strict=True) if step <= checkpoint.step]
    if not reached:
        return
    asked = config.batch_schedule.noise_factor
    named = f"--batch_schedule.steps {' '.join(map(str, steps))} --batch_schedule.sizes {' '.join(map(str, sizes))}"
    raise UsageError(
        f"batch_schedule.noise_factor: {asked}: by step {checkpoint.step} batch_schedule.steps had led to "
        f"{reached[-1]} samples per step, but a measurement would begin with global_batch_size "
        f"{config.global_batch_size} again; leave out the options of the noise and give {named}, or train a new run "
        f"from these weights in an unused --output_dir, with --init_from {shlex.quote(str(checkpoint.path))} "
        f"--global_batch_size {reached[-1]}"
    )


def _refuse_without_measured(config: ExperimentConfig, run: Run) -> None:
    """Raise ``UsageError`` for a schedule that lacks the changes measured so far."""
    schedule = config.batch_schedule
    checkpoint = run.checkpoint
    assert checkpoint is not None, "a resume"
    grown = [tuple(pair) for pair in checkpoint.manifest.get("grown", ())]
    given = list(zip(schedule.steps, schedule.sizes, strict=True))
    if given[: len(grown)] == grown:
        return
    steps, sizes = (" ".join(map(str, numbers)) for numbers in zip(*grown, strict=True))
    raise UsageError(
        f"batch_schedule.noise_factor: {schedule.noise_factor}: by step {checkpoint.step} the measured noise had "
        f"led to {grown[-1][1]} samples per step, and without it the changes so far must be named; give "
        f"--batch_schedule.steps {steps} --batch_schedule.sizes {sizes} --allow batch_schedule"
    )


def _keep_threads(config: ExperimentConfig, run: Run, accelerator: Accelerator) -> None:
    if run.checkpoint is None:
        return
    on_host = threads.updates_on_host(accelerator, config.optimizer.name)
    device = accelerator.device.type
    info(logger, *threads.keep_threads(run.checkpoint.manifest, device, updates_on_host=on_host))


def _refuse_different_data(accelerator: Accelerator, dataset_size: int, fingerprint: str) -> None:
    """Refuse processes with different data, such as a host with a stale copy of the files.

    Such a host would train on other samples, or leave the other processes waiting.
    """
    if accelerator.num_processes == 1:
        return
    mine = (fingerprint, dataset_size, socket.gethostname(), accelerator.process_index)
    all_data: list[tuple[str, int, str, int]] = gather_object([mine])  # in a list: Accelerate joins the lists of all
    first = all_data[0]
    for other in all_data:
        if other[:2] != first[:2]:
            raise UsageError(
                f"the processes see different data: {_describe_data(*first)}; {_describe_data(*other)}. All hosts must "
                "read the same files and the same revisions: share the folder, or bring the copies up to date"
            )


def _describe_data(fingerprint: str, dataset_size: int, host: str, process: int) -> str:
    return f"{dataset_size} samples, fingerprint {fingerprint}, on {host} (process {process})"


def nothing_to_do(opened: Experiment) -> int:
    """End a run without steps left: push what an earlier start left in the queue. Returns exit code 0."""
    run = opened.run
    config = opened.config
    if opened.accelerator.is_main_process and run.checkpoint is not None:
        policy = config.checkpoints
        push_the_rest(run.directory, run.checkpoint, config.hub, policy.best_metric, policy.best_mode)
    return 0
