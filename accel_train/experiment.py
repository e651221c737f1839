"""What every recipe has, whatever it trains: its options, its start and its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from accelerate import Accelerator

from accel_train.checkpoints.hub_options import HubConfig
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run, open_run
from accel_train.config import PositiveFloat, PositiveInt, Seed, UsageError, expand_path
from accel_train.data import sampler
from accel_train.data.loader import LoaderConfig, resolve_loader
from accel_train.metrics.logs import info, setup_logging
from accel_train.metrics.recorder import LogConfig
from accel_train.metrics.trackers import resolve_trackers
from accel_train.models.activation_checkpointing import ActivationCheckpointingConfig
from accel_train.models.attention import check_name
from accel_train.models.compile import CompileConfig
from accel_train.runtime.accelerator import Precision, build_accelerator
from accel_train.runtime.distributed_options import DistributedConfig
from accel_train.runtime.signals import EXIT_PREEMPTED
from accel_train.training.accumulation import SyncPolicy
from accel_train.training.ema import EmaConfig
from accel_train.training.optimizers import OptimizerConfig
from accel_train.training.schedules import ScheduleConfig, notices, resolve_decay_steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExperimentConfig:
    """What a run is, where it is kept and how it is computed. A recipe's config adds its model, data and objective.

    The one place where a class is extended rather than composed: flags and YAML keep the short names (``--seed``,
    not ``--run.seed``), and two recipes cannot drift apart in what they mean.
    """

    output_dir: str = "runs/experiment"
    """Directory of the run: checkpoints, metrics, pictures. Shared by all hosts."""
    seed: Seed = 0
    """Everything random is a function of it: weights, order, noise."""
    global_batch_size: PositiveInt = 64
    """Samples per optimizer step over all processes: part of the experiment."""
    micro_batch_size: PositiveInt = 64
    """Samples per process per forward: part of the machine. Accumulation is derived from the two."""
    max_steps: PositiveInt | None = None
    """Optimizer steps in all. Give this or max_epochs."""
    max_epochs: PositiveFloat | None = None
    """Passes over the training split, instead of max_steps."""
    precision: Precision = "fp32"
    """Of the computation; weights, optimizer and average stay fp32."""
    attention: str = "auto"
    """Kernel of attention. auto: by a table of what each can do. tune: the fastest on these shapes, measured at the
    start. Else a name that `accel-train doctor --attention` lists, or module:function of your own. Each is proven
    against fp64 at the start; one that cannot run or is wrong is refused."""
    sync: SyncPolicy = "auto"
    """When gradients are reduced: on the last micro-batch, on every one, or as the strategy does best."""
    resume: str = "auto"
    """auto resumes what is in output_dir, else starts; must requires it; never refuses a used directory; the path of
    a checkpoint or hub:org/name@step starts a new directory from there."""
    allow: tuple[str, ...] = ()
    """Options that may differ from the saved experiment when resuming, on purpose."""
    overwrite: bool = False
    """Delete what is in output_dir and start anew."""
    init_from: str | None = None
    """Checkpoint directory (or any with model.safetensors) to take the weights from, and nothing else."""
    evaluate_only: bool = False
    """Evaluate and sample from the newest checkpoint in output_dir; train nothing."""
    collective_timeout_seconds: PositiveInt = 1800
    """How long a process waits for the others before the run stops with an error."""
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UsageError(
                f"max_steps: {self.max_steps}, max_epochs: {self.max_epochs}: exactly one of the two is required; "
                "set the other to None"
            )


@dataclass(frozen=True)
class Opened:
    """An experiment with its directory and its length, as far as it got before. One per process."""

    run: Run
    max_steps: int
    """From the options, or from max_epochs and the size of the data."""
    decay_steps: int
    """Of the schedule, as the first start resolved it: a raised max_steps holds the floor."""
    accumulation_steps: int
    """Micro-batches per process and step."""
    finished: bool
    """There is no step left, and no evaluation was asked for."""

    @property
    def start_step(self) -> int:
        """Optimizer steps already done."""
        return self.run.start_step


def start(config: ExperimentConfig) -> Accelerator:
    """The verified ``Accelerator``, with logging set up. All processes call it, before anything heavy.

    Raises ``UsageError`` for a machine that is not what was asked for, a tracker that is not installed, a kernel that
    nobody knows, and loader options that the device cannot obey.
    """
    resolve_trackers(config.log.trackers)
    check_name(config.attention)
    accelerator = build_accelerator(
        precision=config.precision,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        max_grad_norm=config.optimizer.max_grad_norm,
        collective_timeout_seconds=config.collective_timeout_seconds,
        distributed=config.distributed,
    )
    setup_logging(expand_path(config.output_dir), accelerator.process_index, accelerator.num_processes)
    resolve_loader(config.loader, accelerator.device)
    return accelerator


def open_experiment(
    config: ExperimentConfig, accelerator: Accelerator, dataset_size: int, fingerprint: str, words: Sequence[str] = ()
) -> Opened:
    """Open the run directory: a start or a resume. All processes call it; collective.

    ``dataset_size`` samples make an epoch; ``fingerprint`` is the data's; ``words`` are said first. Raises what
    ``open_run`` raises.
    """
    batch, world_size = config.global_batch_size, accelerator.num_processes
    max_steps = config.max_steps or math.ceil((config.max_epochs or 0) * dataset_size / batch)
    decay_steps = resolve_decay_steps(config.schedule, max_steps)
    run = open_run(config, accelerator, fingerprint, {"schedule.decay_steps": decay_steps})
    decay_steps = run.resolved("schedule.decay_steps")
    uneven = sampler.notices(batch, world_size, config.micro_batch_size)
    info(logger, *words, *uneven, *notices(config.schedule, decay_steps, max_steps), run.decision)
    finished = run.start_step >= max_steps and not config.evaluate_only
    if finished:
        info(logger, f"the run is finished: step {run.start_step} of {max_steps}; raise --max_steps to go on")
        info(logger, "no evaluation.json there? --evaluate_only writes it")
    pieces = sampler.accumulation_steps(batch, world_size, config.micro_batch_size)
    return Opened(run, max_steps, decay_steps, pieces, finished)


def finish(accelerator: Accelerator, opened: Opened, step: int, stopped: bool) -> int:
    """End the trackers, say where things are, and give the exit code: 75 where a run was asked to stop."""
    accelerator.end_training()
    if stopped:
        info(logger, f"stopped at step {step} of {opened.max_steps} and saved; start again to go on (exit code 75)")
        return EXIT_PREEMPTED
    place = opened.run.directory
    info(logger, f"finished: {place} holds the checkpoint, evaluation.json and the pictures")
    return 0
