"""Options of every recipe, and the declarations that a recipe makes to the mechanism."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accel_train.checkpoints.policy import CheckpointConfig, RunOptions, of_this_start, refuse_smoke_of_a_run
from accel_train.config import (
    MicroBatchSize,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    TimeoutSeconds,
    UsageError,
    launched_processes,
    origin_of,
    refuse_without_effect,
    replaced_options,
)
from accel_train.data.options import BatchScheduleConfig, LoaderConfig
from accel_train.hub.options import HubConfig, refuse_choice_of_pushes
from accel_train.metrics.profiling.options import ProfileConfig
from accel_train.metrics.progress import Labels, LogConfig
from accel_train.options.tree import config_text, defaults_tree, experiment_tree, flatten, option_names, to_tree
from accel_train.precision import Precision
from accel_train.runtime.distributed_options import DistributedConfig
from accel_train.speed.options import ActivationCheckpointingConfig, CompileConfig, Float8, MemoryConfig, OutOfMemory
from accel_train.training.ema import EmaConfig
from accel_train.training.feedback.options import BalanceConfig, PlateauConfig
from accel_train.training.gradients.sync import SyncPolicy
from accel_train.training.health.options import HealthConfig
from accel_train.training.optimizers import OptimizerConfig
from accel_train.training.schedules import ScheduleConfig

if TYPE_CHECKING:
    from accel_train.data.datasets import TextRows
    from accel_train.pipeline import TrainedModel

FREE_TO_CHANGE = (
    "output_dir",
    "max_steps",
    "max_epochs",
    "micro_batch_size",
    "sync",
    "attention",
    "deterministic",
    "activation_checkpointing",
    "memory",
    "compile",
    "offload_frozen",
    "out_of_memory",
    "regrow_after",
    "distributed.gradient_as_bucket_view",
    "distributed.bucket_cap_mb",
    "distributed.static_graph",
    "distributed.fsdp2_prefetch",
    "collective_timeout_seconds",
    "health",
    "loader",
    "log",
    "profile",
    "checkpoints",
    "hub",
)
"""Options (or groups) of every recipe that do not change the trajectory, or only prolong it."""

_AUTO = "_micro_batch_is_auto"

FIRST_OPTIONS = (
    "output_dir",
    "seed",
    "global_batch_size",
    "micro_batch_size",
    "max_steps",
    "max_epochs",
    "precision",
    "resume",
    "overwrite",
    "init_from",
    "evaluate_only",
    "optimizer.lr",
    "schedule.warmup_steps",
    "checkpoints.save_every",
)
"""Options of every recipe that ``--help`` shows first."""


@dataclass(frozen=True)
class Recipe:
    """Declarations of a recipe. The mechanism reads them here and names no recipe."""

    free_to_change: tuple[str, ...] = ()
    """Its own options, or groups of them, that may differ on resume because they do not change the trajectory."""
    decides_shapes: tuple[str, ...] = ()
    """Its own options, or groups of them, that decide the shapes of the weights: a resume cannot change them."""
    labels: Labels = field(default_factory=Labels)
    """Units and titles of its metrics."""
    base_option: str | None = None
    """Its option with the folder or Hub id of pretrained weights. A folder that is gone is refused at the start."""
    loads_with: type | None = None
    """Class whose ``from_pretrained`` loads a checkpoint, named by the card on the Hub."""
    first_options: tuple[str, ...] = ()
    """Its own options that ``--help`` shows first. Empty: those outside groups."""
    pipeline: type[TrainedModel] | None = None
    """Class returned by ``accel_train.load`` for a checkpoint, and used by ``accel-train sample`` and ``export``."""
    text_rows: Callable[[Any], TextRows] | None = None
    """Function of what ``startup.prepare_data`` returned: its rows as text, for ``accel-train data rows``."""
    timesteps: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps a loss term to the model input with its diffusion time, (B,) in [0, 1], to record its loss by time."""
    smoke: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = field(default_factory=dict[str, Any])
    """Values of its own options with ``--smoke``, such as an evaluation of few samples. Or a function of the config
    that returns them."""
    one_loss_term: bool = False
    """Every step has one loss term, so that ``balance`` is refused."""
    decided_by: Mapping[str, Literal["min", "max"]] = field(default_factory=dict[str, Literal["min", "max"]])
    """Evaluation metrics that decide which of two checkpoints is better (``accel-train better``), by their name or its
    last word. ``min``: a smaller value is better, and ``checkpoints.best_mode`` must say so too."""


