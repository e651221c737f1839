"""Options for bad steps and hangs, and the combinations in which such a step could not be left out exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from accelerate import Accelerator
from torch import nn

from accel_train.config import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UsageError,
    refuse_without_effect,
)
from accel_train.wording import shortened

COMPARE_EVERY = 500


@dataclass(frozen=True)
class HealthConfig:
    """Handling of bad steps (non-finite values, gradient spikes), of steps that hang, and of slow or diverging
    processes."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """stop: end the run with the sample numbers, exit code 1. skip: leave out the step's update. Weights, optimizer
    state and EMA stay bit for bit as they were, and the run continues with the next step's data and learning rate.
    rollback: start again from the newest checkpoint, and leave out the samples of that step from there on. Several
    processes need `accel-train launch`, torchrun's --max-restarts or a scheduler that starts them again (exit code
    75)."""

    max_skipped: PositiveInt = 10
    """Skipped steps in a row that are allowed. One more ends the run with the sample numbers, exit code 1. A step that
    was trained starts the count over."""

    max_rollbacks: PositiveInt = 3
    """Rollbacks of a run that are allowed. A step that would need one more ends it with exit code 1."""

    spike_factor: NonNegativeFloat = 0.0
    """A step is a spike if the norm of its gradient, before clipping, exceeds this many times the median of the last
    spike_window trained steps. 0: off. Try 10. No step is judged before that many were trained."""

    spike: Literal["warn", "clip", "skip"] = "warn"
    """warn: train on a spike, with a warning and an event that has the sample numbers. clip: also scale its gradient
    down to spike_factor times the median, if optimizer.max_grad_norm does not scale it further. skip: leave out its
    update, as for a step that is not finite. clip and skip: not under ZeRO."""

    spike_window: PositiveInt = 100
    """Trained steps whose gradient norms give the median."""

    hang_seconds: NonNegativeFloat | None = None
    """Seconds without a finished step, evaluations and saves not counted, after which each process writes the Python
    stacks of its threads to its log, and the main process names those that the others wait for. The run continues.
    None: half of collective_timeout_seconds. 0: never."""

    compare_every: NonNegativeInt | None = None
    """Steps between two checks for processes slower than the others. They compare the wait for data, under DDP the
    forward, and a matrix product and a Python loop that all processes time at that step. A slow process is named in a
    warning and an event. None: 500 with several processes. 0: never."""

    slow_factor: PositiveFloat = 1.3
    """A process is slow if, in two checks in a row, it takes this many times the median of all processes, or its wait
    for data makes a step this many times as long."""

    check_replicas_every: NonNegativeInt | None = None
    """Steps between two checks that processes with the same weights still hold the same bits: under DDP, ZeRO-1 and
    ZeRO-2, and those of FSDP2's replicas. Also checked before every save. If they differ, the run ends with exit code
    1 and the names of the parameters and of the processes, before anything is saved. None: 1000 where weights are on
    several processes, else never. 0: never, not before a save either."""

    @property
    def steps_between_comparisons(self) -> int:
        """``compare_every``, with its default for several processes. 0: never."""
        if self.compare_every is None:
            return COMPARE_EVERY
        return self.compare_every

    @property
    def finds_spikes(self) -> bool:
        """True if gradient norms are compared with their median."""
        return self.spike_factor > 0

    @property
    def clips_spikes(self) -> bool:
        """True if the gradient of a spike is scaled down."""
        return self.finds_spikes and self.spike == "clip"

    @property
    def skips_spikes(self) -> bool:
        """True if the update of a spike is left out."""
        return self.finds_spikes and self.spike == "skip"

    @property
    def skips(self) -> bool:
        """True if the update of any step may be left out."""
        return self.non_finite == "skip" or self.skips_spikes

    def __post_init__(self) -> None:
        if 0 < self.spike_factor <= 1:
            raise UsageError(
                f"health.spike_factor: {self.spike_factor}: more than 1 is required, or every other step is a spike; "
                "try 10, or 0 to switch it off"
            )
        if self.slow_factor <= 1:
            raise UsageError(
                f"health.slow_factor: {self.slow_factor}: more than 1 is required, or every process above the median "
                "is slow; try 1.3, or --health.compare_every 0 to switch the check off"
            )
        if self.compare_every == 0:
            refuse_without_effect(self, "health", ["slow_factor"], "with health.compare_every: 0")
        if not self.finds_spikes:
            because = "with health.spike_factor: 0, which switches spike detection off"
            instead = "set spike_factor, such as --health.spike_factor 10"
            refuse_without_effect(self, "health", ["spike", "spike_window"], because, instead)
        if not self.skips:
            because = f"with health.non_finite: {self.non_finite}, which skips no step"
            refuse_without_effect(self, "health", ["max_skipped"], because, "give --health.non_finite skip")
        if self.non_finite != "rollback":
            because = f"with health.non_finite: {self.non_finite}, which never goes back"
            refuse_without_effect(self, "health", ["max_rollbacks"], because, "give --health.non_finite rollback")

    def refuse_strategy(self, strategy: str, precision: str, comm_hook: str) -> None:
        """Raise ``UsageError`` where ``refuse_inexact`` does so for every model."""
        zero = strategy.startswith("zero")
        if zero and (self.clips_spikes or self.skips_spikes):
            raise UsageError(
                f"health.spike: {self.spike}: under {strategy} DeepSpeed steps before the norm of the gradient is "
                "known; use --health.spike warn, or a launch file for DDP or FSDP2"
            )
        # What a bad step leaves behind differs by part: each has its own refusal and remedy.
        if zero and precision == "fp16" and self.non_finite in ("skip", "rollback"):
            raise UsageError(
                f"health.non_finite: {self.non_finite} under {strategy} with precision: fp16: DeepSpeed lowers its "
                "loss scale for a gradient that is not finite at any scale, until it stops; use --precision bf16, or "
                "--health.non_finite stop"
            )
        if self.skips and comm_hook == "powersgd":
            raise UsageError(
                f"{_skipping(self)} with distributed.comm_hook: powersgd: the hook carries the error of one gradient "
                "over to the next, and one that is not finite would stay in it for good; use --distributed.comm_hook "
                "none or bf16, or --health.non_finite stop"
            )

    def describe(self) -> list[str]:
        """Return notices about the treatment of bad steps. Empty for the defaults."""
        notices: list[str] = []
        if self.non_finite == "skip":
            notices.append(f"steps that are not finite are skipped, up to {self.max_skipped} in a row")
        if self.non_finite == "rollback":
            notices.append(
                f"after a step that is not finite the run goes back to its newest checkpoint, up to "
                f"{self.max_rollbacks} times, and leaves out the samples of that step"
            )
        if self.finds_spikes:
            action = {"warn": "reported", "clip": "scaled down to that norm", "skip": "skipped"}[self.spike]
            notices.append(
                f"steps with a gradient norm above {self.spike_factor:g} times the median of {self.spike_window} are "
                f"{action}"
            )
        return notices


def has_replicas(accelerator: Accelerator, strategy: str) -> bool:
    """Return True if some weights are on several processes."""
    if strategy == "fsdp2":
        mesh: Any = getattr(accelerator, "parallelism_config", None)
        return mesh is not None and mesh.dp_replicate_size > 1
    return accelerator.num_processes > 1 and strategy != "zero3"


def nothing_to_compare(config: HealthConfig, processes: int, *, replicated: bool) -> list[str]:
    """Return a notice for each requested comparison that has nothing to compare in this run.

    A notice rather than an error, because the same options must run on one process and on many. ``replicated``: some
    weights are on several processes.
    """
    notices: list[str] = []
    asked: dict[str, float] = {"compare_every": config.compare_every or 0}
    if config.slow_factor != HealthConfig.slow_factor:
        asked["slow_factor"] = config.slow_factor
    for name, value in asked.items():
        if processes == 1 and value:
            notices.append(f"health.{name}: {value}: nothing to compare, this run has one process")
    if config.check_replicas_every and not replicated:
        notices.append(
            f"health.check_replicas_every: {config.check_replicas_every}: nothing to compare, because no weight is on "
            "more than one process here (weights are under DDP, ZeRO-1, ZeRO-2 and FSDP2 with replicas, on several "
            "processes)"
        )
    return notices


def refuse_inexact(config: HealthConfig, model: nn.Module, strategy: str, precision: str, comm_hook: str) -> None:
    """Raise ``UsageError`` where a spike cannot be held back, or a skipped step would still leave traces."""
    config.refuse_strategy(strategy, precision, comm_hook)
    if not config.skips:
        return
    moving = [name for name, module in model.named_modules() if getattr(module, "running_mean", None) is not None]
    if moving:
        raise UsageError(
            f"{_skipping(config)}: the model has running statistics ({shortened(moving, 3)}), which a forward changes "
            "before the step is known to be bad; use a norm without them (GroupNorm, LayerNorm), or "
            "--health.non_finite stop"
        )


def _skipping(config: HealthConfig) -> str:
    return "health.non_finite: skip" if config.non_finite == "skip" else "health.spike: skip"
