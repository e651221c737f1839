"""Options for bad steps and hangs, and the combinations in which such a step could not be left out exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from accel_train.config import NonNegativeFloat, PositiveInt, UsageError
from accel_train.wording import shortened


@dataclass(frozen=True)
class HealthConfig:
    """Bad steps: a loss or gradient that is not finite, or a gradient norm far above the usual one. And steps that do
    not end."""

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
    spike_window trained steps. 0 = off. Try 10. No step is judged before as many were trained."""

    spike: Literal["warn", "clip", "skip"] = "warn"
    """warn: train on a spike, with a warning and an event that has the sample numbers. clip: also scale its gradient
    down to spike_factor times the median, if optimizer.max_grad_norm does not scale it further. skip: leave out its
    update, as of a step that is not finite. clip and skip: not under ZeRO."""

    spike_window: PositiveInt = 100
    """Trained steps whose gradient norms give the median."""

    hang_seconds: NonNegativeFloat | None = None
    """Seconds without the end of a step, evaluations and saves apart, after which each process writes the Python stacks
    of its threads to its log, and the main process names those that the others wait for. The run goes on. None: half of
    collective_timeout_seconds. 0: never."""

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
        if self.spike != "warn" and not self.finds_spikes:
            raise UsageError(
                f"health.spike: {self.spike}: nothing looks for spikes, because health.spike_factor is 0; set it, such "
                "as --health.spike_factor 10, or leave spike out"
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


def refuse_inexact(config: HealthConfig, model: nn.Module, strategy: str, precision: str, comm_hook: str) -> None:
    """Raise ``UsageError`` where a spike cannot be held back, or skipping a step would leave something of it behind."""
    zero = strategy.startswith("zero")
    if zero and (config.clips_spikes or config.skips_spikes):
        raise UsageError(
            f"health.spike: {config.spike}: under {strategy} DeepSpeed steps before the norm of the gradient is known; "
            "use --health.spike warn, or a launch file for DDP or FSDP2"
        )
    if not config.skips:
        return
    option = "health.non_finite: skip" if config.non_finite == "skip" else "health.spike: skip"
    # What a bad step leaves behind differs by part: each has its own refusal and remedy.
    if zero and precision == "fp16":
        raise UsageError(
            f"{option} under {strategy} with precision: fp16: DeepSpeed lowers its loss scale for a gradient that is "
            "not finite at any scale, until it stops; use --precision bf16, or --health.non_finite stop"
        )
    if comm_hook == "powersgd":
        raise UsageError(
            f"{option} with distributed.comm_hook: powersgd: the hook carries the error of one gradient over to the "
            "next, and one that is not finite would stay in it for good; use --distributed.comm_hook none or bf16, or "
            "--health.non_finite stop"
        )
    moving = [name for name, module in model.named_modules() if getattr(module, "running_mean", None) is not None]
    if moving:
        raise UsageError(
            f"{option}: the model has running statistics ({shortened(moving, 3)}), which a forward changes before the "
            "step is known to be bad; use a norm without them (GroupNorm, LayerNorm), or --health.non_finite stop"
        )