@dataclass(frozen=True)
class ExperimentConfig:
    """Options of a run. A recipe's config extends it with its model, data and objective.

    The one class that is extended rather than composed: flags and YAML keep short names (``--seed``, not
    ``--run.seed``), and they mean the same in every recipe. Its checks run before a recipe's own ``__post_init__``.
    """

    recipe: ClassVar[Recipe] = Recipe()

    output_dir: str = "runs/experiment"
    """Directory of the run: checkpoints, metrics, pictures. Shared by all hosts."""
    seed: Seed = 0
    """Seed of everything random: initial weights, data order, noise."""
    global_batch_size: PositiveInt = 64
    """Samples per optimizer step over all processes: part of the experiment. batch_schedule may change it later."""
    micro_batch_size: MicroBatchSize = 64
    """Samples per process per forward: part of the machine. Accumulation is derived from the two. auto: all samples
    that a process has in a step, halved by out_of_memory until a step fits."""
    max_steps: PositiveInt | None = None
    """Total number of optimizer steps. Give this or max_epochs."""
    max_epochs: PositiveFloat | None = None
    """Passes over the training split, instead of max_steps."""
    precision: Precision = "fp32"
    """Compute dtype. Weights, optimizer state and EMA stay fp32."""
    attention: str = "auto"
    """Attention kernel. auto: chosen by a table of capabilities. tune: the fastest on these shapes, measured at
    startup. Or a name from `accel-train doctor --attention`, or your own module:function. For transformers and
    diffusers models, auto keeps the library's choice. Every kernel is checked against fp64 at startup."""
    deterministic: bool = False
    """Use kernels that give the same bits in every run (torch.use_deterministic_algorithms). An operation without a
    deterministic kernel stops the run. Needed for bit-exact resume on a GPU; slower. Not yet measured on a GPU."""
    float8: Float8 = "none"
    """Run the matrix products of the blocks' large linear layers in float8 (torchao), the rest in bf16. Weights,
    optimizer and checkpoints stay fp32. tensorwise: one scale per tensor, the fastest, needs compute capability 8.9.
    rowwise: one scale per row, needs 9.0; an outlier coarsens its own row only. Use with compile.mode on."""
    offload_frozen: bool = False
    """Keep the frozen weights of the blocks in host memory, and two blocks at a time on the device: while one computes,
    the next is copied. For adapters on a base that does not fit; every micro-batch reads the base twice over the bus.
    One process or DDP, without compile.mode. Changes no result. Its speed: not yet measured on a GPU."""
    out_of_memory: OutOfMemory = "halve"
    """halve: after a training step that does not fit, start again from the newest checkpoint with half of
    micro_batch_size and the same global batch. Without a checkpoint from step 0. Several processes need
    `accel-train launch`, torchrun's --max-restarts or a scheduler that starts them again (exit code 75). stop: end with
    the error."""
    regrow_after: NonNegativeInt = 0
    """Double a micro-batch that was halved after running out of memory, up to micro_batch_size, at the first save
    after this many steps. This costs a restart, as described under out_of_memory. Each retry doubles the wait. 0:
    never."""
    sync: SyncPolicy = "auto"
    """When to reduce gradients: on the last micro-batch, on every one, or whichever suits the strategy (auto)."""
    resume: str = "auto"
    """auto: resume from output_dir if it has a run, else start. must: require a run to resume. never: refuse a used
    directory. A checkpoint (its path, RUN@STEP, RUN@best or hub:org/name@step): start a new directory from it."""
    allow: tuple[str, ...] = ()
    """Options whose changes to accept when resuming, although they are part of the experiment."""
    overwrite: bool = False
    """Delete checkpoints, metrics and the report in output_dir and start again from step 0. Logs and trackers stay."""
    init_from: str | None = None
    """Weights to start from, at step 0: a run, a checkpoint (also RUN@STEP, RUN@best, hub:org/name@step), a directory
    with model.safetensors, or an adapter export."""
    evaluate_only: bool = False
    """Evaluate the newest checkpoint in output_dir without training. With --resume never: the initial weights."""
    collective_timeout_seconds: TimeoutSeconds = 1800
    """How long a process waits for the others before the run stops with an error. At most a year."""
    without_samples: tuple[NonNegativeInt, ...] = ()
    """Training samples to skip, by index. All others keep their position, noise and weight. A step with no sample left
    changes nothing. `accel-train blame` finds such indices."""
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    batch_schedule: BatchScheduleConfig = field(default_factory=BatchScheduleConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def micro_batch_is_auto(self) -> bool:
        """True if ``micro_batch_size`` was ``auto``, and has become a number."""
        return getattr(self, _AUTO, False)

    @classmethod
    def first_options(cls) -> list[str]:
        """Return the options that ``--help`` shows first: the recipe's own, then those of every recipe."""
        shared = option_names(ExperimentConfig)
        # Options outside groups are few, and a recipe has them there because they matter.
        own = [name for name in option_names(cls) if "." not in name and name not in shared]
        return [*(cls.recipe.first_options or own), *FIRST_OPTIONS]

    def command_line_flags(self, group: str) -> list[str]:
        """List the flags of the command line that set options of ``group``."""
        flags: list[str] = []
        for option, value in flatten(to_tree(self)).items():
            # Those of a preset are not in the command that a message repeats.
            if option.startswith(f"{group}.") and origin_of(self, option) == "command line":
                flags.append(f"--{option} {value}")
        return flags

    def base_source(self) -> str | None:
        """Return the folder or Hub id of pretrained weights, None for a recipe or run without."""
        option = self.recipe.base_option
        if option is None:
            return None
        source = flatten(to_tree(self))[option]
        return None if source is None else str(source)

    def is_default(self, option: str) -> bool:
        """Return True if ``option`` is unset, or a file repeats its default, as the config.yaml of a run may."""
        origin = origin_of(self, option)
        if origin in ("default", "command line"):
            return origin == "default"
        return flatten(to_tree(self))[option] == flatten(defaults_tree(type(self)))[option]

    def replaced_by_flags(self, flags: Mapping[str, Any]) -> dict[str, str]:
        """Return the options that ``flags`` replace, each with its flag: a run has only one length."""
        pairs = (("max_epochs", "max_steps"), ("max_steps", "max_epochs"))
        return {other: flag for other, flag in pairs if other not in flags and flags.get(flag) is not None}

    def replaced_notices(self) -> list[str]:
        """Name each option of the preset or file that gave way to a flag, with the value of the flag."""
        values = flatten(to_tree(self))
        notices: list[str] = []
        for option, origin in replaced_options(self).items():
            *_, flag = origin.rpartition(" --")
            notice = f"{option}: {origin}"
            if flag in values:
                notice += f" {values[flag]}"
            notices.append(notice)
        return notices

    @classmethod
    def may_change_on_resume(cls, option: str) -> bool:
        """Return True for an option whose value may differ from the run's on a resume."""
        free = (*FREE_TO_CHANGE, *cls.recipe.free_to_change)
        return any(option == name or option.startswith(f"{name}.") for name in free)

    def smoke_values(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that ``--smoke`` sets where no flag does: two small steps, an evaluation and a save.

        The run has a directory of its own, which is overwritten, unless ``flags`` name one. It pushes and tracks
        nothing.
        """
        samples = 4
        values: dict[str, Any] = {
            "max_steps": 2,
            "max_epochs": None,
            # Every process needs a sample.
            "global_batch_size": samples * launched_processes(os.environ),
            "micro_batch_size": samples,
            "log.log_every": 1,
            # A smoke run does not belong in a tracker.
            "log.trackers": [],
        }
        # Schedules and profiles of later steps, or a push of some checkpoints only, have no meaning in two steps.
        unused = {
            "schedule": ScheduleConfig("constant"),
            "batch_schedule": BatchScheduleConfig(),
            "hub": HubConfig(),
            "profile": ProfileConfig(),
        }
        for group, defaults in unused.items():
            values |= {f"{group}.{key}": value for key, value in flatten(to_tree(defaults)).items()}
        if "output_dir" not in flags:
            refuse_smoke_of_a_run(self.output_dir, flags, evaluates_only=self.evaluate_only)
            values |= {"output_dir": f"{self.output_dir}-smoke", "overwrite": True, "resume": "auto"}
        # The recipe's values come last, because it knows which of its parts take long.
        own = self.recipe.smoke
        if callable(own):
            own = own(self)
        return values | dict(own)

    def run_options(self) -> RunOptions:
        """Return the options of ``open_run`` in this start. Raises ``UsageError`` for an unknown name in ``allow``."""
        loader = self.recipe.loads_with
        options = RunOptions(
            output_dir=self.output_dir,
            experiment=flatten(experiment_tree(self)),
            defaults=flatten(defaults_tree(type(self))),
            config_text=config_text(self),
            free_to_change=(*FREE_TO_CHANGE, *self.recipe.free_to_change),
            decides_shapes=self.recipe.decides_shapes,
            loads_with=None if loader is None else f"{loader.__module__}.{loader.__qualname__}",
            resume=self.resume,
            allow=self.allow,
            overwrite=self.overwrite,
            evaluate_only=self.evaluate_only,
            init_from=self.init_from,
            hub=self.hub,
            collective_timeout_seconds=self.collective_timeout_seconds,
        )
        return of_this_start(options)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__.get("__post_init__")
        # An inherited one already runs the checks.
        if own is None:
            return

        @functools.wraps(own)
        def with_the_checks_of_every_recipe(self: ExperimentConfig) -> None:
            # A recipe that had to call the checks could forget to, and they would be off silently.
            ExperimentConfig.__post_init__(self)
            own(self)

        cls.__post_init__ = with_the_checks_of_every_recipe

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UsageError(f"max_steps: {self.max_steps}, max_epochs: {self.max_epochs}: give exactly one of them")
        self._resolve_micro_batch()
        if self.recipe.one_loss_term:
            self.balance.refuse_single_term(1)
        saved = self.checkpoints
        # A recipe without such an option evaluates whenever it chooses.
        saved.refuse_single_evaluation(getattr(getattr(self, "evaluation", None), "every", 1))
        saved.refuse_other_direction(self.recipe.decided_by)
        refuse_choice_of_pushes(self.hub, saved.best_metric, saves_state=saved.save_state)
        if self.evaluate_only:
            self.profile.refuse_without_training()
        optimizer = self.optimizer
        self.batch_schedule.refuse_unmeasurable(
            self.global_batch_size, optimizer.name, optimizer.betas[0], self.max_epochs
        )

    def _resolve_micro_batch(self) -> None:
        """Replace ``auto`` by a number. Raises ``UsageError`` if nothing could reduce it later."""
        # A recipe that calls `super().__post_init__()` comes here twice.
        if self.micro_batch_is_auto:
            return
        if self.out_of_memory == "stop":
            because = "with out_of_memory: stop, which halves nothing"
            refuse_without_effect(self, "", ["regrow_after"], because, "give --out_of_memory halve")
        # With auto the number follows from the processes of one start, and the next may have fewer.
        if self.micro_batch_size == 1:
            because = "with micro_batch_size: 1, which cannot be halved"
            refuse_without_effect(self, "", ["regrow_after"], because, "give --micro_batch_size 2 or more")
        if str(self.micro_batch_size) != "auto":
            return
        if self.out_of_memory == "stop":
            raise UsageError(
                "micro_batch_size: auto: out_of_memory: halve is required, which reduces it until a step fits; give "
                "--out_of_memory halve, or a number"
            )
        share = math.ceil(self.global_batch_size / launched_processes(os.environ))
        object.__setattr__(self, "micro_batch_size", share)
        # Not a field, so that the saved config has the number alone.
        object.__setattr__(self, _AUTO, True)
